"""Outputs of the modules of `transformers`, recorded by forward hooks under their own names, can be compared."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.analysis.compare import Comparison, compare
from model.analysis.compare.sources import StageTensors, match_stages
from model.checkpoints.streamed import OpenCheckpoint, open_checkpoint
from tests.parity.reference import BASES, config_of
from tests.tiny import random_ids, write_reference

IDS = random_ids(71, 9)


def record_modules(network: Any) -> dict[str, Tensor]:
    """The output of every module of a pass, by the name of the module."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, Tensor):
                outputs[name] = tensor

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in network.named_modules() if name]
    with torch.inference_mode():
        network(IDS)
    for handle in handles:
        handle.remove()
    return outputs


def compare_modules(network: Any, opened: OpenCheckpoint) -> Comparison:
    ids = IDS[0].tolist()
    outputs = {name: tensor for name, tensor in record_modules(network).items() if tensor.is_floating_point()}
    return compare(opened, match_stages(StageTensors("transformers", outputs), opened.config, ids), ids)


@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("gpt2", ("embed", "pos_embed", "ln1.out", "attn_out", "ln2.out", "mlp.pre", "mlp_out", "resid_post")),
        ("llama", ("embed", "ln1.out", "attn.q", "attn.v", "attn_out", "mlp.pre_linear", "mlp_out", "resid_post")),
        ("qwen3", ("attn.q", "attn_out", "resid_post", "ln_final.out", "logits")),
        ("mistral", ("attn.k", "resid_post", "logits")),
        ("granite", ("attn.k", "mlp.pre", "resid_post", "ln_final.out")),
        *((family, ()) for family in ("gpt_neox", "mixtral", "qwen2", "qwen3_moe", "phi3", "smollm3", "stablelm")),
    ],
)
def test_the_modules_of_transformers_do_not_differ(family: str, stages: tuple[str, ...], tmp_path: Path) -> None:
    network = write_reference(config_of(family, BASES[family]), tmp_path)
    found = compare_modules(network, open_checkpoint(str(tmp_path)))
    assert found.first is None, found.first
    compared = {stage.name.removeprefix("blocks.1.") for stage in found.stages}
    assert compared >= set(stages)


def test_a_mistake_in_a_module_of_transformers_is_explained(tmp_path: Path) -> None:
    network = write_reference(config_of("llama", BASES["llama"]), tmp_path)
    for layer in network.model.layers:
        layer.post_attention_layernorm.variance_epsilon = 1e-5
    found = compare_modules(network, open_checkpoint(str(tmp_path)))
    assert found.first is not None
    assert found.first.name == "blocks.0.ln2.out"
    assert found.hints[0].code == "norm_eps"
    assert "is 1e-05, A's is 0.003" in found.hints[0].message
