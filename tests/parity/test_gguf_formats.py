"""A GGUF file that is computed in its own formats predicts what its dequantized weights predict."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from model.analysis.perplexity import score_ids
from model.checkpoints.load import Checkpoint, load_checkpoint
from model.checkpoints.streamed import open_checkpoint
from model.choices import Quantization
from model.network.float_copy import linear_weight
from model.network.transformer import Transformer
from model.ops.cpu.grouped_linear import GroupedLinear
from model.ops.torch_ops import TORCH
from tests.checkpoints.test_gguf_models import CASES, tiny_config
from tests.ops.cpu.common import NO_KERNELS
from tests.published_models import gemma3_gguf, smollm2_gguf
from tests.tiny import write_reference
from tests.tiny_gguf import write_gguf

TEXT = (
    "The old lighthouse stood at the end of the harbour wall, and every evening its keeper climbed the stairs to light "
    "the lamp. One night in November the wind was so strong that the boats stayed in the harbour, and the fishermen "
    "sat in the kitchen of the inn and told each other stories about the great storms of former years. "
)


def load(path: Path, quantize: Quantization) -> Checkpoint:
    checkpoint = load_checkpoint(str(path), dtype="float32", quantize=quantize, kernels="auto")
    if checkpoint.model.backend.ops is TORCH.ops:
        pytest.skip(NO_KERNELS)
    return checkpoint


def grouped_layers(model: Transformer) -> dict[str, GroupedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GroupedLinear)}


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(params=["llama tied", "qwen2", "gemma3"])
def tiny_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny(request.param, tmp_path)


def write_tiny(case: str, directory: Path) -> Path:
    """A GGUF file with a tiny network, all of whose matrices are in Q8_0."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "query_pre_attn_scalar": 16}
    model_type, options = CASES[case]
    write_reference(tiny_config(model_type, options | {key: sizes[key] for key in sizes.keys() & options}), directory)
    return write_gguf(directory, directory / "q8.gguf", kind=Kind.Q8_0)


def test_every_layer_keeps_the_numbers_of_the_file_and_the_logits_differ_only_by_rounded_inputs(
    tiny_file: Path,
) -> None:
    stored, dequantized = load(tiny_file, "stored"), load(tiny_file, "none")
    assert (stored.quantization, dequantized.quantization) == ("stored", "none")
    layers = grouped_layers(stored.model)
    assert len(layers) == 4 * stored.model.config.num_layers + ("head" in layers)
    for name, layer in layers.items():
        assert torch.equal(layer.unpacked(), linear_weight(dequantized.model.get_submodule(name))), name
    ids = torch.randint(stored.model.config.vocab_size, (1, 33), generator=torch.Generator().manual_seed(0))
    # An input is rounded to 1 / 254 of the largest of its group: about 0.5 % of noise in each of up to 29 layers.
    assert 0 < relative_error(stored.model(ids), dequantized.model(ids)) < 0.08


def test_a_network_that_reads_its_weights_when_it_computes_gives_the_same_bits(tiny_file: Path) -> None:
    stored = load(tiny_file, "stored").model
    streamed = open_checkpoint(str(tiny_file)).network(torch.float32, quantize="stored", kernels="auto")
    ids = torch.randint(stored.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(streamed(ids), stored(ids))


def test_a_router_that_is_stored_quantized_is_dequantized_by_the_loader_and_when_weights_are_read_again(
    tmp_path: Path,
) -> None:
    path = write_tiny("mixtral", tmp_path)
    stored = load(path, "stored").model
    layers = grouped_layers(stored)
    assert layers
    assert not [name for name in layers if name.endswith(".router")]
    streamed = open_checkpoint(str(path)).network(torch.float32, quantize="stored", kernels="auto")
    ids = torch.randint(stored.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(streamed(ids), stored(ids))


def test_pytorch_computes_with_dequantized_weights(tiny_file: Path) -> None:
    checkpoint = load_checkpoint(str(tiny_file), dtype="float32", quantize="stored", kernels="torch")
    assert not grouped_layers(checkpoint.model)
    assert checkpoint.quantization == "none"


@pytest.mark.slow
@pytest.mark.parametrize(("file", "num_layers"), [(smollm2_gguf, 30), (gemma3_gguf, 18)], ids=["smollm2", "gemma3"])
def test_a_published_file_in_its_own_formats_predicts_as_well_as_dequantized(
    file: Callable[[], Path], num_layers: int
) -> None:
    stored, dequantized = load(file(), "stored"), load(file(), "none")
    assert len(grouped_layers(stored.model)) == 4 * num_layers + 1
    assert stored.tokenizer is not None
    ids = stored.tokenizer.encode(TEXT)
    alone, parts = stored.model(torch.tensor([ids])), stored.model.new_cache(len(ids))
    chunks = [stored.model(torch.tensor([ids[start : start + 7]]), parts) for start in range(0, len(ids), 7)]
    assert torch.equal(torch.cat(chunks, dim=1), alone)  # no bit depends on how the text is divided
    found, expected = score_ids(stored.model, [ids]), score_ids(dequantized.model, [ids])
    # Rounded inputs add noise of either sign: on 15,000 tokens it costs a few tenths of a percent of perplexity, on
    # these 80 it may be ten times as much.
    assert abs(found.nats_per_token - expected.nats_per_token) < 0.05
