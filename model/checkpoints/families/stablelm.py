"""StableLM 2 and StableLM 3B (Bellagente et al. 2024): Llama with LayerNorm and rotary positions in part of each head.

Some models add attention and feed-forward in parallel, with one norm for both, or have a LayerNorm for each head.
"""

from model.checkpoints.families import llama
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family, stored
from model.checkpoints.families.rope import RopeKeys
from model.config import ModelConfig

DEFAULTS = llama.DEFAULTS | {"max_position_embeddings": 4096, "num_key_value_heads": 32, "norm_eps": 1e-5}
NORMS = {
    "blocks.{i}.attn.q_norm": stored("model.layers.{i}.self_attn.q_layernorm.norms.{h}", layout="heads"),
    "blocks.{i}.attn.k_norm": stored("model.layers.{i}.self_attn.k_layernorm.norms.{h}", layout="heads"),
}


def read(config: ConfigReader) -> ModelConfig:
    config.expect("head_dim", None)
    parallel = config.take("use_parallel_residual", False)
    return llama.read_common(
        config,
        defaults=DEFAULTS,
        rope_keys=RopeKeys(default_fraction=0.25),
        norm_eps_key="layer_norm_eps",
        norm="layer",
        parallel_residual=parallel,
        shared_norm=parallel,
        qkv_bias=config.take("use_qkv_bias", False),
        qk_norm="each_head" if config.flag("qk_layernorm", False) else None,
    )


FAMILY = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    read=read,
    tensors=llama.TENSORS | NORMS,
    keys=llama.KEYS
    | {"norm_eps": "layer_norm_eps", "qkv_bias": "use_qkv_bias", "parallel_residual": "use_parallel_residual"},
)
