"""Loading is strict: what a checkpoint lacks, has too much of, or asks for and is not implemented is named."""

import json
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from model.checkpoint import CheckpointError, GenerationDefaults, load_checkpoint
from model.config import MAX_SIZES, ModelConfig
from model.families import translate
from model.layers import rotary_frequencies
from tests.tiny import random_ids, write_reference

transformers = pytest.importorskip("transformers")

Tensors = dict[str, torch.Tensor]
SIZES = {
    "vocab_size": 71,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each kind, as transformers writes it."""
    configs = {
        "tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "untied": transformers.LlamaConfig(**SIZES),
        "gpt2": transformers.GPT2Config(
            vocab_size=71, n_embd=16, n_layer=2, n_head=2, n_positions=40, bos_token_id=1, eos_token_id=2
        ),
    }
    directories = {name: tmp_path_factory.mktemp(name) for name in configs}
    for name, config in configs.items():
        write_reference(config, directories[name])
    return directories


@pytest.fixture
def copy_of(written: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(written[name], tmp_path / name))

    return copy


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, edit: Callable[[Tensors], object]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


class TestTensors:
    @pytest.mark.parametrize(
        ("kind", "name"),
        [
            ("untied", "lm_head.weight"),
            ("untied", "model.embed_tokens.weight"),
            ("tied", "model.layers.1.self_attn.k_proj.weight"),
            ("tied", "model.norm.weight"),
            ("gpt2", "transformer.h.0.attn.c_attn.bias"),
            ("gpt2", "transformer.wpe.weight"),
        ],
    )
    def test_a_missing_tensor_is_named(self, copy_of: Callable[[str], Path], kind: str, name: str) -> None:
        directory = copy_of(kind)
        edit_tensors(directory, lambda tensors: tensors.pop(name))
        with pytest.raises(CheckpointError, match=f"lacks {name}$"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize(
        ("kind", "name"),
        [
            ("untied", "model.layers.0.self_attn.q_proj.bias"),
            ("untied", "model.layers.2.mlp.up_proj.weight"),
            ("tied", "score.weight"),
            ("gpt2", "transformer.h.0.crossattention.c_attn.weight"),
        ],
    )
    def test_a_surplus_tensor_is_named(self, copy_of: Callable[[str], Path], kind: str, name: str) -> None:
        directory = copy_of(kind)
        edit_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(3)}))
        with pytest.raises(CheckpointError, match=f"no place for: {name}$"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize(
        ("kind", "name", "shape"),
        [
            ("untied", "model.embed_tokens.weight", (70, 16)),
            ("untied", "model.layers.0.mlp.down_proj.weight", (24, 16)),
            ("untied", "model.layers.1.self_attn.q_proj.weight", (12, 16)),
            ("untied", "model.layers.1.self_attn.v_proj.weight", (9, 16)),
            ("tied", "model.norm.weight", (1,)),
            ("gpt2", "transformer.h.1.mlp.c_fc.weight", (64, 16)),
            ("gpt2", "transformer.h.1.attn.c_attn.weight", (16, 16)),
        ],
    )
    def test_a_misshapen_tensor_is_named(
        self, copy_of: Callable[[str], Path], kind: str, name: str, shape: tuple[int, ...]
    ) -> None:
        directory = copy_of(kind)
        edit_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(shape)}))
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(str(directory))

    def test_two_misshapen_tensors_whose_rows_add_up_are_not_taken(self, copy_of: Callable[[str], Path]) -> None:
        """q, k and v fill one matrix: a q of 18 rows and a k of 6 would fill it too, with a row of q taken for k."""
        directory = copy_of("untied")
        places = "model.layers.0.self_attn.{}_proj.weight"
        shapes = {places.format("q"): torch.zeros(18, 16), places.format("k"): torch.zeros(6, 16)}
        edit_tensors(directory, lambda tensors: tensors.update(shapes))
        with pytest.raises(CheckpointError, match="_proj"):
            load_checkpoint(str(directory))

    def test_every_tensor_lands_where_it_belongs(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("untied")
        model = load_checkpoint(str(directory)).model
        tensors = load_file(directory / "model.safetensors")
        q, k, v = (tensors[f"model.layers.1.self_attn.{side}_proj.weight"] for side in "qkv")
        assert torch.equal(model.get_parameter("blocks.1.attn.qkv.weight"), torch.cat((q, k, v)))
        gate, up = (tensors[f"model.layers.0.mlp.{side}_proj.weight"] for side in ("gate", "up"))
        assert torch.equal(model.get_parameter("blocks.0.mlp.up.weight"), torch.cat((gate, up)))
        assert torch.equal(model.head.weight, tensors["lm_head.weight"])

    def test_a_loaded_model_wants_no_gradients_and_holds_a_tied_head_once(self, written: dict[str, Path]) -> None:
        model = load_checkpoint(str(written["tied"])).model
        assert model.head.weight is model.embed.weight
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())


class TestTiedHead:
    """Some programs write the head of a tied model a second time."""

    HEADS = (("tied", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight"))

    @pytest.mark.parametrize(("kind", "embedding"), HEADS)
    def test_an_equal_head_beside_a_tied_embedding_is_taken_for_it(
        self, copy_of: Callable[[str], Path], written: dict[str, Path], kind: str, embedding: str
    ) -> None:
        directory = copy_of(kind)
        edit_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
        ids = random_ids(71, 9)
        expected = load_checkpoint(str(written[kind])).model(ids)
        assert torch.equal(load_checkpoint(str(directory)).model(ids), expected)

    @pytest.mark.parametrize(("kind", "embedding"), HEADS)
    def test_a_differing_head_beside_a_tied_embedding_is_refused(
        self, copy_of: Callable[[str], Path], kind: str, embedding: str
    ) -> None:
        directory = copy_of(kind)
        edit_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding] + 1e-3}))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding.*tie_word_embeddings"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize("tied", [True, False])
    def test_gpt2_names_without_their_prefix_may_come_with_a_head(
        self, copy_of: Callable[[str], Path], written: dict[str, Path], tied: bool
    ) -> None:
        """The head has no prefix in either form."""
        directory = copy_of("gpt2")
        edit_config(directory, tie_word_embeddings=tied)
        tensors = load_file(directory / "model.safetensors")
        head = tensors["transformer.wte.weight"].clone()
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        save_file(bare | {"lm_head.weight": head}, directory / "model.safetensors", metadata={"format": "pt"})
        ids = random_ids(71, 9)
        assert torch.equal(load_checkpoint(str(directory)).model(ids), load_checkpoint(str(written["gpt2"])).model(ids))


class TestFiles:
    def test_pickled_weights_are_refused_with_a_hint(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle.*Convert it.*save_pretrained"):
            load_checkpoint(str(directory))

    def test_a_directory_without_weights_says_so(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        (directory / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"no \*\.safetensors$"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize("keep", [0, 4, 100, -8])
    def test_a_broken_safetensors_file_is_named(self, copy_of: Callable[[str], Path], keep: int) -> None:
        directory = copy_of("tied")
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors file"):
            load_checkpoint(str(directory))

    def test_an_index_that_names_an_absent_tensor_is_refused(self, written: dict[str, Path], tmp_path: Path) -> None:
        reference = transformers.AutoModelForCausalLM.from_pretrained(written["untied"])
        reference.save_pretrained(tmp_path, max_shard_size="4KB")
        path = tmp_path / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        load_checkpoint(str(tmp_path))
        file = next(iter(index["weight_map"].values()))
        index["weight_map"]["model.layers.2.mlp.up_proj.weight"] = file
        path.write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=rf"places model\.layers\.2\.mlp\.up_proj\.weight in {file}"):
            load_checkpoint(str(tmp_path))

    def test_an_absent_shard_is_an_error_that_names_it(self, written: dict[str, Path], tmp_path: Path) -> None:
        reference = transformers.AutoModelForCausalLM.from_pretrained(written["untied"])
        reference.save_pretrained(tmp_path, max_shard_size="4KB")
        shard = sorted(tmp_path.glob("*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(CheckpointError, match=shard.name):
            load_checkpoint(str(tmp_path))

    def test_a_tensor_in_two_files_of_the_index_is_refused(self, written: dict[str, Path], tmp_path: Path) -> None:
        reference = transformers.AutoModelForCausalLM.from_pretrained(written["untied"])
        reference.save_pretrained(tmp_path, max_shard_size="4KB")
        save_file({"model.norm.weight": torch.ones(16)}, tmp_path / "other.safetensors")
        path = tmp_path / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.norm.weight"] = "other.safetensors"
        path.write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight: in model-.* and in other\.safetensors"):
            load_checkpoint(str(tmp_path))

    def test_files_that_the_index_does_not_name_are_not_read(self, written: dict[str, Path], tmp_path: Path) -> None:
        reference = transformers.AutoModelForCausalLM.from_pretrained(written["untied"])
        reference.save_pretrained(tmp_path, max_shard_size="4KB")
        save_file({"layers.0.attention.wq.weight": torch.ones(16)}, tmp_path / "consolidated.safetensors")
        load_checkpoint(str(tmp_path))

    def test_the_common_file_is_read_where_others_lie_beside_it(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        save_file({"layers.0.attention.wq.weight": torch.ones(16)}, directory / "consolidated.safetensors")
        load_checkpoint(str(directory))

    def test_several_files_without_an_index_are_refused(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        save_file({"model.norm.weight": torch.ones(16)}, directory / "b.safetensors")
        with pytest.raises(CheckpointError, match=r"several .*a\.safetensors, b\.safetensors.* and no model"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize("weight_map", [[1], None, {"model.norm.weight": 1}])
    def test_an_index_that_is_no_index_is_named(self, copy_of: Callable[[str], Path], weight_map: object) -> None:
        directory = copy_of("tied")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=r"index\.json: weight_map is no object"):
            load_checkpoint(str(directory))

    def test_a_checkpoint_of_the_hub_is_named_after_its_id(
        self, written: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(written["tied"]))
        assert load_checkpoint("org/name").name == "org/name"

    @pytest.mark.parametrize(
        ("content", "complaint"), [(None, "missing"), ("{", "not valid JSON"), ("[]", "not a JSON object")]
    )
    def test_an_unreadable_config_is_named(
        self, copy_of: Callable[[str], Path], content: str | None, complaint: str
    ) -> None:
        directory = copy_of("tied")
        path = directory / "config.json"
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(CheckpointError, match=rf"config\.json: {complaint}"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize("source", ["/nowhere/at/all", "./nowhere", "a/b/c"])
    def test_a_source_that_is_neither_directory_nor_hub_id_is_refused(self, source: str) -> None:
        with pytest.raises(CheckpointError, match="no such directory"):
            load_checkpoint(source)

    def test_a_hub_id_without_network_is_a_clear_error(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # the library reads the variable once
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(CheckpointError, match=r"^some/model: not a directory, and the hub could not give it"):
            load_checkpoint("some/model")

    def test_an_unknown_dtype_is_refused_by_name(self, written: dict[str, Path]) -> None:
        with pytest.raises(ValueError, match=r"int3.*float32"):
            load_checkpoint(str(written["tied"]), dtype="int3")

    def test_weights_of_a_dtype_that_is_not_implemented_are_refused(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        edit_tensors(directory, lambda tensors: tensors.update({n: t.to(torch.int8) for n, t in tensors.items()}))
        with pytest.raises(CheckpointError, match="int8"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_one_tensor_of_integers_among_the_weights_is_refused(
        self, copy_of: Callable[[str], Path], dtype: str
    ) -> None:
        """Integers are codes of some quantization; cast to floats they would be served as weights."""
        directory = copy_of("tied")
        name = "model.layers.1.mlp.up_proj.weight"
        edit_tensors(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(str(directory), dtype=dtype)


class TestConfigs:
    @pytest.mark.parametrize("model_type", ["mamba", "", None, "LLAMA"])
    def test_an_unknown_model_type_is_named_beside_the_known(
        self, copy_of: Callable[[str], Path], model_type: str | None
    ) -> None:
        directory = copy_of("tied")
        edit_config(directory, model_type=model_type)
        with pytest.raises(ValueError, match=f"model_type {model_type!r} is not implemented; known: gpt2, llama"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize(
        ("kind", "architectures"),
        [
            ("tied", ["LlamaForSequenceClassification"]),
            ("gpt2", ["GPT2Model"]),
            ("tied", ["LlamaForCausalLM", "LlamaModel"]),
        ],
    )
    def test_another_architecture_is_named(
        self, copy_of: Callable[[str], Path], kind: str, architectures: list[str]
    ) -> None:
        directory = copy_of(kind)
        edit_config(directory, architectures=architectures)
        with pytest.raises(ValueError, match=f"architectures .*{architectures[0]}.* is not implemented"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize(
        ("kind", "key", "value"),
        [
            ("gpt2", "scale_attn_by_inverse_layer_idx", True),
            ("gpt2", "scale_attn_weights", False),
            ("gpt2", "reorder_and_upcast_attn", True),
            ("gpt2", "add_cross_attention", True),
            ("gpt2", "activation_function", "gelu_fast"),
            ("tied", "hidden_act", "quick_gelu"),
            ("tied", "rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}),
            ("tied", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            ("tied", "rope_parameters", {"rope_type": "linear", "factor": 2.0, "curvature": 3}),
            ("tied", "rope_parameters", {"rope_type": "linear"}),
            ("tied", "rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
            ("tied", "partial_rotary_factor", 0.5),
            ("tied", "quantization_config", {"quant_method": "gptq", "bits": 4}),
            ("tied", "sliding_window", 8),
            ("tied", "number_of_the_beast", 666),
            ("gpt2", "number_of_the_beast", 666),
            ("gpt2", "quantization_config", {"quant_method": "awq"}),
            ("gpt2", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ],
    )
    def test_a_key_that_is_not_implemented_is_named(
        self, copy_of: Callable[[str], Path], kind: str, key: str, value: Any
    ) -> None:
        directory = copy_of(kind)
        edit_config(directory, **{key: value})
        innermost = {"partial_rotary_factor", "curvature", "factor", "low_freq_factor", "longrope"}
        named = "|".join([key, *innermost]) if key == "rope_parameters" else key
        with pytest.raises(ValueError, match=named):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"])
    def test_a_key_that_is_missing_is_named(self, copy_of: Callable[[str], Path], key: str) -> None:
        directory = copy_of("tied")
        edit_config(directory, **{key: None})
        with pytest.raises(ValueError, match=f"{key} is missing"):
            load_checkpoint(str(directory))

    def test_rope_said_twice_and_differently_is_refused(self, copy_of: Callable[[str], Path]) -> None:
        """transformers lets rope_scaling win; either choice, taken silently, is another network."""
        directory = copy_of("tied")
        edit_config(directory, rope_scaling={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
        with pytest.raises(ValueError, match="rope_scaling"):
            load_checkpoint(str(directory))

    def test_sliding_layers_without_a_window_are_refused(self) -> None:
        config = transformers.Qwen2Config(**SIZES).to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
        translate(config)
        with pytest.raises(ValueError, match=r"layer_types.*sliding_window"):
            translate(config | {"layer_types": ["sliding_attention", "full_attention"]})
        with pytest.raises(ValueError, match=r"layer_types \['chunked_attention'\]"):
            translate(config | {"layer_types": ["chunked_attention", "full_attention"]})

    @pytest.mark.parametrize(
        ("name", "extra"),
        [
            ("gpt2", {"n_ctx": 1024, "summary_type": "cls_index", "task_specific_params": {"text-generation": {}}}),
            ("gpt2-medium, -large", {"n_ctx": 1024, "n_special": 0, "predict_special_tokens": True}),
            ("gpt2-xl", {"n_ctx": 1024, "n_special": 0, "predict_special_tokens": True, "output_past": True}),
            ("distilgpt2", {"n_ctx": 1024, "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}),
        ],
    )
    def test_the_published_gpt2_configs_are_understood(self, name: str, extra: dict[str, Any]) -> None:
        base = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024}
        sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02}
        assert translate(base | sizes | extra)[1].d_mlp == 3072

    @pytest.mark.parametrize(
        ("name", "extra"),
        [
            ("Qwen2.5-0.5B", {"model_type": "qwen2", "use_mrope": False, "use_sliding_window": False}),
            ("SmolLM2-135M", {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False}),
        ],
    )
    def test_the_published_configs_of_small_llamas_are_understood(self, name: str, extra: dict[str, Any]) -> None:
        translate(SIZES | {"rope_theta": 1e6, "rope_scaling": None, "hidden_act": "silu"} | extra)


class TooSlow(BaseException):
    """Not an `Exception`, so that nothing on the way catches it."""


@contextmanager
def at_once(seconds: float = 3) -> Iterator[None]:
    """Fail where the body takes longer. Far more than a refusal takes, since the machine may be busy."""

    def stop(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refusal(directory: Path) -> str:
    """The message of one line with which loading is refused at once."""
    with at_once(), pytest.raises(ValueError, match=r".") as error:
        load_checkpoint(str(directory))
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 1500
    return message


FAMILY_SIZES = {
    "untied": {
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "intermediate_size": "d_mlp",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "max_position_embeddings": "max_positions",
        "head_dim": "d_head",
    },
    "gpt2": {
        "vocab_size": "vocab_size",
        "n_embd": "d_model",
        "n_inner": "d_mlp",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_positions": "max_positions",
    },
}
KEYS = [(kind, key, field) for kind, fields in FAMILY_SIZES.items() for key, field in fields.items()]


class TestHostileSizes:
    """A config may promise anything; it is refused before memory or time is spent on it."""

    @pytest.mark.parametrize("value", [10**9, 2**63, 10**30, 1e300, -1, 0, True, "7", [7]], ids=repr)
    @pytest.mark.parametrize(("kind", "key", "field"), KEYS)
    def test_an_absurd_size_is_refused_by_its_key(
        self, copy_of: Callable[[str], Path], kind: str, key: str, field: str, value: Any
    ) -> None:
        directory = copy_of(kind)
        if value == 0 and key in ("head_dim", "num_key_value_heads"):
            value = -2  # 0 stands for a value that follows from the others
        edit_config(directory, **{key: value})
        message = refusal(directory)
        assert key in message
        if type(value) is int and value > 1:
            assert str(MAX_SIZES[field]) in message

    # Rotary positions have no weights, so any length of the context fits the files.
    @pytest.mark.parametrize(("kind", "key", "field"), [each for each in KEYS if "max_position_embeddings" not in each])
    def test_the_largest_size_that_is_taken_is_compared_with_the_files_before_memory_is_allocated(
        self, copy_of: Callable[[str], Path], kind: str, key: str, field: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def allocate(*_: Any, **__: Any) -> None:
            raise AssertionError("memory was allocated")

        directory = copy_of(kind)
        edit_config(directory, **({"head_dim": 4} if kind == "untied" else {"n_head": 8}) | {key: MAX_SIZES[field]})
        monkeypatch.setattr(torch.nn.Module, "to_empty", allocate)
        message = refusal(directory)
        assert "config asks for" in message or "the checkpoint lacks" in message or key in message

    @pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
    @pytest.mark.parametrize("key", ["num_hidden_layers", "max_window_layers", "sliding_window"])
    def test_the_layers_of_a_window_are_counted_before_they_are_listed(self, kind: str, key: str) -> None:
        windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        with at_once(), pytest.raises(ValueError, match=rf"^config\.json: {key}\b"):
            translate(SIZES | {"model_type": kind} | windows | {key: 10**9})

    @pytest.mark.parametrize("name", ["original_max_position_embeddings", "factor"])
    @pytest.mark.parametrize("value", [10**9, 10**30, 1e300], ids=repr)
    def test_rope_scaling_cannot_stretch_a_context_without_limit(self, name: str, value: float) -> None:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} | {name: value}
        with pytest.raises(ValueError, match=name):
            translate(SIZES | {"model_type": "llama", "rope_scaling": scaling})

    def test_a_stretched_context_beyond_the_limit_is_refused(self) -> None:
        scaling = {"rope_type": "dynamic", "factor": 1000.0}
        with pytest.raises(ValueError, match=f"max_position_embeddings: .* at most {MAX_SIZES['max_positions']}"):
            translate(SIZES | {"model_type": "llama", "max_position_embeddings": 1 << 20, "rope_scaling": scaling})


class TestHostileNumbers:
    @pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e400", "-1e999"])
    @pytest.mark.parametrize("place", ["rms_norm_eps", "rope_theta", "unread", "rope_scaling.factor", "list.3.deep"])
    def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(
        self, copy_of: Callable[[str], Path], place: str, value: str
    ) -> None:
        directory = copy_of("untied")
        contents = {"list.3.deep": f'"list": [0, 1, 2, {{"deep": {value}}}]', "unread": f'"id2label": {{"0": {value}}}'}
        key, _, inner = place.partition(".")
        content = contents.get(place) or (f'"{key}": {{"{inner}": {value}}}' if inner else f'"{key}": {value}')
        path = directory / "config.json"
        path.write_text(path.read_text().rstrip().removesuffix("}") + f", {content}}}")
        message = refusal(directory)
        assert "config.json" in message
        assert "numbers must be finite" in message
        assert ("id2label.0" if place == "unread" else place) in message

    def test_a_number_that_another_one_replaces_is_finite_too(self, copy_of: Callable[[str], Path]) -> None:
        """Of two equal keys Python keeps the last."""
        directory = copy_of("untied")
        path = directory / "config.json"
        path.write_text(path.read_text().replace('"rms_norm_eps"', '"rms_norm_eps": NaN, "rms_norm_eps"'))
        assert "config.json: a number is NaN; numbers must be finite" in refusal(directory)

    @pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
    def test_an_integer_too_large_for_a_float_is_refused_by_its_key(
        self, copy_of: Callable[[str], Path], key: str
    ) -> None:
        directory = copy_of("untied")
        edit_config(directory, rope_parameters=None, **{key: 10**400})
        assert key in refusal(directory)

    @pytest.mark.parametrize("value", ["NaN", "1e400"])
    def test_generation_defaults_are_finite_too(self, copy_of: Callable[[str], Path], value: str) -> None:
        directory = copy_of("untied")
        (directory / "generation_config.json").write_text(f'{{"temperature": {value}}}')
        message = refusal(directory)
        assert "generation_config.json: temperature is" in message


NUMBERS = st.sampled_from([0, 1, -1, 2, 10**9, 2**63, 10**30, 10**400, 0.0, 0.5, 1e-320, 1e300, -1.5])
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.integers(), st.text(max_size=5))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
KINDS = ["llama", "mistral", "qwen2", "qwen3", "gpt2"]
GPT2 = {"vocab_size": 71, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}
ALL_KEYS = [
    *SIZES,
    *GPT2,
    *("n_inner", "activation_function", "layer_norm_epsilon", "hidden_act", "rms_norm_eps", "rope_theta", "head_dim"),
    *("rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window"),
    *("max_window_layers", "layer_types", "architectures", "model_type", "quantization_config", "unknown"),
]
SCALING_KEYS = [
    *("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("truncate", "attention_factor", "mscale", "mscale_all_dim", "rope_theta", "rope_type", "type", "unknown"),
]
SCALING = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def check_limits(translated: ModelConfig) -> None:
    for field, largest in MAX_SIZES.items():
        assert getattr(translated, field) is None or 1 <= getattr(translated, field) <= largest
    if translated.positions == "rotary":
        assert rotary_frequencies(translated.d_head, translated.rope_theta, translated.rope_scaling).isfinite().all()


@settings(max_examples=500, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    changes=st.dictionaries(st.sampled_from(ALL_KEYS), VALUES, max_size=3),
    scaling_kind=st.sampled_from([None, "linear", "dynamic", "llama3", "yarn"]),
    scaling=st.dictionaries(st.sampled_from(SCALING_KEYS), VALUES, max_size=2),
)
@example("llama", {}, "yarn", {"beta_slow": 5e-324})
@example("llama", {"max_position_embeddings": 0}, "yarn", {"factor": None, "original_max_position_embeddings": None})
@example("qwen2", {"layer_types": [{}]}, None, {})
def test_any_config_is_translated_or_refused_with_a_value_error(
    kind: str, changes: dict[str, Any], scaling_kind: str | None, scaling: dict[str, Any]
) -> None:
    config: dict[str, Any] = {"model_type": kind} | (GPT2 if kind == "gpt2" else SIZES)
    if scaling_kind is not None and kind != "gpt2":
        used = SCALING if scaling_kind == "llama3" else {"factor": 2.0}
        config["rope_scaling"] = used | {"rope_type": scaling_kind} | scaling
    try:
        _, translated = translate(config | changes)
    except ValueError as error:
        message = str(error)
    else:
        message = "translated"
        check_limits(translated)
    assert message.isprintable()
    assert len(message) < 3000


class TestHostileFiles:
    """Only regular files are opened: a pipe would wait for a writer, a device may have no end."""

    NAMES = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "model.safetensors",
    )

    @pytest.fixture
    def pipe(self) -> Iterator[Callable[[Path], None]]:
        """Makes a named pipe. Whoever opens it gets free after ten seconds, so that a test that fails ends."""
        writers = []

        def make(path: Path) -> None:
            os.mkfifo(path)
            writers.append(subprocess.Popen(["sh", "-c", 'sleep 10; while :; do : > "$0"; done', str(path)]))

        yield make
        for writer in writers:
            writer.kill()
            writer.wait()

    @pytest.mark.parametrize("name", NAMES)
    def test_a_named_pipe_is_refused_at_once(
        self, copy_of: Callable[[str], Path], pipe: Callable[[Path], None], name: str
    ) -> None:
        directory = copy_of("untied")
        (directory / name).unlink(missing_ok=True)
        pipe(directory / name)
        message = refusal(directory)
        assert f"{name}: is a named pipe, not a regular file" in message or f"{name}: not a readable" in message
        assert "named pipe" in message

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("kind", ["directory", "socket", "device"])
    def test_what_is_no_regular_file_is_refused_by_name(
        self, copy_of: Callable[[str], Path], name: str, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = copy_of("untied")
        path = directory / name
        path.unlink(missing_ok=True)
        if kind == "directory":
            path.mkdir()
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            monkeypatch.chdir(directory)  # the address of a socket has at most 107 bytes
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(name)
        message = refusal(directory)
        assert name in message
        assert f"is a {kind}, not a regular file" in message

    def test_links_to_regular_files_are_followed(
        self, copy_of: Callable[[str], Path], written: dict[str, Path], tmp_path: Path
    ) -> None:
        """A hub cache keeps every file as a link into a folder of blobs, outside of the checkpoint's directory."""
        linked = tmp_path / "linked"
        linked.mkdir()
        for path in written["untied"].iterdir():
            (linked / path.name).symlink_to(path)
        ids = random_ids(71, 9)
        model = load_checkpoint(str(linked)).model
        assert torch.equal(model(ids), load_checkpoint(str(written["untied"])).model(ids))

    @pytest.mark.parametrize("place", ["../outside.safetensors", "{outside}", "sub/../model.safetensors"])
    def test_an_index_may_only_name_files_beside_it(
        self, copy_of: Callable[[str], Path], written: dict[str, Path], tmp_path: Path, place: str
    ) -> None:
        directory = copy_of("untied")
        outside = tmp_path / "outside.safetensors"
        shutil.copy(written["untied"] / "model.safetensors", outside)
        place = place.format(outside=outside)
        names = load_file(directory / "model.safetensors")
        index = {"weight_map": dict.fromkeys(names, place)}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        message = refusal(directory)
        assert message.endswith(f"names {place}; only files beside it are read")

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON: nested"),
            (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "not valid JSON: nested"),
            (b'{"a": ' * 100_000, "not valid JSON: nested"),
            (b'{"a": "\xff\xfe"}', "not valid JSON: 'utf-8' codec"),
            (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON: Exceeds the limit"),
            (b'{"a": "' + b" " * (5 << 20) + b'"}', "has more than 2097152 bytes"),
        ],
        ids=["deep list", "list of 500 levels", "deep object", "not UTF-8", "long integer", "large"],
    )
    def test_json_that_cannot_be_read_is_refused_by_name(
        self, copy_of: Callable[[str], Path], name: str, content: bytes, complaint: str
    ) -> None:
        directory = copy_of("untied")
        (directory / name).write_bytes(content)
        message = refusal(directory)
        assert f"{name}: {complaint}" in message

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
    def test_a_file_of_a_terabyte_is_not_read_to_its_end(self, copy_of: Callable[[str], Path], name: str) -> None:
        directory = copy_of("untied")
        (directory / name).touch()
        os.truncate(directory / name, 1 << 40)  # a hole, which takes no room on the disk
        assert f"{name}: has more than" in refusal(directory)

    def test_a_header_of_safetensors_is_of_limited_size(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("untied")
        entry = '"{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        header = ("{" + ",".join(entry.format(index) for index in range(300_000)) + "}").encode()
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        assert "model.safetensors: not a readable safetensors file: its header has" in refusal(directory)

    def test_names_from_a_file_cannot_break_the_line_of_a_message(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("untied")
        edit_tensors(
            directory, lambda tensors: tensors.update({"a\nERROR forged": torch.zeros(1), "b" * 500: torch.zeros(1)})
        )
        assert r"'a\nERROR forged'" in refusal(directory)
        edit_config(directory, **{"c\nERROR forged": 1})
        assert r"'c\nERROR forged'" in refusal(directory)


class Marks:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_code_of_a_checkpoint_ever_runs(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    directory, mark = copy_of("untied"), tmp_path / "mark"
    for stem in ("configuration_own", "modeling_own", "tokenization_own"):
        (directory / f"{stem}.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "optimizer.pkl"):
        (directory / name).write_bytes(pickle.dumps(Marks(mark)))
    own = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    edit_config(directory, auto_map=own)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_own.Tokenizer", None]}, "tokenizer_class": "Own"})
    )
    load_checkpoint(str(directory))
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is a pickle"):
        load_checkpoint(str(directory))
    for pickled in directory.glob("*.bin"):
        pickled.rename(directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_checkpoint(str(directory))
    assert not mark.exists()
    pickle.loads(pickle.dumps(Marks(mark)))
    assert mark.exists(), "the pickle is harmless, so the test shows nothing"


class TestGenerationDefaults:
    def read(self, directory: Path, generation: dict[str, Any] | None) -> GenerationDefaults:
        path = directory / "generation_config.json"
        path.unlink(missing_ok=True)
        if generation is not None:
            path.write_text(json.dumps(generation))
        return load_checkpoint(str(directory)).generation

    @pytest.mark.parametrize(
        ("generation", "eos_token_ids"),
        [(None, (2,)), ({}, (2,)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 0]}, (7, 0))],
    )
    def test_the_end_is_one_id_or_a_list_of_them(
        self, copy_of: Callable[[str], Path], generation: dict[str, Any] | None, eos_token_ids: tuple[int, ...]
    ) -> None:
        assert self.read(copy_of("tied"), generation).eos_token_ids == eos_token_ids

    def test_sampling_is_read(self, copy_of: Callable[[str], Path]) -> None:
        sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
        assert self.read(copy_of("tied"), sampling | {"do_sample": True, "bos_token_id": 1}).sampling == sampling

    def test_do_sample_false_means_greedy(self, copy_of: Callable[[str], Path]) -> None:
        generation = {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
        assert self.read(copy_of("tied"), generation).sampling == {"temperature": 0.0, "repetition_penalty": 1.2}

    def test_no_word_on_sampling_leaves_it_open(self, copy_of: Callable[[str], Path]) -> None:
        assert self.read(copy_of("tied"), None).sampling == {}


class TestTokenizer:
    def write(self, directory: Path, num_entries: int) -> None:
        vocabulary = {f"word{index}": index for index in range(num_entries)}
        Backend(WordLevel(vocabulary, unk_token="word0")).save(str(directory / "tokenizer.json"))

    def test_a_tokenizer_as_large_as_the_vocabulary_is_loaded(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        self.write(directory, 71)
        tokenizer = load_checkpoint(str(directory)).tokenizer
        assert tokenizer is not None
        assert tokenizer.vocab_size == 71

    def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_said_with_both_sizes(
        self, copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Such checkpoints are published (a padding token added to the tokenizer alone); their other ids are no use."""
        directory = copy_of("tied")
        self.write(directory, 72)
        model = load_checkpoint(str(directory)).model
        assert "tokenizer.json has 72 entries, the network 71" in caplog.text
        with pytest.raises(IndexError):
            model(torch.tensor([[71]]))

    def test_an_unreadable_tokenizer_is_named(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        (directory / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match=r"tokenizer\.json: not a readable"):
            load_checkpoint(str(directory))

    def test_a_tokenizer_on_which_the_library_panics_is_named(self, copy_of: Callable[[str], Path]) -> None:
        """A panic of the library is no `Exception`: uncaught, it would pass every handler of errors."""
        directory = copy_of("tied")
        self.write(directory, 71)
        path = directory / "tokenizer.json"
        model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"model": model | {"continuing_subword_prefix": "##"}})
        )
        assert "tokenizer.json: not a readable tokenizer.json: " in refusal(directory)

    def test_the_largest_id_costs_no_more_than_a_small_one(self, copy_of: Callable[[str], Path]) -> None:
        """Its vocabulary has one entry, and four billion ids that stand for nothing."""
        directory = copy_of("tied")
        self.write(directory, 1)
        path = directory / "tokenizer.json"
        state = json.loads(path.read_text())
        state["model"] |= {"vocab": {"1": 2**32 - 1}, "unk_token": "1"}
        path.write_text(json.dumps(state))
        with at_once():
            tokenizer = load_checkpoint(str(directory)).tokenizer
        assert tokenizer is not None
        assert tokenizer.vocab_size == 2**32

    def test_without_a_tokenizer_there_is_none(self, written: dict[str, Path]) -> None:
        assert load_checkpoint(str(written["tied"])).tokenizer is None


PEAK = """
import sys
from model.checkpoint import load_checkpoint

def kilobytes(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key))

load_checkpoint(sys.argv[1])
before = kilobytes("VmRSS")
checkpoint = load_checkpoint(sys.argv[2])
sys.stdout.write(str((kilobytes("VmHWM") - before) * 1024))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_loading_holds_the_weights_once(written: dict[str, Path], tmp_path: Path) -> None:
    """The peak of resident memory, mapped files included, over what a process that has loaded a small checkpoint holds.
    A second copy of the weights would make it twice their size."""
    d_model, d_mlp, num_layers = 512, 1536, 15
    shapes = {"self_attn.q_proj": (512, 512), "self_attn.k_proj": (512, 512), "self_attn.v_proj": (512, 512)}
    shapes |= {"self_attn.o_proj": (512, 512), "input_layernorm": (512,), "post_attention_layernorm": (512,)}
    shapes |= {"mlp.gate_proj": (d_mlp, 512), "mlp.up_proj": (d_mlp, 512), "mlp.down_proj": (512, d_mlp)}
    tensors = {
        f"model.layers.{layer}.{name}.weight": torch.ones(shape)
        for layer in range(num_layers)
        for name, shape in shapes.items()
    }
    tensors |= {"model.embed_tokens.weight": torch.ones(71, d_model), "model.norm.weight": torch.ones(d_model)}
    sizes = {"hidden_size": d_model, "intermediate_size": d_mlp, "num_hidden_layers": num_layers}
    config = {"model_type": "llama", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config | sizes | {"num_key_value_heads": 4}))
    save_file(tensors, tmp_path / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert num_bytes > 200e6
    del tensors
    process = subprocess.run(
        [sys.executable, "-c", PEAK, str(written["tied"]), str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    peak = int(process.stdout)
    assert num_bytes * 0.95 < peak < num_bytes * 1.5
