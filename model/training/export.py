"""Save a network and its tokenizer as a checkpoint in Hugging Face layout, for `load_checkpoint` and `transformers`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from model.checkpoints.families import llama, translate
from model.config import ModelConfig
from model.network.transformer import Transformer
from model.text.corpus import END_OF_TEXT, END_OF_TEXT_ID
from model.text.tokenizer import Tokenizer


def llama_config(config: ModelConfig) -> dict[str, Any]:
    """The content of `config.json` for a Llama network with the sizes of `config`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_mlp,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.d_head,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }


def save_checkpoint(model: Transformer, tokenizer: Tokenizer, directory: Path) -> None:
    """Write weights (as bfloat16), config, tokenizer and generation config; generation ends at `END_OF_TEXT`.

    Raises `ValueError` if the network is not a plain Llama.
    """
    config = model.config
    content = llama_config(config)
    if translate(content)[1] != config:  # reading the config.json back must give the same config
        raise ValueError(
            "only a plain Llama can be saved; this network is not the one that its config.json would describe: "
            + json.dumps(content)
        )
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        parts = llama.FAMILY.parts(name, tuple(parameter.shape), config)  # all of them stored as rows (out, in)
        rows = torch.split(parameter.detach().cpu().bfloat16(), [part.num_rows for part in parts])
        tensors |= {part.name: each.contiguous() for part, each in zip(parts, rows, strict=True)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # save_file lets only the owner read it
    tokenizer.save(directory / "tokenizer.json")
    generation = {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "do_sample": True, "temperature": 0.8}
    tokenizer_class = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    write_json(directory / "config.json", content)
    write_json(directory / "generation_config.json", generation)
    write_json(directory / "tokenizer_config.json", tokenizer_class)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
