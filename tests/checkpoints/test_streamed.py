"""A network that reads its weights whenever it computes gives the numbers of a loaded one."""

from pathlib import Path

import pytest
import torch

from model.analysis.compare import compare, record_stages
from model.checkpoints.load import BUNDLED, load_checkpoint
from model.checkpoints.streamed import OpenCheckpoint, StreamedLinear, open_checkpoint
from model.choices import Quantization
from model.errors import CheckpointError
from tests.checkpoints.files import edit_tensors
from tests.parity.reference import BASES, config_of
from tests.tiny import random_ids, write_reference
from tests.tiny_gguf import write_gguf

FAMILIES = tuple(BASES)
IDS = random_ids(71, 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_it_is_loaded(family: str, tmp_path: Path) -> None:
    write_reference(config_of(family, BASES[family]), tmp_path)
    loaded = load_checkpoint(str(tmp_path), dtype="float32").model
    opened = open_checkpoint(str(tmp_path))
    logits = opened.network(torch.float32)(IDS)
    # The order in which PyTorch sums a product depends on the layout of the weight, which differs for GPT-2.
    torch.testing.assert_close(logits, loaded(IDS), atol=1e-5, rtol=0)
    exact = opened.network(torch.float64)(IDS)
    assert exact.dtype == torch.float64
    assert torch.allclose(exact, logits.double(), atol=1e-3)


def test_a_gguf_file_is_read_as_it_is_loaded_and_compared(tmp_path: Path) -> None:
    """Its tensors are converted on several threads, so they cannot be written in inference mode."""
    write_reference(config_of("llama", BASES["llama"]), tmp_path)
    path = write_gguf(tmp_path, tmp_path / "model.gguf")
    opened, other = open_checkpoint(str(path)), open_checkpoint(str(tmp_path))
    logits = opened.network(torch.float32)(IDS)
    torch.testing.assert_close(logits, load_checkpoint(str(path), dtype="float32").model(IDS), atol=1e-5, rtol=0)
    ids = IDS[0].tolist()
    given = record_stages("b", other.network(torch.float32), ids, torch.float32, opened.config)
    assert compare(opened, given, ids).first is None


@pytest.fixture(scope="module")
def bundled() -> OpenCheckpoint:
    return open_checkpoint(str(BUNDLED))


@pytest.mark.parametrize(("quantize", "kernels"), [("int8", "torch"), ("int4", "torch"), ("int8", "auto")])
def test_quantized_networks_are_those_of_the_loader(
    bundled: OpenCheckpoint, quantize: Quantization, kernels: str
) -> None:
    network = bundled.network(torch.bfloat16, quantize=quantize, kernels=kernels)  # type: ignore[arg-type]
    loaded = load_checkpoint(str(BUNDLED), dtype="bfloat16", quantize=quantize, kernels=kernels)  # type: ignore[arg-type]
    with torch.inference_mode():
        logits = network(IDS)
        assert torch.equal(logits, loaded.model(IDS))


def test_no_weight_of_a_linear_layer_stays_in_memory(bundled: OpenCheckpoint) -> None:
    network = bundled.network(torch.float64)
    layers = [module for module in network.modules() if isinstance(module, StreamedLinear)]
    assert len(layers) == 1 + 4 * network.config.num_layers
    kept = sum(parameter.numel() for parameter in network.parameters())
    table = network.embed.weight
    assert kept - table.numel() < 10_000
    assert table.dtype == bundled.dtype


def test_a_checkpoint_that_does_not_fit_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    write_reference(config_of("llama", BASES["llama"]), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
        open_checkpoint(str(tmp_path))
