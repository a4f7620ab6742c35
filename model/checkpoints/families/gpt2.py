"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU without a gate, biases.

Matrices are stored as (in, out).
"""

from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import ACTIVATIONS, Family, stored
from model.config import MAX_SIZES, ModelConfig

KEYS = {
    "d_model": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "d_mlp": "n_inner",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tied_head": "tie_word_embeddings",
}


def read(config: ConfigReader) -> ModelConfig:
    config.expect("scale_attn_weights", True)
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.expect("reorder_and_upcast_attn", False)
    config.ignore("n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout")
    config.ignore("summary_proj_to_labels", "n_special", "predict_special_tokens", "output_past", "_num_labels")
    d_model = config.integer("n_embd", high=MAX_SIZES["d_model"])
    return ModelConfig(
        vocab_size=config.need("vocab_size"),
        d_model=d_model,
        num_layers=config.need("n_layer"),
        num_heads=config.need("n_head"),
        d_mlp=config.take("n_inner", 4 * d_model),
        max_positions=config.need("n_positions"),
        norm="layer",
        norm_eps=config.take("layer_norm_epsilon", 1e-5),
        positions="learned",
        activation=config.choice("activation_function", ACTIVATIONS, "gelu_new"),
        gated=False,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_head=config.take("tie_word_embeddings", True),
    )


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    read=read,
    keys=KEYS,
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    # Causal masks, which old versions of transformers stored.
    surplus=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    tensors={
        "embed": stored("transformer.wte"),
        "pos_embed": stored("transformer.wpe"),
        "blocks.{i}.ln1": stored("transformer.h.{i}.ln_1"),
        "blocks.{i}.attn.qkv": stored("transformer.h.{i}.attn.c_attn", layout="transposed"),
        "blocks.{i}.attn.out": stored("transformer.h.{i}.attn.c_proj", layout="transposed"),
        "blocks.{i}.ln2": stored("transformer.h.{i}.ln_2"),
        "blocks.{i}.mlp.up": stored("transformer.h.{i}.mlp.c_fc", layout="transposed"),
        "blocks.{i}.mlp.down": stored("transformer.h.{i}.mlp.c_proj", layout="transposed"),
        "ln_final": stored("transformer.ln_f"),
        "head": stored("lm_head"),
    },
)
