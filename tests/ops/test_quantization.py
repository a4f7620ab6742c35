"""Quantization to 8, 5 and 4 bits: the rounding of a matrix, the choice of layers, and the effect on perplexity."""

import logging

import pytest
import torch
from torch import nn

from model.analysis.generated_texts import generate_texts
from model.analysis.perplexity import score_ids
from model.checkpoints.load import BUNDLED, load_checkpoint
from model.choices import Kernels, Quantization
from model.ops.cpu.grouped_linear import GroupedLinear
from model.ops.quantization import (
    INT4,
    INT5,
    INT8,
    QuantizedLinear,
    format_of,
    keeps_precision,
    quantize_int8,
    quantize_to,
)
from model.ops.torch_ops import TORCH
from model.ops.weight_formats import GROUP, WeightFormat
from model.text.corpus import Corpus
from tests.conftest import shared
from tests.ops.cpu.common import NO_KERNELS
from tests.service.running import running

TOLERANCE = {"int8": 0.005, "int5": 0.015, "int4": 0.03}  # the relative change of the perplexity
with_minimums = pytest.mark.parametrize("weight_format", [INT5, INT4], ids=["int5", "int4"])
every_format = pytest.mark.parametrize("weight_format", [INT8, INT5, INT4], ids=["int8", "int5", "int4"])


def matrix(rows: int = 24, columns: int = 96) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_int8_rounds_each_number_to_the_nearest_multiple_of_the_scale_of_its_group() -> None:
    weight = matrix()
    weight[3] = 0
    quantized = quantize_int8(weight)
    largest = weight.unflatten(1, (-1, GROUP)).abs().amax(2)
    assert torch.equal(quantized.scales, (largest / 127).half())
    error = (quantized.dequantize() - weight).unflatten(1, (-1, GROUP)).abs()
    # Half a step; and the largest number may not be a multiple of the scale, which float16 has rounded.
    assert (error <= largest[:, :, None] * (1 / 254 + 2**-11)).all()


@with_minimums
def test_formats_with_minimums_have_smaller_errors_than_the_range_of_a_group_in_equal_steps(
    weight_format: WeightFormat,
) -> None:
    weight = matrix()
    weight[3, :GROUP] = 0
    quantized = quantize_to(weight, weight_format)
    assert quantized.integers.max() == weight_format.largest
    assert torch.equal(quantized.dequantize()[3, :GROUP], torch.zeros(GROUP))
    groups = weight.unflatten(1, (-1, GROUP))
    smallest, largest = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = ((largest - smallest) / weight_format.largest).clamp(min=1e-30)
    plain = ((groups - smallest) / step).round() * step + smallest
    plain_error = (plain - groups).square().sum(2)
    error = (quantized.dequantize() - weight).unflatten(1, (-1, GROUP)).square().sum(2)
    assert (error <= plain_error * 1.001 + 1e-5 * step.square().flatten(1)).all()
    assert error.sum() < 0.96 * plain_error.sum()


@with_minimums
def test_numbers_that_a_format_can_represent_are_not_changed(weight_format: WeightFormat) -> None:
    once = quantize_to(matrix(), weight_format).dequantize()
    assert torch.equal(quantize_to(once, weight_format).dequantize(), once)


@every_format
def test_the_scales_of_a_group_are_finite_in_float16(weight_format: WeightFormat) -> None:
    weight = torch.zeros(2, GROUP)
    weight[0, 5], weight[1, 6] = 5.3e7, -3e38
    assert quantize_to(weight, weight_format).scales.isfinite().all()


@every_format
def test_a_group_of_subnormal_numbers_becomes_zeros(weight_format: WeightFormat) -> None:
    """The inverse of its scale would be infinite, and infinity times zero is not a number."""
    weight = torch.full((1, GROUP), 1e-40)
    weight[0, ::2] = 0
    assert torch.equal(quantize_to(weight, weight_format).dequantize(), torch.zeros(1, GROUP))


@with_minimums
def test_a_weight_does_not_depend_on_the_number_of_rows_that_are_quantized_at_a_time(
    weight_format: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize_to(matrix(), weight_format)
    monkeypatch.setattr("model.ops.quantization.CACHED_NUMBERS", 100)
    in_parts = quantize_to(matrix(), weight_format)
    assert torch.equal(whole.integers, in_parts.integers)
    assert torch.equal(whole.scales, in_parts.scales)


@every_format
@pytest.mark.parametrize("num_inputs", [96, 50])
def test_a_quantized_layer_multiplies_by_the_dequantized_weights(weight_format: WeightFormat, num_inputs: int) -> None:
    linear = nn.Linear(num_inputs, 24).requires_grad_(False)
    quantized = quantize_to(linear.weight, weight_format)
    assert quantized.shape == linear.weight.shape
    x = torch.randn(2, 3, num_inputs)
    expected = x @ quantized.dequantize().T + linear.bias
    torch.testing.assert_close(QuantizedLinear(quantized, linear.bias)(x), expected)


def test_int4_uses_int8_for_the_head_and_no_setting_quantizes_the_routers_of_experts() -> None:
    router = "blocks.0.mlp.router"
    assert keeps_precision(router)
    assert [format_of(router, quantization) for quantization in ("int4", "int8", {router: INT8})] == [None] * 3
    assert [format_of("blocks.0.mlp.up", quantization) for quantization in ("int8", "int5")] == [INT8, INT5]
    assert format_of("head", "int4") == INT8
    assert format_of("blocks.0.mlp.up", "int4") == INT4
    assert format_of("head", "none") is None
    assert format_of("head", {"head": INT8}) == INT8


@pytest.fixture(scope="module", params=["held out", "generated"])
def scored_texts(request: pytest.FixtureRequest) -> tuple[list[list[int]], float]:
    """Texts as ids, and their perplexity for the bundled model in float32."""
    reference = load_checkpoint(str(BUNDLED), dtype="float32")
    assert reference.tokenizer is not None
    if request.param == "held out":
        (held_out,) = Corpus.read([shared("corpora/gutenberg/austen-emma.txt")], 0.01).held_out
        texts = [reference.tokenizer.encode(held_out)[:1500]]
    else:
        texts = generate_texts(reference, 3)
    return texts, score_ids(reference.model, texts).perplexity


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int5", "int4"])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_quantization_changes_the_perplexity_of_the_bundled_model_little(
    quantization: Quantization, has_kernels: bool, scored_texts: tuple[list[list[int]], float]
) -> None:
    texts, before = scored_texts
    kernels: Kernels = "auto" if has_kernels else "torch"
    quantized = load_checkpoint(str(BUNDLED), dtype="bfloat16", quantize=quantization, kernels=kernels).model
    if has_kernels and quantized.backend is TORCH:
        pytest.skip(NO_KERNELS)
    after = score_ids(quantized, texts).perplexity
    assert abs(after / before - 1) < TOLERANCE[quantization]
    assert after != before


@pytest.mark.usefixtures("quick_calibration")
@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_service_serves_quantized_models_and_reports_the_quantization(
    quantization: str, kernels: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running(model="bundled", quantize=quantization, kernels=kernels) as service:
        has_kernels = any(isinstance(layer, GroupedLinear) for layer in service.checkpoint.model.modules())
        assert ("not faster" in caplog.text) == (not has_kernels)
        assert kernels == "auto" or not has_kernels
        assert service.get("/model").json()["quantization"] == quantization
        answer = service.answer("/generate", prompt="Emma was", max_tokens=12, temperature=0)
        assert len(answer["tokens"]) == 12
        traced = service.answer("/forward", prompt="Emma was", stages=["blocks.0.mlp_out", "logits"])
        assert [stage["name"] for stage in traced["stages"]] == ["blocks.0.mlp_out", "logits"]
