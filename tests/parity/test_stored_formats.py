"""Checkpoints stored in other ways than today's `transformers` stores them give the same networks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoints.families import translate
from model.checkpoints.load import load_checkpoint
from tests.parity.reference import (
    FULL,
    GEMMA,
    LINEAR,
    LOCAL_ROPE,
    LONG,
    LONGROPE,
    SLIDING,
    assert_same_numbers,
    config_of,
    transformers,
)
from tests.tiny import random_ids, write_reference


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


def test_a_parameter_of_q_k_and_v_stored_by_heads_has_the_rows_of_q_first(tmp_path: Path) -> None:
    write_reference(config_of("gpt_neox", {}), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["gpt_neox.layers.1.attention.query_key_value.weight"]
    qkv = load_checkpoint(str(tmp_path)).model.get_parameter("blocks.1.attn.qkv.weight")
    rows = stored.view(4, 3, 8, 32)  # (H, q k v, D, C)
    assert torch.equal(qkv[:32], rows[:, 0].reshape(32, 32))
    assert torch.equal(qkv[64:], rows[:, 2].reshape(32, 32))
