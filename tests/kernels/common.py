"""What the tests of the kernels share: dtypes, and kernels of the machine at hand, without which they skip."""

from typing import Any

import pytest
import torch
from torch import nn

from model.config import ModelConfig
from model.kernels.linear import pack_linears
from model.kernels.operations import NativeOperations, operations_for, use_kernels
from model.transformer import Transformer

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2**-23, torch.bfloat16: 2**-8}  # of one number
NO_KERNELS = "this machine has no AVX-512 for it, or no C++ compiler"


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
