"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU without a gate, biases.

Matrices are stored as (in, out).
"""

from model.checkpoints.families.config_reader import ConfigReader
from model.checkpoints.families.family import ACTIVATIONS, Family, rows, transposed
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
        "embed.weight": rows("transformer.wte.weight"),
        "pos_embed.weight": rows("transformer.wpe.weight"),
        "blocks.{i}.ln1.weight": rows("transformer.h.{i}.ln_1.weight"),
        "blocks.{i}.ln1.bias": rows("transformer.h.{i}.ln_1.bias"),
        "blocks.{i}.attn.qkv.weight": transposed("transformer.h.{i}.attn.c_attn.weight"),
        "blocks.{i}.attn.qkv.bias": rows("transformer.h.{i}.attn.c_attn.bias"),
        "blocks.{i}.attn.out.weight": transposed("transformer.h.{i}.attn.c_proj.weight"),
        "blocks.{i}.attn.out.bias": rows("transformer.h.{i}.attn.c_proj.bias"),
        "blocks.{i}.ln2.weight": rows("transformer.h.{i}.ln_2.weight"),
        "blocks.{i}.ln2.bias": rows("transformer.h.{i}.ln_2.bias"),
        "blocks.{i}.mlp.up.weight": transposed("transformer.h.{i}.mlp.c_fc.weight"),
        "blocks.{i}.mlp.up.bias": rows("transformer.h.{i}.mlp.c_fc.bias"),
        "blocks.{i}.mlp.down.weight": transposed("transformer.h.{i}.mlp.c_proj.weight"),
        "blocks.{i}.mlp.down.bias": rows("transformer.h.{i}.mlp.c_proj.bias"),
        "ln_final.weight": rows("transformer.ln_f.weight"),
        "ln_final.bias": rows("transformer.ln_f.bias"),
        "head.weight": rows("lm_head.weight"),
    },
)
