"""What the tests of the kernels share: dtypes, and kernels of the machine at hand, without which they skip."""

import hashlib
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from model.config import ModelConfig
from model.kernels import calls, native
from model.kernels.linear import pack_linears
from model.kernels.operations import NativeOperations, operations_for, use_kernels
from model.transformer import Transformer

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8}  # of one number
INSTRUCTIONS = ("AVX2", "AVX512-BF16", "AMX")  # that kernels are compiled for, beside the CPU's own


def including(header: str) -> str:
    """Compiler flags that put a header of this folder before a kernel's source.

    Compiled libraries are kept under a hash of their flags, so the flags also hold a hash of the header's content: a
    library that was compiled with an older header is not used again.
    """
    path = Path(__file__).with_name(header)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return f"-include {shlex.quote(str(path))} -DHASH_OF_{path.stem}=0x{digest}"


EMULATED = {"avx512_bf16": including("bfloat16_pairs.h"), "amx_bf16": including("matrix_unit.h")}
NO_KERNELS = "this machine has neither AVX-512 nor AVX2, or no C++ compiler"


@contextmanager
def compiled_for(instructions: str) -> Iterator[None]:
    """Kernels for other instructions than the CPU's own; skips where they cannot be run, or are its own."""
    found = native.cpu().split()
    if "avx512f" not in found:
        pytest.skip("this machine has no AVX-512")
    if instructions == "AVX2":
        flags = "-mno-avx512f"
    elif instructions == "AVX512-BF16" and "amx_bf16" in found:
        flags = "-mno-amx-tile"
    else:
        wanted = ("avx512_bf16", "amx_bf16") if instructions == "AMX" else ("avx512_bf16",)
        if wanted[-1] in found:
            pytest.skip(f"this machine's own {instructions} is tested")
        flags = " ".join(EMULATED[name] for name in wanted if name not in found)
    with compiled_with(flags):
        yield


@contextmanager
def compiled_with(flags: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXXFLAGS", flags)
        forget_kernels()
        yield
    forget_kernels()


def forget_kernels() -> None:
    native.load.cache_clear()
    calls.runner.cache_clear()


def by_kernels(model: Transformer) -> Transformer:
    """The network by our kernels; skips where there are none."""
    if not use_kernels(model):
        pytest.skip(NO_KERNELS)
    return model


def packed_of(layer: nn.Module) -> Any:
    """The layer by our kernels; skips where there are none."""
    holder = nn.Sequential(layer)
    if not pack_linears(holder):
        pytest.skip(NO_KERNELS)
    return holder[0]


def native_operations(dtype: torch.dtype, d_head: int = 16) -> NativeOperations:
    config = ModelConfig(vocab_size=8, d_model=d_head, num_layers=1, num_heads=1, d_head=d_head, d_mlp=8)
    operations = operations_for(config, dtype, torch.device("cpu"))
    if operations is None:
        pytest.skip(NO_KERNELS)
    return operations
