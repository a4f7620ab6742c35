"""The queries of GET /weights and GET /weights/{name}."""

from typing import Annotated, Literal

from pydantic import Field

from service.http.field_types import ShortText, StrictBody, Text
from service.http.schemas import MODEL_OR_EXAMPLE

MAX_TEXT = 8192  # characters of the indices of one dim
Indices = Annotated[
    Annotated[Text, Field(max_length=MAX_TEXT)] | None,
    Field(
        description="indices of this dim, if the weight has it: numbers and ranges start:stop:step, separated by "
        "commas; negative ones count from the end, and a range ends before its stop; default: all"
    ),
]


class WeightsQuery(StrictBody):
    model: ShortText | None = MODEL_OR_EXAMPLE
    adapter: ShortText | None = Field(
        None, description="the name of an adapter, whose product is added to the weights that it changes"
    )


class WeightQuery(WeightsQuery):
    detail: Literal["values", "summary", "none"] = Field(
        "values", description="values: the numbers and their summary; summary: without the numbers; none: shapes only"
    )
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = Field(
        None, description="dtype of the returned numbers; default: that of GET /weights"
    )
    encoding: Literal["json", "base64", "safetensors"] | None = Field(
        None,
        description="json: nested lists; base64: little-endian bytes in row-major order; safetensors: a file, with the "
        "rest of the answer in its metadata. Default: json, or what the header Accept names",
    )
    head: Indices = None
    kv_head: Indices = None
    d_model: Indices = None
    d_head: Indices = None
    d_mlp: Indices = None
    d_vocab: Indices = None
    position: Indices = None
    expert: Indices = None
    d_expert: Indices = None
    d_q: Indices = None
    d_k: Indices = None


INDEXED = frozenset(WeightQuery.model_fields) - frozenset(WeightsQuery.model_fields) - {"detail", "dtype", "encoding"}
"""The names of the dims by which a part of a weight is chosen."""
