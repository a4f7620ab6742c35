"""Shared by the tests of the CPU kernels: dtypes, instruction sets, and kernels for this machine (or a skip)."""

import hashlib
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from model.ops.cpu import build, recording
from model.ops.cpu.cpu_ops import find_backend
from model.ops.cpu.packed_linear import pack_linear
from model.ops.interface import Backend
from model.ops.quantization import Quantization, Quantized
from model.ops.torch_ops import TORCH

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8}  # relative, of a single number
INSTRUCTIONS = ("AVX2", "AVX512-BF16", "AMX")  # instruction sets to test in addition to the CPU's own


def including(header: str) -> str:
    """Compiler flags that include a header of this folder before a kernel's source.

    The cache identifies a compiled library by its flags, so the flags contain a hash of the header. A library that was
    compiled with an older version of the header is therefore not used again.
    """
    path = Path(__file__).with_name(header)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return f"-include {shlex.quote(str(path))} -DHASH_OF_{path.stem}=0x{digest}"


EMULATED = {"avx512_bf16": including("bfloat16_pairs.h"), "amx_bf16": including("matrix_unit.h")}
NO_KERNELS = "this machine has neither AVX-512 nor AVX2, or no C++ compiler"


@contextmanager
def compiled_for(instructions: str) -> Iterator[None]:
    """Compile the kernels for other instructions than the CPU's own, emulated if the CPU does not have them.

    Skips the test if these instructions cannot run on this machine, or if they are the CPU's own.
    """
    available = build.describe_cpu().split()
    if "avx512f" not in available:
        pytest.skip("this machine has no AVX-512")
    if instructions == "AVX2":
        flags = "-mno-avx512f"
    elif instructions == "AVX512-BF16" and "amx_bf16" in available:
        flags = "-mno-amx-tile"
    else:
        wanted = ("avx512_bf16", "amx_bf16") if instructions == "AMX" else ("avx512_bf16",)
        if wanted[-1] in available:
            pytest.skip(f"{instructions} is tested as this machine's own instruction set")
        flags = " ".join(EMULATED[name] for name in wanted if name not in available)
    with compiled_with(flags):
        yield


@contextmanager
def compiled_with(flags: str) -> Iterator[None]:
    """Use kernels that are compiled with these additional flags."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXXFLAGS", flags)
        forget_kernels()
        yield
    forget_kernels()


def forget_kernels() -> None:
    """Make the next call load the kernels again, as after a change of the compiler or its flags."""
    build.load.cache_clear()
    recording.thread_pool.cache_clear()


def by_kernels(model: Transformer, quantize: Quantization = "none") -> Transformer:
    """The same network, computed by our kernels. Skips the test if there are none for this machine."""
    prepared = prepare_model(model.config, model.state_dict(), quantize=quantize, kernels="auto")
    if prepared.backend is TORCH:
        pytest.skip(NO_KERNELS)
    return prepared


def packed_layer(weight: Tensor | Quantized, bias: Tensor | None, dtype: torch.dtype) -> Any:
    """The linear layer with this weight, computed by our kernels. Skips the test if there are none for this machine."""
    layer = pack_linear(weight, bias, dtype)
    if layer is None:
        pytest.skip(NO_KERNELS)
    return layer


def cpu_backend(dtype: torch.dtype, d_head: int = 16) -> Backend:
    """The backend of our kernels. Skips the test if there are none for this machine."""
    backend = find_backend(dtype, d_head)
    if backend is None:
        pytest.skip(NO_KERNELS)
    return backend
