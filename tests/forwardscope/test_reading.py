"""Reading of bytes: safetensors files with bfloat16, and Server-Sent Events in pieces of any size."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from forwardscope.errors import ForwardscopeError
from forwardscope.events import EventDecoder, RawEvent
from forwardscope.tensor_files import read_base64, read_safetensors, widen
from service.http.encoding import Base64, safetensors_bytes, to_json


def test_every_bfloat16_is_widened_to_the_same_number() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    numbers = bits.view(torch.bfloat16)
    assert np.array_equal(widen(bits.numpy()), numbers.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3, 4)], ids=str)
def test_tensors_of_every_dtype_and_shape_are_read(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    expected = tensor.float().numpy() if dtype == torch.bfloat16 else tensor.numpy()
    for content in (
        bytes(safetensors_bytes({"b": tensor, "a": tensor.clone()}, {"x": [1]})),
        save({"a": tensor, "b": tensor.clone()}, {"forwardscope": '{"x": [1]}'}),
    ):
        arrays, metadata = read_safetensors(content)
        assert metadata == {"x": [1]}
        for name in ("a", "b"):
            assert arrays[name].dtype == expected.dtype
            assert arrays[name].shape == shape
            assert np.array_equal(arrays[name], expected)
            assert arrays[name].flags.writeable
    if dtype != torch.int64 and shape:
        name = str(dtype).removeprefix("torch.")
        assert np.array_equal(read_base64(to_json(Base64(tensor))[1:-1].decode(), name, shape), expected)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"__metadata__": {}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [99], "data_offsets": [0, 396]}},
        {"a": {"dtype": "F32", "shape": None, "data_offsets": [0, 4]}},
        {"a": []},
        [],
    ],
    ids=str,
)
def test_a_damaged_file_is_a_clear_error(header: Any) -> None:
    if isinstance(header, dict):
        header.setdefault("__metadata__", {"forwardscope": "{}"} if header else {})
    encoded = json.dumps(header).encode()
    with pytest.raises(ForwardscopeError, match="not a safetensors file"):
        read_safetensors(len(encoded).to_bytes(8, "little") + encoded + bytes(8))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    with pytest.raises(ForwardscopeError, match="not a safetensors file"):
        read_safetensors(content)


EVENTS: list[dict[str, Any]] = [{"text": "a\u2028b\x85c\r"}, {"text": "ß🥊"}, {"text": ""}, {"n": 1}]


@given(st.lists(st.integers(1, 40), min_size=1), st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_in_pieces_of_any_size(sizes: list[int], end: bytes) -> None:
    """Characters that other decoders take for the end of a line stay in their event."""
    lines = [b": a comment", b"", b"event: error", b'data: {"n":', b"data: 0}", b""]
    for event in EVENTS:
        lines += [b"data: " + json.dumps(event, ensure_ascii=False).encode(), b""]
    content = end.join([*lines, b"data:[DONE]", b"", b""])
    decoder, found = EventDecoder(), []
    while content:
        for size in sizes:
            assert not decoder.is_done or not content
            found += decoder.push(content[:size])
            content = content[size:]
    assert found == [RawEvent("error", {"n": 0}), *(RawEvent("message", event) for event in EVENTS)]
    assert decoder.is_done
