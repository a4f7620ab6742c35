"""Files of vectors for edits: safetensors, and control vectors of llama.cpp. Hostile and unfit files are refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from model.checkpoints.vector_files import MAX_TENSORS, read_vector_bytes, read_vectors
from model.errors import CheckpointError
from model.tracing.stages import stages_of
from tests.tiny import CONFIGS

CONFIG = CONFIGS["llama"]
STAGES = stages_of(CONFIG)
WIDTH, LAYERS = CONFIG.d_model, CONFIG.num_layers


def write_control_vector(
    path: Path,
    directions: dict[str, np.ndarray[Any, Any]],
    *,
    architecture: str = "controlvector",
    hint: str | None = "llama",
) -> Path:
    """Write a GGUF file as llama.cpp's generator of control vectors does."""
    writer = gguf.GGUFWriter(path, architecture)
    if hint is not None:
        writer.add_string("controlvector.model_hint", hint)
    writer.add_uint32("controlvector.layer_count", len(directions))
    for name, values in directions.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stated(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with this header, which may be a lie."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(content) if length is None else length).to_bytes(8, "little") + content + data


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_each_file_is_named_by_its_name_without_the_ending(tmp_path: Path) -> None:
    happy = torch.arange(WIDTH).float()
    save_file({"vector": happy}, tmp_path / "happy.safetensors")
    save_file({f"blocks.{layer}.hook_resid_post": happy + layer for layer in range(LAYERS)}, tmp_path / "b.safetensors")
    save_file({"one": happy, "two": happy.bfloat16()}, tmp_path / "several.safetensors")
    (tmp_path / "notes.txt").write_text("not a vector")
    found = read_vectors(tmp_path, CONFIG, STAGES)
    assert list(found) == ["b", "happy", "several"]
    assert [vector.by_stage for vector in found.values()] == [True, False, False]
    assert torch.equal(found["happy"].tensors["vector"], happy)
    assert torch.equal(found["b"].tensors["blocks.1.resid_post"], happy + 1)
    assert found["several"].tensors["two"].dtype == torch.bfloat16
    assert found["several"].num_bytes == WIDTH * 6


def test_a_stage_as_a_trace_has_it_loses_its_dims_of_one() -> None:
    tensors = {
        "blocks.0.resid_post": torch.ones(1, 1, WIDTH),
        "blocks.1.resid_post": torch.ones(1, 3, WIDTH),
        "blocks.0.attn.z": torch.ones(1, 1, CONFIG.num_heads, CONFIG.d_head),
        "blocks.0.attn.pattern": torch.ones(1, 1, 1, 5),
        "blocks.1.attn.z": torch.ones(1, CONFIG.d_head),
    }
    found = read_vector_bytes(save(tensors), STAGES)
    assert {name: list(tensor.shape) for name, tensor in found.tensors.items()} == {
        "blocks.0.resid_post": [WIDTH],
        "blocks.1.resid_post": [3, WIDTH],
        "blocks.0.attn.z": [CONFIG.num_heads, CONFIG.d_head],
        "blocks.0.attn.pattern": [1, 1, 5],
        "blocks.1.attn.z": [1, CONFIG.d_head],
    }


def test_a_direction_of_a_control_vector_is_for_the_output_of_its_layer(tmp_path: Path) -> None:
    directions = {f"direction.{layer}": np.full(WIDTH, layer, np.float32) for layer in range(1, LAYERS)}
    write_control_vector(tmp_path / "happy.gguf", directions)
    (happy,) = read_vectors(tmp_path, CONFIG, STAGES).values()
    assert happy.by_stage
    assert {name: float(tensor[0]) for name, tensor in happy.tensors.items()} == {
        f"blocks.{layer}.resid_post": layer for layer in range(1, LAYERS)
    }


@pytest.mark.parametrize(
    ("directions", "options", "reason"),
    [
        ({"direction.0": np.ones(WIDTH, np.float32)}, {}, "has direction.0, but"),
        ({f"direction.{LAYERS}": np.ones(WIDTH, np.float32)}, {}, "the file was made for 'llama'"),
        ({"direction.x": np.ones(WIDTH, np.float32)}, {}, "has direction.x"),
        ({"blk.1.attn": np.ones(WIDTH, np.float32)}, {}, "has blk.1.attn"),
        ({"direction.1": np.ones(WIDTH + 1, np.float32)}, {"hint": "qwen2"}, f"d_model is {WIDTH}; the file was made"),
        ({"direction.1": np.ones((1, WIDTH), np.float32)}, {"hint": None}, f"d_model is {WIDTH}$"),
        ({"direction.1": np.ones(WIDTH, np.int32)}, {}, "is I32; only F32, F16 and BF16"),
        ({"direction.1": np.full(WIDTH, np.nan, np.float32)}, {}, "direction.1 has numbers that are not finite"),
        ({"direction.1": np.ones(WIDTH, np.float32), "direction.01": np.ones(WIDTH, np.float32)}, {}, "two directions"),
        ({"direction.1": np.ones(WIDTH, np.float32)}, {"architecture": "llama"}, "holds 'llama', not a control vector"),
    ],
    ids=str,
)
def test_an_unfit_control_vector_is_refused(
    tmp_path: Path, directions: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    path = write_control_vector(tmp_path / "a.gguf", directions, **options)
    with pytest.raises(CheckpointError, match=reason) as error:
        read_vectors(tmp_path, CONFIG, STAGES)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "has no"),
        (["a.safetensors", "a.gguf"], "two files have the name a"),
        (["a b.safetensors"], "must have a name of"),
        (["-a.gguf"], "must have a name of"),
    ],
)
def test_an_unclear_directory_is_refused(tmp_path: Path, files: list[str], reason: str) -> None:
    for file in files:
        if file.endswith("gguf"):
            write_control_vector(tmp_path / file, {"direction.1": np.ones(WIDTH, np.float32)})
        else:
            save_file({"a": torch.ones(2)}, tmp_path / file)
    with pytest.raises(CheckpointError, match=reason):
        read_vectors(tmp_path, CONFIG, STAGES)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        read_vectors(tmp_path / "nope", CONFIG, STAGES)


HOSTILE = {
    "nothing": b"",
    "a short length": b"\x01\x00",
    "a header that is longer than the file": stated({}, length=1 << 40),
    "a header of the largest length": stated({}, length=(1 << 64) - 1),
    "no JSON": stated(b"{]"),
    "no object": stated(b"[1]"),
    "no tensors": stated({}),
    "only metadata": stated({"__metadata__": {"a": "b"}}),
    "offsets after the end": stated({"a": entry(offsets=(0, 8))}, b"1234"),
    "offsets that do not fit the shape": stated({"a": entry(shape=(3,))}, b"12345678"),
    "an absurd shape": stated({"a": entry(shape=(2**40, 2**40))}, b"12345678"),
    "negative sizes": stated({"a": entry(shape=(-2,))}, b"12345678"),
    "overlapping tensors": stated({"a": entry(), "b": entry()}, b"12345678"),
    "a hole": stated({"a": entry(offsets=(8, 16))}, b"1234567812345678"),
    "bytes after the end": stated({"a": entry()}, b"123456789"),
    "an unknown dtype": stated({"a": entry("F12")}, b"12345678"),
    "integers": stated({"a": entry("I32")}, b"12345678"),
    "truth values": stated({"a": entry("BOOL", (8,))}, b"12345678"),
    "an empty tensor": stated({"a": entry(shape=(0,), offsets=(0, 0))}),
    "no dims": stated({"a": entry("F64", ())}, b"12345678"),
    "many dims": stated({"a": entry(shape=(2, 1, 1, 1, 1))}, b"12345678"),
    "an empty name": stated({"": entry()}, b"12345678"),
    "a long name": stated({"a" * 201: entry()}, b"12345678"),
    "a name with a line end": stated({"a\nb": entry()}, b"12345678"),
    "too many tensors": save({f"{index}": torch.ones(1) for index in range(MAX_TENSORS + 1)}),
    "NaN": save({"a": torch.tensor([1.0, torch.nan])}),
    "infinity": save({"a": torch.tensor([torch.inf], dtype=torch.bfloat16)}),
    "a pickle": b"\x80\x04\x95" + bytes(100),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointError):
        read_vector_bytes(content, STAGES)
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        read_vectors(tmp_path, CONFIG, STAGES)
