"""Blocks of GGUF files keep every bit: the integers and scales stand for the numbers of the `gguf` package."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from model.checkpoints.gguf_files import read_gguf_checkpoint
from model.checkpoints.gguf_files.blocks import KINDS, read_blocks
from model.ops.cpu.grouped_packing import pack_stored, unpack_groups
from model.ops.stored_weights import StackedGroups
from tests.checkpoints.test_gguf_models import CASES, tiny_config
from tests.checkpoints.test_gguf_tensors import bits, random_blocks
from tests.tiny import write_reference
from tests.tiny_gguf import write_gguf


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_blocks_stand_for_the_numbers_of_the_gguf_package(kind: Kind) -> None:
    data = random_blocks(kind)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    found = read_blocks(kind, torch.from_numpy(data)).dequantize().view(expected.shape)
    is_nan = expected.isnan()
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(bits(found[~is_nan]), bits(expected[~is_nan]))


@pytest.mark.parametrize("name", ["llama with biases", "gemma3", "mixtral", "qwen2", "phi3"])
def test_rows_in_their_own_format_have_the_order_of_dequantized_ones(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "query_pre_attn_scalar": 16}
    model_type, options = CASES[name]
    write_reference(tiny_config(model_type, options | {key: sizes[key] for key in sizes.keys() & options}), tmp_path)
    path = write_gguf(tmp_path, tmp_path / "q8.gguf", kind=Kind.Q8_0)
    tensors = read_gguf_checkpoint(path, quantized_as=torch.float32).tensors
    num_grouped = 0
    for tensor, header in tensors.headers.items():
        grouped = tensors.grouped(tensor)
        assert (grouped is not None) == (header.stored_as == "Q8_0")
        if grouped is not None:
            num_grouped += 1
            stored = StackedGroups((grouped,), torch.float32, torch.device("cpu"))
            assert torch.equal(stored.tensor(), tensors.read(tensor))
            (packed,) = pack_stored(stored)
            assert torch.equal(unpack_groups(packed).dequantize(), tensors.read(tensor))
    assert num_grouped > 4


def test_a_transposed_matrix_has_no_rows_in_its_own_format(tmp_path: Path) -> None:
    model_type, options = CASES["gpt2"]
    write_reference(tiny_config(model_type, options | {"n_embd": 64}), tmp_path)
    tensors = read_gguf_checkpoint(write_gguf(tmp_path, tmp_path / "q8.gguf", kind=Kind.Q8_0)).tensors
    name = "transformer.h.0.attn.c_attn.weight"
    assert tensors.headers[name].stored_as == "Q8_0"
    assert tensors.grouped(name) is None
