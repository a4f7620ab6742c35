"""GPT-NeoX and Pythia (Black et al. 2022, Biderman et al. 2023).

LayerNorm, attention and feed-forward in parallel, rotary positions in part of each head, GELU without a gate, biases.
"""

from model.checkpoints.families import llama
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family, stored
from model.checkpoints.families.rope import RopeKeys
from model.config import ModelConfig

DEFAULTS = llama.DEFAULTS | {"norm_eps": 1e-5, "hidden_act": "gelu"}
ROPE_KEYS = RopeKeys(theta="rotary_emb_base", fraction="rotary_pct", default_fraction=0.25)


def read(config: ConfigReader) -> ModelConfig:
    for key in ("head_dim", "num_key_value_heads"):
        config.expect(key, None)
    return llama.read_common(
        config,
        defaults=DEFAULTS,
        rope_keys=ROPE_KEYS,
        norm_eps_key="layer_norm_eps",
        norm="layer",
        parallel_residual=config.take("use_parallel_residual", True),
        gated=False,
        **llama.attention_biases(config, default=True),
        mlp_bias=True,
    )


FAMILY = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    read=read,
    keys=llama.KEYS
    | {"norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base", "rotary_dim": "rotary_pct"}
    | {"parallel_residual": "use_parallel_residual"},
    # Causal masks, which old versions of transformers stored.
    surplus=("gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias"),
    tensors={
        "embed": stored("gpt_neox.embed_in"),
        "blocks.{i}.ln1": stored("gpt_neox.layers.{i}.input_layernorm"),
        "blocks.{i}.attn.qkv": stored("gpt_neox.layers.{i}.attention.query_key_value", layout="interleaved"),
        "blocks.{i}.attn.out": stored("gpt_neox.layers.{i}.attention.dense"),
        "blocks.{i}.ln2": stored("gpt_neox.layers.{i}.post_attention_layernorm"),
        "blocks.{i}.mlp.up": stored("gpt_neox.layers.{i}.mlp.dense_h_to_4h"),
        "blocks.{i}.mlp.down": stored("gpt_neox.layers.{i}.mlp.dense_4h_to_h"),
        "ln_final": stored("gpt_neox.final_layer_norm"),
        "head": stored("embed_out"),
    },
)
