"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024): Llama with fused matrices and LongRoPE scaling."""

from model.checkpoints.families import llama
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family, stored
from model.checkpoints.families.rope import RopeKeys
from model.config import ModelConfig

DEFAULTS = llama.DEFAULTS | {"max_position_embeddings": 4096, "norm_eps": 1e-5}
ROPE_KEYS = RopeKeys(
    default_fraction=1.0,
    default_original=4096,
    kinds={"longrope": "longrope", "su": "longrope", "yarn": "longrope"},  # older names of the same method
)
# The fused matrices have the same order of rows as ours: q, k, v, and gate, up.
FUSED = {
    "blocks.{i}.attn.qkv": stored("model.layers.{i}.self_attn.qkv_proj"),
    "blocks.{i}.mlp.up": stored("model.layers.{i}.mlp.gate_up_proj"),
}


def read(config: ConfigReader) -> ModelConfig:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.expect(key, False)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.expect(key, 1)
    return llama.read_common(config, defaults=DEFAULTS, rope_keys=ROPE_KEYS, window=config.take("sliding_window"))


FAMILY = Family(
    model_type="phi3", architecture="Phi3ForCausalLM", read=read, tensors=llama.TENSORS | FUSED, keys=llama.KEYS
)
