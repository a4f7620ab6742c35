"""Named options of the families beyond GPT-2, Llama, Mistral and Qwen, compared with `transformers`.

See `test_transformers.py` for what is compared, and `test_random_configs.py` for combinations of options.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoints.families import translate
from model.checkpoints.load import load_checkpoint
from tests.parity.reference import GEMMA, LLAMA, LOCAL_ROPE, ROPE, assert_same_numbers, config_of, transformers
from tests.tiny import random_ids, write_reference

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


def rewrite(directory: Path, **changes: Any) -> dict[str, Any]:
    """Change a config.json: None removes a key. Returns the new content."""
    path = directory / "config.json"
    config = {key: value for key, value in (json.loads(path.read_text()) | changes).items() if value is not None}
    path.write_text(json.dumps(config))
    return config


class TestOlderKeys:
    """Configs as versions of transformers before 5 wrote them give the same network."""

    def test_pythia(self, tmp_path: Path) -> None:
        reference = write_reference(config_of("gpt_neox", {}), tmp_path)
        rewrite(tmp_path, rope_parameters=None, rotary_pct=0.5, rotary_emb_base=150)
        assert_same_numbers(reference, tmp_path, num_tokens=20)

    def test_gpt_neox_files_with_masks_and_frequencies(self, tmp_path: Path) -> None:
        reference = write_reference(config_of("gpt_neox", {}), tmp_path)
        path = tmp_path / "model.safetensors"
        masks = {"bias": torch.ones(1, 1, 40, 40), "masked_bias": torch.ones(()), "rotary_emb.inv_freq": torch.ones(2)}
        stored = {f"gpt_neox.layers.{i}.attention.{name}": mask.clone() for i in (0, 1) for name, mask in masks.items()}
        save_file(load_file(path) | stored, path, metadata={"format": "pt"})
        assert_same_numbers(reference, tmp_path, num_tokens=20)

    def test_gemma2_without_layer_types(self, tmp_path: Path) -> None:
        reference = write_reference(config_of("gemma2", {}), tmp_path)
        config = rewrite(tmp_path, rope_parameters=None, rope_theta=150.0, layer_types=None, hidden_act="gelu")
        assert translate(config)[1].windowed_layers == (True, False, True)
        assert_same_numbers(reference, tmp_path, num_tokens=20)

    def test_gemma3_with_a_pattern_of_windows(self, tmp_path: Path) -> None:
        rope = {FULL: LINEAR, SLIDING: LOCAL_ROPE[SLIDING]}
        options = {"layer_types": [SLIDING, SLIDING, FULL, SLIDING], "rope_parameters": rope}
        reference = write_reference(config_of("gemma3_text", options), tmp_path)
        rewrite(
            tmp_path,
            layer_types=None,
            _sliding_window_pattern=None,
            rope_parameters=None,
            sliding_window_pattern=3,
            rope_theta=150.0,
            rope_local_base_freq=20.0,
            rope_scaling={"rope_type": "linear", "factor": 2.5},
        )
        assert_same_numbers(reference, tmp_path, num_tokens=20)

    @pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
    def test_phi3(self, kind: str, tmp_path: Path) -> None:
        reference = write_reference(config_of("phi3", LONG | {"rope_parameters": LONGROPE}), tmp_path)
        factors = {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
        rewrite(tmp_path, rope_parameters=None, rope_theta=150.0, rope_scaling=factors | {"type": kind})
        assert_same_numbers(reference, tmp_path, num_tokens=20)

    def test_stablelm(self, tmp_path: Path) -> None:
        reference = write_reference(config_of("stablelm", {}), tmp_path)
        rewrite(tmp_path, rope_parameters=None, rope_theta=150.0, partial_rotary_factor=0.5)
        assert_same_numbers(reference, tmp_path, num_tokens=20)


class TestGemma3WithImages:
    """The text model of a checkpoint that also has an image encoder."""

    TEXT = GEMMA | {"rope_parameters": LOCAL_ROPE, "layer_types": [SLIDING, FULL, SLIDING]}
    VISION: Mapping[str, Any] = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }

    def write(self, directory: Path) -> Any:
        tokens = {"image_token_index": 70, "boi_token_index": 69, "eoi_token_index": 68}
        text = transformers.Gemma3TextConfig(**self.TEXT)
        config = transformers.Gemma3Config(
            text_config=text, vision_config=dict(self.VISION), mm_tokens_per_image=4, **tokens
        )
        return write_reference(config, directory)

    def test_its_logits_equal_transformers(self, tmp_path: Path) -> None:
        reference = self.write(tmp_path)
        model = load_checkpoint(str(tmp_path)).model
        ids = random_ids(60, 30, batch=2)
        torch.testing.assert_close(model(ids), reference(ids, use_cache=False).logits, atol=1e-5, rtol=1e-5)

    def test_it_is_the_network_of_its_text_config(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        text = config["text_config"]
        assert translate(config)[1] == translate(text)[1]
        published = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
        published |= {
            "num_hidden_layers": 34,
            "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "type": "linear"},
        }
        sizes = translate(config | {"text_config": published})[1]
        assert (sizes.vocab_size, sizes.num_heads, sizes.num_kv_heads, sizes.d_head) == (262208, 8, 4, 256)
        assert (sizes.rope_theta, sizes.local_rope_theta, sizes.max_positions) == (1e6, 10000.0, 131072)
        assert sizes.windowed_layers is not None
        assert sizes.windowed_layers[:7] == (True, True, True, True, True, False, True)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"text_config": None}, "text_config is missing"),
            ({"text_config": {"model_type": "llama"}}, "is not that of a gemma3_text model"),
            ({"tie_word_embeddings": False}, "tie_word_embeddings = False"),
            ({"unknown": 1}, "unknown: unknown in this family"),
        ],
        ids=str,
    )
    def test_other_configs_are_refused(self, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
        self.write(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        with pytest.raises(ValueError, match=message):
            translate(config | changes)
        with pytest.raises(ValueError, match=r"text_config\.unknown: unknown in this family"):
            translate(config | {"text_config": config["text_config"] | {"unknown": 1}})


class TestRefusals:
    """What transformers computes in another way, or not at all, is refused, and the key is named."""

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


def test_a_parameter_of_q_k_and_v_stored_by_heads_has_the_rows_of_q_first(tmp_path: Path) -> None:
    write_reference(config_of("gpt_neox", {}), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["gpt_neox.layers.1.attention.query_key_value.weight"]
    qkv = load_checkpoint(str(tmp_path)).model.blocks[1].attn.qkv.weight
    rows = stored.view(4, 3, 8, 32)  # (H, q k v, D, C)
    assert torch.equal(qkv[:32], rows[:, 0].reshape(32, 32))
    assert torch.equal(qkv[64:], rows[:, 2].reshape(32, 32))


def test_the_bases_are_distinct() -> None:
    assert GEMMA["query_pre_attn_scalar"] != GEMMA["head_dim"], "the scale would be that of other families"
    assert LLAMA["num_key_value_heads"] != LLAMA["num_attention_heads"]
