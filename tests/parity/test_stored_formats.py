"""Checkpoints stored in other ways than today's `transformers` stores them give the same networks."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoints.families import translate
from model.checkpoints.families.config_reader import NETWORK_KEYS, ConfigReader
from model.checkpoints.load import load_checkpoint
from model.errors import CheckpointError
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


def rename(directory: Path, old: str, new: str) -> None:
    """Replace the beginning of the names of tensors."""
    path = directory / "model.safetensors"
    tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


class TestNames:
    """Tensors under the names that other versions and larger models give them."""

    @pytest.mark.parametrize(
        ("family", "old", "new"),
        [
            ("llama", "model.", ""),
            ("llama", "model.", "model.language_model."),
            ("qwen3", "model.", "language_model.model."),
            ("gpt_neox", "gpt_neox.", ""),
            ("gpt_neox", "gpt_neox.", "model.gpt_neox."),
            ("gpt2", "transformer.", ""),
            ("stablelm", "", "_orig_mod."),  # saved from a compiled network
            ("gemma3_text", "model.", "model.language_model."),
            ("qwen3_moe", "model.", ""),
        ],
    )
    def test_the_prefix_may_be_another_one(self, family: str, old: str, new: str, tmp_path: Path) -> None:
        reference = write_reference(config_of(family, {}), tmp_path)
        rename(tmp_path, old, new)
        assert_same_numbers(reference, tmp_path, num_tokens=20)

    @pytest.mark.parametrize(("family", "head"), [("llama", "lm_head.weight"), ("gpt_neox", "embed_out.weight")])
    def test_a_network_that_was_saved_without_its_head_needs_a_tied_one(
        self, family: str, head: str, tmp_path: Path
    ) -> None:
        config = config_of(family, {"tie_word_embeddings": False})
        transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
        assert rewrite(tmp_path)["architectures"][0].endswith("Model")
        with pytest.raises(CheckpointError, match=f"the checkpoint lacks {head}$"):
            load_checkpoint(str(tmp_path))
        rewrite(tmp_path, tie_word_embeddings=True)
        assert load_checkpoint(str(tmp_path)).model.config.tied_head

    @pytest.mark.parametrize(
        ("family", "name"),
        [
            ("llama", "model.rotary_emb.inv_freq"),
            ("qwen2", "model.layers.1.self_attn.rotary_emb.inv_freq"),
            ("gpt_neox", "gpt_neox.rotary_emb.inv_freq"),
            ("gemma3_text", "model.rotary_emb_local.inv_freq"),
            ("phi3", "model.layers.0.self_attn.rotary_emb.cos_cached"),
            ("olmo2", "model.rotary_emb.original_inv_freq"),
        ],
    )
    def test_stored_rotary_frequencies_are_not_needed(self, family: str, name: str, tmp_path: Path) -> None:
        write_reference(config_of(family, {}), tmp_path)
        ids = random_ids(71, 20)
        before = load_checkpoint(str(tmp_path)).model(ids)
        path = tmp_path / "model.safetensors"
        save_file(load_file(path) | {name: torch.ones(4)}, path, metadata={"format": "pt"})
        assert torch.equal(load_checkpoint(str(tmp_path)).model(ids), before)

    @pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
    @pytest.mark.parametrize("prefix", ["model.", "", "model.language_model."])
    def test_experts_may_be_stored_as_one_tensor(self, family: str, prefix: str, tmp_path: Path) -> None:
        reference = write_reference(config_of(family, {}), tmp_path, save_original_format=False)
        assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
        rename(tmp_path, "model.", prefix)
        assert_same_numbers(reference, tmp_path, num_tokens=20)

    def test_a_wrong_shape_of_fused_experts_is_named(self, tmp_path: Path) -> None:
        write_reference(config_of("mixtral", {}), tmp_path, save_original_format=False)
        rewrite(tmp_path, num_local_experts=4)
        message = r"layers\.0\.mlp\.(gate\.weight|experts\.\w+) has the shape \(5, .*, but the config asks for \(4, "
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(str(tmp_path))

    @pytest.mark.parametrize(
        ("family", "renamed"),
        [
            ("gpt2", {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}),
            ("mixtral", {"num_local_experts": "num_experts"}),
            ("qwen3_moe", {"num_experts": "num_local_experts"}),
        ],
    )
    def test_keys_may_have_the_other_names_that_transformers_knows(
        self, family: str, renamed: dict[str, str], tmp_path: Path
    ) -> None:
        write_reference(config_of(family, {}), tmp_path)
        config = rewrite(tmp_path)
        other = {renamed.get(key, key): value for key, value in config.items()}
        assert translate(other)[1] == translate(config)[1] == translate(config | other)[1]
        used, alias = next(iter(renamed.items()))
        keys = {used: config.get(used, config.get(alias)), alias: 1}
        with pytest.raises(ValueError, match=r"and .* mean the same, but differ"):
            translate(config | keys)


NETWORKS = (
    *("gpt2", "gpt_neox", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3"),
    *("olmo2", "smollm3", "granite", "stablelm"),
)
# Methods, and keys of heads for classification, of losses and of images.
NOT_OF_NETWORKS = {
    *("default_theta", "get_text_config", "json", "standardize_rope_params", "validate_rope", "num_labels"),
    *("summary_activation", "summary_first_dropout", "summary_last_dropout", "summary_proj_to_labels", "summary_type"),
    *("summary_use_proj", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    *("image_token_id", "mm_tokens_per_image"),
}


class TestUnknownKeys:
    def test_the_networks_of_transformers_read_no_other_keys(self) -> None:
        directory = Path(transformers.__file__).parent
        files = [directory / f"models/{name}/modeling_{name}.py" for name in NETWORKS]
        files += [directory / f"{name}.py" for name in ("modeling_rope_utils", "masking_utils", "cache_utils")]
        source = "".join(file.read_text() for file in files)
        read = {*re.findall(r"\bconfig\.(\w+)", source), *re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source)}
        known = NETWORK_KEYS | ConfigReader.HARMLESS | ConfigReader.NEUTRAL.keys() | NOT_OF_NETWORKS
        assert len(read) > 50
        assert read <= known

    @pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "phi3", "qwen3_moe"])
    def test_keys_that_no_network_reads_are_named_in_a_warning(
        self, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_reference(config_of(family, {}), tmp_path)
        config = rewrite(tmp_path)
        unknown = {"internal_version": 2, "name_or_path": "x", "num_steps": [1, 2], "trained_by": {"a": 1}}
        assert translate(config | unknown) == translate(config)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        named = "internal_version, name_or_path, num_steps, trained_by"
        assert record.getMessage() == f"config.json: {named}: unknown, so without effect, as in transformers"

    def test_keys_of_other_networks_are_refused_unless_they_ask_for_nothing(self, tmp_path: Path) -> None:
        write_reference(config_of("llama", {}), tmp_path)
        config = rewrite(tmp_path)
        neutral: dict[str, Any] = {
            "use_sliding_window": False,
            "num_experts": 0,
            "mlp_only_layers": [],
            "qk_layernorm": None,
        }
        neutral |= {"layer_types": ["full_attention"] * 2}
        assert translate(config | neutral) == translate(config)
        with pytest.raises(ValueError, match=r"json: num_experts, sliding_window: unknown in this family; a key that"):
            translate(config | {"sliding_window": 5, "num_experts": 2})


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

    def test_it_may_have_the_names_that_transformers_has_in_memory(self, tmp_path: Path) -> None:
        reference = self.write(tmp_path)
        reference.save_pretrained(tmp_path, save_original_format=False)
        names = load_file(tmp_path / "model.safetensors")
        assert "model.language_model.layers.0.self_attn.q_proj.weight" in names
        assert any(name.startswith("model.vision_tower.") for name in names)
        ids = random_ids(60, 30, batch=2)
        expected = reference(ids, use_cache=False).logits
        torch.testing.assert_close(load_checkpoint(str(tmp_path)).model(ids), expected, atol=1e-5, rtol=1e-5)

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
            ({"sliding_window": 1}, "sliding_window: unknown in this family"),
        ],
        ids=str,
    )
    def test_other_configs_are_refused(self, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
        self.write(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        with pytest.raises(ValueError, match=message):
            translate(config | changes)
        with pytest.raises(ValueError, match=r"text_config\.num_experts: unknown in this family"):
            translate(config | {"text_config": config["text_config"] | {"num_experts": 1}})


def test_a_parameter_of_q_k_and_v_stored_by_heads_has_the_rows_of_q_first(tmp_path: Path) -> None:
    write_reference(config_of("gpt_neox", {}), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")["gpt_neox.layers.1.attention.query_key_value.weight"]
    qkv = load_checkpoint(str(tmp_path)).model.get_parameter("blocks.1.attn.qkv.weight")
    rows = stored.view(4, 3, 8, 32)  # (H, q k v, D, C)
    assert torch.equal(qkv[:32], rows[:, 0].reshape(32, 32))
    assert torch.equal(qkv[64:], rows[:, 2].reshape(32, 32))
