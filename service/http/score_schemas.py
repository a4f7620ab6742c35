"""The JSON body of POST /score."""

from typing import Annotated

from pydantic import Field, Tag

from service.http.field_types import LIST_OR_LISTS, Prompt, ShortText, Text, TokenIds, at_most
from service.http.schemas import MAX_PROMPTS, EditedRequest, example

Continuations = Annotated[
    Annotated[list[Text], Field(fail_fast=True, min_length=1), at_most(MAX_PROMPTS), Tag("list")]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1), at_most(MAX_PROMPTS), Tag("lists")],
    LIST_OR_LISTS,
]


class ScoreRequest(EditedRequest):
    model_config = example(prompt="Once upon a time, there was a little", continuations=[" girl", " boy", " table"])

    prompt: Prompt
    continuations: Continuations = Field(
        description="texts that may follow a text, or lists of token ids; at most 256 of at least one token each"
    )
    cache_salt: ShortText | None = Field(None, description="as in /generate")
