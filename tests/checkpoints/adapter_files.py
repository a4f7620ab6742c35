"""Write adapters as PEFT saves them, without PEFT: for Llama-like checkpoints, with random matrices."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ADAPTER_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "r": 2,
    "lora_alpha": 4,
}
MODULES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}


def module_sizes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of each module, from a config.json."""
    width, inner, num_heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    d_head = config.get("head_dim") or width // num_heads
    queries, keys = num_heads * d_head, config["num_key_value_heads"] * d_head
    return {
        "q_proj": (width, queries),
        "k_proj": (width, keys),
        "v_proj": (width, keys),
        "o_proj": (queries, width),
        "gate_proj": (width, inner),
        "up_proj": (width, inner),
        "down_proj": (inner, width),
    }


def write_adapter(
    directory: Path,
    base: Path,
    *,
    targets: tuple[str, ...] = tuple(MODULES),
    seed: int = 1,
    size: float = 0.5,
    **config: Any,
) -> Path:
    """Write an adapter for the Llama-like checkpoint in `base`. `config` replaces keys of `ADAPTER_CONFIG`."""
    directory.mkdir(parents=True)
    content = ADAPTER_CONFIG | {"target_modules": list(targets)} | config
    (directory / "adapter_config.json").write_text(json.dumps(content))
    shape = json.loads((base / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for target in targets:
            num_inputs, num_outputs = module_sizes(shape)[target]
            name = f"base_model.model.model.layers.{layer}.{MODULES[target]}"
            a = torch.randn(content["r"], num_inputs, generator=generator) / num_inputs**0.5
            tensors[f"{name}.lora_A.weight"] = a
            tensors[f"{name}.lora_B.weight"] = size * torch.randn(num_outputs, content["r"], generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
