"""A service of two processes: its answers are those of one process, and it ends when one of them ends."""

import contextlib
import os
import re
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from service.commands.ranks import find_place
from service.settings import Settings
from tests.service.checkpoints import write_checkpoint
from tests.service.running import PATIENCE_SECONDS, ROOT, Running, running
from tests.service.torchrun import free_port, torchrun, wait_for

PROMPT = "the cat sat on the mat"
ENDED = "a process that computes a part of the model has ended"


@pytest.fixture(scope="module")
def one(tiny_directory: Path) -> Iterator[Running]:
    """A service of one process, which computes with PyTorch as well."""
    with running(model=str(tiny_directory), kernels="torch") as service:
        yield service


@pytest.fixture(scope="module")
def two(tiny_directory: Path) -> Iterator[httpx.Client]:
    """A service of two processes, which torchrun has started."""
    with torchrun(str(tiny_directory), 2) as client:
        yield client


@contextlib.contextmanager
def ranks(directory: Path) -> Iterator[tuple[httpx.Client, list[subprocess.Popen[str]]]]:
    """Two processes without torchrun, which would end one when the other ends. Their logs are on `stderr`."""
    port, master_port = free_port(), free_port()
    command = [sys.executable, "-m", "service", "serve", str(directory), "--tensor-parallel", "2", "--threads", "1"]
    processes = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port)}
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **place}
        processes.append(
            subprocess.Popen(
                [*command, "--port", str(port)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
            )
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS, trust_env=False) as client:
            wait_for(client, processes)
            yield client, processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def assert_same(found: Any, expected: Any, place: str = "") -> None:
    """Assert equal JSON, except for times, ids and the rounding of numbers."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key in expected.keys() - {"timings", "id", "seconds"}:
            assert_same(found[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for index, (own, one) in enumerate(zip(found, expected, strict=True)):
            assert_same(own, one, f"{place}[{index}]")
    elif place.startswith(".maps") and place.endswith(".values"):  # base64 of numbers in float32
        found, expected = (
            torch.frombuffer(bytearray(b64decode(each)), dtype=torch.float32) for each in (found, expected)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), place
    else:
        assert found == expected, place


HEAD = {"stage": "blocks.1.attn.z", "op": "zero", "heads": [5]}  # a head of rank 1
TRACE = {"stages": ["blocks.*.attn.pattern", "blocks.1.mlp.post", "blocks.0.resid_post"], "detail": "values"}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 2}),
    "generate with edits": ("/generate", {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "edits": [HEAD]}),
    "generate with a trace": (
        "/generate",
        {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "trace": {"logit_lens": True, "top_k": 1, **TRACE}},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "temperature": 0},
    ),
    "forward": ("/forward", {"prompt": PROMPT, "stages": ["*"], "detail": "values"}),
    "forward of a prompt list": ("/forward", {"prompt": [PROMPT, "the dog"], "stages": ["*.z"], "heads": [0, 4]}),
    "forward with edits": ("/forward", {"prompt": PROMPT, "stages": ["*"], "edits": [HEAD], "baseline": True}),
    "forward with a patch": (
        "/forward",
        {
            "prompt": PROMPT,
            "stages": ["logits"],
            "edits": [
                {
                    "stage": "blocks.0.mlp.post",
                    "op": "patch",
                    "positions": [1, 3],
                    "source": {"prompt": "the dogs ran on", "positions": [0, 2]},
                }
            ],
        },
    ),
    "logits": ("/logits", {"prompt": PROMPT}),
    "patterns": ("/patterns", {"prompt": PROMPT}),
    "logit lens": ("/attribute", {"method": "logit_lens", "prompt": PROMPT, "top_k": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_every_answer_is_that_of_one_process(name: str, one: Running, two: httpx.Client) -> None:
    path, body = REQUESTS[name]
    response = two.post(path, json=body)
    assert response.status_code == 200, response.text
    content = one.answer(path, **body)
    if name == "chat":
        content["created"] = response.json()["created"]
    assert_same(response.json(), content)


@pytest.mark.slow
def test_what_needs_whole_weights_is_refused_and_missing_in_the_capabilities(two: httpx.Client) -> None:
    offered = two.get("/model").json()["capabilities"]
    assert (offered["edits"], offered["patterns"], offered["attribution"]) == (True, True, True)
    assert not any(offered[name] for name in ("direct_attribution", "gradients", "compare", "weights"))
    question = {"prompt": PROMPT, "token": " cat"}
    refused = [
        two.post("/attribute", json={"method": "direct", **question}),
        two.post("/attribute", json={"method": "gradient", "stages": ["embed"], **question}),
        two.post("/compare", json={"prompt": PROMPT, "b": {"setting": {"dtype": "bfloat16"}}}),
        two.get("/weights"),
        two.get("/weights/blocks.0.attn.W_Q"),
    ]
    for response in refused:
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "tensor_parallel"
        assert "--tensor-parallel" in response.json()["error"]["message"]


@pytest.fixture(scope="module")
def long_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that can generate for a long time."""
    return write_checkpoint(tmp_path_factory.mktemp("long") / "long", max_position_embeddings=1 << 15)


def errors_of(process: subprocess.Popen[str]) -> list[str]:
    """The errors in the log of a process that ends by itself with 1."""
    _, log = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1, log
    return [line for line in log.splitlines() if " ERROR " in line or "Traceback" in line]


@pytest.mark.slow
def test_a_stream_ends_with_an_error_and_the_service_with_1_if_a_follower_dies(long_directory: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30_000, "temperature": 0, "ignore_eos": True, "stream": True}
    with ranks(long_directory) as (client, (leader, follower)):
        with client.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            follower.kill()
            rest = list(lines)
        end = rest.index("event: error")
        assert ENDED in rest[end + 1]
        assert [line for line in rest[end + 2 :] if line] == ["data: [DONE]"]
        (error,) = errors_of(leader)
        assert re.search(r"rank 0 of 2 has lost another rank, so the network cannot be computed: \S", error)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [0, 1])
def test_an_idle_service_ends_with_1_if_any_of_its_processes_dies(dies: int, long_directory: Path) -> None:
    with ranks(long_directory) as (client, processes):
        assert client.post("/logits", json={"prompt": PROMPT}).status_code == 200
        processes[dies].kill()
        (error,) = errors_of(processes[1 - dies])
        assert f"rank {1 - dies} of 2 has lost another rank" in error


ARGUMENTS = ["bundled", "--tensor-parallel", "2"]


@pytest.mark.parametrize(
    ("size", "world", "message"),
    [
        (2, None, "torchrun has not started this one; run: torchrun --standalone --nproc-per-node 2 -m service serve "),
        (2, "3", "2 needs 2 processes, but torchrun has started 3; run: torchrun .* bundled --tensor-parallel 2"),
        (1, "2", "torchrun has started 2 processes, but tensor_parallel is 1; add --tensor-parallel 2, or start"),
    ],
)
def test_another_number_of_processes_is_refused_with_the_command_to_run(
    size: int, world: str | None, message: str
) -> None:
    environment = {} if world is None else {"RANK": "0", "WORLD_SIZE": world, "MASTER_ADDR": "localhost"}
    with pytest.raises(ValueError, match=message):
        find_place(Settings(tensor_parallel=size), ARGUMENTS, environment)


@pytest.mark.slow
def test_one_process_needs_no_torchrun_and_may_have_it() -> None:
    assert find_place(Settings(), [], {}) is None
    assert find_place(Settings(), [], {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("adapter", ["a=/path"]),
        ("quantize", "int8"),
        ("gradients", "float32"),
        ("compare_directory", "/"),
        ("model", "none"),
    ],
)
def test_settings_that_need_whole_weights_are_refused_at_the_start(option: str, value: Any) -> None:
    fields: dict[str, Any] = {option: value}
    Settings(**fields)
    with pytest.raises(ValueError, match=f"{option}: .* is not implemented with --tensor-parallel 2; leave out"):
        Settings(tensor_parallel=2, **fields)
