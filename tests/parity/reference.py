"""Tiny networks of Hugging Face `transformers`, and the comparison of their numbers with ours."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.checkpoints.load import load_checkpoint
from model.network.transformer import Transformer
from tests.tiny import ROUNDING, random_ids, record

transformers = pytest.importorskip("transformers")
assert transformers.PreTrainedModel  # imports most of the library now: it takes seconds, which no case should pay

CLASSES = {
    "gpt2": transformers.GPT2Config,
    "gpt_neox": transformers.GPTNeoXConfig,
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "phi3": transformers.Phi3Config,
    "olmo2": transformers.Olmo2Config,
    "smollm3": transformers.SmolLM3Config,
    "granite": transformers.GraniteConfig,
    "stablelm": transformers.StableLmConfig,
}
GPT2 = {"vocab_size": 71, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40, "layer_norm_epsilon": 3e-3}
ROPE = {"rope_type": "default", "rope_theta": 150.0}
SIZES: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    # The defaults of some families are not in this vocabulary.
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
LLAMA = SIZES | {"num_key_value_heads": 2, "rms_norm_eps": 3e-3, "rope_parameters": ROPE}
GEMMA = LLAMA | {"head_dim": 8, "query_pre_attn_scalar": 20, "sliding_window": 6, "num_hidden_layers": 3}
LOCAL_ROPE = {"full_attention": ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}}
PARTIAL_ROPE = ROPE | {"partial_rotary_factor": 0.5}
SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "rope_theta": 150.0, "factor": 2.5}
# A head of 8 has four pairs of dims. The prompts are longer than the trained length.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 150.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.3, 2.0, 3.0, 4.0],
}
SHORT, LONG = {"original_max_position_embeddings": 36}, {"original_max_position_embeddings": 12}
# A small but complete config of each family. Heads are wide enough for a part of each to be rotated. transformers
# needs expert matrices whose rows are multiples of 16 bytes.
BASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_neox": SIZES | {"layer_norm_eps": 3e-3, "rope_parameters": PARTIAL_ROPE},
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA | {"intermediate_size": 48, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 8},
    "qwen3_moe": LLAMA | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma2": GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": GEMMA
    | {"rope_parameters": LOCAL_ROPE, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"num_hidden_layers": 4},
    "phi3": LLAMA,
    "olmo2": LLAMA,
    "smollm3": LLAMA | {"no_rope_layer_interval": 2},
    "granite": LLAMA
    | {"attention_multiplier": 0.2, "embedding_multiplier": 3.0}
    | {"residual_multiplier": 0.6, "logits_scaling": 1.5},
    "stablelm": SIZES | {"num_key_value_heads": 2, "layer_norm_eps": 3e-3, "rope_parameters": PARTIAL_ROPE},
}


MAX_ROUNDING = 3e-5  # a larger difference between float32 and float64 is not taken for rounding


def config_of(family: str, options: dict[str, Any]) -> Any:
    return CLASSES[family](**BASES[family] | options)


def run_reference(reference: Any, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the logits, and the residual stream before block 0 and after each block.

    A hook reads the last one, because transformers lists it after the final norm.
    """
    body = reference.base_model
    final_norm = next(getattr(body, name) for name in ("norm", "ln_f", "final_layer_norm") if hasattr(body, name))
    last: list[Tensor] = []
    hook = final_norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))
    output = reference(ids, output_hidden_states=True, use_cache=False)
    hook.remove()
    return output.logits, [*output.hidden_states[:-1], last[0]]


def assert_same_numbers(
    reference: Any, directory: Path, num_tokens: int, tolerance: float = ROUNDING[torch.float32]
) -> None:
    """Compare the residual stream of every block, and the logits of a batch and of cached passes, in float32.

    The tolerance is for values of up to about 10. It is larger in proportion if there are larger ones, and in networks
    that enlarge rounding errors: up to 8 times the difference of our own network in float32 from float64.
    """
    model = load_checkpoint(str(directory)).model
    ids = random_ids(model.config.vocab_size, num_tokens, batch=2)
    expected_logits, expected = run_reference(reference, ids)
    logits, stages = record(model, ids)
    exact_logits = deepcopy(model).double()(ids)
    rounding = min(float((logits - exact_logits).abs().max()), MAX_ROUNDING)

    def check(found: Tensor, expected: Tensor, name: str) -> None:
        atol = max(tolerance * max(1.0, float(expected.abs().max()) / 10), 8 * rounding)
        torch.testing.assert_close(found, expected, atol=atol, rtol=tolerance, msg=lambda detail: f"{name}: {detail}")

    assert len(expected) == model.config.num_layers + 1
    for layer in range(model.config.num_layers):
        for stage, value in (("resid_pre", expected[layer]), ("resid_post", expected[layer + 1])):
            check(stages[f"blocks.{layer}.{stage}"], value, f"blocks.{layer}.{stage}")
    check(logits, expected_logits, "traced logits")
    check(model(ids), expected_logits, "logits")
    assert expected_logits.std() > 0.3, "such small logits would hide a difference"
    for sequence, expected_rows in zip(ids, expected_logits, strict=True):
        check(cached_logits(model, sequence), expected_rows, "logits of cached passes")


def cached_logits(model: Transformer, ids: Tensor) -> Tensor:
    """The logits of one sequence (T,), computed with a cache: its first half at once, then token by token."""
    num_first = max(1, len(ids) // 2)
    cache = model.new_cache(len(ids))
    passes = ids.split([num_first, *[1] * (len(ids) - num_first)])
    return torch.cat([model(new[None], cache)[0] for new in passes])
