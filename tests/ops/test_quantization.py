"""Quantization to 8 and 4 bits: the rounding of a matrix, the choice of layers, and the effect on perplexity."""

import logging

import pytest
import torch
from torch import nn

from model.analysis.drift import generate_texts
from model.analysis.perplexity import score_ids
from model.checkpoints.load import BUNDLED, load_checkpoint
from model.network.prepare import Kernels
from model.ops.cpu.packed_linear import PackedQuantizedLinear
from model.ops.quantization import GROUP, Quantization, QuantizedLinear, bits_of, quantize_int4, quantize_int8
from model.ops.torch_ops import TORCH
from model.text.corpus import Corpus
from tests.conftest import shared
from tests.ops.cpu.common import NO_KERNELS
from tests.service.running import running

TOLERANCE = {"int8": 0.005, "int4": 0.03}  # the relative change of the perplexity


def matrix(rows: int = 24, columns: int = 96) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_int8_rounds_each_number_to_the_nearest_multiple_of_the_scale_of_its_row() -> None:
    weight = matrix()
    weight[3] = 0
    quantized = quantize_int8(weight)
    largest = weight.abs().amax(1, keepdim=True)
    assert torch.equal(quantized.scales, largest / 127)
    assert quantized.values.abs().amax(1).tolist() == [127] * 3 + [0] + [127] * 20
    assert ((quantized.dequantize(torch.float32) - weight).abs() <= largest / 254 * 1.0001).all()


def test_int4_scales_give_smaller_errors_than_scales_from_the_largest_number_alone() -> None:
    weight = matrix()
    weight[3, :GROUP] = 0
    quantized = quantize_int4(weight)
    assert quantized.values.min() >= -8
    assert quantized.values.max() <= 7
    assert torch.equal(quantized.dequantize(torch.float32)[3, :GROUP], torch.zeros(GROUP))
    groups = weight.unflatten(1, (-1, GROUP))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8
    plain = (groups / largest).round().clamp(-8, 7) * largest
    plain_error = (plain - groups).nan_to_num().square().sum(2)
    error = (quantized.dequantize(torch.float32) - weight).unflatten(1, (-1, GROUP)).square().sum(2)
    assert (error <= plain_error * 1.001).all()
    assert error.sum() < 0.95 * plain_error.sum()


def test_the_scale_of_an_int4_group_is_finite_in_float16() -> None:
    weight = torch.zeros(1, GROUP)
    weight[0, 5] = 5.3e5
    assert quantize_int4(weight).scales.half().isfinite().all()


def test_a_group_of_subnormal_numbers_becomes_zeros() -> None:
    """The inverse of its scale would be infinite, and infinity times zero is not a number."""
    weight = torch.full((1, GROUP), 1e-40)
    weight[0, ::2] = 0
    assert torch.equal(quantize_int4(weight).dequantize(torch.float32), torch.zeros(1, GROUP))


def test_int4_does_not_depend_on_the_number_of_rows_that_are_quantized_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = quantize_int4(matrix())
    monkeypatch.setattr("model.ops.quantization.CACHED_NUMBERS", 100)
    in_parts = quantize_int4(matrix())
    assert torch.equal(whole.values, in_parts.values)
    assert torch.equal(whole.scales, in_parts.scales)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_layer_multiplies_by_the_dequantized_weights(bits: int) -> None:
    linear = nn.Linear(96, 24).requires_grad_(False)
    quantized = (quantize_int8 if bits == 8 else quantize_int4)(linear.weight)
    x = torch.randn(2, 3, 96)
    expected = x @ quantized.dequantize(torch.float32).T + linear.bias
    torch.testing.assert_close(QuantizedLinear(quantized, linear.bias)(x), expected)


@pytest.mark.parametrize(
    ("name", "num_inputs", "bits"),
    [("a", 64, 4), ("odd", 36, 8), ("none", 33, None), ("head", 64, 8)],
)
def test_int4_uses_int8_for_the_head_and_for_incomplete_groups(name: str, num_inputs: int, bits: int | None) -> None:
    assert bits_of(name, num_inputs, "int4") == bits
    assert bits_of(name, num_inputs, "none") is None


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("text", ["held out", "generated"])
def test_quantization_changes_the_perplexity_of_the_bundled_model_little(
    quantization: Quantization, has_kernels: bool, text: str
) -> None:
    reference = load_checkpoint(str(BUNDLED), dtype="float32")
    assert reference.tokenizer is not None
    if text == "held out":
        (held_out,) = Corpus.read([shared("corpora/gutenberg/austen-emma.txt")], 0.01).held_out
        texts = [reference.tokenizer.encode(held_out)[:1500]]
    else:
        texts = generate_texts(reference, 3)
    kernels: Kernels = "auto" if has_kernels else "torch"
    quantized = load_checkpoint(str(BUNDLED), dtype="bfloat16", quantize=quantization, kernels=kernels).model
    if has_kernels and quantized.backend is TORCH:
        pytest.skip(NO_KERNELS)
    before, after = (score_ids(model, texts).perplexity for model in (reference.model, quantized))
    assert abs(after / before - 1) < TOLERANCE[quantization]
    assert after != before


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_service_serves_quantized_models_and_reports_the_quantization(
    quantization: str, kernels: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running(model="bundled", quantize=quantization, kernels=kernels) as service:
        has_kernels = any(isinstance(layer, PackedQuantizedLinear) for layer in service.checkpoint.model.modules())
        assert ("not faster" in caplog.text) == (not has_kernels)
        assert kernels == "auto" or not has_kernels
        assert service.get("/model").json()["quantization"] == quantization
        answer = service.answer("/generate", prompt="Emma was", max_tokens=12, temperature=0)
        assert len(answer["tokens"]) == 12
        traced = service.answer("/forward", prompt="Emma was", stages=["blocks.0.mlp_out", "logits"])
        assert [stage["name"] for stage in traced["stages"]] == ["blocks.0.mlp_out", "logits"]
