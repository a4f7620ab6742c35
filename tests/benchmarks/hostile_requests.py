"""Requests that are allowed, or nearly, and that once stopped a service: the rows of the second attack campaign.

Each row is sent to a service of its own by `python -m tests.benchmarks.hostile`. Meanwhile another client generates
greedily, again and again, and `hostile.py` compares what it sees with `TARGETS`. Rows with chats need a model with a
chat template, which the bundled one does not have.
"""

import base64
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MIB = 1 << 20
BODY_BYTES = 4 * MIB - 1000


@dataclass(frozen=True)
class HostileRequest:
    """One request, sent `count` times at once. `is_unread`: its answer is not read until the end of the attack."""

    path: str
    body: bytes
    method: str = "POST"
    content_type: str = "application/json"
    count: int = 1
    is_unread: bool = False


@dataclass(frozen=True)
class Row:
    """Requests that are sent one after the other, and the options of their service.

    After `seconds` the clients leave. Later the requests are sent once more, and the service gets SIGTERM meanwhile.
    """

    make: Callable[[Path], Sequence[HostileRequest]]  # from a directory for files of the server
    options: Sequence[str] = ()
    seconds: float = 20.0
    max_memory_mb: int = 500


def as_json(path: str, body: Any, **options: Any) -> HostileRequest:
    return HostileRequest(path, json.dumps(body).encode(), **options)


def chat(content: str = "a", **message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **message}], "max_tokens": 1}


def safetensors_of(names: Sequence[str], size: int = 4) -> bytes:
    """A safetensors file with a float32 vector for each name."""
    header = {
        name: {"dtype": "F32", "shape": [size], "data_offsets": [4 * size * index, 4 * size * (index + 1)]}
        for index, name in enumerate(names)
    }
    content = json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content + bytes(4 * size * len(names))


def tensor_name(size: int) -> Callable[[Path], list[HostileRequest]]:
    def make(_: Path) -> list[HostileRequest]:
        tensors = base64.b64encode(safetensors_of(["model." * (size // 6) + "\n"])).decode()
        return [as_json("/compare", {"prompt": [1, 2], "b": {"tensors": tensors}})]

    return make


def grammar(rule: str) -> Callable[[Path], list[HostileRequest]]:
    structured = {"prompt": [1], "max_tokens": 2, "structured_outputs": {"grammar": rule}}
    return lambda _: [as_json("/generate", structured, count=4)]


def arguments(item: str) -> Callable[[Path], list[HostileRequest]]:
    text = "[" + ",".join([item] * (BODY_BYTES // (len(item) + 3))) + "]"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    body = chat() | {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]}
    return lambda _: [as_json("/v1/chat/completions", body), as_json("/tokenize", {"messages": body["messages"]})]


def long_text(text: str) -> Callable[[Path], list[HostileRequest]]:
    content = text * (BODY_BYTES // len(json.dumps(text).strip('"')) - 10)
    bodies = {"/v1/chat/completions": chat(content), "/generate": {"prompt": content}, "/tokenize": {"text": content}}
    return lambda _: [as_json(path, body) for path, body in bodies.items()]


def many_edits(number: int, **fields: Any) -> Callable[[Path], list[HostileRequest]]:
    edits = [{"stage": "blocks.*.resid_post", "op": "scale", "factor": 1.0 + index / 1000} for index in range(number)]
    return lambda _: [as_json("/generate", {"prompt": [1, 2, 3], "max_tokens": 100, "edits": edits} | fields)]


def noise(**fields: Any) -> Callable[[Path], list[HostileRequest]]:
    edits = [{"stage": "blocks.*.resid_p*", "op": "noise", "std": 0.01}]
    return lambda _: [as_json("/generate", {"prompt": [1, 2, 3], "max_tokens": 100, "edits": edits} | fields)]


def prompts_with_edits(_: Path) -> list[HostileRequest]:
    edits = [{"stage": "blocks.*.resid_post", "op": "scale", "factor": 1.0 + index / 1000} for index in range(64)]
    prompts = [[1] * (index % 200 + 1) for index in range(256)]
    fields = {"prompt": prompts, "max_tokens": 50, "edits": edits}
    return [as_json("/v1/completions", fields), as_json("/v1/completions", fields | {"prompt": [[1, 2]] * 256})]


def traces(**fields: Any) -> Callable[[Path], list[HostileRequest]]:
    return lambda _: [as_json("/generate", {"prompt": [1, 2, 3], "max_tokens": 40, "stream": True, "n": 64} | fields)]


def multiples(_: Path) -> list[HostileRequest]:
    properties = {f"p{index}": {"type": "number", "multipleOf": 5e-324} for index in range(1200)}
    schema = {"type": "object", "properties": properties}
    body = {"prompt": [1], "max_tokens": 2, "structured_outputs": {"json": schema}}
    return [as_json("/generate", body, count=9), *slow_schemas()]


def slow_schemas() -> list[HostileRequest]:
    """Nine different schemas that take more than the limit of two seconds to compile."""
    slow = [{"anyOf": [{"multipleOf": 89_980 - n - i} for i in range(10)], "type": "integer"} for n in range(9)]
    bodies = [{"prompt": [1], "max_tokens": 2, "structured_outputs": {"json": schema}} for schema in slow]
    return [as_json("/generate", body) for body in bodies]


def json_text(_: Path) -> list[HostileRequest]:
    text = "[" + "1," * (BODY_BYTES // 2 - 200) + "1]"
    return [as_json("/generate", {"prompt": [1], "structured_outputs": {"json": text}}, count=16)]


def many_tensors(_: Path) -> list[HostileRequest]:
    content = safetensors_of([f"t{index}" for index in range(45_000)], size=1)
    compared = base64.b64encode(safetensors_of([f"t{index}" for index in range(40_000)], size=1)).decode()
    put = HostileRequest("/vectors/v", content, "PUT", "application/octet-stream", count=20)
    return [put, as_json("/compare", {"prompt": [1], "b": {"tensors": compared}})]


def understated(directory: Path) -> list[HostileRequest]:
    """An npz whose directory says that a member of 2 GB unpacks to little."""
    size = 2 << 30
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (size // 4,)})
    path = directory / "understated.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("embed.npy", "w", force_zip64=True) as file,
    ):
        file.write(header.getvalue())
        for _ in range(size >> 24):
            file.write(bytes(1 << 24))
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = (4096).to_bytes(4, "little")  # the stated size
    path.write_bytes(content)
    return [as_json("/compare", {"prompt": [1], "b": {"path": path.name}})]


def compare_all(_: Path) -> list[HostileRequest]:
    ids = [7 * index % 3000 + 1 for index in range(200)]
    return [as_json("/compare", {"prompt": ids, "b": {"setting": {"dtype": "float32", "kernels": "torch"}}})]


def downloads(_: Path) -> list[HostileRequest]:
    files = ("swagger-ui-bundle.js", "redoc.standalone.js")
    return [HostileRequest(f"/static-offline-docs/{file}", b"", "GET", count=300, is_unread=True) for file in files]


def deep(_: Path) -> list[HostileRequest]:
    requests = []
    for depth in (99, 101, 955, 5000):
        text = "[" * depth + "]" * depth
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        body = chat() | {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]}
        tool = {"type": "function", "function": {"name": "f", "parameters": "DEEP"}}
        with_tools = json.dumps(chat() | {"tools": [tool]}).replace('"DEEP"', f'{{"x": {text}}}')
        requests += [as_json("/v1/chat/completions", body), HostileRequest("/v1/chat/completions", with_tools.encode())]
    return requests


def sweep(_: Path) -> list[HostileRequest]:
    ids = list(range(5, 17))
    fields = {"method": "patching", "prompt": ids, "corrupted": [*ids[:5], 99, *ids[6:]], "token": 5, "minus": 17}
    return [as_json("/attribute", fields | {"stages": ["*.resid_pre", "*.attn_out", "*.mlp_out"]}, count=2)]


FILES = ("--compare-directory", "DIRECTORY")
ROWS: dict[str, Row] = {
    "1 tensor name of 16 KB": Row(tensor_name(1 << 14)),
    "1 tensor name of 128 KB": Row(tensor_name(1 << 17)),
    "2 grammar of escaped quotes": Row(grammar('start: "' + '\\"' * 32_000)),
    "2 grammar of slashes": Row(grammar("start: /" + "\\/" * 32_000)),
    "3 arguments of numbers": Row(arguments("1")),
    "3 arguments of lists": Row(arguments("[[1]]")),
    "3 text of digits": Row(long_text("1 ")),
    "3 text of letters": Row(long_text("a")),
    "3 text of emoji": Row(long_text("🙂")),
    "4 schema as a text": Row(json_text),
    "5 n of 64": Row(
        lambda _: [as_json("/generate", {"prompt": [1, 2], "n": 64, "max_tokens": 450, "ignore_eos": True})]
    ),
    "5 64 prompts": Row(
        lambda _: [as_json("/v1/completions", {"prompt": [[1, 2, 3]] * 64, "max_tokens": 450, "ignore_eos": True})]
    ),
    "6 noise in 64 choices": Row(noise(n=64)),
    "6 64 edits in 64 choices": Row(many_edits(64, n=64)),
    "6 one edit of patterns in 64 choices": Row(
        many_edits(0, n=64, edits=[{"stage": "*.attn.pattern", "op": "scale", "factor": 1.0}])
    ),
    "6 prompts with 64 edits": Row(prompts_with_edits),
    "6 all stages of 64 choices": Row(traces(trace={"stages": ["*"]})),
    "6 lens of 64 choices": Row(traces(trace={"stages": ["embed"], "logit_lens": True, "top_k": 5})),
    "7 multiples": Row(multiples),
    "8 many tensors": Row(many_tensors, ("--api-key", "k")),
    "9 an understated npz": Row(understated, FILES),
    "10 a comparison": Row(compare_all, seconds=60, max_memory_mb=6144),  # below --max-pass-bytes
    "12 unread downloads": Row(downloads),
    "13 deep JSON": Row(deep),
    "15 sweeps at the end": Row(sweep),
}
