"""Find kernels in the libraries, with the layout of their arguments, and check the constants that Python shares.

The C++ code declares the structs. A library exports a description of each (`csrc/shared_struct.h`).
"""

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from model.ops.cpu import libraries
from model.ops.cpu.constants import CONSTANTS

# The kinds of fields as C++ names them, with their format in the module `struct`. All of them have FIELD_BYTES.
FORMATS = {"address": "P", "integer": "q", "number": "d"}
FIELD_BYTES = 8
Argument = int | float | Tensor | None
"""The value of a field: a number, or what an address is taken of."""


class LayoutMismatch(RuntimeError):
    """Python and C++ disagree about a struct or a constant: a mistake in the code of this package."""


class MissingKernel(Exception):
    """There is no such kernel for this CPU, or its library could not be built."""


@dataclass(frozen=True)
class Layout:
    """The fields of a C++ struct by name, in their order, and their kinds: keys of `FORMATS`."""

    fields: Mapping[str, str]

    @classmethod
    def read(cls, library: ctypes.CDLL, function: str) -> "Layout":
        """Read the description of a struct that a function of the library returns."""
        describe = library[function]  # a new object, unlike an attribute
        describe.argtypes, describe.restype = [], ctypes.c_char_p
        *lines, size = (line.split() for line in describe().decode().splitlines())
        fields = {name: kind for name, kind, _ in lines}
        offsets = [int(offset) for _, _, offset in lines]
        if offsets != [FIELD_BYTES * index for index in range(len(lines))] or size[1] != str(FIELD_BYTES * len(fields)):
            raise LayoutMismatch(f"{function} describes a struct whose fields do not follow one another")
        return cls(fields)

    @cached_property
    def format(self) -> str:
        """The layout in the notation of the module `struct`."""
        return "".join(FORMATS[kind] for kind in self.fields.values())

    @cached_property
    def _struct(self) -> struct.Struct:
        return struct.Struct(self.format)

    @cached_property
    def _addresses(self) -> list[int]:
        return [index for index, kind in enumerate(self.fields.values()) if kind == "address"]

    def pack(self, values: Mapping[str, Argument]) -> bytes:
        """Make the struct. An address is given as it is, as a tensor, or as None for null.

        Raises TypeError for missing and unknown fields, and `struct.error` for values of another kind.
        """
        try:
            ordered = [*map(values.__getitem__, self.fields)]
        except KeyError:
            ordered = []
        if len(ordered) != len(values) or not ordered:
            raise TypeError(f"the fields are {', '.join(self.fields)}; given are {', '.join(values)}")
        for index in self._addresses:
            value = ordered[index]
            if value is None:
                ordered[index] = 0
            elif isinstance(value, Tensor):
                ordered[index] = value.data_ptr()
        return self._struct.pack(*ordered)


@dataclass(frozen=True)
class Kernel:
    """A kernel in memory, and the layout of its arguments."""

    name: str
    address: int
    arguments: Layout


def find_kernel(library: str, name: str, dtype: torch.dtype | None) -> Kernel | None:
    """The kernel `name` for this dtype in `library`.cpp; None if there is none for this CPU.

    `KERNEL(name_dtype, ...)` in C++ exports it. A kernel for several dtypes is `KERNEL(name, ...)`, and its `dtype` is
    None: its arguments say which one it is.

    Raises LayoutMismatch if a constant of the library differs between Python and C++.
    """
    loaded = load_checked(library)
    full_name = name if dtype is None else f"{name}_{str(dtype).removeprefix('torch.')}"
    function = getattr(loaded, full_name, None)
    if loaded is None or function is None:
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return Kernel(full_name, address, Layout.read(loaded, f"{full_name}_arguments"))


def need_kernel(library: str, name: str, dtype: torch.dtype | None) -> Kernel:
    """Like `find_kernel`, but raises `MissingKernel` if there is none for this CPU."""
    kernel = find_kernel(library, name, dtype)
    if kernel is None:
        raise MissingKernel(f"{library}.cpp has no kernel {name} for {dtype}")
    return kernel


def need_kernels(library: str, dtype: torch.dtype, *names: str) -> dict[str, Kernel]:
    """Several kernels of one library and dtype, by name."""
    return {name: need_kernel(library, name, dtype) for name in names}


def load_checked(library: str) -> ctypes.CDLL | None:
    """Load the library of a C++ file, and compare its constants with ours."""
    loaded = libraries.load(library)
    if loaded is not None:
        for name, ours in CONSTANTS.get(library, {}).items():
            theirs = ctypes.c_int64.in_dll(loaded, f"constant_{name}").value
            if theirs != ours:
                raise LayoutMismatch(f"the constant {name} is {theirs} in {library}.cpp and {ours} in constants.py")
    return loaded


def check_layout(library: str, function: str, ours: Layout) -> None:
    """Compare the fields of a struct that Python reads or writes itself. Raises LayoutMismatch."""
    loaded = load_checked(library)
    if loaded is not None and (theirs := Layout.read(loaded, function)) != ours:
        raise LayoutMismatch(f"{function} of {library}.cpp has {dict(theirs.fields)}, but Python {dict(ours.fields)}")
