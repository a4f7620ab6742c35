"""Calibrated weights: smaller errors of outputs than by rounding, and a file that is kept for the next start."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from model.analysis import auto_quantization
from model.analysis.auto_quantization import resolve
from model.analysis.format_choice import LossMeter
from model.analysis.quantization.calibration import CALIBRATED, calibrate, input_moments, linear_layers
from model.analysis.quantization.error_feedback import InputMoments, quantize_for_inputs
from model.analysis.quantization.kept_weights import read_weights, write_weights
from model.checkpoints.load import load_checkpoint
from model.checkpoints.memory import NotEnoughMemory
from model.choices import Kernels
from model.errors import CheckpointError
from model.network.float_copy import linear_weight
from model.ops.cpu.grouped_packing import pack_weight, unpack_groups
from model.ops.quantization import INT4, INT5, INT8, quantize_to
from model.ops.weight_formats import FORMATS, GROUP, PackedGroups
from tests.ops.cpu.common import by_kernels
from tests.parity.reference import BASES, config_of
from tests.published_models import smollm2
from tests.tiny import CONFIGS, build, random_ids, write_reference

ARCHITECTURE = Path(__file__).parents[2] / "docs/architecture.md"


def correlated_inputs(num_inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_inputs)
    mixed = torch.randn(num_inputs, num_inputs, generator=generator) * num_inputs**-0.5 + torch.eye(num_inputs)
    sizes = torch.randn(num_inputs, generator=generator).exp()
    inputs: Tensor = torch.randn(2000, num_inputs, generator=generator) @ mixed * sizes
    return inputs


def random_weight(num_inputs: int) -> Tensor:
    return torch.randn(40, num_inputs, generator=torch.Generator().manual_seed(1)) * 0.02


def output_error(weight: Tensor, quantized: Tensor, x: Tensor) -> float:
    return float((x @ (quantized - weight).T).square().mean())


@pytest.mark.parametrize("num_inputs", [96, 76])
def test_the_outputs_of_a_calibrated_weight_have_half_the_error_of_rounding_to_nearest(num_inputs: int) -> None:
    """In 4.7 bits instead of 5, and on other inputs than those of the calibration."""
    weight, (x, others) = random_weight(num_inputs), correlated_inputs(num_inputs).chunk(2)
    inputs = InputMoments.prepare(x.T @ x)
    for calibrated, rounded in (("int4", INT4), ("int5", INT5)):
        found = quantize_for_inputs(weight, inputs, FORMATS[calibrated])
        assert found.shape == weight.shape
        error = output_error(weight, found.dequantize(), others)
        assert error < 0.5 * output_error(weight, quantize_to(weight, rounded).dequantize(), others)


def test_weights_that_lie_on_a_grid_of_4_bits_lose_almost_nothing() -> None:
    x = correlated_inputs(96)
    x[:, 40:50] = 0
    inputs, weight = InputMoments.prepare(x.T @ x), random_weight(96)
    on_grid = quantize_to(weight, INT4).dequantize()
    error, usual_error = (
        output_error(each, quantize_for_inputs(each, inputs, FORMATS["int4"]).dequantize(), x)
        for each in (on_grid, weight)
    )
    assert error < 0.01 * usual_error


def test_a_weight_that_is_zero_or_not_finite_harms_no_other_row() -> None:
    x, weight = correlated_inputs(64), random_weight(64)
    inputs = InputMoments.prepare(x.T @ x)
    expected = quantize_for_inputs(weight, inputs, FORMATS["int4"]).dequantize()
    weight[3], weight[5, 7] = 0, torch.inf
    found = quantize_for_inputs(weight, inputs, FORMATS["int4"]).dequantize()
    assert torch.equal(found[3], torch.zeros(64))
    assert found[5].isnan().all()
    others = [row for row in range(40) if row not in (3, 5)]
    torch.testing.assert_close(found[others], expected[others])


@pytest.mark.parametrize("network", ["llama", "gpt2", "mixtral"])
def test_every_linear_layer_is_calibrated_on_its_own_inputs(network: str) -> None:
    model = by_kernels(build(CONFIGS[network]))
    ids = random_ids(model.config.vocab_size, 36).view(3, 12)
    expected: dict[str, Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        def add(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].flatten(0, -2)
            expected[name] = expected.get(name, torch.zeros(())) + x.T @ x

        return add

    layers = linear_layers(model)
    handles = [layer.register_forward_pre_hook(record(name)) for name, layer in layers.items()]
    model(ids)
    for handle in handles:
        handle.remove()
    found = dict(input_moments(model, ids))
    assert found.keys() == layers.keys()
    for name, moments in found.items():
        torch.testing.assert_close(moments, expected.get(name, torch.eye(len(moments))), rtol=1e-4, atol=1e-4)
    calibrated = calibrate(model, ids, lambda name: CALIBRATED)
    assert calibrated.keys() == {(name, format.name) for name in found for format in CALIBRATED}


def test_a_layer_that_is_not_finite_is_named() -> None:
    plain = build(CONFIGS["llama"])
    plain.get_parameter("blocks.1.mlp.up.weight")[3, 5] = torch.nan
    with pytest.raises(CheckpointError, match=r"blocks\.1\.mlp\.up has weights or inputs that are not finite"):
        calibrate(plain, random_ids(plain.config.vocab_size, 12), lambda name: CALIBRATED)


def test_kept_weights_are_the_same_and_a_damaged_file_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, x = tmp_path / "weights.safetensors", correlated_inputs(76)
    inputs = InputMoments.prepare(x.T @ x)
    quantized = [quantize_for_inputs(random_weight(76), inputs, format) for format in CALIBRATED]
    weights = {weight.format.name: pack_weight(weight) for weight in quantized}
    assert read_weights(path) is None
    write_weights(path, weights)
    found = read_weights(path)
    assert found is not None
    for name, weight in weights.items():
        assert torch.equal(unpack_groups(found[name]).dequantize(), unpack_groups(weight).dequantize())
    assert not caplog.records
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    assert read_weights(path) is None
    path.write_bytes(content[:500])
    assert read_weights(path) is None
    assert caplog.text.count("calibrated again") == 2


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("llama")
    write_reference(config_of("llama", BASES["llama"]), directory)
    return str(directory)


@pytest.mark.usefixtures("quick_calibration")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_int4_is_calibrated_once_and_loaded_with_and_without_kernels(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: str
) -> None:
    formats = resolve(tiny_checkpoint, "int4", None, kernels)
    monkeypatch.setattr(auto_quantization, "calibrate", None)  # calibrating again would fail
    kept = resolve(tiny_checkpoint, "int4", None, kernels)
    checkpoint = load_checkpoint(tiny_checkpoint, quantize=kept, kernels=kernels)
    assert isinstance(formats, dict)
    assert formats.pop("head") == INT8
    for name, weight in formats.items():
        assert isinstance(weight, PackedGroups)
        assert weight.format == FORMATS["int4"]
        layer = checkpoint.model.get_submodule(name)
        assert torch.equal(linear_weight(layer), unpack_groups(weight).dequantize())


@pytest.mark.usefixtures("quick_calibration")
def test_a_network_that_does_not_fit_into_memory_in_float32_is_rounded_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(*args: object, **settings: object) -> None:
        raise NotEnoughMemory("not enough memory: 28 GB")

    monkeypatch.setattr(auto_quantization, "load_checkpoint", load)
    assert resolve("bundled", "int4", None, "auto") == "int4"
    assert "int4: rounded to nearest" in caplog.text


@pytest.mark.slow
def test_calibrated_weights_of_smollm2_lose_half_as_much_as_rounded_ones_off_their_grid() -> None:
    """Its published weights lie on a grid of 4 bits, so they are moved by up to half a step, as in 16 bits."""
    checkpoint = load_checkpoint(str(smollm2()), dtype="float32", kernels="torch")
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    assert tokenizer is not None
    moved = [name for name in linear_layers(model) if re.match(r"blocks\.[0-5]\.", name)]
    generator = torch.Generator().manual_seed(1)
    for name in moved:
        groups = model.get_parameter(f"{name}.weight").unflatten(1, (-1, GROUP))
        step = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15
        groups += (torch.rand(groups.shape, generator=generator) - 0.5) * step
    texts = torch.tensor(tokenizer.encode(ARCHITECTURE.read_text(encoding="utf-8"))[: 24 * 128]).view(24, 128)
    calibrated = calibrate(model, texts[:20], lambda name: [FORMATS["int4"]] if name in moved else [])
    meter = LossMeter(model, texts[20:], calibrated)
    found, rounded = (meter.loss(dict.fromkeys(moved, format)) for format in (FORMATS["int4"], INT4))
    assert found < 0.5 * rounded
