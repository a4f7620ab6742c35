"""Adapters change the logits as in `peft`, with its own modules and merged into the weights, for every kind of layer.

The adapters have random matrices, so that a missing module, a wrong scale or swapped rows change the logits by far more
than rounding.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.checkpoints.adapters import load_adapter
from model.checkpoints.families import FAMILIES
from model.checkpoints.load import load_checkpoint
from model.network.adapted_network import AdaptedNetwork
from tests.tiny import ROUNDING, random_ids, write_reference

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# peft uses a property that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TOLERANCE = ROUNDING[torch.float32]
SIZES = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "rms_norm_eps": 3e-3,
}
LLAMA = transformers.LlamaConfig(**SIZES)
GPT2 = transformers.GPT2Config(vocab_size=71, n_embd=24, n_layer=3, n_head=4, n_positions=40, layer_norm_epsilon=3e-3)
QWEN3 = transformers.Qwen3Config(**SIZES, head_dim=8)
HEADS = SIZES | {"head_dim": 8, "pad_token_id": 0}
PLAIN = {key: value for key, value in SIZES.items() if key not in ("num_key_value_heads", "rms_norm_eps")}
# One network of every family, all of whose linear layers are adapted, except experts.
FAMILY_CONFIGS: dict[str, Any] = {
    "gpt2": GPT2,
    "gpt_neox": transformers.GPTNeoXConfig(**PLAIN, rotary_pct=0.5),
    "llama": LLAMA,
    "mistral": transformers.MistralConfig(**SIZES),
    "mixtral": transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": QWEN3,
    "qwen3_moe": transformers.Qwen3MoeConfig(**HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12),
    "gemma2": transformers.Gemma2Config(**HEADS),
    "gemma3_text": transformers.Gemma3TextConfig(**HEADS),
    "phi3": transformers.Phi3Config(**SIZES, pad_token_id=0),
    "olmo2": transformers.Olmo2Config(**SIZES),
    "smollm3": transformers.SmolLM3Config(**SIZES, pad_token_id=0),
    "granite": transformers.GraniteConfig(**SIZES),
    "stablelm": transformers.StableLmConfig(**PLAIN, num_key_value_heads=2),
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama, all layers": (LLAMA, {"target_modules": ATTENTION + MLP, "r": 4, "lora_alpha": 12}),
    "llama, all-linear": (LLAMA, {"target_modules": "all-linear", "r": 3}),
    "llama, by a regular expression": (LLAMA, {"target_modules": r".*\.layers\.[02]\..*(q_proj|up_proj)", "r": 2}),
    "llama, q and v only": (LLAMA, {"target_modules": ["q_proj", "v_proj"], "r": 5, "lora_alpha": 7}),
    "llama, the second factor only": (LLAMA, {"target_modules": ["up_proj"], "r": 1}),
    "llama, one layer": (LLAMA, {"target_modules": ATTENTION, "layers_to_transform": [1], "layers_pattern": "layers"}),
    "llama, without k": (LLAMA, {"target_modules": ATTENTION, "exclude_modules": ["k_proj"]}),
    "llama, by full names": (LLAMA, {"target_modules": ["model.layers.2.self_attn.q_proj", "layers.0.mlp.down_proj"]}),
    "rank-stabilized": (LLAMA, {"target_modules": ATTENTION, "r": 4, "lora_alpha": 3, "use_rslora": True}),
    "patterns of ranks": (
        LLAMA,
        {
            "target_modules": ATTENTION + MLP,
            "r": 4,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*_proj": 6, "^model.layers.0.mlp.up_proj": 1},
            "alpha_pattern": {"k_proj": 20, "layers.2.self_attn.q_proj": 1},
        },
    ),
    **{
        family: (
            FAMILY_CONFIGS[family],
            {
                "target_modules": ATTENTION if family in ("mixtral", "qwen3_moe") else "all-linear",
                "r": 4,
                "fan_in_fan_out": family == "gpt2",
            },
        )
        for family in FAMILIES
        if family in FAMILY_CONFIGS
    },
    "gpt2, attention only": (GPT2, {"target_modules": ["attn.c_attn", "attn.c_proj"], "r": 4, "fan_in_fan_out": True}),
}


def test_every_family_is_compared() -> None:
    """The text model of gemma3 is that of gemma3_text."""
    assert FAMILIES.keys() - {"gemma3"} <= FAMILY_CONFIGS.keys()


def write_adapter(network: Any, directory: Path, *, seed: int = 3, **config: Any) -> Any:
    """Add an adapter with random matrices to a network of transformers, and save it. Returns the network with it."""
    adapted = peft.get_peft_model(network, peft.LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    adapted.save_pretrained(directory)
    return adapted


@pytest.fixture(scope="module", autouse=True)
def _used_once() -> None:
    """PEFT imports most of its modules when it is used for the first time."""
    network = transformers.AutoModelForCausalLM.from_config(LLAMA)
    peft.get_peft_model(network, peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_peft_merged_and_unmerged(case: str, tmp_path: Path) -> None:
    config, lora = CASES[case]
    network = write_reference(config, tmp_path / "base")
    checkpoint = load_checkpoint(str(tmp_path / "base"))
    ids = random_ids(71, 20, batch=2)
    plain = network(ids).logits
    adapted = write_adapter(network, tmp_path / "adapter", **lora)
    adapter = load_adapter(checkpoint, tmp_path / "adapter")
    found = AdaptedNetwork(checkpoint.model, adapter)(ids)
    unmerged: Tensor = adapted(ids).logits.detach()
    merged: Tensor = adapted.merge_and_unload()(ids).logits.detach()
    assert (plain - unmerged).abs().max() > 0.1
    torch.testing.assert_close(found, unmerged, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(found, merged, atol=TOLERANCE, rtol=TOLERANCE)
