"""Tiny networks with random weights that reveal errors, and tiny checkpoints written by `transformers`.

Every matrix keeps the scale of its input, no bias is zero and no gain is one. A swapped tensor, a missing bias or a
shifted position therefore changes the logits by far more than rounding. The epsilons are large for the same reason.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.config import ModelConfig, RopeScaling
from model.network.transformer import Transformer
from model.tracing.stages import stages_of
from model.tracing.tap import Recorder

ROUNDING = {
    # The tolerance of sums in another order: they differ by a few ulps of the largest term. Values here are about 1 to
    # 10, and an ulp of float32 is 1e-6 at 10. From float32 to float64 a rounding error shrinks by nine digits; a real
    # difference does not shrink.
    torch.float32: 1e-5,
    torch.float64: 1e-12,
}
BOTH_DTYPES = tuple(ROUNDING)


def quick(number: int, values: Iterable[object]) -> list[object]:
    """The values of a parameter: the first are in the quick tests, and the others are marked `slow`."""
    return [value if i < number else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]


GPT2 = ModelConfig(
    vocab_size=67,
    d_model=24,
    num_layers=3,
    num_heads=4,
    d_mlp=40,
    max_positions=48,
    norm="layer",
    norm_eps=1e-3,
    positions="learned",
    activation="gelu_tanh",
    gated=False,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
)
_LLAMA: dict[str, Any] = {
    "vocab_size": 67,
    "d_model": 24,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "d_head": 6,
    "d_mlp": 40,
    "max_positions": 48,
    "norm_eps": 1e-3,
    "rope_theta": 100.0,
}
_GEMMA: dict[str, Any] = _LLAMA | {
    "d_head": 8,
    "norm_offset": True,
    "norm_placement": "both",
    "activation": "gelu_tanh",
    "attention_scale": 0.3,
    "embedding_scale": 24**0.5,
}
CONFIGS = {
    "gpt2": GPT2,
    "llama": ModelConfig(**_LLAMA),
    "llama with llama3 scaling": ModelConfig(
        **_LLAMA, rope_scaling=RopeScaling(kind="llama3", factor=4.0, original_max_positions=12), tied_head=False
    ),
    "llama with dynamic scaling": ModelConfig(
        **_LLAMA, rope_scaling=RopeScaling(kind="dynamic", factor=4.0, original_max_positions=12), mlp_bias=True
    ),
    "mistral": ModelConfig(**_LLAMA, window=5),
    "qwen2": ModelConfig(**_LLAMA, qkv_bias=True, window=4, windowed_layers=(True, False, True)),
    "qwen3": ModelConfig(**_LLAMA, qk_norm="head", window=7, windowed_layers=(False, True, False), tied_head=False),
    "gpt_neox": ModelConfig(
        **_LLAMA,
        norm="layer",
        rotary_dim=2,
        parallel_residual=True,
        activation="gelu",
        gated=False,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_head=False,
    ),
    "gemma2": ModelConfig(
        **_GEMMA, attention_softcap=2.5, logits_softcap=9.0, window=4, windowed_layers=(True, False, True)
    ),
    "gemma3": ModelConfig(
        **_GEMMA, qk_norm="head", window=5, windowed_layers=(True, True, False), local_rope_theta=10.0
    ),
    "phi3": ModelConfig(
        **_LLAMA | {"d_head": 8},
        rotary_dim=6,
        rope_scaling=RopeScaling(
            kind="longrope",
            factor=4.0,
            original_max_positions=12,
            attention_factor=1.2,
            short_factors=(1.0, 1.1, 1.3),
            long_factors=(1.2, 2.0, 4.0),
        ),
    ),
    "olmo2": ModelConfig(**_LLAMA, norm_placement="output", qk_norm="projection"),
    "smollm3": ModelConfig(**_LLAMA, rotary_layers=(True, False, True)),
    "granite": ModelConfig(**_LLAMA, attention_scale=0.3, embedding_scale=3.0, residual_scale=0.4, logits_scale=0.7),
    "stablelm": ModelConfig(
        **_LLAMA,
        norm="layer",
        rotary_dim=4,
        parallel_residual=True,
        shared_norm=True,
        qk_norm="each_head",
        qkv_bias=True,
    ),
    "mixtral": ModelConfig(**_LLAMA, num_experts=5, num_experts_per_token=2, d_expert=12),
    "qwen3_moe": ModelConfig(
        **_LLAMA,
        qk_norm="head",
        num_experts=4,
        num_experts_per_token=3,
        d_expert=12,
        expert_layers=(True, False, True),
        normalize_expert_weights=False,
    ),
    "2017 block": ModelConfig(
        vocab_size=67,
        d_model=24,
        num_layers=3,
        num_heads=4,
        d_mlp=40,
        max_positions=48,
        norm="layer",
        norm_eps=1e-3,
        norm_placement="post",
        positions="sinusoidal",
        gated=False,
        activation="relu",
        mlp_bias=True,
    ),
}
every_config = pytest.mark.parametrize("name", CONFIGS)
# The networks whose caches, positions or batches differ in a way that an engine must handle.
ENGINE_CONFIGS = (
    "gpt2",
    "llama with dynamic scaling",
    "mistral",
    "gemma3",
    "mixtral",
    "qwen3",
    "gemma2",
    "phi3",
    "smollm3",
)
every_engine_config = pytest.mark.parametrize("name", quick(5, ENGINE_CONFIGS))


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0, *, norm_offset: bool = False) -> None:
    """Set the weights that the module docstring describes, in one of our networks or in one of transformers.

    With `norm_offset`, norms multiply by 1 + weight.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(0.5 * noise)
        else:
            parameter.copy_(0.3 * noise if norm_offset else 1 + 0.3 * noise)


def build(config: ModelConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Transformer:
    """A network of this config with random weights that reveal errors."""
    model = Transformer(config)
    randomize(model, seed, norm_offset=config.norm_offset)
    return model.to(dtype).requires_grad_(False).eval()


def exact(name: str) -> Transformer:
    """The network of this config in float64, in which rounding hides no real difference."""
    return build(CONFIGS[name], dtype=torch.float64)


def random_ids(vocab_size: int, num_tokens: int, *, batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(vocab_size, (batch, num_tokens), generator=torch.Generator().manual_seed(seed))


def record(model: Transformer, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a pass that records every stage. Returns the logits, and the stages in the order in which they fired."""
    recorder = Recorder(stages_of(model.config))
    logits = model(ids, tap=recorder)
    return logits, recorder.kept


def build_reference(config: Any, *, seed: int = 0) -> Any:
    """The network of a transformers config, with random weights that reveal errors and its "eager" attention."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(reference, seed, norm_offset=config.model_type.startswith("gemma"))
    return reference.requires_grad_(False)


def write_reference(config: Any, directory: Path, *, seed: int = 0, **save: Any) -> Any:
    """Build a reference and save it to `directory` in the format of published checkpoints."""
    reference = build_reference(config, seed=seed)
    reference.save_pretrained(directory, **save)
    return reference
