"""The metadata of a GGUF file is translated completely: a key that could change the computation is used or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from model.checkpoints.families import translate
from model.checkpoints.gguf_files.config import ARCHITECTURES, read_config
from model.checkpoints.gguf_files.header import StoredTensor
from model.checkpoints.gguf_files.metadata import MetadataReader
from model.checkpoints.gguf_files.rope import llama3_divisors, read_rope
from model.errors import CheckpointError

FILE = Path("x.gguf")
KEYS = {
    "context_length": 64,
    "embedding_length": 32,
    "block_count": 2,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "attention.layer_norm_epsilon": float(np.float32(1e-5)),
}
EXTRA: dict[str, dict[str, Any]] = {
    "gptneox": {"use_parallel_residual": True},
    "granite": {"logit_scale": 8.0},
    "qwen3moe": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16},
}
UNREAD = {  # of the two epsilons, architectures with RMSNorm do not have the second, and the others not the first
    "attention.layer_norm_epsilon": set(ARCHITECTURES) - {"gpt2", "gptneox", "stablelm"},
    "attention.layer_norm_rms_epsilon": {"gpt2", "gptneox", "stablelm"},
}


def config_of(architecture: str = "llama", tensors: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    """The config of an architecture with small sizes. None removes a key; `__` in a name stands for a dot."""
    own = {key: value for key, value in KEYS.items() if architecture not in UNREAD.get(key, ())}
    own |= EXTRA.get(architecture, {}) | {key.replace("__", "."): value for key, value in keys.items()}
    metadata = {f"{architecture}.{key}": value for key, value in own.items() if value is not None}
    stored = {
        name: StoredTensor(FILE, name, (71, 32), Kind.F32, 0, 71 * 32 * 4) for name in ("token_embd.weight", *tensors)
    }
    return read_config(FILE, {"general.architecture": architecture} | metadata, stored)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_unknown_key_of_the_architecture_is_refused_by_name(architecture: str) -> None:
    assert config_of(architecture)["vocab_size"] == 71
    with pytest.raises(CheckpointError, match=rf"{architecture}\.attention\.clamp_kqv: unknown for this architecture"):
        config_of(architecture, attention__clamp_kqv=8.0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("key", ["context_length", "embedding_length", "block_count", "attention__head_count"])
@pytest.mark.parametrize("value", [0, -1, 1 << 40, 1.5, "4", True, [4, 4], None], ids=repr)
def test_an_absurd_size_is_refused_by_name(architecture: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"{architecture}\.{key.replace('__', '.')} is "):
        config_of(architecture, **{key: value})


def test_an_unknown_architecture_is_refused_and_the_known_ones_are_listed() -> None:
    with pytest.raises(
        CheckpointError, match=r"general\.architecture 'mamba' is not implemented; known: llama, qwen2,"
    ):
        config_of("mamba")


@pytest.mark.parametrize("kind", ["adapter", "mmproj", 7])
def test_a_file_that_holds_no_model_is_refused(kind: Any) -> None:
    metadata = {"general.type": kind, "general.architecture": "llama"}
    with pytest.raises(CheckpointError, match=r"general\.type is .*; only a 'model' can be served"):
        read_config(FILE, metadata, {})


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("llama", "attention__causal", False),
        ("llama", "rope__dimension_count", 4),
        ("llama", "attention__value_length", 4),
        ("llama", "rope__scaling__type", "ntk"),
        ("llama", "rope__scaling__attn_factor", 1.5),
        ("llama", "attention__head_count_kv", np.array([2, 4], np.int32)),
        ("olmo2", "attention__sliding_window", 4096),
        ("granite", "rope__scaling__finetuned", False),
        ("qwen3moe", "expert_gating_func", 2),
        ("gptneox", "use_parallel_residual", None),
    ],
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(architecture: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"{architecture}\.{key.replace('__', '.')} "):
        config_of(architecture, **{key: value})


def test_a_list_with_one_number_for_all_layers_is_a_number() -> None:
    assert config_of(attention__head_count_kv=np.array([2, 2], np.int32))["num_key_value_heads"] == 2


def test_missing_keys_have_the_defaults_of_llama_cpp() -> None:
    llama, gemma2, gemma3 = config_of("llama"), config_of("gemma2"), config_of("gemma3", block_count=7)
    assert (llama["rope_theta"], llama["num_key_value_heads"], llama["rope_scaling"]) == (10000.0, 4, None)
    assert (gemma2["sliding_window"], gemma2["attn_logit_softcapping"]) == (4096, 50.0)
    assert gemma2["final_logit_softcapping"] == 30.0
    assert gemma3["rope_local_base_freq"] == 10000.0
    assert gemma3["layer_types"] == ["full_attention"] * 7
    for architecture, full in (("gemma2", 1), ("gemma3", 5)):
        _, config = translate(config_of(architecture, block_count=7, attention__sliding_window=16))
        assert config.windowed_layers is not None
        assert config.windowed_layers.index(False) == full
    _, smollm3 = translate(config_of("smollm3", block_count=7))
    assert smollm3.rotary_layers is not None
    assert smollm3.rotary_layers.index(False) == 3


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_scales_attention_by_its_width(architecture: str, num_layers: int) -> None:
    assert config_of(architecture, attention__key_length=16)["query_pre_attn_scalar"] == 16
    assert config_of(architecture, attention__key_length=16, block_count=num_layers)["query_pre_attn_scalar"] == 8


def test_a_head_is_tied_if_the_file_has_no_output_tensor() -> None:
    assert config_of()["tie_word_embeddings"]
    assert not config_of(tensors=("output.weight",))["tie_word_embeddings"]


class TestRope:
    @staticmethod
    def scaling(factors: dict[str, Any] | None = None, rotary_dim: int = 64, **keys: Any) -> Any:
        metadata = {f"llama.rope.{key}": value for key, value in keys.items()} | {"general.architecture": "llama"}
        reader = MetadataReader(FILE, metadata)
        tensors = {name: np.asarray(values, np.float32) for name, values in (factors or {}).items()}
        return read_rope(reader, tensors, rotary_dim, 4096)["rope_scaling"]

    def test_linear_is_the_kind_without_a_key(self) -> None:
        keys: dict[str, Any] = {"scaling.factor": 4.0}
        assert self.scaling(**keys) == {"rope_type": "linear", "factor": 4.0}
        assert self.scaling(scale_linear=4.0) == {"rope_type": "linear", "factor": 4.0}
        assert self.scaling(**keys | {"scaling.type": "none"}) is None

    def test_the_settings_of_llama_3_are_found_from_its_divisors(self) -> None:
        divisors = llama3_divisors(500000.0, 64, 32.0, 8192)
        found = self.scaling({"rope_freqs": divisors}, freq_base=500000.0)
        assert (found["rope_type"], found["factor"]) == ("llama3", 32.0)
        assert found["original_max_position_embeddings"] == 8192

    def test_other_divisors_are_kept_as_they_are(self) -> None:
        divisors = np.linspace(1, 3, 32)
        found = self.scaling({"rope_freqs": divisors})
        assert (found["rope_type"], found["attention_factor"]) == ("longrope", 1.0)
        assert found["short_factor"] == found["long_factor"]
        assert np.float32(found["short_factor"]).tolist() == np.float32(divisors).tolist()

    def test_divisors_of_one_are_no_scaling(self) -> None:
        assert self.scaling({"rope_freqs": np.ones(32)}) is None

    @pytest.mark.parametrize("divisors", [np.ones(31), np.zeros(32), np.full(32, np.nan), -np.ones(32)])
    def test_impossible_divisors_are_refused(self, divisors: Any) -> None:
        with pytest.raises(CheckpointError, match=r"does not fit rope_freqs\.weight, or its factors are not positive"):
            self.scaling({"rope_freqs": divisors})

    @pytest.mark.parametrize("key", ["yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier"])
    def test_settings_of_yarn_that_transformers_reads_differently_are_refused(self, key: str) -> None:
        keys: dict[str, Any] = {"scaling.type": "yarn", "scaling.factor": 4.0, f"scaling.{key}": 0.5}
        with pytest.raises(CheckpointError, match=rf"rope\.scaling\.{key} is 0\.5, which is not implemented"):
            self.scaling(**keys)

    def test_one_list_of_longrope_factors_is_not_enough(self) -> None:
        with pytest.raises(CheckpointError, match="needs both lists of factors"):
            self.scaling({"rope_factors_long": np.ones(32)})
