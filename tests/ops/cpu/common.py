"""Shared by the tests of the CPU kernels: dtypes, instruction sets, and kernels for this machine (or a skip)."""

import hashlib
import platform
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.choices import Quantization
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from model.ops.cpu import instruction_levels, launch, libraries
from model.ops.cpu.cpu_ops import find_backend
from model.ops.cpu.grouped_linear import GroupedLinear, has_grouped_kernel
from model.ops.cpu.grouped_packing import pack_weight
from model.ops.cpu.instruction_levels import AVX512, AVX512_VNNI, LEVELS
from model.ops.cpu.packed_linear import pack_linear
from model.ops.interface import Backend
from model.ops.torch_ops import TORCH
from model.ops.weight_formats import GroupedWeight

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8}  # relative, of a single number
# Levels with which most tests run, in addition to the CPU's own.
INSTRUCTIONS = ("avx2", "avx512-bf16", "amx") if platform.machine() == "x86_64" else ("neon", "neon-dotprod")


def including(header: str) -> str:
    """Compiler flags that include a header of this folder before a kernel's source.

    The cache identifies a compiled library by its flags, so the flags contain a hash of the header. A library that was
    compiled with an older version of the header is therefore not used again.
    """
    path = Path(__file__).with_name(header)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return f"-include {shlex.quote(str(path))} -DHASH_OF_{path.stem}=0x{digest}"


# Headers that emulate CPU features, and the level whose instructions an emulation uses.
EMULATED = {
    "avx_vnni": including("byte_products.h"),
    "avx512_bf16": including("bfloat16_pairs.h"),
    "amx_bf16": including("matrix_unit.h"),
}
EMULATED_WITH = {"avx_vnni": AVX512_VNNI, "avx512_bf16": AVX512, "amx_bf16": AVX512}
NO_KERNELS = "this machine has neither AVX2 nor 64-bit NEON, or the kernels could not be compiled"


@contextmanager
def compiled_for(name: str) -> Iterator[None]:
    """Compile the kernels for an instruction level, emulated if the CPU does not have its instructions.

    Skips the test if the level cannot run on this machine, or if it is the machine's own.
    """
    level = next((level for level in LEVELS if level.name == name), None)
    if level is None:
        pytest.skip(f"{name} is for another kind of processor")
    if level == instruction_levels.chosen_level():
        pytest.skip(f"{name} is tested as this machine's own instruction level")
    available = instruction_levels.cpu_features()
    missing = [feature for feature in EMULATED if feature in level.cpu_features - available]
    if not missing and not level.cpu_features <= available:
        pytest.skip(f"this machine does not have the instructions of {name}")
    if not all(EMULATED_WITH[feature].cpu_features <= available for feature in missing):
        pytest.skip(f"this machine can neither run nor emulate the instructions of {name}")
    base = [each for each in LEVELS if each.cpu_features <= level.cpu_features & available][-1]
    with set_variable(instruction_levels.VARIABLE, base.name):
        if not missing:
            yield
            return
        with compiled_with(" ".join(EMULATED[feature] for feature in missing)):
            yield


@contextmanager
def compiled_with(flags: str) -> Iterator[None]:
    """Use kernels that are compiled with these additional flags."""
    with set_variable("CXXFLAGS", flags):
        yield


@contextmanager
def set_variable(name: str, value: str) -> Iterator[None]:
    """Use the kernels that belong to a value of an environment variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        forget_kernels()
        yield
    forget_kernels()


def forget_kernels() -> None:
    """Make the next call load the kernels again, as after a change of the compiler or its flags."""
    libraries._load.cache_clear()
    launch.thread_pool.cache_clear()


def by_kernels(model: Transformer, quantize: Quantization = "none") -> Transformer:
    """The same network, computed by our kernels. Skips the test if there are none for this machine."""
    prepared = prepare_model(model.config, model.state_dict(), quantize=quantize, kernels="auto")
    if prepared.backend is TORCH:
        pytest.skip(NO_KERNELS)
    return prepared


def packed_layer(weight: Tensor | GroupedWeight, bias: Tensor | None, dtype: torch.dtype) -> Any:
    """The linear layer with this weight, computed by our kernels. Skips the test if there are none for this machine."""
    if isinstance(weight, Tensor):
        layer = pack_linear(weight, bias, dtype)
    else:
        has_kernel = has_grouped_kernel(weight.format, dtype)
        layer = GroupedLinear([pack_weight(weight)], bias, dtype) if has_kernel else None
    if layer is None:
        pytest.skip(NO_KERNELS)
    return layer


def cpu_backend(dtype: torch.dtype, d_head: int = 16) -> Backend:
    """The backend of our kernels. Skips the test if there are none for this machine."""
    backend = find_backend(dtype, d_head)
    if backend is None:
        pytest.skip(NO_KERNELS)
    return backend
