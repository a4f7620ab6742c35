"""Adapters change the logits as in `peft`, with its own modules and merged into the weights, for every kind of layer.

The adapters have random matrices, so that a missing module, a wrong scale or swapped rows change the logits by far more
than rounding.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoints.adapters import load_adapter
from model.checkpoints.families import FAMILIES
from model.checkpoints.load import load_checkpoint
from model.errors import CheckpointError
from model.network.joint_passes import AdaptedNetwork
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
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LANGUAGE_LAYERS = r".*language_model.*_proj"  # not those of the image encoder
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
    "gemma3": transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**HEADS, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=70,
        boi_token_index=69,
        eoi_token_index=68,
    ),
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
                "target_modules": {"mixtral": ATTENTION, "qwen3_moe": ATTENTION, "gemma3": LANGUAGE_LAYERS}.get(
                    family, "all-linear"
                ),
                "r": 4,
                "fan_in_fan_out": family == "gpt2",
            },
        )
        for family in FAMILIES
    },
    "gpt2, attention only": (GPT2, {"target_modules": ["attn.c_attn", "attn.c_proj"], "r": 4, "fan_in_fan_out": True}),
}


def test_every_family_is_compared() -> None:
    assert FAMILIES.keys() == FAMILY_CONFIGS.keys()
    documented = re.findall(r"^\| `(\w+)` \|", Path("docs/checkpoints.md").read_text(), re.MULTILINE)
    assert FAMILY_CONFIGS.keys() <= set(documented)


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


BASES = {
    "without a head": ("base_model.model.model.", "base_model.model."),
    "in a larger model": ("base_model.model.model.", "base_model.model.model.language_model."),
    "in an older larger model": ("base_model.model.model.", "base_model.model.language_model.model."),
}


@pytest.mark.parametrize("base", BASES)
def test_an_adapter_may_be_of_the_same_network_inside_another_one(base: str, tmp_path: Path) -> None:
    network = write_reference(LLAMA, tmp_path / "base")
    checkpoint = load_checkpoint(str(tmp_path / "base"))
    names = ["model.layers.2.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    adapted = write_adapter(network, tmp_path / "adapter", target_modules=names, r=2)
    ids = random_ids(71, 20)
    old, new = BASES[base]
    path, config = tmp_path / "adapter" / "adapter_model.safetensors", tmp_path / "adapter" / "adapter_config.json"
    save_file({new + name.removeprefix(old): tensor for name, tensor in load_file(path).items()}, path)
    text = config.read_text().replace('"model.', f'"{new.removeprefix("base_model.model.")}')
    config.write_text(text)
    found = AdaptedNetwork(checkpoint.model, load_adapter(checkpoint, tmp_path / "adapter"))(ids)
    torch.testing.assert_close(found, adapted(ids).logits.detach(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("llama", {"target_modules": ["q_proj", "lm_head"]}, "lm_head.lora_A.weight.*; they change the head"),
        ("llama", {"target_modules": ["embed_tokens", "q_proj"]}, "lora_embedding_B; they change the embedding"),
        (
            "gemma3",
            {"target_modules": ["q_proj"]},
            "vision_.*q_proj.lora_B.weight; they change the part that reads images",
        ),
        ("qwen3_moe", {"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
        ("gpt2", {"target_modules": ["wte", "c_attn"], "fan_in_fan_out": True}, "; they change the embedding"),
    ],
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_an_adapter_of_peft_that_cannot_be_loaded_says_why(
    family: str, config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    network = write_reference(FAMILY_CONFIGS[family], tmp_path / "base")
    checkpoint = load_checkpoint(str(tmp_path / "base"))
    write_adapter(network, tmp_path / "adapter", r=2, **config)
    pattern = re.escape(reason).replace(r"\.\*", ".*")
    with pytest.raises(CheckpointError, match=pattern):
        load_adapter(checkpoint, tmp_path / "adapter")


def test_an_adapter_of_another_network_says_what_is_missing(tmp_path: Path) -> None:
    write_reference(LLAMA, tmp_path / "base")
    checkpoint = load_checkpoint(str(tmp_path / "base"))
    larger = write_reference(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 5}), tmp_path / "larger")
    write_adapter(larger, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match=r"layers\.3\..*; layer 3 does not exist, because the network has 3"):
        load_adapter(checkpoint, tmp_path / "adapter")
    other = write_reference(GPT2, tmp_path / "gpt2")
    write_adapter(other, tmp_path / "other", target_modules=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(CheckpointError, match=r"no such module; the names of its modules begin with model\."):
        load_adapter(checkpoint, tmp_path / "other")
