"""The JSON bodies of GET, PUT and DELETE /vectors."""

from pydantic import Field

from service.http.field_types import Answer


class VectorTensor(Answer):
    name: str
    shape: list[int]
    dtype: str


class VectorAnswer(Answer):
    """A named vector: one tensor for any stage, or one for each of some stages, which are then its tensors' names."""

    name: str
    uploaded: bool = Field(description="whether a client has sent it; others come from --vectors and cannot be changed")
    by_stage: bool = Field(description="whether the names of the tensors are those of the stages that they are for")
    tensors: list[VectorTensor]
    bytes: int


class VectorsAnswer(Answer):
    vectors: list[VectorAnswer]
