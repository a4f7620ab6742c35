"""Named options of the families beyond GPT-2, Llama, Mistral and Qwen, compared with `transformers`.

See `test_transformers.py` for what is compared, and `test_random_configs.py` for combinations of options.
"""

from pathlib import Path
from typing import Any

import pytest

from model.checkpoints.families import translate
from tests.parity.reference import (
    FULL,
    GEMMA,
    LINEAR,
    LLAMA,
    LOCAL_ROPE,
    LONG,
    LONGROPE,
    ROPE,
    SHORT,
    SLIDING,
    assert_same_numbers,
    config_of,
)
from tests.tiny import write_reference

WINDOW = {"use_sliding_window": True, "sliding_window": 6}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox rotating all dims": ("gpt_neox", {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}),
    "gpt_neox rotating a quarter": ("gpt_neox", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}),
    "gpt_neox without attention biases": ("gpt_neox", {"attention_bias": False}),
    "gpt_neox tied": ("gpt_neox", {"tie_word_embeddings": True}),
    "gpt_neox with gelu_fast": ("gpt_neox", {"hidden_act": "gelu_fast"}),
    "gpt_neox with relu": ("gpt_neox", {"hidden_act": "relu"}),
    "gpt_neox, linear": ("gpt_neox", {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}),
    "gemma2": ("gemma2", {}),
    "gemma2 without soft caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2 with other windows": ("gemma2", {"layer_types": [FULL, FULL, SLIDING]}),
    "gemma2 without windows": ("gemma2", {"layer_types": [FULL] * 3}),
    "gemma2 untied, with biases": ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3_text": ("gemma3_text", {}),
    "gemma3_text with a soft cap of the logits": ("gemma3_text", {"final_logit_softcapping": 3.0}),
    "gemma3_text with linear scaling of global layers": (
        "gemma3_text",
        {"rope_parameters": LOCAL_ROPE | {"full_attention": LINEAR}},
    ),
    "gemma3_text without windows": ("gemma3_text", {"layer_types": [FULL] * 4}),
    "gemma3_text with one base": ("gemma3_text", {"rope_parameters": {FULL: ROPE, SLIDING: ROPE}}),
    "phi3": ("phi3", {}),
    "phi3 with a window": ("phi3", {"sliding_window": 6}),
    "phi3 tied": ("phi3", {"tie_word_embeddings": True}),
    "phi3 rotating a part of each head": ("phi3", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.75}}),
    "phi3, longrope within the trained length": ("phi3", SHORT | {"rope_parameters": LONGROPE}),
    "phi3, longrope beyond the trained length": ("phi3", LONG | {"rope_parameters": LONGROPE}),
    "phi3, longrope with an attention factor": (
        "phi3",
        LONG | {"rope_parameters": LONGROPE | {"attention_factor": 1.3}},
    ),
    "phi3, longrope with a factor": ("phi3", LONG | {"rope_parameters": LONGROPE | {"factor": 7.0}}),
    "phi3, longrope of a part of each head": (
        "phi3",
        LONG
        | {
            "rope_parameters": LONGROPE
            | {"partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.3, 2.0, 3.0]}
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2 with attention biases": ("olmo2", {"attention_bias": True}),
    "olmo2 tied, as many kv heads as heads": ("olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "smollm3": ("smollm3", {}),
    "smollm3 with chosen layers": ("smollm3", {"no_rope_layers": [0, 1]}),
    "smollm3 with windows": ("smollm3", WINDOW),
    "smollm3 with chosen windows": ("smollm3", WINDOW | {"layer_types": [SLIDING, FULL]}),
    "smollm3 with biases, untied": (
        "smollm3",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "granite": ("granite", {}),
    "granite with the defaults": (
        "granite",
        dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
    ),
    "granite with biases, tied": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "stablelm": ("stablelm", {}),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True}),
    "stablelm with norms of q and k": ("stablelm", {"qk_layernorm": True}),
    "stablelm with everything": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True, "tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral with a window": ("mixtral", {"sliding_window": 6}),
    "mixtral with one expert a token": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral with all experts": ("mixtral", {"num_experts_per_tok": 5, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe with normalized weights": ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 3}),
    "qwen3_moe with a dense layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen3_moe with experts in every third layer": (
        "qwen3_moe",
        {"decoder_sparse_step": 3, "num_hidden_layers": 4},
    ),
    "qwen3_moe without experts": ("qwen3_moe", {"mlp_only_layers": [0, 1]}),
    "qwen3_moe with a window": ("qwen3_moe", WINDOW | {"attention_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_residual_equal_transformers(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    reference = write_reference(config_of(family, options), tmp_path)
    assert_same_numbers(reference, tmp_path, num_tokens=33)


def test_every_option_changes_the_network() -> None:
    """Otherwise the comparisons above could pass with an option that is ignored."""
    translated: dict[Any, str] = {}
    for case, (family, options) in CASES.items():
        config = config_of(family, options)
        content = config.to_dict() | {"architectures": None}
        key = (family, translate(content)[1])
        assert key not in translated, f"{case} is the same network as {translated.get(key)}"
        translated[key] = case


class TestRefusals:
    """Configs that transformers computes in another way, or not at all, are refused. The error names the key."""

    @pytest.mark.parametrize(
        ("family", "changes", "message"),
        [
            ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
            ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
            ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
            ("gemma3_text", {"rope_parameters": ROPE}, "must have the entries full_attention and sliding_attention"),
            (
                "gemma3_text",
                {"rope_parameters": {FULL: ROPE, SLIDING: LINEAR}},
                "rope_parameters.sliding_attention.rope_type = 'linear'",
            ),
            ("gemma2", {"sliding_window": None}, "there is no sliding_window"),
            ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 must be a finite number above 0"),
            ("granite", {"attention_multiplier": 0.0}, "attention_multiplier = 0.0 must be a finite number above 0"),
            ("granite", {"logits_scaling": 0}, "logits_scaling = 0 must be a finite number above 0"),
            ("gpt_neox", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
            ("phi3", {"rope_parameters": LINEAR}, "rope_type 'linear' is not implemented"),
            ("phi3", {"rope_parameters": LONGROPE | LONG}, "original_max_position_embeddings = 12"),
            ("phi3", {"rope_parameters": LONGROPE | {"long_factor": [1.0]}}, "long_factors: has 1 numbers"),
            ("phi3", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.4}}, "partial_rotary_factor: 3 must be"),
            ("phi3", {"rope_parameters": ROPE | {"partial_rotary_factor": 1.5}}, "partial_rotary_factor = 1.5 must be"),
            ("llama", {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
            ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers = \[1\] must be a list"),
            ("smollm3", {"no_rope_layers": [1, 2]}, r"no_rope_layers = \[1, 2\] must be a list"),
            ("stablelm", {"qk_layernorm": 1}, "qk_layernorm = 1 must be true or false"),
            ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok: 6 is more than num_experts 5"),
            ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
            ("qwen3_moe", {"mlp_only_layers": [0.5]}, "mlp_only_layers"),
            ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size: unknown"),
        ],
        ids=str,
    )
    def test_a_config_that_is_not_implemented_is_refused(
        self, family: str, changes: dict[str, Any], message: str
    ) -> None:
        content = config_of(family, {}).to_dict() | {"architectures": None}
        translate(content)
        with pytest.raises(ValueError, match=message):
            translate(content | changes)


def test_the_bases_are_distinct() -> None:
    assert GEMMA["query_pre_attn_scalar"] != GEMMA["head_dim"], "the scale would be that of other families"
    assert LLAMA["num_key_value_heads"] != LLAMA["num_attention_heads"]
