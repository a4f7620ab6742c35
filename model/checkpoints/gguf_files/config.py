"""Translate the metadata of a GGUF file to the config.json of the same model in Hugging Face layout.

Defaults are those of llama.cpp, which these files are made for: a setting without a key has one fixed value.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from model.checkpoints.families import FAMILIES
from model.checkpoints.gguf_files.config_parts import ConfigSource, read_common, read_sizes
from model.checkpoints.gguf_files.header import StoredTensor
from model.checkpoints.gguf_files.metadata import MetadataReader
from model.errors import CheckpointError, short_repr

GEMMA3_LOCAL_THETA = 10000.0
# Every such layer attends to all tokens; the others have a window. The families have the same defaults.
GEMMA2_PERIOD, GEMMA3_PERIOD = 2, 6
# The models with this number of layers (27B) scale attention by the width of the network over its heads.
GEMMA2_WIDE_LAYERS, GEMMA3_WIDE_LAYERS = 46, 62


def read_config(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The config.json of a checkpoint. Raises `CheckpointError` naming a key that is invalid or not implemented."""
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file}: general.type is {short_repr(kind)}; only a 'model' can be served")
    source = ConfigSource(MetadataReader(file, metadata), tensors)
    architecture = source.reader.architecture
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(
            f"{file}: general.architecture {short_repr(architecture)} is not implemented; known: {known}"
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file}: the checkpoint lacks token_embd.weight")
    source.reader.expect("attention.causal", True)
    config = ARCHITECTURES[architecture](source)
    source.reader.finish()
    config |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": "output.weight" not in tensors}
    config["architectures"] = [FAMILIES[config["model_type"]].architecture]
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(token_id) is int:
            config[key] = token_id
    return config


def _expect_no_experts(source: ConfigSource) -> None:
    source.reader.expect("expert_count", 0)
    source.reader.expect("expert_used_count", 0)


def _expect_plain_routing(source: ConfigSource) -> None:
    """Check that the experts are chosen by a softmax, and weighted so that the sum of the weights is 1."""
    source.reader.expect("expert_gating_func", 1)  # softmax
    source.reader.expect("expert_weights_scale", 0.0, 1.0)
    source.reader.expect("expert_weights_norm", True)
    for key in ("expert_shared_count", "expert_group_count", "leading_dense_block_count"):
        source.reader.expect(key, 0)


def _biases(source: ConfigSource) -> dict[str, bool]:
    return {"attention_bias": source.has("attn_q.bias"), "mlp_bias": source.has("ffn_up.bias")}


def _llama(source: ConfigSource) -> dict[str, Any]:
    """Llama, Mistral and Mixtral have the same architecture in llama.cpp."""
    reader = source.reader
    if reader.integer("expert_count", 0) > 0:
        _expect_plain_routing(source)
        return read_common(source, "mixtral") | {
            "num_local_experts": reader.integer("expert_count"),
            "num_experts_per_tok": reader.integer("expert_used_count"),
            "sliding_window": reader.integer("attention.sliding_window", 0) or None,
        }
    _expect_no_experts(source)
    window = reader.integer("attention.sliding_window", 0)
    if window > 0:
        return read_common(source, "mistral") | {"sliding_window": window}
    return read_common(source, "llama") | _biases(source)


def _qwen3(source: ConfigSource) -> dict[str, Any]:
    config = read_common(source, "qwen3", always_head_dim=True)
    return config | {"attention_bias": source.has("attn_q.bias")}


def _qwen3_moe(source: ConfigSource) -> dict[str, Any]:
    reader = source.reader
    _expect_plain_routing(source)
    config = read_common(source, "qwen3_moe", always_head_dim=True)
    return config | {
        "attention_bias": source.has("attn_q.bias"),
        "num_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma(source: ConfigSource, model_type: str, wide_layers: int) -> dict[str, Any]:
    """The keys that Gemma 2 and Gemma 3 share. `wide_layers`: the number of layers of the 27B model."""
    config = read_common(source, model_type, always_head_dim=True)
    is_wide = config["num_hidden_layers"] == wide_layers
    query_scalar = config["hidden_size"] // config["num_attention_heads"] if is_wide else config["head_dim"]
    return config | {"query_pre_attn_scalar": query_scalar, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(source: ConfigSource) -> dict[str, Any]:
    reader = source.reader
    config = _gemma(source, "gemma2", GEMMA2_WIDE_LAYERS)
    reader.expect("attention.sliding_window_pattern", GEMMA2_PERIOD)
    return config | {
        "attn_logit_softcapping": reader.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": reader.number("final_logit_softcapping", 30.0),
        "sliding_window": reader.integer("attention.sliding_window", 4096),
    }


def _gemma3(source: ConfigSource) -> dict[str, Any]:
    reader = source.reader
    config = _gemma(source, "gemma3_text", GEMMA3_WIDE_LAYERS)
    reader.expect("attention.sliding_window_pattern", GEMMA3_PERIOD)
    window = reader.integer("attention.sliding_window", 0)
    config["rope_local_base_freq"] = reader.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA)
    config["final_logit_softcapping"] = reader.number("final_logit_softcapping", 0.0) or None
    if not window:  # all layers use `rope_theta` then
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return config | {"sliding_window": window or None}


def _phi3(source: ConfigSource) -> dict[str, Any]:
    reader = source.reader
    _expect_no_experts(source)
    config = read_common(source, "phi3", partial_key="partial_rotary_factor")
    original = reader.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = reader.integer("attention.sliding_window", 0) or None
    if config["partial_rotary_factor"] == 1.0:
        del config["partial_rotary_factor"]
    return config | {"original_max_position_embeddings": original, "sliding_window": window}


def _olmo2(source: ConfigSource) -> dict[str, Any]:
    if source.reader.has("attention.sliding_window"):
        raise source.reader.error("attention.sliding_window", "is set, so this is Olmo 3, which is not implemented")
    return read_common(source, "olmo2") | {"attention_bias": False}


def _smollm3(source: ConfigSource) -> dict[str, Any]:
    return read_common(source, "smollm3") | _biases(source)


def _granite(source: ConfigSource) -> dict[str, Any]:
    reader = source.reader
    reader.expect("rope.scaling.finetuned", True)  # False turns rotary positions off
    _expect_no_experts(source)
    config = read_common(source, "granite") | _biases(source)
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config | {
        "attention_multiplier": reader.number("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": reader.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": reader.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": reader.number("logit_scale"),
    }


def _stablelm(source: ConfigSource) -> dict[str, Any]:
    reader = source.reader
    reader.ignore("use_parallel_residual")  # llama.cpp goes by the tensors
    config = read_common(source, "stablelm", partial_key="partial_rotary_factor", eps_key="layer_norm_eps")
    return config | {
        "use_qkv_bias": source.has("attn_q.bias"),
        "qk_layernorm": source.has("attn_q_norm.weight"),
        "use_parallel_residual": not source.has("ffn_norm.weight"),
    }


def _gpt_neox(source: ConfigSource) -> dict[str, Any]:
    reader = source.reader
    is_parallel = reader.take("use_parallel_residual")
    if type(is_parallel) is not bool:
        raise reader.error("use_parallel_residual", "is missing, or neither true nor false")
    config = read_common(source, "gpt_neox", partial_key="rotary_pct", eps_key="layer_norm_eps")
    if config.pop("num_key_value_heads") != config["num_attention_heads"]:
        raise reader.error("attention.head_count_kv", "differs from attention.head_count, which is not implemented")
    config["rotary_emb_base"] = config.pop("rope_theta")
    return config | {"use_parallel_residual": is_parallel, "hidden_act": "gelu", "attention_bias": True}


def _gpt2(source: ConfigSource) -> dict[str, Any]:
    reader, sizes = source.reader, read_sizes(source)
    reader.expect("attention.head_count_kv", sizes["num_attention_heads"])
    return {
        "model_type": "gpt2",
        "n_embd": sizes["hidden_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_head": sizes["num_attention_heads"],
        "n_positions": sizes["max_position_embeddings"],
        "n_inner": reader.integer("feed_forward_length"),
        "layer_norm_epsilon": reader.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


# general.architecture -> what reads the config.
ARCHITECTURES: Mapping[str, Callable[[ConfigSource], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": partial(read_common, model_type="qwen2"),
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "granite": _granite,
    "stablelm": _stablelm,
    "gptneox": _gpt_neox,
    "gpt2": _gpt2,
}
