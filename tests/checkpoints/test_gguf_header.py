"""Damaged and hostile GGUF files are refused quickly, with one line, and without memory for what they claim."""

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from model.checkpoints.gguf_files import find_gguf, read_gguf_checkpoint
from model.checkpoints.gguf_files.checkpoint import _generation, _templates
from model.checkpoints.gguf_files.dequantize import value_dtype
from model.checkpoints.gguf_files.header import MAX_STRINGS, read_header
from model.checkpoints.gguf_files.parts import GGUFFiles
from model.errors import CheckpointError
from tests.checkpoints.files import time_limit

TOKENS = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "<|im_end|>", "  "]
TYPES = [2, 3, 3, 1, 1, 1, 1, 1, 4, 4]


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * 3 + [-5.0, -6.0, -7.0, -1.0, -2.0, -1000.0, -1000.0])
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")


def write_llama(path: Path, **split: Any) -> Path:
    """A valid file of about 3 kB: one layer, with a vocabulary and a quantized tensor."""
    writer = gguf.GGUFWriter(path, "llama", **split)
    for key, value in {"context_length": 40, "embedding_length": 32, "block_count": 1}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.feed_forward_length", 32)
    writer.add_array("llama.attention.head_count", [2])
    writer.add_layer_norm_rms_eps(1e-5)
    add_vocabulary(writer)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    values = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    for index, name in enumerate(names):
        kind = (Kind.Q8_0, Kind.Q4_0)[index % 2]
        writer.add_tensor(f"blk.0.{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", values[0])
    writer.add_tensor("token_embd.weight", values[: len(TOKENS)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_llama(tmp_path_factory.mktemp("valid") / "model.gguf").read_bytes()


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[[bytes], str]:
    """A function that reads a file with the given content, which must be refused. Returns the message."""

    def read(content: bytes) -> str:
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            with time_limit(), pytest.raises(CheckpointError) as error:
                read_gguf_checkpoint(path)
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()
        message = str(error.value)
        assert str(path) in message
        assert message.isprintable()
        assert len(message) < 1500
        return message.replace(str(path), "bad.gguf")

    return read


def read_all(path: Path) -> None:
    """Read everything of a file that may be damaged. Only a `CheckpointError` may be raised."""
    try:
        with time_limit():
            checkpoint = read_gguf_checkpoint(path)
            for name in checkpoint.tensors.headers:
                checkpoint.tensors.read(name)
    except CheckpointError:
        pass


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(num_tensors: int = 0, num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def test_a_valid_file_is_read(tmp_path: Path) -> None:
    checkpoint = read_gguf_checkpoint(write_llama(tmp_path / "model.gguf"))
    assert checkpoint.config["num_attention_heads"] == 2
    assert len(checkpoint.tensors.headers) == 11
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.encode("ab  a", add_special_tokens=False) == [3, 6, 9, 4]
    assert checkpoint.generation == {"eos_token_id": [2, 8]}
    assert checkpoint.chat_templates == {"default": "{{ messages[0].content }}"}


@pytest.mark.parametrize("seed", range(4))
def test_a_file_that_ends_early_is_refused(valid: bytes, tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    path = tmp_path / "short.gguf"
    for size in [*range(40), *(random.randrange(len(valid)) for _ in range(100)), len(valid) - 1]:
        path.write_bytes(valid[:size])
        with time_limit(), pytest.raises(CheckpointError):
            read_gguf_checkpoint(path)


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_file_gives_a_checkpoint_error_or_a_result(valid: bytes, tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    path = tmp_path / "damaged.gguf"
    for _ in range(150):
        content = bytearray(valid)
        for _ in range(random.choice([1, 1, 2, 8])):
            position = random.randrange(random.choice([64, 1600, len(content)]))
            content[position] = random.choice([0, 1, 2, 127, 255, content[position] ^ 1 << random.randrange(8)])
        path.write_bytes(content)
        read_all(path)


@pytest.mark.parametrize("seed", range(4))
def test_numbers_replaced_by_extreme_ones_give_a_checkpoint_error_or_a_result(
    valid: bytes, tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    path = tmp_path / "extreme.gguf"
    extremes = [0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
    for _ in range(200):
        content = bytearray(valid)
        position = random.randrange(4, 1800)
        size = random.choice([4, 8])
        content[position : position + size] = struct.pack("<Q", random.choice(extremes))[:size]
        path.write_bytes(content)
        read_all(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "only 0 bytes"),
        (b"PK\x03\x04....", "does not begin with the letters GGUF"),
        (header(version=1), "its version is 1"),
        (header(version=4), "its version is 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(num_tensors=2**63), "9223372036854775808 tensors, more than"),
        (header(num_keys=2**40), "1099511627776 keys, more than"),
        (header(num_keys=1) + struct.pack("<Q", 10 << 30), "the name of a key has 10737418240 bytes"),
        (header(num_keys=1) + string("a") + struct.pack("<IQ", 8, 10 << 30), "the file ends inside its header"),
        (header(num_keys=1) + string("a") + struct.pack("<I", 13), "a has the unknown type 13"),
        (header(num_keys=1) + string("a") + struct.pack("<IIQ", 9, 9, 1), "an array of arrays"),
        (header(num_keys=1) + string("a") + struct.pack("<IIQ", 9, 8, 2**60), f"over {MAX_STRINGS}"),
        (header(num_keys=1) + string("a") + struct.pack("<IIQ", 9, 8, 10**6), "the file ends inside its header"),
        (header(num_keys=1) + string("a") + struct.pack("<IIQ", 9, 4, 2**61), "over 67108864"),
        (header(num_keys=1) + string("a") + struct.pack("<IIQ", 9, 4, 2**20), "the file ends inside its header"),
        (header(num_keys=2) + 2 * (string("a") + struct.pack("<IB", 7, 1)), "the key a occurs twice"),
        (header(num_keys=1) + string("a") + struct.pack("<IB", 7, 2), "neither 0 nor 1"),
        (header(num_keys=1) + string("a") + struct.pack("<IQ", 8, 1) + b"\xff", "not UTF-8"),
        (header(1) + string("w") + struct.pack("<I", 5), "w has 5 dims"),
        (header(1) + string("w") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), "impossible shape"),
        (header(1) + string("w") + struct.pack("<IQIQ", 1, 32, 77, 0), "unknown tensor type 77"),
        (header(1) + string("w") + struct.pack("<IQIQ", 1, 33, 2, 0), "not whole Q4_0 blocks"),
        (header(1) + string("w") + struct.pack("<IQIQ", 1, 32, 0, 7), "not aligned"),
        (header(1) + string("w") + struct.pack("<IQIQ", 1, 32, 0, 2**62), "ends after the file"),
        (header(2) + 2 * (string("w") + struct.pack("<IQIQ", 1, 1, 0, 0)) + bytes(99), "occurs twice"),
        (
            header(2) + b"".join(string(name) + struct.pack("<IQIQ", 1, 1, 0, 0) for name in "vw") + bytes(99),
            "the tensors v and w overlap",
        ),
    ],
)
def test_a_hostile_header_is_refused_by_name(refusal: Callable[[bytes], str], content: bytes, expected: str) -> None:
    assert expected in refusal(content)


def test_a_tensor_of_a_type_that_is_not_implemented_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 66), np.uint8), raw_dtype=Kind.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = read_header(tmp_path / "model.gguf").tensors.values()
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is IQ2_XXS, which is not implemented; known: F32"):
        value_dtype(tensor)


class TestSplitModels:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        write_llama(tmp_path / "model.gguf", split_max_tensors=4)
        return sorted(tmp_path.glob("*.gguf"))

    def test_any_part_stands_for_the_whole_model(self, parts: list[Path], tmp_path: Path) -> None:
        assert [part.name for part in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
        whole = read_gguf_checkpoint(write_llama(tmp_path / "whole.gguf"))
        for part in parts:
            checkpoint = read_gguf_checkpoint(part)
            assert checkpoint.file == parts[0]
            assert checkpoint.config == whole.config
            assert checkpoint.tensors.files == tuple(parts)
            assert checkpoint.tensors.headers.keys() == whole.tensors.headers.keys()
            for name in whole.tensors.headers:
                assert checkpoint.tensors.read(name).equal(whole.tensors.read(name))

    def test_a_missing_part_is_named(self, parts: list[Path]) -> None:
        parts[1].unlink()
        with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf is missing; the model has 3 parts"):
            read_gguf_checkpoint(parts[0])

    def test_a_part_under_the_name_of_another_part_is_refused(self, parts: list[Path]) -> None:
        parts[1].write_bytes(parts[2].read_bytes())
        with pytest.raises(CheckpointError, match=r"split\.no is 2 .*but its name says 1"):
            read_gguf_checkpoint(parts[0])

    def test_a_renamed_part_is_refused(self, parts: list[Path]) -> None:
        renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
        with pytest.raises(CheckpointError, match=r"is one of 3 parts, whose files must have names such as"):
            read_gguf_checkpoint(renamed)

    def test_a_directory_with_all_parts_has_one_model(self, parts: list[Path]) -> None:
        assert find_gguf(parts[0].parent) == parts[0]


def test_a_file_or_a_directory_with_one_file_is_found(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path / "other.safetensors") is None
    path = tmp_path / "model.gguf"
    path.touch()
    assert find_gguf(tmp_path) == path
    assert find_gguf(path) == path


def test_a_directory_with_several_models_is_refused_with_their_names(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"several GGUF files \(a\.gguf, b\.gguf\); name one of them"):
        find_gguf(tmp_path)


def test_a_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with time_limit(), pytest.raises(CheckpointError, match="is a named pipe"):
        read_gguf_checkpoint(tmp_path / "model.gguf")


def test_settings_of_generation_have_the_names_of_generation_config_json(tmp_path: Path) -> None:
    keys = {"temp": 0.7, "top_p": 0.95, "top_k": 20, "penalty_repeat": 1.1, "mirostat": 2}
    metadata: dict[str, Any] = {f"general.sampling.{key}": value for key, value in keys.items()}
    metadata["general.sampling.temp"] = float(np.float32(0.7))
    metadata["tokenizer.ggml.suppress_tokens"] = np.array([3, 4], np.int32)
    files = GGUFFiles(tmp_path, (tmp_path,), metadata, {})
    assert _generation(files) == {
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "suppress_tokens": [3, 4],
    }


def test_templates_with_names_are_found_beside_the_default(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf")
    reader = read_header(path)
    metadata = dict(reader.metadata) | {"tokenizer.chat_template.tool_use": "b", "tokenizer.chat_templates": ["x"]}
    files = GGUFFiles(path, (path,), metadata, {})
    assert _templates(files) == {"default": "{{ messages[0].content }}", "tool_use": "b"}
