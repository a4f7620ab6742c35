"""A streaming client that uses little CPU time: it sends one POST over a socket, and notes when each token arrives."""

import asyncio
import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Dialect:
    """How a server streams: the path, the pattern of the tokens in a frame, and the end mark.

    The group of the pattern is the id of the token, or several with commas, or empty if the server does not say it.
    """

    path: str
    token: re.Pattern[bytes]
    end: bytes


OURS = Dialect("/generate", re.compile(rb'"token":\{"id":(\d+)'), b"[DONE]")
LLAMA = {
    "llama.cpp": Dialect("/completion", re.compile(rb'"tokens":\[([\d,]+)\]'), b'"stop":true'),
    "ik_llama.cpp": Dialect("/completion", re.compile(rb'"content":".*"stop":false()'), b'"stop":true'),
}
VLLM = Dialect("/v1/completions", re.compile(rb'"token_ids":\[([\d,]+)\]'), b"[DONE]")


@dataclass
class Timed:
    """One request: when it was sent and when each token arrived, in seconds of `time.perf_counter`."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def first(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]


class Reading(asyncio.Protocol):
    """Notes tokens as they arrive, without waking a task for each. `ended` is done when the stream has ended.

    The sizes of HTTP chunks between the frames are read as parts of the frames, which is harmless: they do not look
    like tokens.
    """

    def __init__(self, timed: Timed, dialect: Dialect) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timed = timed
        self._dialect = dialect
        self._unread = b""
        self._status = b""

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._unread += data
        if not self._status:
            head, found, rest = self._unread.partition(b"\r\n\r\n")
            if not found:
                return
            self._status, self._unread = head.splitlines()[0], rest
        if b" 200 " not in self._status:
            return
        *frames, self._unread = self._unread.split(b"\n\n")
        for frame in frames:
            if token := self._dialect.token.search(frame):
                ids = token[1].split(b",")
                self._timed.tokens += [now] * len(ids)
                self._timed.ids += map(int, filter(None, ids))
            elif b"event: error" in frame:
                self._timed.error = frame.decode(errors="replace")
            elif self._dialect.end in frame:
                self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self._timed.error = (self._status + self._unread).decode(errors="replace") or f"no answer: {error}"
            self.ended.set_result(None)


async def generate(port: int, body: dict[str, Any], into: Timed | None = None, dialect: Dialect = OURS) -> Timed:
    """Stream one request to its end. The tokens are added to `into`, if it is given, as they arrive."""
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST {dialect.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    timed = into or Timed(time.perf_counter())
    loop = asyncio.get_running_loop()
    transport, reading = await loop.create_connection(lambda: Reading(timed, dialect), "127.0.0.1", port)
    try:
        transport.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await reading.ended
    finally:
        transport.close()
    return timed


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def summarize(requests: Sequence[Timed]) -> dict[str, float]:
    """Latencies (ms) and tokens per second of requests that ran together."""
    good = [request for request in requests if request.error is None]
    gaps = [gap for request in good for gap in request.gaps]
    first, end = min(request.sent for request in requests), max(request.tokens[-1] for request in good)
    return {
        "errors": len(requests) - len(good),
        "tokens_per_second": sum(len(request.tokens) for request in good) / (end - first),
        "ttft_p50_ms": 1e3 * statistics.median(request.first for request in good),
        "ttft_p99_ms": 1e3 * percentile([request.first for request in good], 99),
        "itl_p50_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * percentile(gaps, 99),
        "e2e_p50_ms": 1e3 * statistics.median(request.tokens[-1] - request.sent for request in good),
    }
