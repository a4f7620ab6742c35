"""Python fills the arguments of kernels by the names that C++ declares; a mistake is an error before any call."""

import ctypes
import struct

import pytest
import torch

from model.ops.cpu import build, constants, launch, libraries
from model.ops.cpu.shared_layout import FORMATS, Kernel, Layout, LayoutMismatch, check_layout, find_kernel
from model.ops.cpu.trace_kernels import PIECE
from tests.ops.cpu.common import NO_KERNELS


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if libraries.load("elementwise") is None:
        pytest.skip(NO_KERNELS)


@pytest.fixture
def add() -> Kernel:
    kernel = find_kernel("elementwise", "add", torch.float32)
    assert kernel is not None
    return kernel


def test_a_layout_has_the_fields_of_the_struct_in_their_order(add: Kernel) -> None:
    assert list(add.arguments.fields.items()) == [
        ("a", "address"),
        ("b", "address"),
        ("out", "address"),
        ("num_elements", "integer"),
    ]
    packed = add.arguments.pack({"num_elements": 4, "out": 3, "b": 2, "a": 1})
    assert struct.unpack("4q", packed) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        {"a": 0, "b": 0, "out": 0},
        {"a": 0, "b": 0, "out": 0, "num_elements": 0, "factor": 1.0},
        {"a": 0, "second": 0, "out": 0, "num_elements": 0},
        {},
    ],
)
def test_a_missing_or_unknown_argument_never_reaches_the_kernel(add: Kernel, arguments: dict[str, float]) -> None:
    with pytest.raises(TypeError, match="the fields are a, b, out, num_elements; given are"):
        launch.call(add, 1, **arguments)


@pytest.mark.parametrize("wrong", [{"a": 0.0}, {"num_elements": 0.5}])
def test_an_argument_of_another_kind_never_reaches_the_kernel(add: Kernel, wrong: dict[str, float]) -> None:
    with pytest.raises(struct.error):
        launch.call(add, 1, **{"a": 0, "b": 0, "out": 0, "num_elements": 0} | wrong)


@pytest.mark.parametrize(
    "ours",
    [
        Layout({"address": "address", "offset": "integer", "size": "integer"}),
        Layout({"address": "address", "place": "number", "size": "integer"}),
        Layout({"address": "address", "place": "integer"}),
    ],
)
def test_a_struct_that_python_reads_itself_and_that_differs_is_an_error(ours: Layout) -> None:
    check_layout("tracing", "piece", PIECE)
    with pytest.raises(LayoutMismatch, match=r"piece of tracing\.cpp has .*'place': 'integer'"):
        check_layout("tracing", "piece", ours)


def test_a_constant_that_differs_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(constants.CONSTANTS["statistics"], "NUM_MOMENTS", 4)
    with pytest.raises(LayoutMismatch, match=r"NUM_MOMENTS is 5 in statistics\.cpp and 4"):
        find_kernel("statistics", "moments", torch.float32)


def test_every_kernel_of_every_library_describes_its_arguments() -> None:
    num_kernels = 0
    for source in sorted(build.CSRC.glob("*.cpp")):
        library = libraries.load(source.stem)
        assert library is not None
        for name in exported_descriptions(library):
            layout = Layout.read(library, name)
            assert layout.fields, f"{source.name}: {name}"
            assert set(layout.fields.values()) <= FORMATS.keys(), f"{source.name}: {name}"
            num_kernels += 1
    assert num_kernels > 50


def exported_descriptions(library: ctypes.CDLL) -> list[str]:
    """The names of the functions `..._arguments` that a library exports, found as text in its file."""
    with open(library._name, "rb") as file:
        text = file.read()
    names = {part.decode() for part in text.split(b"\0") if part.endswith(b"_arguments") and part.isascii()}
    return sorted(name for name in names if name.isidentifier() and hasattr(library, name))
