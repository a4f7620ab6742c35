"""The shapes of a network's parameters, and the reading of a network from any source of tensors."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.checkpoints.families import FAMILIES
from model.checkpoints.network_weights import MAX_PARAMETERS, NetworkWeights, parameter_shapes
from model.checkpoints.tensor_source import TensorHeader
from model.config import ModelConfig
from model.errors import CheckpointError
from model.network.transformer import Transformer
from tests.tiny import CONFIGS, every_config


@every_config
def test_parameter_shapes_are_those_of_the_network(name: str) -> None:
    expected = {name: tuple(parameter.shape) for name, parameter in Transformer(CONFIGS[name]).named_parameters()}
    assert parameter_shapes(CONFIGS[name]) == expected


def test_a_config_with_too_many_parameters_is_refused_before_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.checkpoints.network_weights.MAX_PARAMETERS", 20)
    with pytest.raises(CheckpointError, match="the limit is 20"):
        parameter_shapes(CONFIGS["llama"])
    assert MAX_PARAMETERS > 20


class TensorsInMemory:
    """A source of tensors that are no files."""

    def __init__(self, tensors: dict[str, Tensor], aliases: dict[str, str]) -> None:
        self.tensors, self.aliases = tensors, aliases
        self.files: Sequence[Path] = ()
        self.headers = {
            name: TensorHeader(tuple(tensor.shape), tensor.dtype, str(tensor.dtype), Path("memory"))
            for name, tensor in tensors.items()
        }

    def grouped(self, name: str) -> None:
        return None

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def random_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Tensors of the Llama family for this config, named and shaped as in published checkpoints."""
    family, tensors = FAMILIES["llama"], {}
    for name, parameter in Transformer(config).named_parameters():
        source = family.source(name)
        num_rows = [len(parameter) // len(source.names)] * len(source.names)
        if ".qkv." in name:
            num_rows = [heads * config.d_head for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        for stored_name, rows in zip(source.names, num_rows, strict=True):
            tensors[stored_name] = torch.randn(rows, *parameter.shape[1:])
    return tensors


def test_a_network_is_read_from_any_source_of_tensors() -> None:
    config = dataclasses.replace(CONFIGS["llama"], tied_head=False)
    tensors = random_tensors(config)
    head = tensors.pop("lm_head.weight")
    weights = NetworkWeights(
        TensorsInMemory(tensors, {"lm_head.weight": "model.embed_tokens.weight"}), FAMILIES["llama"], config
    )
    weights.check()
    read = weights.read(torch.float32, torch.device("cpu"))
    assert list(read) == list(parameter_shapes(config))
    parameters = {}
    for name, weight in read.items():
        assert not isinstance(weight, Tensor)
        parameters[name] = weight.tensor()
    assert torch.equal(parameters["head.weight"], tensors["model.embed_tokens.weight"])
    assert parameters["head.weight"].shape == head.shape
    q, k, v = (tensors[f"model.layers.1.self_attn.{side}_proj.weight"] for side in "qkv")
    assert torch.equal(parameters["blocks.1.attn.qkv.weight"], torch.cat((q, k, v)))
    gate, up = (tensors[f"model.layers.2.mlp.{side}_proj.weight"] for side in ("gate", "up"))
    assert torch.equal(parameters["blocks.2.mlp.up.weight"], torch.cat((gate, up)))
