"""The JSON body of POST /score."""

from typing import Annotated

from pydantic import Discriminator, Field, Tag

from service.http.field_types import Prompt, ShortText, Text, TokenIds, at_most
from service.http.schemas import MAX_PROMPTS, EditedRequest, example


def _kind_of_continuations(value: object) -> str:
    return "lists of ids" if isinstance(value, list) and value and isinstance(value[0], list) else "texts"


Continuations = Annotated[
    Annotated[list[Text], Field(fail_fast=True, min_length=1), at_most(MAX_PROMPTS), Tag("texts")]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1), at_most(MAX_PROMPTS), Tag("lists of ids")],
    Discriminator(_kind_of_continuations),
]


class ScoreRequest(EditedRequest):
    model_config = example(prompt="Once upon a time, there was a little", continuations=[" girl", " boy", " table"])

    prompt: Prompt
    continuations: Continuations = Field(
        description="texts that may follow a text, or lists of token ids; at most 256 of at least one token each"
    )
    cache_salt: ShortText | None = Field(None, description="as in /generate")
