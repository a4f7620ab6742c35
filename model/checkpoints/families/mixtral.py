"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts in every layer."""

from model.checkpoints.families import llama
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family, stored
from model.checkpoints.families.rope import RopeKeys
from model.config import ModelConfig

DEFAULTS = llama.DEFAULTS | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "norm_eps": 1e-5}
EXPERTS = {
    "blocks.{i}.mlp.router": stored("model.layers.{i}.block_sparse_moe.gate"),
    "blocks.{i}.mlp.experts.{e}.up": stored(
        "model.layers.{i}.block_sparse_moe.experts.{e}.w1",
        "model.layers.{i}.block_sparse_moe.experts.{e}.w3",
    ),
    "blocks.{i}.mlp.experts.{e}.down": stored("model.layers.{i}.block_sparse_moe.experts.{e}.w2"),
}
# The experts as transformers 5 holds them in memory; it can save them so.
FUSED = {
    "blocks.{i}.mlp.router": stored("model.layers.{i}.mlp.gate"),
    "blocks.{i}.mlp.experts.{e}.up": stored("model.layers.{i}.mlp.experts.gate_up_proj", layout="expert"),
    "blocks.{i}.mlp.experts.{e}.down": stored("model.layers.{i}.mlp.experts.down_proj", layout="expert"),
}


def read(config: ConfigReader) -> ModelConfig:
    config.expect("attention_bias", False)
    config.ignore("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # used in training only
    return llama.read_common(
        config,
        defaults=DEFAULTS,
        rope_keys=RopeKeys(default_theta=1e6),
        window=config.take("sliding_window"),
        num_experts=config.need("num_local_experts"),
        num_experts_per_token=config.need("num_experts_per_tok"),
        d_expert=config.need("intermediate_size"),
        normalize_expert_weights=True,
    )


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=read,
    tensors={name: source for name, source in llama.TENSORS.items() if ".mlp." not in name} | EXPERTS,
    keys=llama.KEYS | {"num_experts": "num_local_experts", "d_expert": "intermediate_size"},
    aliases={"num_experts": "num_local_experts"},
    fused=FUSED,
)
