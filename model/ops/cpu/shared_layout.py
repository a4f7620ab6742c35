"""Find kernels in the libraries, and check that Python and C++ agree on structs and constants.

`arguments.py` declares the Python side. A library exports descriptions of the C++ side (`csrc/shared_struct.h`).
"""

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, get_type_hints

import torch

from model.ops.cpu import build
from model.ops.cpu.arguments import CONSTANTS, Address

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])
# The kinds of fields as C++ names them, with their format in the module `struct`. All of them have FIELD_BYTES.
FORMATS = {"address": "P", "integer": "q", "number": "d"}
FIELD_BYTES = 8
KINDS: dict[Any, str] = {Address: "address", int: "integer", float: "number"}


class LayoutMismatch(RuntimeError):
    """Python and C++ disagree about a struct or a constant: a mistake in the code of this package."""


@dataclass(frozen=True)
class Kernel(Generic[Arguments]):
    """A kernel in memory, and the function that makes the C++ struct of its arguments."""

    name: str
    address: int
    pack: Callable[..., bytes]


def find_kernel(library: str, name: str, dtype: torch.dtype, arguments: type[Arguments]) -> Kernel[Arguments] | None:
    """The kernel `name` for this dtype in `library`.cpp; None if there is none for this CPU.

    Raises LayoutMismatch if its arguments, or a constant of the library, differ between Python and C++.
    """
    loaded = load_checked(library)
    full_name = f"{name}_{str(dtype).removeprefix('torch.')}"
    function = getattr(loaded, full_name, None)
    if loaded is None or function is None:
        return None
    check_struct(loaded, f"{full_name}_arguments", arguments)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return Kernel(full_name, address, struct.Struct(struct_format(arguments)).pack)


def load_checked(library: str) -> ctypes.CDLL | None:
    """Load the library of a C++ file, and compare its constants with ours."""
    loaded = build.load(library)
    if loaded is not None:
        for name, ours in CONSTANTS.get(library, {}).items():
            theirs = ctypes.c_int64.in_dll(loaded, f"constant_{name}").value
            if theirs != ours:
                raise LayoutMismatch(f"the constant {name} is {theirs} in {library}.cpp and {ours} in arguments.py")
    return loaded


def check_struct(library: ctypes.CDLL, function: str, ours: type[tuple[Any, ...]]) -> None:
    """Compare a struct with the description that a function of the library returns. Raises LayoutMismatch."""
    describe = library[function]  # a new object, unlike an attribute
    describe.argtypes, describe.restype = [], ctypes.c_char_p
    expected, found = describe_struct(ours).splitlines(), describe().decode().splitlines()
    for our_line, their_line in zip(expected, found, strict=False):  # the last lines differ if the numbers do
        if our_line != their_line:
            raise LayoutMismatch(
                f"{ours.__name__} in arguments.py has '{our_line}' where {function} of the C++ code has "
                f"'{their_line}' (a field's name, kind and offset, or the size); make the declarations equal"
            )


@cache
def describe_struct(fields: type[tuple[Any, ...]]) -> str:
    """A line for each field with its name, kind and offset, then the size of the struct, as `STRUCT` in C++ writes."""
    kinds = field_kinds(fields)
    lines = [f"{name} {kind} {FIELD_BYTES * index}" for index, (name, kind) in enumerate(kinds.items())]
    return "\n".join([*lines, f"size {FIELD_BYTES * len(kinds)}"])


def struct_format(fields: type[tuple[Any, ...]]) -> str:
    """The layout of a struct as the format of the module `struct`."""
    return "".join(FORMATS[kind] for kind in field_kinds(fields).values())


def field_kinds(fields: type[tuple[Any, ...]]) -> dict[str, str]:
    """The kind of each field of a NamedTuple, in order."""
    return {name: KINDS[hint] for name, hint in get_type_hints(fields, include_extras=True).items()}
