"""Edits and vectors as arguments of calls: arrays and tensors become base64 or safetensors."""

import base64
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forwardscope.tensor_files import NumpyArray, write_safetensors

DTYPES = ("float64", "float32", "float16")


def to_edits(edits: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The `edits` of a JSON body. A `vector` may be an array or a tensor, and positions may be a `range`."""
    return None if edits is None else [to_edit(edit) for edit in edits]


def to_edit(edit: Mapping[str, Any]) -> dict[str, Any]:
    body = dict(edit)
    for name in ("positions", "keys"):
        if body.get(name) is not None:
            body[name] = to_positions(body[name])
    if body.get("heads") is not None:
        body["heads"] = [operator.index(each) for each in body["heads"]]
    if body.get("source") is not None:
        source = body["source"] = dict(body["source"])
        if not isinstance(source.get("prompt"), str | None):
            source["prompt"] = [operator.index(each) for each in source["prompt"]]
        if source.get("positions") is not None:
            source["positions"] = to_positions(source["positions"])
    if hasattr(body.get("vector"), "shape"):
        array = to_array(body["vector"])
        data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        body["vector"] = {"data": data, "dtype": array.dtype.name, "shape": list(array.shape)}
    for name in ("value", "scale", "factor", "coeff", "min", "max", "std"):
        if hasattr(body.get(name), "item"):  # a number of numpy or PyTorch
            body[name] = body[name].item()
    if hasattr(body.get("seed"), "item"):
        body["seed"] = operator.index(body["seed"])
    return {name: value for name, value in body.items() if value is not None}


def to_positions(positions: Any) -> Any:
    """A word, or a list of indices and ranges."""
    if isinstance(positions, str):
        return positions
    return [
        [operator.index(end) for end in each] if isinstance(each, list | tuple) else operator.index(each)
        for each in positions
    ]


def to_array(vector: Any) -> NumpyArray:
    """A numpy array of an array, a tensor or nested lists.

    bfloat16 and short integers become float32, and long integers float64. Raises `ValueError` unless the numbers are
    real.
    """
    if hasattr(vector, "detach"):  # a tensor of PyTorch, which this module does not import
        vector = vector.detach().cpu()
        vector = (vector.float() if str(vector.dtype) == "torch.bfloat16" else vector).numpy()
    array = np.asarray(vector)
    if array.dtype.kind not in "fiu":
        raise ValueError(f"an array of {array.dtype} cannot be sent; give real numbers")
    if array.dtype.itemsize == 8:  # float32 cannot hold every large integer
        return array.astype(np.float64)
    return array if array.dtype.name in DTYPES else array.astype(np.float32)


def vector_file(vector: Any) -> bytes:
    """The safetensors file of a vector: one array, or arrays by the names of their stages."""
    arrays = vector if isinstance(vector, Mapping) else {"vector": vector}
    return write_safetensors({name: to_array(array) for name, array in arrays.items()})
