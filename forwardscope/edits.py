"""Edits and vectors as arguments of calls: arrays and tensors become base64 or safetensors."""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from forwardscope.arguments import shown, to_indices, to_integer, to_list, to_mapping, to_mappings, to_prompt
from forwardscope.errors import InvalidArgument
from forwardscope.tensor_files import NumpyArray, write_safetensors

DTYPES = ("float64", "float32", "float16")
NUMBERS = ("value", "scale", "factor", "coeff", "min", "max", "std", "seed", "above")
CONDITION = "a mapping, such as {'tokens': [5]}"
Read = Callable[[Any, str], Any]
"""Reads a field of an edit; takes its value, and its name for errors."""


def to_edits(edits: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The `edits` of a JSON body. A `vector` may be an array or a tensor, and positions may be a `range`."""
    if edits is None:
        return None
    return [
        to_edit(edit, f"edits.{index}", sent_vector) for index, edit in enumerate(to_mappings(edits, "edits", "edit"))
    ]


def to_edit(edit: Mapping[str, Any], field: str, read_vector: Read) -> dict[str, Any]:
    """The fields of an edit or of a condition that are not None, as values of Python, with vectors as they are read."""
    fields = {name: to_number(value) if name in NUMBERS else value for name, value in edit.items() if value is not None}
    readers: dict[str, Read] = {
        "when": lambda when, name: to_edit(to_mapping(when, name, CONDITION), name, read_vector),
        "positions": to_positions,
        "keys": to_positions,
        "heads": to_indices,
        "neurons": to_indices,
        "tokens": to_indices,
        "source": to_source,
        "vector": read_vector,
        "subspace": read_vector,
    }
    for name, read in readers.items():
        if name in fields:
            fields[name] = read(fields[name], f"{field}.{name}")
    return fields


def to_source(given: Any, name: str) -> dict[str, Any]:
    """The source of an edit: a prompt, or several, and positions."""
    source = to_mapping(given, name, "a mapping with a `prompt`")
    if source.get("prompt") is not None:
        source["prompt"] = to_prompt(source["prompt"], f"{name}.prompt")
    if source.get("prompts") is not None:
        prompts = to_list(source["prompts"], f"{name}.prompts", "a list of prompts")
        source["prompts"] = [to_prompt(each, f"{name}.prompts.{index}") for index, each in enumerate(prompts)]
    if source.get("positions") is not None:
        source["positions"] = to_positions(source["positions"], f"{name}.positions")
    return source


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


def sent_vector(vector: Any, name: str) -> Any:
    """The vector of an edit in a JSON body. Raises `InvalidArgument` for a mapping of stages, which cannot be sent."""
    if isinstance(vector, Mapping) and "data" not in vector:
        reason = "a mapping is for `run` of a model of `load`; a server takes it with `put_vector`, and edits name it"
        raise InvalidArgument(name, reason)
    return to_vector(vector, name)


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
