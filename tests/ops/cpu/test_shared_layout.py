"""Python and C++ declare the same arguments of kernels; a difference is an error before anything is called."""

import ctypes
import struct
from typing import Any, NamedTuple, get_type_hints

import pytest
import torch

from model.ops.cpu import arguments, build, recording, shared_layout
from model.ops.cpu.arguments import AddArguments, Address, MomentsArguments
from model.ops.cpu.shared_layout import Kernel, LayoutMismatch, find_kernel
from tests.ops.cpu.common import NO_KERNELS


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if build.load("elementwise") is None:
        pytest.skip(NO_KERNELS)


class RenamedField(NamedTuple):
    a: Address
    second: Address
    out: Address
    num_elements: int


class FieldOfAnotherKind(NamedTuple):
    a: Address
    b: Address
    out: Address
    num_elements: float


class MissingField(NamedTuple):
    a: Address
    b: Address
    out: Address


class SurplusField(NamedTuple):
    a: Address
    b: Address
    out: Address
    num_elements: int
    factor: float


class FieldsInAnotherOrder(NamedTuple):
    b: Address
    a: Address
    out: Address
    num_elements: int


@pytest.mark.parametrize(
    ("declaration", "named"),
    [
        (RenamedField, "'second address 8' where add_float32_arguments .* has 'b address 8'"),
        (FieldOfAnotherKind, "'num_elements number 24'"),
        (MissingField, "'size 24' where .* has 'num_elements integer 24'"),
        (SurplusField, "'factor number 32' where .* has 'size 32'"),
        (FieldsInAnotherOrder, "'b address 0' where .* has 'a address 0'"),
    ],
)
def test_a_difference_between_the_declarations_is_an_error_that_names_the_field(declaration: Any, named: str) -> None:
    with pytest.raises(LayoutMismatch, match=named):
        find_kernel("elementwise", "add", torch.float32, declaration)


def test_a_constant_that_differs_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arguments.CONSTANTS["statistics"], "NUM_MOMENTS", 4)
    with pytest.raises(LayoutMismatch, match=r"NUM_MOMENTS is 5 in statistics\.cpp and 4"):
        find_kernel("statistics", "moments", torch.float32, MomentsArguments)


def test_a_call_with_a_wrong_number_of_arguments_or_a_wrong_type_never_reaches_the_kernel() -> None:
    kernel: Kernel[Any] | None = find_kernel("elementwise", "add", torch.float32, AddArguments)
    assert kernel is not None
    for values in ((0, 0, 0), (0, 0, 0, 0, 0), (0, 0, 0, 0.5), (0.0, 0, 0, 0)):
        with pytest.raises(struct.error):
            recording.call(kernel, 1, values)


def test_every_kernel_of_every_library_describes_arguments_that_python_declares() -> None:
    declared = {
        shared_layout.describe_struct(each)
        for each in vars(arguments).values()
        if isinstance(each, type) and hasattr(each, "_fields") and get_type_hints(each)
    }
    num_kernels = 0
    for source in sorted(build.CSRC.glob("*.cpp")):
        library = build.load(source.stem)
        assert library is not None
        symbols = exported_descriptions(library)
        for name in symbols:
            describe = library[name]
            describe.restype = ctypes.c_char_p
            assert describe().decode() in declared, f"{source.name}: {name}"
        num_kernels += len(symbols)
    assert num_kernels > 50


def exported_descriptions(library: ctypes.CDLL) -> list[str]:
    """The names of the functions `..._arguments` that a library exports, found as text in its file."""
    with open(library._name, "rb") as file:
        text = file.read()
    names = {part.decode() for part in text.split(b"\0") if part.endswith(b"_arguments") and part.isascii()}
    return sorted(name for name in names if name.isidentifier() and hasattr(library, name))
