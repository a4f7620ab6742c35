"""A network on a GPU gives the numbers of the same network on a CPU, and those of `transformers` on this GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.checkpoints.load import load_checkpoint
from model.choices import Kernels, Quantization
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from tests.tiny import CONFIGS, build, every_config, random_ids, record, write_reference

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
# Of float32, because sums are in another order; the largest values are about 10. bfloat16 has 8 bits.
TOLERANCE = {torch.float64: 2e-6, torch.float32: 1e-4}  # the cosines of rotations are in float32


def on_device(model: Transformer, device: torch.device, **options: Any) -> Transformer:
    """The network as it is served on this device."""
    return prepare_model(model.config, {name: x.to(device) for name, x in model.state_dict().items()}, **options)


def assert_close(found: Tensor, expected: Tensor, tolerance: float, name: str = "logits") -> None:
    scale = max(1.0, float(expected[expected.isfinite()].abs().max()) / 10)
    found, expected = found.cpu().double(), expected.double()
    torch.testing.assert_close(
        found, expected, atol=scale * tolerance, rtol=tolerance, msg=lambda text: f"{name}: {text}"
    )


@every_config
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_stage_is_that_of_a_cpu(name: str, dtype: torch.dtype, device: torch.device) -> None:
    exact = build(CONFIGS[name], dtype=torch.float64)
    ids = random_ids(exact.config.vocab_size, 33, batch=2)
    logits, stages = record(on_device(exact.to(dtype), device), ids.to(device))
    expected_logits, expected = record(exact.double(), ids)
    assert list(stages) == list(expected)
    for stage, x in stages.items():
        assert x.dtype in (dtype, torch.float32)
        assert_close(x, expected[stage], TOLERANCE[dtype], stage)
    assert_close(logits, expected_logits, TOLERANCE[dtype])


@every_config
def test_reading_stages_changes_no_bit(name: str, device: torch.device) -> None:
    model = on_device(build(CONFIGS[name], dtype=torch.bfloat16), device)
    ids = random_ids(model.config.vocab_size, 33, batch=2).to(device)
    assert torch.equal(record(model, ids)[0], model(ids))


@pytest.mark.parametrize("quantize", ["int8", "int5", "int4"])
def test_quantized_weights_give_the_numbers_of_a_cpu(quantize: Quantization, device: torch.device) -> None:
    model = build(CONFIGS["llama"])
    ids = random_ids(model.config.vocab_size, 33)
    expected = prepare_model(model.config, dict(model.state_dict()), quantize=quantize, kernels="torch")(ids)
    kernels: Kernels = "torch" if device.type == "cpu" else "auto"
    assert_close(on_device(model, device, quantize=quantize, kernels=kernels)(ids.to(device)), expected, 1e-4)


def test_the_logits_are_those_of_transformers(family: str, tmp_path: Path, device: torch.device) -> None:
    """In float32 up to rounding; in bfloat16 as near to the exact ones as those of transformers."""
    from tests.parity.reference import config_of

    reference = write_reference(config_of(family, {}), tmp_path)
    ids = random_ids(71, 33, batch=2)
    exact = reference(ids).logits.double()
    reference = reference.to(device)
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            model = load_checkpoint(str(tmp_path), device=str(device), dtype=str(dtype).removeprefix("torch.")).model
            ours = model(ids.to(device))
            theirs = reference.to(dtype)(ids.to(device)).logits
            if dtype == torch.float32:
                assert_close(ours, theirs.cpu(), 1e-4)
            elif not model.config.num_experts:  # rounding may choose other experts
                errors = [float((x.cpu().double() - exact).square().mean().sqrt()) for x in (ours, theirs)]
                assert errors[0] < 1.5 * errors[1], errors


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        from tests.parity.reference import CLASSES

        metafunc.parametrize("family", CLASSES)
