"""Hostile checkpoints are refused quickly, with a short message, before memory is allocated; their code never runs."""

import json
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from model.checkpoints.families import FAMILIES, translate
from model.checkpoints.load import load_checkpoint
from model.checkpoints.network_weights import NetworkWeights
from model.config import MAX_SIZES, ModelConfig
from model.errors import CheckpointError
from model.network.rotary import rotary_frequencies
from tests.checkpoints.files import (
    SIZES,
    edit_config,
    edit_tensors,
    make_room,
    refusal_message,
    time_limit,
    write_tokenizer,
)
from tests.tiny import random_ids

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
    """A config can state any size. Sizes that are too large are refused before they cost memory or time."""

    @pytest.mark.parametrize("value", [10**9, 2**63, 10**30, 1e300, -1, 0, True, "7", [7]], ids=repr)
    @pytest.mark.parametrize(("kind", "key", "field"), KEYS)
    def test_an_absurd_size_is_refused_and_its_key_is_named(
        self, copy_of: Callable[[str], Path], kind: str, key: str, field: str, value: Any
    ) -> None:
        directory = copy_of(kind)
        if value == 0 and key in ("head_dim", "num_key_value_heads"):
            value = -2  # 0 is valid: it means that the value follows from other keys
        edit_config(directory, **{key: value})
        message = refusal_message(directory)
        assert key in message
        if type(value) is int and value > 1:
            assert str(MAX_SIZES[field]) in message

    # Rotary positions have no weights, so every context length matches the files.
    @pytest.mark.parametrize(("kind", "key", "field"), [each for each in KEYS if "max_position_embeddings" not in each])
    def test_the_largest_allowed_size_is_compared_with_the_files_before_memory_is_allocated(
        self, copy_of: Callable[[str], Path], kind: str, key: str, field: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def allocate(*_: Any, **__: Any) -> None:
            raise AssertionError("memory was allocated")

        directory = copy_of(kind)
        edit_config(directory, **({"head_dim": 4} if kind == "untied" else {"n_head": 8}) | {key: MAX_SIZES[field]})
        monkeypatch.setattr(NetworkWeights, "read", allocate)
        message = refusal_message(directory)
        assert "config asks for" in message or "the checkpoint lacks" in message or key in message

    @pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
    @pytest.mark.parametrize("key", ["num_hidden_layers", "max_window_layers", "sliding_window"])
    def test_the_number_of_layers_is_checked_before_a_list_of_layers_is_made(self, kind: str, key: str) -> None:
        windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        with time_limit(), pytest.raises(ValueError, match=rf"^config\.json: {key}\b"):
            translate(SIZES | {"model_type": kind} | windows | {key: 10**9})

    @pytest.mark.parametrize("name", ["original_max_position_embeddings", "factor"])
    @pytest.mark.parametrize("value", [10**9, 10**30, 1e300], ids=repr)
    def test_rope_scaling_cannot_extend_a_context_without_limit(self, name: str, value: float) -> None:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} | {name: value}
        with pytest.raises(ValueError, match=name):
            translate(SIZES | {"model_type": "llama", "rope_scaling": scaling})

    def test_an_extended_context_beyond_the_limit_is_refused(self) -> None:
        scaling = {"rope_type": "dynamic", "factor": 1000.0}
        with pytest.raises(ValueError, match=f"max_position_embeddings: .* at most {MAX_SIZES['max_positions']}"):
            translate(SIZES | {"model_type": "llama", "max_position_embeddings": 1 << 20, "rope_scaling": scaling})


class TestHostileNumbers:
    @pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "1e400", "-1e999"])
    @pytest.mark.parametrize("key_path", ["rms_norm_eps", "rope_theta", "unread", "rope_scaling.factor", "list.3.deep"])
    def test_a_number_that_is_not_finite_is_refused_anywhere_in_the_file(
        self, copy_of: Callable[[str], Path], key_path: str, value: str
    ) -> None:
        directory = copy_of("untied")
        contents = {"list.3.deep": f'"list": [0, 1, 2, {{"deep": {value}}}]', "unread": f'"id2label": {{"0": {value}}}'}
        key, _, inner = key_path.partition(".")
        content = contents.get(key_path) or (f'"{key}": {{"{inner}": {value}}}' if inner else f'"{key}": {value}')
        path = directory / "config.json"
        path.write_text(path.read_text().rstrip().removesuffix("}") + f", {content}}}")
        message = refusal_message(directory)
        assert "config.json" in message
        assert "numbers must be finite" in message
        assert ("id2label.0" if key_path == "unread" else key_path) in message

    def test_a_number_that_is_not_finite_is_refused_even_if_a_duplicate_key_replaces_it(
        self, copy_of: Callable[[str], Path]
    ) -> None:
        """Python's parser keeps the last of two equal keys."""
        directory = copy_of("untied")
        path = directory / "config.json"
        path.write_text(path.read_text().replace('"rms_norm_eps"', '"rms_norm_eps": NaN, "rms_norm_eps"'))
        assert "config.json: a number is NaN; numbers must be finite" in refusal_message(directory)

    @pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
    def test_an_integer_too_large_for_a_float_is_refused_and_its_key_is_named(
        self, copy_of: Callable[[str], Path], key: str
    ) -> None:
        directory = copy_of("untied")
        edit_config(directory, rope_parameters=None, **{key: 10**400})
        assert key in refusal_message(directory)

    @pytest.mark.parametrize("value", ["NaN", "1e400"])
    def test_generation_settings_must_be_finite(self, copy_of: Callable[[str], Path], value: str) -> None:
        directory = copy_of("untied")
        (directory / "generation_config.json").write_text(f'{{"temperature": {value}}}')
        message = refusal_message(directory)
        assert "generation_config.json: temperature is" in message


NUMBERS = st.sampled_from([0, 1, -1, 2, 10**9, 2**63, 10**30, 10**400, 0.0, 0.5, 1e-320, 1e300, -1.5])
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.integers(), st.text(max_size=5))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
KINDS = sorted(FAMILIES)
GPT2 = {"vocab_size": 71, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40}
ALL_KEYS = [
    *SIZES,
    *GPT2,
    *("n_inner", "activation_function", "layer_norm_epsilon", "hidden_act", "rms_norm_eps", "rope_theta", "head_dim"),
    *("rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window"),
    *("max_window_layers", "layer_types", "architectures", "model_type", "quantization_config", "unknown"),
    *("rotary_pct", "rotary_emb_base", "use_parallel_residual", "layer_norm_eps", "qk_layernorm", "use_qkv_bias"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq"),
    *("sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval", "num_local_experts", "num_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
]
SCALING_KEYS = [
    *("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("truncate", "attention_factor", "mscale", "mscale_all_dim", "rope_theta", "rope_type", "type", "unknown"),
    *("short_factor", "long_factor", "full_attention", "sliding_attention"),
]
SCALING = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


EXPERT_SIZES = ("num_experts", "num_experts_per_token", "d_expert")  # 0 without experts


def check_limits(translated: ModelConfig) -> None:
    for field, largest in MAX_SIZES.items():
        size = getattr(translated, field)
        assert size is None or 1 <= size <= largest or (size == 0 and field in EXPERT_SIZES)
    if translated.positions == "rotary":
        assert (
            rotary_frequencies(translated.rotary_dim, translated.rope_theta, translated.rope_scaling).isfinite().all()
        )


@settings(max_examples=250, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    changes=st.dictionaries(st.sampled_from(ALL_KEYS), VALUES, max_size=3),
    scaling_kind=st.sampled_from([None, "linear", "dynamic", "llama3", "yarn", "longrope"]),
    scaling=st.dictionaries(st.sampled_from(SCALING_KEYS), VALUES, max_size=2),
)
@example("llama", {}, "yarn", {"beta_slow": 5e-324})
@example("llama", {"max_position_embeddings": 0}, "yarn", {"factor": None, "original_max_position_embeddings": None})
@example("qwen2", {"layer_types": [{}]}, None, {})
def test_any_config_is_translated_or_refused_with_a_short_value_error(
    kind: str, changes: dict[str, Any], scaling_kind: str | None, scaling: dict[str, Any]
) -> None:
    config: dict[str, Any] = {"model_type": kind} | (GPT2 if kind == "gpt2" else SIZES)
    if kind in ("mixtral", "qwen3_moe"):
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    if scaling_kind is not None and kind != "gpt2":
        used: dict[str, Any] = SCALING if scaling_kind == "llama3" else {"factor": 2.0}
        if scaling_kind == "longrope":
            used |= {"short_factor": [1.0] * 2, "long_factor": [2.0] * 2}  # heads of 4
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
    """Only regular files are opened, because opening a pipe waits for a writer, and reading a device may never end."""

    NAMES = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
        "model.safetensors",
    )

    @pytest.fixture
    def pipe(self) -> Iterator[Callable[[Path], None]]:
        """A function that makes a named pipe. Opening it ends after ten seconds, so that a failing test ends, too."""
        writers = []

        def make_pipe(path: Path) -> None:
            os.mkfifo(path)
            writers.append(subprocess.Popen(["sh", "-c", 'sleep 10; while :; do : > "$0"; done', str(path)]))

        yield make_pipe
        for writer in writers:
            writer.kill()
            writer.wait()

    @pytest.mark.parametrize("name", NAMES)
    def test_a_named_pipe_is_refused_without_opening_it(
        self, copy_of: Callable[[str], Path], pipe: Callable[[Path], None], name: str
    ) -> None:
        directory = copy_of("untied")
        make_room(directory, name)
        pipe(directory / name)
        message = refusal_message(directory)
        assert f"{name}: is a named pipe, not a regular file" in message or f"{name}: not a readable" in message
        assert "named pipe" in message

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("kind", ["directory", "socket", "device"])
    def test_a_file_that_is_not_regular_is_refused_and_named(
        self, copy_of: Callable[[str], Path], name: str, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory = copy_of("untied")
        path = directory / name
        make_room(directory, name)
        if kind == "directory":
            path.mkdir()
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            monkeypatch.chdir(directory)  # the path of a socket has at most 107 bytes
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(name)
        message = refusal_message(directory)
        assert name in message
        assert f"is a {kind}, not a regular file" in message

    def test_links_to_regular_files_are_followed(
        self, copy_of: Callable[[str], Path], originals: dict[str, Path], tmp_path: Path
    ) -> None:
        """In the cache of the hub, every file is a link to a blob outside of the checkpoint's directory."""
        linked = tmp_path / "linked"
        linked.mkdir()
        for path in originals["untied"].iterdir():
            (linked / path.name).symlink_to(path)
        ids = random_ids(71, 9)
        model = load_checkpoint(str(linked)).model
        assert torch.equal(model(ids), load_checkpoint(str(originals["untied"])).model(ids))

    @pytest.mark.parametrize("file", ["../outside.safetensors", "{outside}", "sub/../model.safetensors"])
    def test_an_index_may_only_name_files_in_its_own_directory(
        self, copy_of: Callable[[str], Path], originals: dict[str, Path], tmp_path: Path, file: str
    ) -> None:
        directory = copy_of("untied")
        outside = tmp_path / "outside.safetensors"
        shutil.copy(originals["untied"] / "model.safetensors", outside)
        file = file.format(outside=outside)
        tensors = load_file(directory / "model.safetensors")
        make_room(directory, "model.safetensors.index.json")
        index = {"weight_map": dict.fromkeys(tensors, file)}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        message = refusal_message(directory)
        assert message.endswith(f"names {file}; only files in the same directory are read")

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
            (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "nested deeper than 64 levels"),
            (b'{"a": ' * 100_000, "nested too deeply"),
            (b'{"a": "\xff\xfe"}', "not valid JSON: 'utf-8' codec"),
            (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON: Exceeds the limit"),
            (b'{"a": "' + b" " * (9 << 20) + b'"}', "has more than"),
        ],
        ids=["deep list", "list of 500 levels", "deep object", "not UTF-8", "long integer", "large"],
    )
    def test_a_file_that_is_not_valid_json_or_exceeds_a_limit_is_refused_and_named(
        self, copy_of: Callable[[str], Path], name: str, content: bytes, complaint: str
    ) -> None:
        directory = copy_of("untied")
        make_room(directory, name)
        (directory / name).write_bytes(content)
        message = refusal_message(directory)
        assert f"{name}: {complaint}" in message

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
    def test_a_file_of_a_terabyte_is_not_read_completely(self, copy_of: Callable[[str], Path], name: str) -> None:
        directory = copy_of("untied")
        make_room(directory, name)
        (directory / name).touch()
        os.truncate(directory / name, 1 << 40)  # a sparse file, which uses no space on the disk
        assert f"{name}: has more than" in refusal_message(directory)

    def test_a_safetensors_header_has_a_maximum_size(self, copy_of: Callable[[str], Path]) -> None:
        directory = copy_of("untied")
        entry = '"{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        header = ("{" + ",".join(entry.format(index) for index in range(300_000)) + "}").encode()
        (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        assert "model.safetensors: not a readable safetensors file: its header has" in refusal_message(directory)

    def test_names_from_a_file_cannot_add_lines_to_a_message(
        self, copy_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        directory = copy_of("untied")
        edit_tensors(
            directory, lambda tensors: tensors.update({"a\nERROR forged": torch.zeros(1), "b" * 500: torch.zeros(1)})
        )
        assert r"'a\nERROR forged'" in refusal_message(directory)
        edit_config(directory, **{"c\nERROR forged": 1})
        refusal_message(directory)
        assert r"'c\nERROR forged'" in caplog.messages[-1]


class CreatesFile:
    """Unpickling an instance creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_code_of_a_checkpoint_runs(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    directory, mark = copy_of("untied"), tmp_path / "mark"
    for stem in ("configuration_own", "modeling_own", "tokenization_own"):
        (directory / f"{stem}.py").write_text(f"open({str(mark)!r}, 'w')\n")
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "optimizer.pkl"):
        (directory / name).write_bytes(pickle.dumps(CreatesFile(mark)))
    auto_map = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    edit_config(directory, auto_map=auto_map)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_own.Tokenizer", None]}, "tokenizer_class": "Own"})
    )
    load_checkpoint(str(directory))
    (directory / "model.safetensors").unlink()
    (directory / "a_state.pt").write_bytes(b"")  # the weights are named, not the state of an optimizer
    with pytest.raises(CheckpointError, match=r"model\.ckpt is a pickle"):
        load_checkpoint(str(directory))
    for pickled in directory.glob("*.bin"):
        pickled.rename(directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_checkpoint(str(directory))
    assert not mark.exists()
    pickle.loads(pickle.dumps(CreatesFile(mark)))
    assert mark.exists(), "the pickle does nothing, so this test could not fail"


class TestHostileTokenizers:
    def test_a_tokenizer_that_makes_the_library_panic_is_refused_and_named(
        self, copy_of: Callable[[str], Path]
    ) -> None:
        """A panic of the library is not an `Exception`, so no ordinary error handler would catch it."""
        directory = copy_of("tied")
        write_tokenizer(directory, 71)
        path = directory / "tokenizer.json"
        model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"model": model | {"continuing_subword_prefix": "##"}})
        )
        assert "tokenizer.json: not a readable tokenizer.json: " in refusal_message(directory)

    @pytest.mark.parametrize("token_id", [2**32 - 1, 2**31, 70_000])
    def test_a_tokenizer_with_a_very_large_id_is_refused_quickly(
        self, copy_of: Callable[[str], Path], token_id: int
    ) -> None:
        """The vocabulary has one entry. The library writes, and tables have, an entry for each id up to the largest."""
        directory = copy_of("tied")
        write_tokenizer(directory, 1)
        path = directory / "tokenizer.json"
        state = json.loads(path.read_text())
        state["model"] |= {"vocab": {"1": token_id}, "unk_token": "1"}
        path.write_text(json.dumps(state))
        with time_limit():
            message = refusal_message(directory)
        assert f"has 1 tokens, but the largest token id is {token_id}" in message


MEASURE_PEAK = """
import sys
from model.checkpoints.load import load_checkpoint

def kilobytes(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key))

load_checkpoint(sys.argv[1])
before = kilobytes("VmRSS")
checkpoint = load_checkpoint(sys.argv[2])
sys.stdout.write(str((kilobytes("VmHWM") - before) * 1024))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_loading_keeps_the_weights_in_memory_only_once(originals: dict[str, Path], tmp_path: Path) -> None:
    """Measure the peak of resident memory, including mapped files, above that of a process with a small checkpoint.

    With a second copy of the weights, it would be twice their size.
    """
    d_model, d_mlp, num_layers = 512, 1536, 15
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (512, 512),
        "self_attn.k_proj": (512, 512),
        "self_attn.v_proj": (512, 512),
    }
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
        [sys.executable, "-c", MEASURE_PEAK, str(originals["tied"]), str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    peak = int(process.stdout)
    assert num_bytes * 0.95 < peak < num_bytes * 1.5
