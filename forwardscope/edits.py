"""Edits and vectors as arguments of calls: arrays and tensors become base64 or safetensors."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from forwardscope.arguments import shown, to_indices, to_integer, to_list, to_mappings, to_prompt
from forwardscope.errors import InvalidArgument
from forwardscope.tensor_files import NumpyArray, write_safetensors

DTYPES = ("float64", "float32", "float16")
NUMBERS = ("value", "scale", "factor", "coeff", "min", "max", "std", "seed", "above")


def to_edits(edits: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The `edits` of a JSON body. A `vector` may be an array or a tensor, and positions may be a `range`."""
    if edits is None:
        return None
    return [to_edit(edit, f"edits.{index}") for index, edit in enumerate(to_mappings(edits, "edits", "edit"))]


def to_edit(edit: Mapping[str, Any], field: str) -> dict[str, Any]:
    body = dict(edit)
    if body.get("when") is not None:
        if not isinstance(body["when"], Mapping):
            raise InvalidArgument(f"{field}.when", f"{shown(body['when'])} is not a mapping, such as {{'tokens': [5]}}")
        body["when"] = to_edit(body["when"], f"{field}.when")
    for name in ("positions", "keys"):
        if body.get(name) is not None:
            body[name] = to_positions(body[name], f"{field}.{name}")
    for name in ("heads", "neurons", "tokens"):
        body[name] = to_indices(body.get(name), f"{field}.{name}")
    if body.get("source") is not None:
        if not isinstance(body["source"], Mapping):
            raise InvalidArgument(f"{field}.source", f"{shown(body['source'])} is not a mapping with a `prompt`")
        source = body["source"] = dict(body["source"])
        if source.get("prompt") is not None:
            source["prompt"] = to_prompt(source["prompt"], f"{field}.source.prompt")
        if source.get("prompts") is not None:
            given = to_list(source["prompts"], f"{field}.source.prompts", "a list of prompts")
            source["prompts"] = [to_prompt(each, f"{field}.source.prompts.{i}") for i, each in enumerate(given)]
        if source.get("positions") is not None:
            source["positions"] = to_positions(source["positions"], f"{field}.source.positions")
    if isinstance(body.get("vector"), Mapping) and "data" not in body["vector"]:
        reason = "a mapping is for `run` of a model of `load`; a server takes it with `put_vector`, and edits name it"
        raise InvalidArgument(f"{field}.vector", reason)
    for name in ("vector", "subspace"):
        body[name] = to_vector(body.get(name), f"{field}.{name}")
    return {name: value for name, value in with_numbers(body).items() if value is not None}


def with_numbers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an edit or of a condition, with numbers of Python in place of those of numpy and PyTorch."""
    return {name: to_number(value) if name in NUMBERS else value for name, value in fields.items()}


def to_number(value: Any) -> Any:
    """A number of numpy or PyTorch as one of Python; other values, such as arrays of several numbers, as they are."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        return value


def to_positions(positions: Any, name: str) -> Any:
    """A word, or a list of indices and ranges."""
    if isinstance(positions, str):
        return positions
    takes = 'a word such as "last", or a list of indices and ranges such as [0, [3, 5], [7, None]]'
    return [to_position(each, name, f"give {takes}") for each in to_list(positions, name, takes)]


def to_position(position: Any, name: str, hint: str) -> Any:
    """An index, or a range, which may end with None."""
    if not isinstance(position, list | tuple):
        return to_integer(position, name, hint)
    return [None if end is None else to_integer(end, name, hint) for end in position]


def to_vector(vector: Any, name: str) -> Any:
    """A vector of a JSON body: arrays and tensors become base64; names and lists are left as they are."""
    if not hasattr(vector, "shape"):
        return vector
    array = to_array(vector, name)
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"data": data, "dtype": array.dtype.name, "shape": list(array.shape)}


def to_array(vector: Any, name: str) -> NumpyArray:
    """A numpy array of an array, a tensor or nested lists.

    bfloat16 and short integers become float32, and long integers float64. Raises `InvalidArgument` unless the numbers
    are real.
    """
    if hasattr(vector, "detach"):  # a tensor of PyTorch, which this module does not import
        vector = vector.detach().cpu()
        vector = (vector.float() if str(vector.dtype) == "torch.bfloat16" else vector).numpy()
    try:
        array = np.asarray(vector)
    except ValueError:
        raise InvalidArgument(name, "has lists of different lengths") from None
    if array.dtype.kind not in "fiu":
        raise InvalidArgument(name, f"an array of {array.dtype} cannot be sent; give real numbers")
    if array.dtype.itemsize == 8:  # float32 cannot hold every large integer
        return array.astype(np.float64)
    return array if array.dtype.name in DTYPES else array.astype(np.float32)


def vector_file(vector: Any) -> bytes:
    """The safetensors file of a vector: one array, or arrays by the names of their stages."""
    return stages_file(vector if isinstance(vector, Mapping) else {"vector": vector})


def stages_file(stages: Mapping[str, Any]) -> bytes:
    """The safetensors file of arrays by name. Whatever has `items` will do, such as TransformerLens's caches."""
    if not hasattr(stages, "items"):
        raise InvalidArgument("stages", f"{shown(stages)} is not a mapping from names to arrays")
    return write_safetensors({name: to_array(array, name) for name, array in stages.items()})
