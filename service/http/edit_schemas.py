"""The JSON form of edits: changes of stages of the forward pass, and what answers say about them.

This module checks the form of the fields only. `plan_edits` of model/tracing/edits/ checks whether an edit fits the
network and the prompt.
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator

from model.tracing.edits import Op
from model.tracing.edits.operands import LARGEST
from model.tracing.edits.planner import MAX_EDITS
from model.tracing.edits.positions import PositionWord
from service.http.field_types import Indices, Prompt, ShortText, StrictBody, Text, at_most

MAX_POSITIONS = 4096  # entries of one list of positions; a range is one entry
MAX_SOURCES = 64  # prompts of one mean
MAX_SCALES = 64
MAX_DEPTH = 4  # of nested lists of numbers
MAX_SIZE = 1 << 31  # of one dim


# Positions


def _kind_of_positions(value: Any) -> str:
    return "list" if isinstance(value, list) else "word"


PositionRange = Annotated[list[int | None], Field(min_length=2, max_length=2)]
PositionList = Annotated[list[int | PositionRange], Field(fail_fast=True, min_length=1), at_most(MAX_POSITIONS)]
PositionSpec = Annotated[
    Annotated[PositionWord, Tag("word")] | Annotated[PositionList, Tag("list")], Discriminator(_kind_of_positions)
]


# Vectors


def check_numbers(value: list[Any]) -> list[Any]:
    """Raise `ValueError` unless the nested lists hold finite numbers only, and all lists of one depth are equally long.

    The depth is checked first, because the lists come from a client.
    """
    shape: list[int] = []
    level: list[Any] = [value]
    while isinstance(level[0], list):
        if len(shape) == MAX_DEPTH:
            raise ValueError(f"has lists nested more than {MAX_DEPTH} deep")
        size = len(level[0])
        if size == 0:
            raise ValueError("has an empty list; send at least one number")
        if any(not isinstance(each, list) or len(each) != size for each in level):
            raise ValueError("has lists of different lengths, or numbers beside lists")
        shape.append(size)
        level = [item for each in level for item in each]
    for each in level:
        if type(each) is not int and type(each) is not float:
            kind = "a list" if isinstance(each, list) else f"{str(each)[:20]!r}"
            raise ValueError(f"has {kind} where a number is expected")
        if not abs(each) <= LARGEST:
            raise ValueError("has a number that is not finite in float32")
    return value


NUMBERS_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {"anyOf": [{"type": "number"}, {"type": "array", "items": {}}]},
    "description": "nested lists of numbers",
}
NumberLists = Annotated[list[Any], AfterValidator(check_numbers), WithJsonSchema(NUMBERS_SCHEMA)]


class EncodedTensor(StrictBody):
    """Numbers as base64 of their little-endian bytes in row-major order."""

    data: Text
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    shape: Annotated[list[Annotated[int, Field(ge=1, le=MAX_SIZE)]], Field(min_length=1, max_length=MAX_DEPTH)]


def _kind_of_vector(value: Any) -> str:
    kinds = (("name", str), ("numbers", list), ("tensor", dict | EncodedTensor))
    return next((kind for kind, types in kinds if isinstance(value, types)), "none")


Vector = Annotated[
    Annotated[ShortText, Tag("name")]
    | Annotated[NumberLists, Tag("numbers")]
    | Annotated[EncodedTensor, Tag("tensor")],
    Discriminator(
        _kind_of_vector,
        custom_error_type="vector_type",
        custom_error_message="send the name of a vector, nested lists of numbers, or an object with data, dtype and "
        "shape",
    ),
    Field(description="the name of a vector (see GET /vectors), nested lists of numbers, or base64"),
]


# Edits

SUBSPACE: Any = Field(None, description="vectors (k, D) that span a subspace; only the component in it is changed")


class EditSourceRequest(StrictBody):
    """Another prompt, or several for a mean, from whose unedited passes values are taken."""

    prompt: Prompt | None = None
    prompts: Annotated[list[Prompt], Field(fail_fast=True, min_length=1), at_most(MAX_SOURCES)] | None = Field(
        None, description="for a mean over the positions of several prompts, in place of `prompt`"
    )
    positions: PositionSpec | None = Field(
        None, description="positions in this prompt; default: for patch those of the edit, for mean all"
    )

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError("send either `prompt` or `prompts`")
        return self


class ConditionRequest(StrictBody):
    """The edit applies from the first position on with one of these tokens, or at which the product of the row of a
    stage and a vector is above a number.
    """

    tokens: Indices | None = Field(None, description="token ids")
    stage: ShortText | None = Field(None, description="the name of a stage, not after those that the edit changes")
    vector: Vector | None = Field(None, description="a vector with the shape of a row of the stage")
    above: float | None = None
    positions: PositionSpec = Field("all", description="positions at which the condition is checked")


class EditRequest(StrictBody):
    """The fields that all edits have."""

    stage: ShortText = Field(description="a glob over the stage names of GET /model")
    positions: PositionSpec = Field(
        "all",
        description="positions to change: all, prompt, generated, last (the last position of the prompt), or a list of "
        "indices and [first, last] ranges (no end: [first, null]); negative indices count from the end of the prompt",
    )
    heads: Indices | None = Field(None, description="query heads, and for k and v the key-value heads that they read")
    neurons: Indices | None = Field(None, description="for stages without heads: the numbers of the last dim to change")
    keys: PositionSpec | None = Field(None, description="for stages with a dim `key`: the keys to change; default: all")
    when: ConditionRequest | None = Field(None, description="change those of the positions from which on this holds")

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, values: Any) -> Any:
        """Refuse a field of another operation, and say which fields this one has."""
        unknown = [name for name in values if name not in cls.model_fields] if isinstance(values, dict) else []
        if unknown:
            (op,) = get_args(cls.model_fields["op"].annotation)
            own = [name for name in cls.model_fields if name not in EditRequest.model_fields and name != "op"]
            has = f"its own fields are {', '.join(own)}" if own else "it has no fields of its own"
            raise ValueError(f"the operation {op!r} has no field {unknown[0][:100]!r}; {has}")
        return values


class ZeroEdit(EditRequest):
    """Set the numbers to 0."""

    op: Literal["zero"]


class SetEdit(EditRequest):
    """Replace the numbers by a vector or one number."""

    op: Literal["set"]
    vector: Vector | None = None
    value: float | None = None


class MeanEdit(EditRequest):
    """Replace the numbers by their mean over the positions of a prompt."""

    op: Literal["mean"]
    source: EditSourceRequest | None = Field(None, description="default: all positions of the request's own prompt")
    subspace: Vector | None = SUBSPACE


class PatchEdit(EditRequest):
    """Replace the numbers by those of another prompt."""

    op: Literal["patch"]
    source: EditSourceRequest
    subspace: Vector | None = SUBSPACE


class AddEdit(EditRequest):
    """Add a vector times `scale`, or one number."""

    op: Literal["add"]
    vector: Vector | None = None
    value: float | None = None
    scale: float = 1.0


class ScaleEdit(EditRequest):
    """Multiply the numbers by a factor."""

    op: Literal["scale"]
    factor: float


class ProjectEdit(EditRequest):
    """Multiply the component along a direction, or in a subspace, by `coeff`: 0 removes it, 1 changes nothing."""

    op: Literal["project"]
    vector: Vector | None = None
    subspace: Vector | None = SUBSPACE
    coeff: float = 0.0


class CapEdit(EditRequest):
    """Limit each number or, with a `vector`, the component along this direction."""

    op: Literal["cap"]
    vector: Vector | None = None
    min: float | None = None
    max: float | None = None


class NoiseEdit(EditRequest):
    """Add normal noise, which depends on the seed, the stage, the position and the index only."""

    op: Literal["noise"]
    std: float
    seed: int = Field(0, ge=0, lt=2**63)


def _kind_of_edit(value: Any) -> str:
    op = value.get("op") if isinstance(value, dict) else getattr(value, "op", None)
    return f"{op} edit" if isinstance(op, str) else "none"


# The tags are no names of fields, because the tags are parts of the locations of errors (see `known_part`).
Edit = Annotated[
    Annotated[ZeroEdit, Tag("zero edit")]
    | Annotated[SetEdit, Tag("set edit")]
    | Annotated[MeanEdit, Tag("mean edit")]
    | Annotated[PatchEdit, Tag("patch edit")]
    | Annotated[AddEdit, Tag("add edit")]
    | Annotated[ScaleEdit, Tag("scale edit")]
    | Annotated[ProjectEdit, Tag("project edit")]
    | Annotated[CapEdit, Tag("cap edit")]
    | Annotated[NoiseEdit, Tag("noise edit")],
    Discriminator(
        _kind_of_edit,
        custom_error_type="edit_op",
        custom_error_message=f"send an object whose op is one of {', '.join(get_args(Op))}",
    ),
]
Edits = Annotated[list[Edit], Field(fail_fast=True), at_most(MAX_EDITS)]
Scales = Annotated[
    Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(fail_fast=True, min_length=1)],
    at_most(MAX_SCALES),
]
SCALES: Any = Field(
    None,
    description="run once for each of these numbers, by which the changes of all `edits` are multiplied: 0 changes "
    "nothing, 1 is as declared; for add, scale, project and noise",
)
