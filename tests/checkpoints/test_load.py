"""Loading is strict: an error names each part of a checkpoint that is missing, surplus, wrong or not implemented."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoints.families import translate
from model.checkpoints.load import NOT_IMPLEMENTED, GenerationDefaults, load_checkpoint
from model.errors import CheckpointError
from tests.checkpoints.files import SIZES, edit_config, edit_tensors, hub_files, write_tokenizer
from tests.tiny import random_ids

transformers = pytest.importorskip("transformers")


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
        with pytest.raises(CheckpointError, match=f"does not use: {name}$"):
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

    def test_misshapen_q_and_k_are_refused_even_if_their_rows_add_up(self, copy_of: Callable[[str], Path]) -> None:
        """q, k and v fill one matrix. A q of 18 rows and a k of 6 would also fill it, with rows of q used for k."""
        directory = copy_of("untied")
        name = "model.layers.0.self_attn.{}_proj.weight"
        misshapen = {name.format("q"): torch.zeros(18, 16), name.format("k"): torch.zeros(6, 16)}
        edit_tensors(directory, lambda tensors: tensors.update(misshapen))
        with pytest.raises(CheckpointError, match="_proj"):
            load_checkpoint(str(directory))

    def test_every_tensor_fills_its_own_parameter(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("untied")
        model = load_checkpoint(str(directory)).model
        tensors = load_file(directory / "model.safetensors")
        q, k, v = (tensors[f"model.layers.1.self_attn.{side}_proj.weight"] for side in "qkv")
        assert torch.equal(model.get_parameter("blocks.1.attn.qkv.weight"), torch.cat((q, k, v)))
        gate, up = (tensors[f"model.layers.0.mlp.{side}_proj.weight"] for side in ("gate", "up"))
        assert torch.equal(model.get_parameter("blocks.0.mlp.up.weight"), torch.cat((gate, up)))
        assert torch.equal(model.get_parameter("head.weight"), tensors["lm_head.weight"])

    def test_a_loaded_model_needs_no_gradients_and_shares_a_tied_head(self, originals: dict[str, Path]) -> None:
        model = load_checkpoint(str(originals["tied"])).model
        assert model.head.weight is model.embed.weight
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())


class TestTiedHead:
    """Some programs also store the head of a tied model, which is a second copy of the embedding."""

    HEADS = (("tied", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight"))

    @pytest.mark.parametrize(("kind", "embedding"), HEADS)
    def test_a_stored_head_that_equals_the_tied_embedding_changes_nothing(
        self, copy_of: Callable[[str], Path], originals: dict[str, Path], kind: str, embedding: str
    ) -> None:
        directory = copy_of(kind)
        edit_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
        ids = random_ids(71, 9)
        expected = load_checkpoint(str(originals[kind])).model(ids)
        assert torch.equal(load_checkpoint(str(directory)).model(ids), expected)

    @pytest.mark.parametrize(("kind", "embedding"), HEADS)
    def test_a_stored_head_that_differs_from_the_tied_embedding_is_refused(
        self, copy_of: Callable[[str], Path], kind: str, embedding: str
    ) -> None:
        directory = copy_of(kind)
        edit_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding] + 1e-3}))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embedding.*tie_word_embeddings"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize(("kind", "embedding"), HEADS)
    def test_a_tied_embedding_may_be_stored_under_the_name_of_the_head_alone(
        self, copy_of: Callable[[str], Path], originals: dict[str, Path], kind: str, embedding: str
    ) -> None:
        directory = copy_of(kind)
        edit_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(embedding)}))
        ids = random_ids(71, 9)
        expected = load_checkpoint(str(originals[kind])).model(ids)
        assert torch.equal(load_checkpoint(str(directory)).model(ids), expected)

    def test_an_untied_embedding_is_not_taken_from_the_head(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("untied")
        edit_tensors(directory, lambda tensors: tensors.pop("model.embed_tokens.weight"))
        with pytest.raises(CheckpointError, match=r"lacks model\.embed_tokens\.weight$"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize("tied", [True, False])
    def test_gpt2_names_without_their_prefix_may_include_a_head(
        self, copy_of: Callable[[str], Path], originals: dict[str, Path], tied: bool
    ) -> None:
        """The name of the head never has the prefix."""
        directory = copy_of("gpt2")
        edit_config(directory, tie_word_embeddings=tied)
        tensors = load_file(directory / "model.safetensors")
        head = tensors["transformer.wte.weight"].clone()
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        save_file(bare | {"lm_head.weight": head}, directory / "model.safetensors", metadata={"format": "pt"})
        ids = random_ids(71, 9)
        assert torch.equal(
            load_checkpoint(str(directory)).model(ids), load_checkpoint(str(originals["gpt2"])).model(ids)
        )


class TestAliases:
    """`safetensors.torch.save_model` stores equal tensors once, and names the others in the metadata of the file."""

    EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

    def write(self, directory: Path, metadata: dict[str, str], *, without: str) -> None:
        path = directory / "model.safetensors"
        tensors = {name: tensor for name, tensor in load_file(path).items() if name != without}
        save_file(tensors, path, metadata={"format": "pt"} | metadata)

    @pytest.mark.parametrize(("stored", "alias"), [(EMBEDDING, HEAD), (HEAD, EMBEDDING)])
    def test_an_alias_is_read_from_the_stored_tensor(
        self, copy_of: Callable[[str], Path], stored: str, alias: str
    ) -> None:
        directory = copy_of("untied")
        self.write(directory, {alias: stored}, without=alias)
        model = load_checkpoint(str(directory)).model
        expected = load_file(directory / "model.safetensors")[stored]
        assert torch.equal(model.get_parameter("head.weight"), expected)
        assert torch.equal(model.embed.weight, expected)

    def test_an_alias_of_a_stored_tensor_has_no_effect(
        self, copy_of: Callable[[str], Path], originals: dict[str, Path]
    ) -> None:
        directory = copy_of("untied")
        self.write(directory, {self.HEAD: self.EMBEDDING}, without="nothing")
        model, original = (load_checkpoint(str(path)).model for path in (directory, originals["untied"]))
        assert torch.equal(model.get_parameter("head.weight"), original.get_parameter("head.weight"))

    def test_an_alias_of_an_absent_tensor_has_no_effect(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("untied")
        self.write(directory, {self.HEAD: "model.nothing.weight"}, without=self.HEAD)
        with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight$"):
            load_checkpoint(str(directory))


class TestFiles:
    def test_pickled_weights_are_refused_with_a_hint(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle.*convert it.*save_pretrained"):
            load_checkpoint(str(directory))

    def test_a_directory_without_weights_is_refused(self, copy_of: Callable[[str], Path]) -> None:
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

    def test_an_index_that_names_an_absent_tensor_is_refused(self, originals: dict[str, Path], tmp_path: Path) -> None:
        reference = transformers.AutoModelForCausalLM.from_pretrained(originals["untied"])
        reference.save_pretrained(tmp_path, max_shard_size="4KB")
        path = tmp_path / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        load_checkpoint(str(tmp_path))
        file = next(iter(index["weight_map"].values()))
        index["weight_map"]["model.layers.2.mlp.up_proj.weight"] = file
        path.write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=rf"says that model\.layers\.2\.mlp\.up_proj\.weight is in {file}"):
            load_checkpoint(str(tmp_path))

    def test_an_absent_shard_is_named(self, originals: dict[str, Path], tmp_path: Path) -> None:
        reference = transformers.AutoModelForCausalLM.from_pretrained(originals["untied"])
        reference.save_pretrained(tmp_path, max_shard_size="4KB")
        shard = sorted(tmp_path.glob("*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(CheckpointError, match=shard.name):
            load_checkpoint(str(tmp_path))

    def test_a_tensor_in_two_files_of_the_index_is_refused(self, originals: dict[str, Path], tmp_path: Path) -> None:
        reference = transformers.AutoModelForCausalLM.from_pretrained(originals["untied"])
        reference.save_pretrained(tmp_path, max_shard_size="4KB")
        save_file({"model.norm.weight": torch.ones(16)}, tmp_path / "other.safetensors")
        path = tmp_path / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.norm.weight"] = "other.safetensors"
        path.write_text(json.dumps(index))
        with pytest.raises(
            CheckpointError, match=r"model\.norm\.weight: stored twice, in model-.* and other\.safetensors"
        ):
            load_checkpoint(str(tmp_path))

    def test_files_that_the_index_does_not_name_are_not_read(self, originals: dict[str, Path], tmp_path: Path) -> None:
        reference = transformers.AutoModelForCausalLM.from_pretrained(originals["untied"])
        reference.save_pretrained(tmp_path, max_shard_size="4KB")
        save_file({"layers.0.attention.wq.weight": torch.ones(16)}, tmp_path / "consolidated.safetensors")
        load_checkpoint(str(tmp_path))

    def test_without_an_index_only_model_safetensors_is_read(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        save_file({"layers.0.attention.wq.weight": torch.ones(16)}, directory / "consolidated.safetensors")
        load_checkpoint(str(directory))

    def test_one_file_comes_before_the_index_of_an_earlier_save_as_in_transformers(
        self, originals: dict[str, Path], tmp_path: Path
    ) -> None:
        """transformers leaves the index there, and the shards, too, if their names do not end in numbers."""
        earlier = transformers.AutoModelForCausalLM.from_pretrained(originals["untied"])
        earlier.save_pretrained(tmp_path, max_shard_size="4KB")
        shards = {path: path.read_bytes() for path in tmp_path.glob("model-*")}
        later = transformers.AutoModelForCausalLM.from_config(earlier.config).eval()
        later.save_pretrained(tmp_path)
        assert (tmp_path / "model.safetensors.index.json").exists()
        ids = random_ids(71, 9)
        expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
        assert torch.equal(expected, later(ids).logits)
        torch.testing.assert_close(load_checkpoint(str(tmp_path)).model(ids), expected)
        for path, content in shards.items():
            path.write_bytes(content)
        torch.testing.assert_close(load_checkpoint(str(tmp_path)).model(ids), expected)

    def test_several_files_without_an_index_are_refused(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        save_file({"model.norm.weight": torch.ones(16)}, directory / "b.safetensors")
        with pytest.raises(CheckpointError, match=r"several .*a\.safetensors, b\.safetensors.* and no model"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize("weight_map", [[1], None, {"model.norm.weight": 1}])
    def test_an_index_with_an_invalid_weight_map_is_named(
        self, copy_of: Callable[[str], Path], weight_map: object
    ) -> None:
        directory = copy_of("tied")
        (directory / "model.safetensors").rename(directory / "a.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=r"index\.json: weight_map is not an object"):
            load_checkpoint(str(directory))

    def test_the_name_of_a_hub_checkpoint_is_its_id(
        self, originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: hub_files("model.safetensors"))
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(originals["tied"]))
        assert load_checkpoint("org/name").name == "org/name"

    @pytest.mark.parametrize(
        ("content", "complaint"), [(None, "file is missing"), ("{", "not valid JSON"), ("[]", "not a JSON object")]
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
        with pytest.raises(CheckpointError, match="no such file or directory"):
            load_checkpoint(source)

    def test_a_hub_id_without_network_is_a_clear_error(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # the library reads the variable once
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(
            CheckpointError, match=r"^some/model: no such directory, not downloaded before, and HF_HUB_OFFLINE forbids"
        ):
            load_checkpoint("some/model")

    def test_an_unknown_dtype_is_refused_by_name(self, originals: dict[str, Path]) -> None:
        with pytest.raises(ValueError, match=r"int3.*float32"):
            load_checkpoint(str(originals["tied"]), dtype="int3")

    def test_weights_of_a_dtype_that_is_not_implemented_are_refused(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        edit_tensors(directory, lambda tensors: tensors.update({n: t.to(torch.int8) for n, t in tensors.items()}))
        with pytest.raises(CheckpointError, match="int8"):
            load_checkpoint(str(directory))

    def test_weights_of_8_bits_are_refused_by_name_with_the_reason(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        name = "model.layers.1.mlp.up_proj.weight"
        edit_tensors(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight is F8_E4M3, .* scales .*bfloat16"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_one_tensor_of_integers_among_the_weights_is_refused(
        self, copy_of: Callable[[str], Path], dtype: str
    ) -> None:
        """Integers are the codes of a quantization. If they were cast to floats, the codes would be used as weights."""
        directory = copy_of("tied")
        name = "model.layers.1.mlp.up_proj.weight"
        edit_tensors(directory, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(str(directory), dtype=dtype)


class TestConfigs:
    @pytest.mark.parametrize("model_type", ["mamba", "", None, "LLAMA"])
    def test_an_unknown_model_type_is_named_together_with_the_known_ones(
        self, copy_of: Callable[[str], Path], model_type: str | None
    ) -> None:
        directory = copy_of("tied")
        edit_config(directory, model_type=model_type)
        with pytest.raises(ValueError, match=f"model_type {model_type!r} is not implemented.*; known: gpt2"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize(
        ("kind", "architectures"),
        [
            ("tied", ["LlamaForSequenceClassification"]),
            ("gpt2", ["GPT2DoubleHeadsModel"]),
            ("tied", ["LlamaForCausalLM", "LlamaModel"]),
        ],
    )
    def test_an_unsupported_architecture_is_named(
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
            ("gpt2", "activation_function", "gelu_quick"),
            ("tied", "hidden_act", "quick_gelu"),
            ("tied", "rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}),
            ("tied", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
            ("tied", "rope_parameters", {"rope_type": "linear"}),
            ("tied", "rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
            ("tied", "partial_rotary_factor", 0.5),
            ("tied", "quantization_config", {"quant_method": "gptq", "bits": 4}),
            ("tied", "sliding_window", 8),
            ("gpt2", "quantization_config", {"quant_method": "awq"}),
            ("gpt2", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ],
    )
    def test_a_key_with_an_unsupported_value_is_named(
        self, copy_of: Callable[[str], Path], kind: str, key: str, value: Any
    ) -> None:
        directory = copy_of(kind)
        edit_config(directory, **{key: value})
        innermost = {"partial_rotary_factor", "factor", "low_freq_factor", "longrope"}
        named = "|".join([key, *innermost]) if key == "rope_parameters" else key
        with pytest.raises(ValueError, match=named):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
    def test_the_settings_of_older_quantizers_are_recognized(self, copy_of: Callable[[str], Path], name: str) -> None:
        directory = copy_of("tied")
        (directory / name).write_text(json.dumps({"bits": 4, "group_size": 128}))
        with pytest.raises(CheckpointError, match=rf"{name}: weights quantized with .*'bits': 4.* are not implemented"):
            load_checkpoint(str(directory))

    @pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"])
    def test_a_key_that_is_missing_is_named(self, copy_of: Callable[[str], Path], key: str) -> None:
        directory = copy_of("tied")
        edit_config(directory, **{key: None})
        with pytest.raises(ValueError, match=f"{key} is missing"):
            load_checkpoint(str(directory))

    def test_conflicting_rope_settings_are_refused(self, copy_of: Callable[[str], Path]) -> None:
        """transformers silently uses rope_scaling. The other choice would be a different network."""
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
    def test_the_published_gpt2_configs_are_accepted(self, name: str, extra: dict[str, Any]) -> None:
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
    def test_the_published_configs_of_small_llama_like_models_are_accepted(
        self, name: str, extra: dict[str, Any]
    ) -> None:
        translate(SIZES | {"rope_theta": 1e6, "rope_scaling": None, "hidden_act": "silu"} | extra)


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
    def test_the_end_of_sequence_is_one_id_or_a_list_of_ids(
        self, copy_of: Callable[[str], Path], generation: dict[str, Any] | None, eos_token_ids: tuple[int, ...]
    ) -> None:
        assert self.read(copy_of("tied"), generation).eos_token_ids == eos_token_ids

    def test_an_end_of_sequence_that_the_network_lacks_is_named_in_a_warning(
        self, copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        directory = copy_of("tied")
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [70, 71, -1]}))
        generation = load_checkpoint(str(directory)).generation
        assert generation.eos_token_ids == generation.chat_eos_token_ids == (70,)
        assert "eos_token_id -1, 71: without effect, because the network has only 71 tokens" in caplog.text

    def test_sampling_parameters_are_read(self, copy_of: Callable[[str], Path]) -> None:
        sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
        assert self.read(copy_of("tied"), sampling | {"do_sample": True, "bos_token_id": 1}).sampling == sampling

    def test_do_sample_false_means_greedy(self, copy_of: Callable[[str], Path]) -> None:
        generation = {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}
        assert self.read(copy_of("tied"), generation).sampling == {"temperature": 0.0, "repetition_penalty": 1.2}

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("num_beams", 4),
            ("no_repeat_ngram_size", 3),
            ("stop_strings", ["\n"]),
            ("max_new_tokens", 256),
            ("suppress_tokens", [1, 2]),
            ("penalty_alpha", 0.6),
            ("guidance_scale", 1.5),
            ("eta_cutoff", 0.01),
            ("sequence_bias", [[[1], -1.0]]),
            ("min_new_tokens", 5),
            ("max_length", 30),
            ("encoder_repetition_penalty", 1.2),
        ],
    )
    def test_a_setting_that_is_not_implemented_is_named_in_a_warning(
        self, copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture, key: str, value: Any
    ) -> None:
        directory = copy_of("tied")
        plain = self.read(directory, {"temperature": 0.5})
        assert self.read(directory, {"temperature": 0.5, key: value}) == plain
        assert caplog.messages == [f"generation_config.json: not implemented, so without effect: {key}"]

    def test_neutral_settings_give_no_warning(
        self, copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        neutral = {"num_beams": 1, "bad_words_ids": [], "suppress_tokens": None, "max_length": 100000, "typical_p": 1.0}
        harmless = {
            "use_cache": True,
            "cache_implementation": "hybrid",
            "transformers_version": "5.0",
            "pad_token_id": 1,
        }
        self.read(copy_of("tied"), {**neutral, **harmless, "early_stopping": False, "max_time": None})
        assert caplog.messages == []

    def test_every_setting_of_transformers_is_read_or_named_or_changes_no_token(self) -> None:
        transformers = pytest.importorskip("transformers")
        read = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample", "eos_token_id"}
        # Which tokens are computed, how fast, and what is returned beside them; begin and padding come from elsewhere.
        no_effect = {
            *("_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
            *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "use_mtp"),
            *("assistant_lookbehind", "target_lookbehind", "is_assistant", "num_assistant_tokens", "speculation_type"),
            *("num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "max_matching_ngram_size", "use_cache"),
            *("cache_config", "cache_implementation", "max_cache_len", "compile_config", "disable_compile"),
            *("continuous_batching_config", "prefill_chunk_size", "low_memory", "output_attentions"),
            *("output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
        }
        settings = set(transformers.GenerationConfig().to_dict())
        assert len(settings) > 40
        assert settings <= read | no_effect | NOT_IMPLEMENTED.keys()

    def test_without_sampling_parameters_there_are_no_defaults(self, copy_of: Callable[[str], Path]) -> None:
        assert self.read(copy_of("tied"), None).sampling == {}


class TestTokenizer:
    def test_a_tokenizer_as_large_as_the_vocabulary_is_loaded(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        write_tokenizer(directory, 71)
        tokenizer = load_checkpoint(str(directory)).tokenizer
        assert tokenizer is not None
        assert tokenizer.vocab_size == 71

    def test_a_tokenizer_larger_than_the_network_is_loaded_with_a_warning_that_states_both_sizes(
        self, copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Such checkpoints are published: a padding token was added to the tokenizer, but not to the network."""
        directory = copy_of("tied")
        write_tokenizer(directory, 72)
        model = load_checkpoint(str(directory)).model
        assert "the tokenizer has ids for 72 tokens, but the network has 71" in caplog.text
        with pytest.raises(IndexError):
            model(torch.tensor([[71]]))

    def test_an_unreadable_tokenizer_is_named(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("tied")
        (directory / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match=r"tokenizer\.json: not a readable"):
            load_checkpoint(str(directory))

    def test_a_checkpoint_without_tokenizer_json_has_no_tokenizer(self, originals: dict[str, Path]) -> None:
        assert load_checkpoint(str(originals["tied"])).tokenizer is None
