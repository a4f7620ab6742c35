"""The JSON bodies of requests: the parts that several routes share. `*_schemas.py` have those of one route.

Requests are strict: an unknown field, a boolean instead of a number, NaN, a NUL character or a lone surrogate is an
error, and is never ignored.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from service.http.edit_schemas import Edits
from service.http.field_types import ShortText, StrictBody, Text, TokenIds, at_most

PROMPT = "the cat sat on"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Positions = Annotated[list[int], Field(fail_fast=True, min_length=1)]
GlobList = Annotated[list[ShortText], Field(fail_fast=True, min_length=1, max_length=200), at_most(200)]
Globs = Annotated[GlobList, BeforeValidator(_as_list, json_schema_input_type=ShortText | GlobList)]
MAX_PROMPTS = 256


def _kind_of_prompt(value: Any) -> str:
    """Name the form of a prompt, so that errors speak of this form only."""
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, str | list):
        return "texts" if isinstance(first, str) else "lists of ids"
    if isinstance(value, str):
        return "text"
    return "ids" if isinstance(value, list) else "none"


PROMPT_KIND = Discriminator(
    _kind_of_prompt,
    custom_error_type="prompt_type",
    custom_error_message="send text, a list of token ids, or a list of such prompts",
)
Prompts = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[Text], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("texts")]
    | Annotated[list[TokenIds], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("lists of ids")],
    PROMPT_KIND,
    Field(description="text, or token ids, which are used as they are; or a list of at most 256 such prompts"),
]


class ModelRequest(StrictBody):
    """A request that may name its model, because clients for several models always do."""

    model: ShortText | None = Field(
        None, description="the served model (default), or one of its adapters; see GET /models"
    )


class AdaptedRequest(ModelRequest):
    """A request that may choose an adapter, also by its name in `model`."""

    adapter: ShortText | None = Field(
        None, description="the name of an adapter, see GET /models; default: the one that `model` names, else none"
    )


MODEL_OR_EXAMPLE: Any = Field(
    None, description="the served model (default), one of its adapters, or a worked example; see GET /models"
)


class EditedRequest(AdaptedRequest):
    """A request whose passes may be changed."""

    edits: Edits = Field(
        [], description="changes of stages of the served model, applied in the order of the list; see GET /model"
    )


BASELINE: Any = Field(
    False, description="also run without the edits, and report how far each stage has changed; needs `edits`"
)


def example(**fields: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [fields]})
