"""Safetensors files of clients: what the library writes is read, and everything else is refused at a low cost."""

import json
import time
from typing import Any

import pytest
import torch
from safetensors.torch import save

from model.checkpoints.safetensors_bytes import read_safetensors
from model.errors import CheckpointError


def stated(header: Any, data: bytes = b"") -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def test_the_files_of_the_library_are_read() -> None:
    tensors = {
        "a": torch.randn(2, 3),
        "b": torch.randn(5).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "c{": torch.tensor([[1, -2]], dtype=torch.int8),
        "flags": torch.tensor([True, False]),
    }
    found, metadata = read_safetensors(save(tensors, {"k": "v"}), 7)
    assert metadata == {"k": "v"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "longer than the file"),
        ((1 << 60).to_bytes(8, "little"), "longer than the file"),
        (stated(b"{"), "not JSON"),
        (stated(b"\xff"), "not JSON"),
        (stated(b"[" * 3000), "not JSON"),
        (stated([1]), "not an object"),
        (stated({"__metadata__": [1]}), "__metadata__"),
        (stated({"__metadata__": {"a": 1}}), "__metadata__"),
        (stated({"a": 1}), "a has no dtype"),
        (stated({"a": entry(more=1)}, bytes(8)), "or more"),
        (stated({"a": entry(dtype="F8")}, bytes(8)), "is F8, which cannot be read"),
        (stated({"a": entry(dtype=1)}, bytes(8)), "cannot be read"),
        (stated({"a": entry(shape=[True, 2])}, bytes(8)), "not lists of sizes"),
        (stated({"a": entry(shape=[-2])}, bytes(8)), "not lists of sizes"),
        (stated({"a": entry(shape="2")}, bytes(8)), "not lists of sizes"),
        (stated({"a": entry(shape=[1 << 62])}, bytes(8)), "not lists of sizes"),
        (stated({"a": entry(shape=[3])}, bytes(8)), "does not fit"),
        (stated({"a": entry(data_offsets=[0, 8, 8])}, bytes(8)), "not lists of sizes"),
        (stated({"a": entry(data_offsets=[8, 0])}, bytes(8)), "does not fit"),
        (stated({"a": entry()}, bytes(4)), "outside of the file"),
        (stated({"a": entry()}, bytes(12)), "longer than its tensors"),
        (stated({"a": entry(data_offsets=[4, 12])}, bytes(12)), "gaps"),
        (stated({"a": entry(), "b": entry()}, bytes(8)), "overlap"),
        (stated(b'{"a":1,"a":2}'), "twice"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_other_files_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_safetensors(content, 4)


def test_too_many_tensors_are_refused_before_the_header_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the header was parsed"))
    entries = b",".join(b'"%d":{}' % i for i in range(140_000))
    began = time.thread_time()
    for content in (stated(b"{" + entries + b"}"), stated(b"{" + b" " * (8 << 20) + b"}")):
        with pytest.raises(CheckpointError, match="the limit is"):
            read_safetensors(content, 512)
    assert time.thread_time() - began < 1
