"""Weights of 8 and 4 bits: what is kept of a matrix, which layers, and how well the network then predicts."""

import logging

import pytest
import torch
from torch import nn

from model.checkpoint import load_checkpoint
from model.corpus import Corpus
from model.drift import write_texts
from model.kernels.linear import PackedQuantizedLinear
from model.kernels.operations import use_kernels
from model.perplexity import predict_ids
from model.quantization import GROUP, QuantizedLinear, quantize_int4, quantize_int8, quantize_linears
from service.app import BUNDLED
from tests.conftest import shared
from tests.kernels.common import NO_KERNELS
from tests.service.running import running

TOLERATED = {"int8": 0.005, "int4": 0.03}  # of the perplexity


def matrix(rows: int = 24, columns: int = 96) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_int8_is_each_rows_nearest_multiple_of_its_scale() -> None:
    weight = matrix()
    weight[3] = 0
    quantized = quantize_int8(weight)
    largest = weight.abs().amax(1, keepdim=True)
    assert torch.equal(quantized.scales, largest / 127)
    assert quantized.values.abs().amax(1).tolist() == [127] * 3 + [0] + [127] * 20
    assert ((quantized.dequantize(torch.float32) - weight).abs() <= largest / 254 * 1.0001).all()


def test_int4_leaves_a_smaller_error_than_the_largest_number_alone_would_give() -> None:
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


def test_the_scale_of_a_group_of_4_bits_is_one_that_can_be_kept() -> None:
    weight = torch.zeros(1, GROUP)
    weight[0, 5] = 5.3e5
    assert quantize_int4(weight).scales.half().isfinite().all()


def test_groups_do_not_depend_on_how_many_rows_are_worked_on_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize_int4(matrix())
    monkeypatch.setattr("model.quantization.CACHED_NUMBERS", 100)
    parts = quantize_int4(matrix())
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.scales, parts.scales)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_layer_multiplies_by_what_was_kept(bits: int) -> None:
    linear = nn.Linear(96, 24).requires_grad_(False)
    quantized = (quantize_int8 if bits == 8 else quantize_int4)(linear.weight)
    x = torch.randn(2, 3, 96)
    expected = x @ quantized.dequantize(torch.float32).T + linear.bias
    torch.testing.assert_close(QuantizedLinear(linear, quantized)(x), expected)


def test_int4_keeps_the_head_in_int8_and_what_is_no_whole_group_too() -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(64, 8), "odd": nn.Linear(36, 8), "none": nn.Linear(33, 8), "head": nn.Linear(64, 8)}
    )
    assert quantize_linears(model, "int4") == 3
    bits = {name: child.quantized.bits for name, child in model.items() if isinstance(child, QuantizedLinear)}
    assert bits == {"a": 4, "odd": 8, "head": 8}
    assert quantize_linears(nn.ModuleDict({"a": nn.Linear(64, 8)}), "none") == 0


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("text", ["held out", "its own"])
def test_the_bundled_model_predicts_about_as_well(quantization: str, has_kernels: bool, text: str) -> None:
    reference = load_checkpoint(str(BUNDLED), dtype="float32")
    assert reference.tokenizer is not None
    if text == "held out":
        (held_out,) = Corpus.read([shared("corpora/gutenberg/austen-emma.txt")], 0.01).held_out
        texts = [reference.tokenizer.encode(held_out)[:1500]]
    else:
        texts = write_texts(reference, 3)
    quantized = load_checkpoint(str(BUNDLED), dtype="bfloat16").model
    quantize_linears(quantized, quantization)  # type: ignore[arg-type]
    if has_kernels and not use_kernels(quantized):
        pytest.skip(NO_KERNELS)
    before, after = (predict_ids(model, texts).perplexity for model in (reference.model, quantized))
    assert abs(after / before - 1) < TOLERATED[quantization]
    assert after != before


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_service_runs_on_it_and_says_so(quantization: str, kernels: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running(model="bundled", quantize=quantization, kernels=kernels) as service:
        has_kernels = any(isinstance(layer, PackedQuantizedLinear) for layer in service.checkpoint.model.modules())
        assert ("not faster" in caplog.text) == (not has_kernels)
        assert kernels == "auto" or not has_kernels
        assert service.get("/model").json()["quantization"] == quantization
        answer = service.answer("/generate", prompt="Emma was", max_tokens=12, temperature=0)
        assert len(answer["tokens"]) == 12
        shown = service.answer("/forward", prompt="Emma was", stages=["blocks.0.mlp_out", "logits"])
        assert [stage["name"] for stage in shown["stages"]] == ["blocks.0.mlp_out", "logits"]
