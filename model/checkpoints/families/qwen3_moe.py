"""The mixtures of experts of Qwen3 (Yang et al. 2025): Qwen3 with experts in all layers or in some of them."""

from typing import Any

from model.checkpoints.families import llama, mixtral, qwen2, qwen3
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family, stored
from model.config import MAX_SIZES, ModelConfig
from model.errors import short_repr

DEFAULTS = llama.DEFAULTS | {"max_position_embeddings": 32768, "num_key_value_heads": 4}
EXPERTS = {
    "blocks.{i}.mlp.router": stored("model.layers.{i}.mlp.gate"),
    "blocks.{i}.mlp.experts.{e}.up": stored(
        "model.layers.{i}.mlp.experts.{e}.gate_proj", "model.layers.{i}.mlp.experts.{e}.up_proj"
    ),
    "blocks.{i}.mlp.experts.{e}.down": stored("model.layers.{i}.mlp.experts.{e}.down_proj"),
}


def read(config: ConfigReader) -> ModelConfig:
    config.ignore("output_router_logits", "router_aux_loss_coef")  # used in training only
    config.ignore("max_window_layers")  # the window is that of every layer
    return llama.read_common(
        config,
        defaults=DEFAULTS,
        window=qwen2.read_window(config),
        **llama.attention_biases(config),
        qk_norm="head",
        **read_experts(config),
    )


def read_experts(config: ConfigReader) -> dict[str, Any]:
    """Read the fields of the experts. No fields if no layer has experts."""
    num_layers = config.integer("num_hidden_layers", high=MAX_SIZES["num_layers"])
    step = config.integer("decoder_sparse_step", 1, high=MAX_SIZES["num_layers"])
    dense = config.take("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ValueError(f"config.json: mlp_only_layers = {short_repr(dense)} is not a list of layers")
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    fields = {
        "num_experts": config.need("num_experts"),
        "num_experts_per_token": config.need("num_experts_per_tok"),
        "d_expert": config.need("moe_intermediate_size"),
        "normalize_expert_weights": config.take("norm_topk_prob", False),
    }
    return fields | {"expert_layers": None if all(layers) else layers} if any(layers) else {}


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=read,
    tensors=qwen3.TENSORS | EXPERTS,
    keys=llama.KEYS | {"d_expert": "moe_intermediate_size", "normalize_expert_weights": "norm_topk_prob"},
    aliases={"num_local_experts": "num_experts"},
    fused=mixtral.FUSED,
)
