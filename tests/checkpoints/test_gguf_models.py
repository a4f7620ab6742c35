"""A GGUF file gives the same config and the same tensors as the checkpoint that it was converted from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoints.families import FAMILIES, translate
from model.checkpoints.gguf_files import read_gguf_checkpoint
from tests.tiny import write_reference
from tests.tiny_gguf import ARCHITECTURES, write_gguf

transformers = pytest.importorskip("transformers")

ROPE = {"rope_type": "default", "rope_theta": 150.0}
LLAMA: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "rms_norm_eps": 3e-3,
    "rope_parameters": ROPE,
    "pad_token_id": None,
}
HALF = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
NEOX = {key: value for key, value in LLAMA.items() if key not in ("rms_norm_eps", "num_key_value_heads")}
NEOX |= HALF | {"layer_norm_eps": 3e-3}
YARN = {"rope_type": "yarn", "rope_theta": 150.0, "factor": 3.0, "original_max_position_embeddings": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 150.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [1.25, 2.0, 3.0, 7.5],
    "original_max_position_embeddings": 16,
}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 6, "tie_word_embeddings": True}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GPT2 = {"vocab_size": 71, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40, "layer_norm_epsilon": 3e-3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2 with another inner size": ("gpt2", GPT2 | {"n_inner": 37}),
    "llama": ("llama", LLAMA),
    "llama tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "llama with wide heads": ("llama", LLAMA | {"head_dim": 12}),
    "llama with biases": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama with linear scaling": (
        "llama",
        LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 150.0, "factor": 2.5}},
    ),
    "llama 3": ("llama", LLAMA | {"rope_parameters": LLAMA3, "head_dim": 64}),
    "mistral": ("mistral", LLAMA | {"sliding_window": 6}),
    "mixtral": (
        "mixtral",
        LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": None},
    ),
    "qwen2": ("qwen2", LLAMA),
    "qwen2 with yarn": ("qwen2", LLAMA | {"rope_parameters": YARN}),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 8}),
    "qwen3_moe": (
        "qwen3_moe",
        LLAMA
        | {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": ("gemma2", LLAMA | GEMMA),
    "gemma3": ("gemma3_text", LLAMA | GEMMA | {"num_hidden_layers": 7, "rope_parameters": GEMMA3_ROPE}),
    "olmo2": ("olmo2", LLAMA),
    "phi3": ("phi3", LLAMA | {"original_max_position_embeddings": 40, "sliding_window": None}),
    "phi3 with a window": ("phi3", LLAMA | {"original_max_position_embeddings": 40, "sliding_window": 6}),
    "phi3 with longrope": ("phi3", LLAMA | {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "phi3 with heads rotated in part": ("phi3", LLAMA | HALF | {"original_max_position_embeddings": 40}),
    "smollm3": ("smollm3", LLAMA | {"num_hidden_layers": 5}),
    "granite": (
        "granite",
        LLAMA
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.5,
            "residual_multiplier": 0.22,
            "logits_scaling": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm": ("stablelm", NEOX | {"num_key_value_heads": 2}),
    "stablelm 2": (
        "stablelm",
        NEOX | {"num_key_value_heads": 2, "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox in sequence": ("gpt_neox", NEOX | {"use_parallel_residual": False}),
}
# Settings of training and generation, and others that do not change the logits.
IRRELEVANT = {"dtype", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "architectures"}
IRRELEVANT |= {"use_cache", "no_rope_layer_interval", "max_window_layers", "n_inner", "_name_or_path"}


def tiny_config(model_type: str, options: dict[str, Any]) -> Any:
    given = {key: value for key, value in options.items() if key != "model_type"}
    return transformers.AutoConfig.for_model(model_type, **given)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The name of a case, and the directory of its checkpoint with a file model.gguf in it."""
    directory = tmp_path / "reference"
    directory.mkdir()
    write_reference(tiny_config(*CASES[request.param]), directory)
    write_gguf(directory, tmp_path / "model.gguf")
    return request.param, tmp_path


def relevant(config: Any) -> dict[str, Any]:
    settings = {key: value for key, value in config.to_dict().items() if key not in IRRELEVANT}
    rope = settings.get("rope_parameters", {})
    fraction = rope.get("partial_rotary_factor", 1.0)
    if settings.get("partial_rotary_factor", fraction) == fraction:  # older configs have it outside
        settings.pop("partial_rotary_factor", None)
    if fraction == 1.0:  # the default
        rope.pop("partial_rotary_factor", None)
    return settings


def test_every_architecture_has_a_case() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(ARCHITECTURES)


def test_the_config_means_the_same_as_that_of_the_original(case: tuple[str, Path]) -> None:
    _, directory = case
    original = json.loads((directory / "reference" / "config.json").read_text())
    config = dict(read_gguf_checkpoint(directory / "model.gguf").config)
    assert config["architectures"] == original["architectures"]
    model_type = config["model_type"]
    assert relevant(tiny_config(model_type, config)) == relevant(tiny_config(model_type, original))
    if model_type in FAMILIES:
        assert translate(config)[1] == translate(original)[1]


def test_the_tensors_are_those_of_the_original(case: tuple[str, Path]) -> None:
    _, directory = case
    checkpoint = read_gguf_checkpoint(directory / "model.gguf")
    originals = load_file(directory / "reference" / "model.safetensors")
    assert checkpoint.tensors.headers.keys() == originals.keys()
    for name, original in originals.items():
        header, tensor = checkpoint.tensors.headers[name], checkpoint.tensors.read(name)
        assert (header.shape, header.dtype) == (tuple(tensor.shape), tensor.dtype)
        if "gemma" in checkpoint.config["model_type"] and name.endswith("norm.weight"):
            original = (original + 1) - 1  # the file has this sum in float32
        assert torch.equal(tensor, original), name
