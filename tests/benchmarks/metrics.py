"""Measure how long `GET /metrics` takes while 2,000 other connections are open.

    python -m tests.benchmarks.metrics [--connections 2000] [--scrapes 200] [--threads 1] [--model bundled]

One process is the service, a second one holds the connections, and a third one scrapes ten times a second over one
kept connection, as Prometheus does. For each load, a line shows the latency of the scrapes (ms: median, 99th
percentile, largest) and the tokens per second that the streams got meanwhile. The loads:

- `none`: no other connection.
- `idle`: all connections have made one request, and wait for the next.
- `streams`: 64 streams generate, and there is no other connection. The difference to the last load is what the
  connections cost.
- `idle, 8 streams`: half of the connections are idle, 8 stream, and the others are idle, too.
- `idle, streams`: half of the connections are idle. On each of the others, one stream follows another: 64 generate at a
  time, and the others wait for their turn.

The last line is JSON.
"""

import argparse
import asyncio
import http.client
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from tests.benchmarks.client import percentile
from tests.benchmarks.hostile import serving

SETTLING_SECONDS = 1.0
PERIOD_SECONDS = 0.1
MAX_STREAMING = 64  # the default of --max-num-seqs
STREAM = json.dumps(
    {"prompt": "It was a dark night", "max_tokens": 128, "ignore_eos": True, "temperature": 0.8, "stream": True}
).encode()


class Client(asyncio.Protocol):
    """A connection that makes one request and then idles, or makes one streaming request after another."""

    def __init__(self, *, streams: bool) -> None:
        self._streams = streams
        self._tail = b""
        self.answered = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._request()

    def data_received(self, data: bytes) -> None:
        if not self.answered.done():
            self.answered.set_result(None)
        if self._streams:
            end, self._tail = self._tail + data, data[-32:]
            if b"data: [DONE]" in end:
                self._tail = b""
                self._request()

    def _request(self) -> None:
        if self._streams:
            head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            self.transport.write(f"{head}Content-Length: {len(STREAM)}\r\n\r\n".encode() + STREAM)
        else:
            self.transport.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")


async def hold(port: int, num_idle: int, num_streams: int, orders: Connection) -> None:
    """Open the connections, report that they are open, and close them when told to."""
    loop = asyncio.get_running_loop()
    clients = []
    for index in range(num_idle + num_streams):
        make = lambda is_stream=index >= num_idle: Client(streams=is_stream)  # noqa: E731
        _, client = await loop.create_connection(make, "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.answered for client in clients[:num_idle]))
    orders.send("open")
    await loop.run_in_executor(None, orders.recv)
    for client in clients:
        client.transport.abort()


def hold_connections(port: int, num_idle: int, num_streams: int, orders: Connection) -> None:
    asyncio.run(hold(port, num_idle, num_streams, orders))


def value_of(text: str, name: str) -> float:
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).rpartition(" ")[2])


def wait_for_streams(port: int, num_streams: int) -> None:
    """Wait until almost all streams are admitted: some are between two requests at any moment."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        states = ("running", "waiting")
        if sum(value_of(text, f"forwardscope_num_requests_{state}") for state in states) >= 0.9 * num_streams:
            break
        time.sleep(PERIOD_SECONDS)
    time.sleep(SETTLING_SECONDS)


def scrape(port: int, num_scrapes: int, orders: Connection) -> None:
    """Send the latencies of all scrapes, and the text of the first and of the last one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seconds, texts = [], []
    for _ in range(num_scrapes):
        begin = time.perf_counter()
        connection.request("GET", "/metrics")
        texts.append((begin, connection.getresponse().read().decode()))
        seconds.append(time.perf_counter() - begin)
        time.sleep(PERIOD_SECONDS)
    orders.send((seconds, texts[0], texts[-1]))


def measure(port: int, num_idle: int, num_streams: int, num_scrapes: int) -> dict[str, float]:
    """Scrape under one load: latencies in milliseconds, and what the service says of its load."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    holder = spawn.Process(target=hold_connections, args=(port, num_idle, num_streams, theirs))
    holder.start()
    assert ours.recv() == "open"
    wait_for_streams(port, num_streams)
    results, other = spawn.Pipe()
    scraper = spawn.Process(target=scrape, args=(port, num_scrapes, other))
    scraper.start()
    seconds, (began, first), (ended, last) = results.recv()
    scraper.join()
    ours.send("close")
    holder.join()
    milliseconds = [1000 * value for value in seconds]
    tokens = value_of(last, "forwardscope_generation_tokens_total") - value_of(
        first, "forwardscope_generation_tokens_total"
    )
    return {
        "median_ms": percentile(milliseconds, 50),
        "p99_ms": percentile(milliseconds, 99),
        "max_ms": max(milliseconds),
        "bytes": len(last.encode()),
        "connections": value_of(last, "forwardscope_http_connections"),
        "running": value_of(last, "forwardscope_num_requests_running"),
        "waiting": value_of(last, "forwardscope_num_requests_waiting"),
        "tokens_per_second": tokens / (ended - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--scrapes", type=int, default=200)
    parser.add_argument("--threads", default="1")
    parser.add_argument("--model", default="bundled")
    options = parser.parse_args()
    half = options.connections // 2
    loads = {
        "none": (0, 0),
        "idle": (options.connections, 0),
        "streams": (0, MAX_STREAMING),
        "idle, 8 streams": (options.connections - 8, 8),
        "idle, streams": (half, options.connections - half),
    }
    results: dict[str, Any] = {}
    with serving(options.model, "--threads", options.threads) as service:
        measure(service.port, 0, 8, 20)  # the first requests of a process are slower
        for name, load in loads.items():
            found = results[name] = measure(service.port, *load, options.scrapes)
            sys.stdout.write(
                f"{name:16} median {found['median_ms']:6.2f}  p99 {found['p99_ms']:6.2f}  max {found['max_ms']:6.2f} ms"
                f"  {found['connections']:5.0f} connections  {found['running']:4.0f} run  {found['waiting']:4.0f} wait"
                f"  {found['tokens_per_second']:6.0f} tokens/s\n"
            )
            sys.stdout.flush()
    sys.stdout.write(json.dumps({"threads": options.threads, "loads": results}) + "\n")


if __name__ == "__main__":
    main()
