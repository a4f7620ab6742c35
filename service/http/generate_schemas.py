"""The JSON body of POST /generate."""

from typing import Annotated, Any, Literal

from pydantic import Field

from service.http.edit_schemas import SCALES, Scales
from service.http.field_types import Indices, OneOf, Prompt, ShortText, StrictBody, Text, TokenId, at_most
from service.http.schemas import PROMPT, EditedRequest, Globs, Positions, example

ChoiceText = Annotated[Text, Field(min_length=1, max_length=1 << 12)]
MAX_TOP_K = 2**31 - 1
MAX_TOP = 20
TOP_LOGPROBS: Any = Field(
    None,
    ge=0,
    le=MAX_TOP,
    description="report the log-probabilities of each token and of this many most likely ones",
)
MAX_ENTRIES = 1024
MAX_BAD_WORDS = 64
BadWord = Annotated[Text, Field(min_length=1, max_length=200)]
MAX_GRAMMAR_BYTES = 1 << 16


class TraceRequest(StrictBody):
    """The trace of a generation, including the steps of the prompt: stages, predictions, and the logit lens."""

    stages: Globs | None = Field(
        None,
        description="a glob over stage names, or a list of globs, as in /forward; default: all stages, or none with "
        "logit_lens",
    )
    detail: Literal["summary", "values", "none"] = "summary"
    positions: Positions | None = Field(
        None,
        description="positions to return, each in the step that computes it; a negative one counts from the end of "
        "the prompt, so that -1 is its last token; default: all computed ones",
    )
    heads: Indices | None = Field(None, description="as in /forward")
    top_k: int | None = Field(
        None,
        ge=0,
        description="most likely tokens to report per position (default 0) and per layer of the logit lens (default 5)",
    )
    encoding: Literal["json", "base64"] = "json"
    logit_lens: bool = Field(
        False, description="decode the residual of every layer at the position after which the token was chosen"
    )


class StructuredOutputs(OneOf):
    """A constraint on the generated text. Exactly one of the fields is set."""

    json_schema: dict[str, Any] | Annotated[Text, Field(max_length=MAX_GRAMMAR_BYTES)] | None = Field(
        None, alias="json", description="a JSON schema, or its text; the answer is JSON that is valid under it"
    )
    regex: Annotated[Text, Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)] | None = Field(
        None, description="a regular expression that matches the whole text, without look-around and back references"
    )
    choice: Annotated[list[ChoiceText], Field(min_length=1, max_length=MAX_ENTRIES), at_most(MAX_ENTRIES)] | None = (
        Field(None, description="the text is one of these")
    )
    grammar: Annotated[Text, Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)] | None = Field(
        None, description="a context-free grammar, in Lark (as llguidance reads it) or in EBNF (as llama.cpp does)"
    )


class GenerationRequest(EditedRequest):
    """The fields that POST /generate and the OpenAI routes share."""

    n: int = Field(1, ge=1, description="number of continuations; continuation i, from 0, uses seed + i")
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="maximum number of new tokens; 0 only returns the prompt, with echo; default: 128, or less if the "
        "context has less room",
    )
    temperature: float | None = Field(
        None, ge=0, description="0 always takes the most likely token; default: the checkpoint's, else 1"
    )
    top_k: int | None = Field(
        None, ge=0, le=MAX_TOP_K, description="0 keeps all tokens; default: the checkpoint's, else 0"
    )
    top_p: float | None = Field(None, gt=0, le=1, description="default: the checkpoint's, else 1")
    min_p: float | None = Field(None, ge=0, le=1, description="default: the checkpoint's, else 0")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="default: the checkpoint's, else 1")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[Text, Annotated[float, Field(ge=-100, le=100)]], at_most(MAX_ENTRIES)] = Field(
        {}, max_length=MAX_ENTRIES, description="token id (as a string) -> number that is added to its logit"
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="default: a new random seed for each request")
    stop: ShortText | Annotated[list[ShortText], Field(fail_fast=True), at_most(200)] = Field(
        [], max_length=200, description="strings that end the text; the text ends before the first one found"
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True), at_most(MAX_ENTRIES)] = Field(
        [], max_length=MAX_ENTRIES, description="token ids that end the text"
    )
    min_tokens: int = Field(
        0, ge=0, description="no stop token is chosen, and no stop string found, before the text has this many tokens"
    )
    include_stop_str_in_output: bool = Field(False, description="end the text after the stop string, not before it")
    skip_special_tokens: bool = Field(
        True, description="false: special tokens have their names as text; a stop token only if stops are included"
    )
    bad_words: Annotated[list[BadWord], Field(fail_fast=True), at_most(MAX_BAD_WORDS)] = Field(
        [],
        max_length=MAX_BAD_WORDS,
        description="words whose tokens are never chosen, as vLLM tokenizes them: alone and after a space",
    )
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True), at_most(MAX_ENTRIES)] | None = Field(
        None, min_length=1, max_length=MAX_ENTRIES, description="no other tokens are chosen"
    )
    ignore_eos: bool = Field(False, description="continue after the end-of-sequence tokens of the checkpoint")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="what the text must look like: a JSON schema, a regular expression, choices or a grammar"
    )
    cache_salt: ShortText | None = Field(
        None,
        description="share cached prompts only with requests that have the same salt, so that response times reveal "
        "nothing to others",
    )
    stream: bool = Field(False, description="answer with Server-Sent Events, one per token")
    trace: TraceRequest | None = Field(
        None, description="return stages of the steps of this generation, those of the prompt included"
    )


class GenerateRequest(GenerationRequest):
    model_config = example(prompt=PROMPT, max_tokens=32, temperature=0.8, seed=7)

    prompt: Prompt
    logprobs: int | None = TOP_LOGPROBS
    echo: bool = Field(False, description="return the tokens of the prompt first, as if they had been generated")
    baseline: bool = Field(
        False,
        description="also generate without the edits, and report how far the residuals of each block have changed; "
        "needs `edits`; not for streams",
    )
    scales: Scales | None = SCALES
