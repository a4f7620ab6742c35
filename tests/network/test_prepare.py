"""The served network: built from the weights of a plain network, on the chosen backend, with nothing patched in."""

from dataclasses import replace

import pytest
import torch

from model.choices import Kernels, Quantization
from model.errors import CheckpointError
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from model.ops.quantization import QuantizedLinear
from model.ops.torch_ops import TORCH
from tests.tiny import CONFIGS, build, every_config, random_ids


@every_config
def test_a_network_prepared_for_pytorch_is_the_plain_network_to_the_bit(name: str) -> None:
    plain = build(CONFIGS[name])
    prepared = prepare_model(plain.config, plain.state_dict(), kernels="torch")
    ids = random_ids(plain.config.vocab_size, 13)
    assert torch.equal(prepared(ids), plain(ids))
    assert prepared.backend.ops is TORCH.ops
    assert not prepared.backend.allows_varlen
    expected = {parameter: value.shape for parameter, value in plain.named_parameters()}
    assert {parameter: value.shape for parameter, value in prepared.named_parameters()} == expected
    assert not any(parameter.requires_grad for parameter in prepared.parameters())


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_the_weights_are_handed_over_and_the_source_network_is_unchanged(
    quantize: Quantization, kernels: Kernels
) -> None:
    plain = build(CONFIGS["llama"])
    ids = random_ids(plain.config.vocab_size, 13)
    before = plain(ids)
    weights = plain.state_dict()
    prepare_model(plain.config, weights, quantize=quantize, kernels=kernels)
    assert not weights
    assert torch.equal(plain(ids), before)


def test_only_linear_layers_are_quantized() -> None:
    plain = build(CONFIGS["gpt2"])
    prepared = prepare_model(plain.config, plain.state_dict(), quantize="int8", kernels="torch")
    quantized = [name for name, module in prepared.named_modules() if isinstance(module, QuantizedLinear)]
    layers = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    assert quantized == [*(f"blocks.{i}.{layer}" for i in range(plain.config.num_layers) for layer in layers), "head"]
    assert torch.equal(prepared.embed.weight, plain.embed.weight)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_weight_that_is_not_finite_is_not_quantized_and_the_error_names_it(
    quantize: Quantization, number: float, kernels: Kernels
) -> None:
    plain = build(CONFIGS["gpt2"])
    weights = {name: weight.clone() for name, weight in plain.state_dict().items()}
    weights["blocks.1.mlp.up.weight"][3, 5] = number
    with pytest.raises(CheckpointError, match=r"blocks\.1\.mlp\.up\.weight has numbers that are not finite"):
        prepare_model(plain.config, dict(weights), quantize=quantize, kernels=kernels)
    prepare_model(plain.config, weights, kernels=kernels)


def test_a_missing_weight_and_a_surplus_weight_are_noticed() -> None:
    plain = build(CONFIGS["gpt2"])
    missing = plain.state_dict()
    del missing["blocks.1.ln2.bias"]
    with pytest.raises(AssertionError, match="no weight"):
        prepare_model(plain.config, missing, kernels="torch")
    surplus = plain.state_dict() | {"blocks.9.ln1.bias": torch.zeros(24)}
    with pytest.raises(AssertionError, match=r"blocks\.9\.ln1\.bias"):
        prepare_model(plain.config, surplus, kernels="torch")


def test_a_network_receives_its_backend_at_construction() -> None:
    backend = replace(TORCH, allows_varlen=False)
    assert Transformer(CONFIGS["llama"], backend=backend).backend is backend
    assert Transformer(CONFIGS["llama"]).backend is TORCH
