"""Types of fields that several JSON bodies share, and the base classes of bodies.

Requests are strict: an unknown field, a boolean instead of a number, NaN, a NUL character or a lone surrogate is an
error, and is never ignored. Of unknown fields, the routes of other APIs leave out some (bodies.py).
"""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator

from model.errors import join_words


def check_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("contains a NUL character; if it is intended, send token ids instead")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("contains a lone surrogate, which is not a character") from None
    return text


def at_most(max_length: int) -> BeforeValidator:
    """Check the length of a list or object before its entries are validated.

    Otherwise a long list of wrong entries would make as many errors.
    """

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > max_length:
            raise ValueError(f"has {len(value)} entries; the limit is {max_length}")
        return value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(check_text)]
ShortText = Annotated[Text, Field(max_length=200)]
TokenId = Annotated[int, Field(ge=0)]
Index = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Indices = Annotated[list[Index], Field(fail_fast=True, min_length=1)]


def _is_lists(value: Any) -> str:
    return "lists" if isinstance(value, list) and value and isinstance(value[0], list) else "list"


LIST_OR_LISTS = Discriminator(_is_lists)
Prompt = Annotated[
    Text | TokenIds,
    Field(description="text, or token ids, which are used as they are"),
]


class StrictBody(BaseModel):
    """The base of all JSON objects of requests, and of queries."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class OneOf(StrictBody):
    """An object of which exactly one field is set."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        fields = type(self).model_fields
        if sum(getattr(self, name) is not None for name in fields) != 1:
            names = [field.alias or name for name, field in fields.items()]
            raise ValueError(f"set exactly one of {join_words(names, 'and')}")
        return self
