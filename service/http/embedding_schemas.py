"""The JSON body of POST /v1/embeddings: OpenAI's fields, vLLM's `add_special_tokens`, and our own."""

from typing import Literal

from pydantic import ConfigDict, Field

from service.http.field_types import ShortText
from service.http.openai_schemas import Ignored, Nullable, Prompts, not_implemented
from service.http.schemas import PROMPT, EditedRequest, example

DEFAULT_STAGE = "ln_final.out"


class EmbeddingRequest(Nullable, EditedRequest):
    model_config = ConfigDict(extra="ignore") | example(input=[PROMPT, "Lily had a red ball."], dimensions=4)

    input: Prompts
    stage: ShortText = Field(
        DEFAULT_STAGE, description="the stage whose numbers are pooled: any with numbers for each position"
    )
    pooling: Literal["mean", "last"] = Field(
        "mean", description="the mean over all tokens, or the last token's numbers"
    )
    normalize: bool = Field(True, description="divide each vector by its length")
    dimensions: int | None = Field(
        None, ge=1, description="return only the first numbers of each vector, normalized after that; default: all"
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: float32 numbers, little-endian, as OpenAI's client asks for them"
    )
    add_special_tokens: bool = Field(True, description="add the checkpoint's special tokens to a text")
    user: Ignored
    truncate_prompt_tokens: object = not_implemented()
