"""Write the GGUF file of a small checkpoint in Hugging Face layout, by the rules of llama.cpp's converter.

The names of tensors are those of the `gguf` package, and the changes of values follow `convert_hf_to_gguf.py`. Nothing
of our reader is used, so that both are checked against each other.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]
# model_type -> the name of the architecture in GGUF files.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "granite": "granite",
    "stablelm": "stablelm",
    "gpt_neox": "gptneox",
    "gpt2": "gpt2",
}
PERMUTED = ("llama", "mistral", "mixtral", "smollm3", "granite")
LISTS = {  # parts that the converter stacks -> the name of the whole
    "mixtral": (r"model\.(layers\.\d+)\.block_sparse_moe\.experts\.(\d+)\.(w\d)", r"\1.feed_forward.experts.\3"),
    "qwen3_moe": (r"(.*\.mlp\.experts)\.(\d+)\.(\w+)", r"\1.\3"),
    "stablelm": (r"(.*\.[qk]_layernorm)\.norms\.(\d+)()", r"\1"),
}


def write_gguf(
    directory: Path,
    path: Path,
    *,
    kind: Kind = Kind.F32,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write the checkpoint in `directory` to `path`. Weights of layers are quantized to `kind`; rows must have whole
    blocks. `extra` may add metadata, such as a vocabulary."""
    config = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata(config).items():
        name = f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    if extra is not None:
        extra(writer)
    for name, values in gguf_tensors(config, load_file(directory / "model.safetensors")).items():
        is_matrix = values.ndim >= 2 and "_norm." not in name and kind is not Kind.F32
        data = gguf.quants.quantize(values, kind) if is_matrix else values
        writer.add_tensor(name, data, raw_dtype=kind if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rope_of(config: Config) -> Config:
    parameters: Config = config.get("rope_parameters") or {}
    full: Config = parameters.get("full_attention", parameters)
    return full


def metadata(config: Config) -> dict[str, Any]:
    """The keys without the name of the architecture."""
    model_type = config["model_type"]
    if model_type == "gpt2":
        return {
            "context_length": config["n_positions"],
            "embedding_length": config["n_embd"],
            "block_count": config["n_layer"],
            "feed_forward_length": config.get("n_inner") or 4 * config["n_embd"],
            "attention.head_count": config["n_head"],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        }
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = rope_of(config)
    partial = rope.get("partial_rotary_factor", 1.0)
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": num_heads,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(partial * head_dim),
    }
    if model_type == "gpt_neox":
        keys["use_parallel_residual"] = config["use_parallel_residual"]
        keys["attention.layer_norm_epsilon"] = config["layer_norm_eps"]
        return keys
    keys["attention.head_count_kv"] = config["num_key_value_heads"]
    if "layer_norm_eps" in config:
        keys["attention.layer_norm_epsilon"] = config["layer_norm_eps"]
        keys["use_parallel_residual"] = config["use_parallel_residual"]
    else:
        keys["attention.layer_norm_rms_epsilon"] = config["rms_norm_eps"]
    if config.get("head_dim"):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if model_type in ("gemma3_text", "qwen2", "qwen3", "qwen3_moe", "olmo2"):
        del keys["rope.dimension_count"]
    return keys | rope_keys(config) | special_keys(config)


def rope_keys(config: Config) -> dict[str, Any]:
    rope = rope_of(config)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if kind == "yarn":
        keys = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
        return keys | {f"rope.scaling.yarn_{name}": rope[name] for name in ("beta_fast", "beta_slow") if name in rope}
    if kind == "longrope":
        original = rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        return {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(scale) / math.log(original)),
        }
    return {}


def special_keys(config: Config) -> dict[str, Any]:
    """The keys that only some architectures have."""
    model_type = config["model_type"]
    keys: dict[str, Any] = {}
    names = {
        "num_local_experts": "expert_count",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    if model_type in ("gemma2", "gemma3_text", "phi3"):
        keys["attention.sliding_window"] = config.get("sliding_window") or 0
    if model_type == "mistral" and config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    return keys | {names[name]: config[name] for name in names if config.get(name) is not None}


def gguf_tensors(config: Config, tensors: Tensors) -> dict[str, np.ndarray]:
    """The tensors with the names and values that the converter gives them."""
    model_type = config["model_type"]
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[model_type])
    names = gguf.get_tensor_name_map(architecture, config.get("num_hidden_layers") or config["n_layer"])
    found = {}
    for name, values in stacked(model_type, tensors):
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        found[new_name] = changed(config, name, values).float().contiguous().numpy()
    return found | rope_tensors(config)


def stacked(model_type: str, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with experts and norms of heads stacked to one tensor."""
    pattern, whole = LISTS.get(model_type, (r"(?!)", ""))
    groups: dict[str, dict[int, Tensor]] = {}
    for name, values in tensors.items():
        match = re.fullmatch(pattern + r"\.weight", name)
        if match is None:
            yield name, values
        else:
            groups.setdefault(match.expand(whole) + ".weight", {})[int(match[2])] = values
    for name, parts in groups.items():
        yield name, torch.stack([parts[index] for index in range(len(parts))])


def changed(config: Config, name: str, values: Tensor) -> Tensor:
    """The values of a tensor as the converter writes them."""
    model_type = config["model_type"]
    if model_type in PERMUTED and re.search(r"\.[qk]_proj\.", name):
        key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
        heads = values.reshape(config[key], 2, -1, *values.shape[1:])
        return heads.swapaxes(1, 2).reshape(values.shape)
    if model_type == "gpt_neox" and "query_key_value" in name:
        heads = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
        return heads.swapaxes(0, 1).reshape(values.shape)
    if model_type == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return values.T
    return values + 1 if model_type.startswith("gemma") and name.endswith("norm.weight") else values


def rope_tensors(config: Config) -> dict[str, np.ndarray]:
    """The divisors of the rotary frequencies, for the kinds of scaling whose settings the converter does not write."""
    if config["model_type"] == "gpt2":
        return {}
    rope = rope_of(config)
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{name}.weight": np.asarray(rope[f"{name}_factor"], np.float32) for name in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    original = rope["original_max_position_embeddings"]
    divisors = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim):
        turns = original * frequency / (2 * math.pi)
        smooth = (turns - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if turns > high else factor if turns < low else between)
    return {"rope_freqs.weight": np.asarray(divisors, np.float32)}
