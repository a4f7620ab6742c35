"""The weights, as TransformerLens names and shapes them, give the stages of a pass with every kind of layer."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from model.choices import Kernels, Quantization
from model.config import ModelConfig
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from model.network.weight_views import WeightViews
from model.ops.cpu.grouped_linear import GroupedLinear
from model.ops.torch_ops import ACTIVATIONS
from tests.tiny import CONFIGS, ROUNDING, build, every_config, quick, random_ids, record

IDS = random_ids(67, 7)
Tensors = Mapping[str, Tensor]


class Weights(dict[str, Tensor]):
    """Weights by name; a bias that the network does not have is zero."""

    def bias(self, name: str) -> Tensor:
        return self.get(name, torch.tensor(0.0))

    def below(self, place: str) -> "Weights":
        """Those of one block or expert, without its name."""
        return Weights({name.removeprefix(place): each for name, each in self.items() if name.startswith(place)})


def all_weights(model: Transformer) -> Weights:
    return Weights({each.name: each.read() for each in WeightViews(model).views()})


def computed_stages(config: ModelConfig, found: Tensors, weights: Weights) -> dict[str, Tensor]:
    """The stages that follow from stages before them and from weights."""
    stages = {"embed": weights["embed.W_E"][IDS]}
    if config.positions == "learned":
        stages["pos_embed"] = weights["pos_embed.W_pos"][: IDS.shape[1]].expand_as(found["embed"])
    for name, normalized in found.items():
        norm = name.removesuffix(".normalized")
        if norm != name:
            gain, bias = weights[f"{norm}.w"], weights.bias(f"{norm}.b")
            stages[f"{norm}.out"] = (normalized.unflatten(-1, gain.shape[-1:]) * gain + bias).view(normalized.shape)
    for layer in range(config.num_layers):
        place = f"blocks.{layer}."
        own = {name.removeprefix(place): stage for name, stage in found.items() if name.startswith(place)}
        for name, stage in block_stages(config, layer, own, weights.below(place)).items():
            stages[f"{place}{name}"] = stage
    last = found["ln_final.out"] if config.has_final_norm else found[f"blocks.{config.num_layers - 1}.ln2.out"]
    logits = last @ weights["unembed.W_U"] * config.logits_scale
    cap = config.logits_softcap
    return stages | {"logits": logits if cap is None else cap * torch.tanh(logits / cap)}


def block_stages(config: ModelConfig, layer: int, found: Tensors, weights: Weights) -> dict[str, Tensor]:
    norms_input = config.norm_placement in ("pre", "both")
    x = found["ln1.out" if norms_input else "resid_pre"]
    stages = {
        f"attn.{part}": torch.einsum("btc,hcd->bthd", x, weights[f"attn.W_{part.upper()}"])
        + weights.bias(f"attn.b_{part.upper()}")
        for part in "qkv"
    }
    attn_out = torch.einsum("bthd,hdc->btc", found["attn.z"], weights["attn.W_O"]) + weights.bias("attn.b_O")
    if config.shared_norm:
        x = found["ln1.out"]
    elif norms_input:
        x = found["ln2.out"]
    else:
        x = found["ln1.out" if config.norm_placement == "post" else "resid_mid"]
    if config.has_experts(layer):
        stages["mlp.router_logits"] = x @ weights["mlp.W_gate"]
        mlp_out = mixture(config, x, found, weights)
    else:
        hidden = x @ weights["mlp.W_in"] + weights.bias("mlp.b_in")
        stages["mlp.pre_linear" if config.gated else "mlp.pre"] = hidden
        if config.gated:
            stages["mlp.pre"] = x @ weights["mlp.W_gate"] + weights.bias("mlp.b_gate")
        mlp_out = found["mlp.post"] @ weights["mlp.W_out"] + weights.bias("mlp.b_out")
    for name, out, norm in (("attn_out", attn_out, "ln1_post"), ("mlp_out", mlp_out, "ln2_post")):
        if config.norm_placement in ("both", "output"):
            stages[f"{norm}.normalized"] = out / found[f"{norm}.scale"]
        else:
            stages[name] = out * config.residual_scale
    return stages


def mixture(config: ModelConfig, x: Tensor, found: Tensors, weights: Weights) -> Tensor:
    """The sum of the outputs of the chosen experts, by their weights."""
    out = torch.zeros_like(x)
    for position, row in enumerate(x[0]):
        chosen = (found[f"mlp.expert_{part}"][0, position] for part in ("indices", "weights"))
        for index, share in zip(*chosen, strict=True):
            expert = weights.below(f"mlp.experts.{int(index)}.")
            gate = ACTIVATIONS[config.activation](row @ expert["W_gate"])
            out[0, position] += share * ((gate * (row @ expert["W_in"])) @ expert["W_out"])
    return out


@every_config
def test_every_stage_follows_from_stages_before_it_and_the_weights(name: str) -> None:
    config = CONFIGS[name]
    model = build(config, dtype=torch.float64)
    _, found = record(model, IDS)
    computed = computed_stages(config, found, all_weights(model))
    for stage, value in computed.items():
        difference = float((value - found[stage]).abs().max())
        assert difference < ROUNDING[torch.float64], stage
    others = ["resid_", "rot_", "scores", "pattern", "attn.z", "mlp.post", "expert_", "probabilities", "loss"]
    others += ["pos_embed"] if config.positions == "sinusoidal" else []
    left_out = [each for each in found if each not in computed and not any(word in each for word in others)]
    assert all(each.endswith((".scale", ".normalized", "attn_out", "mlp_out")) for each in left_out), left_out


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", quick(2, ["gpt2", "mixtral", "gemma3", "llama"]))
def test_every_stage_of_a_quantized_network_follows_from_its_weights(
    name: str, quantize: Quantization, kernels: Kernels
) -> None:
    """PyTorch multiplies by these weights. Our kernels also round the inputs, to 8 bits in groups."""
    config = CONFIGS[name]
    model = prepare_model(config, build(config).state_dict(), quantize=quantize, kernels=kernels)
    _, found = record(model, IDS)
    rounds_inputs = any(isinstance(module, GroupedLinear) for module in model.modules())
    for stage, value in computed_stages(config, found, all_weights(model)).items():
        error = float((value - found[stage]).norm() / found[stage].norm())
        assert error < (2e-2 if rounds_inputs else 1e-5), stage


@pytest.mark.parametrize("config", ["gemma3", "granite", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_have_the_bits_of_the_stage(config: str, dtype: torch.dtype) -> None:
    weights = build(CONFIGS[config], dtype=dtype).state_dict()
    model = prepare_model(CONFIGS[config], weights, kernels="auto")
    _, found = record(model, IDS)
    table = WeightViews(model)["embed.W_E"]
    assert torch.equal(table.read([IDS[0].tolist(), range(24)])[None], found["embed"])


def test_a_row_of_a_large_weight_costs_a_row() -> None:
    """No block has more numbers than are chosen, whichever dims they are chosen in."""
    view = WeightViews(build(CONFIGS["gpt2"]))["unembed.W_U"]
    assert [tuple(block.shape) for block in view.blocks([range(24), [66]])] == [(1, 24)]
    assert [tuple(block.shape) for block in view.blocks([[3], range(67)])] == [(67, 1)]


def test_only_names_of_weights_are_in_the_mapping() -> None:
    views = WeightViews(build(CONFIGS["gpt2"]))
    names: list[object] = ["blocks.0.attn.W_Q", "blocks.99.attn.W_Q", 5]
    assert [name in views for name in names] == [True, False, False]
