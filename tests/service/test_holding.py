"""No request, however large, holds the event loop or Python's lock for long."""

import asyncio
import base64
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.benchmarks.hostile import BAD_BODIES
from tests.benchmarks.hostile_requests import ROWS, HostileRequest, as_json, safetensors_of
from tests.case_costs import slowness
from tests.service.checkpoints import CONTEXT
from tests.service.running import PATIENCE_SECONDS, Running, Start

# Three times what was seen on a quiet machine, or more; `tests.benchmarks.hostile` measures it.
LOOP_SECONDS = 0.1  # of CPU time, of all that one turn of the event loop does
LOCK_SECONDS = 0.25
ATTEMPTS = 3  # what always happens is in each of them, and what another process of the machine does is not
NAMES = ("1 ", "2 ", "3 ", "4 ", "7 ", "8 ", "13 ")
REQUESTS = {name: row.make(Path()) for name, row in ROWS.items() if name.startswith(NAMES)} | {
    name: [HostileRequest(path, body)] for name, (path, body) in BAD_BODIES.items()
}
MANY = 260_000  # nearly as many values as a body may have
TENSORS = safetensors_of([f"blocks.{index}.resid_post" for index in range(8192)], size=1)
# Allowed, or refused for what they ask and not for their size.
REQUESTS |= {
    f"large {path} {name}": [as_json(path, {name: value} if name == "text" else {"prompt": [1], name: value})]
    for path, name, value in [
        ("/tokenize", "text", "\u20ac\u00e9 a\\n" * 200_000),
        ("/detokenize", "tokens", [1] * MANY),
        ("/generate", "prompt", [1] * MANY),
        ("/generate", "logit_bias", {str(index): 1.5 for index in range(4096)}),
        ("/generate", "stop", ["a" * 200 + str(index) for index in range(1000)]),
        ("/generate", "structured_outputs", {"choice": [f"choice {index}" for index in range(4000)]}),
        ("/generate", "edits", [{"stage": "*", "op": "scale", "factor": 0.5}] * 64),
        ("/v1/completions", "prompt", ["the cat " * 20] * 256),
        ("/forward", "stages", ["*" + "a" * 50 + "*" * (index % 9) for index in range(200)]),
        ("/logits", "prompt", [[1] * CONTEXT] * 256),
        ("/compare", "b", {"tensors": base64.b64encode(TENSORS).decode()}),
    ]
}


class Held(NamedTuple):
    loop: float
    lock: float


@contextlib.contextmanager
def watching(service: Running, found: list[Held]) -> Iterator[None]:
    """Append the longest times for which the event loop and Python's lock were held in the `with` block.

    The CPU time of the event loop's thread between two turns, and how much later than it wanted another thread runs; at
    most the CPU time of the process meanwhile, because other processes also delay a thread.
    """
    loop_held = lock_held = 0.0
    stopped = threading.Event()

    async def watch_loop() -> None:
        nonlocal loop_held
        before = time.thread_time()
        while not stopped.is_set():
            await asyncio.sleep(0.001)
            now = time.thread_time()
            loop_held, before = max(loop_held, now - before), now

    def watch_lock() -> None:
        nonlocal lock_held
        while not stopped.is_set():
            before, used_before = time.perf_counter(), time.process_time()
            time.sleep(0.001)
            late = time.perf_counter() - before - 0.001
            lock_held = max(lock_held, min(late, time.process_time() - used_before))

    loop = service.on_loop(watch_loop())
    lock = threading.Thread(target=watch_lock)
    lock.start()
    try:
        yield
    finally:
        stopped.set()
        loop.result(PATIENCE_SECONDS)
        lock.join()
        found.append(Held(loop_held, lock_held))


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_no_request_holds_the_event_loop_or_the_lock(tiny_directory: Path, start: Start, name: str) -> None:
    def send(request: HostileRequest) -> int:
        headers = {"Content-Type": request.content_type, "Authorization": "Bearer key"}
        response = service.client.request(
            request.method, request.path, content=request.body, headers=headers, timeout=20 * PATIENCE_SECONDS
        )
        return response.status_code

    service = start(model=str(tiny_directory), api_key="key")
    found: list[Held] = []
    for _ in range(ATTEMPTS):
        with watching(service, found), ThreadPoolExecutor(16) as pool:
            statuses = list(pool.map(send, [each for each in REQUESTS[name] for _ in range(each.count)]))
        assert 500 not in statuses
        limits = Held(LOOP_SECONDS * slowness(), LOCK_SECONDS * slowness())
        if found[-1].loop < limits.loop and found[-1].lock < limits.lock:
            return
    pytest.fail(f"held for too long each time: {found} (limits: {limits})")
