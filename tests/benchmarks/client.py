"""A client that takes little of the machine it measures on: one POST over a bare socket, when each token came."""

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
    """How a server streams: where to post, what in a frame is a token (its id is the group), what ends the stream."""

    path: str
    token: re.Pattern[bytes]
    end: bytes


OURS = Dialect("/generate", re.compile(rb'"token":\{"id":(\d+)'), b"[DONE]")


@dataclass
class Timed:
    """One request: seconds of `time.perf_counter` at which it was sent, and at which each token came."""

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


async def generate(port: int, body: dict[str, Any], into: Timed | None = None, dialect: Dialect = OURS) -> Timed:
    """Stream one request to its end; `into` shows the tokens while they come.

    The sizes of chunks that stand between the frames are read as parts of them: they look like no token.
    """
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST {dialect.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    timed = into or Timed(time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        status = await reader.readline()
        if b" 200 " not in status:
            timed.error = (status + await reader.read(1000)).decode(errors="replace")
            return timed
        await reader.readuntil(b"\r\n\r\n")
        while True:
            frame = await reader.readuntil(b"\n\n")
            if token := dialect.token.search(frame):
                timed.tokens.append(time.perf_counter())
                timed.ids.append(int(token[1]))
            elif b"event: error" in frame:
                timed.error = frame.decode(errors="replace")
            elif dialect.end in frame:
                return timed
    finally:
        writer.close()


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def summarize(requests: Sequence[Timed]) -> dict[str, float]:
    """Milliseconds and tokens a second of requests that ran together."""
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
