"""OLMo 2 (OLMo Team 2024): Llama with norms after attention and feed-forward, and norms over all heads of q and k."""

from model.checkpoints.families import llama, qwen3
from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import Family, stored
from model.config import ModelConfig

DEFAULTS = llama.DEFAULTS | {"norm_eps": 1e-5}
OUTPUT_NORMS = {
    "blocks.{i}.ln1_post": stored("model.layers.{i}.post_attention_layernorm"),
    "blocks.{i}.ln2_post": stored("model.layers.{i}.post_feedforward_layernorm"),
}
TENSORS = qwen3.TENSORS | OUTPUT_NORMS


def read(config: ConfigReader) -> ModelConfig:
    return llama.read_common(
        config, defaults=DEFAULTS, norm_placement="output", **llama.attention_biases(config), qk_norm="projection"
    )


FAMILY = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    read=read,
    tensors={name: source for name, source in TENSORS.items() if not name.endswith((".ln1", ".ln2"))},
    keys=llama.KEYS,
)
