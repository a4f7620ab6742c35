"""Measure what one attacker costs 32 honest clients, in alternating phases without and with the attacker.

    python -m tests.benchmarks.attacker [--seconds 3600] [--phase-seconds 300] [--row-seconds 20] [--model DIRECTORY]

An honest client sends one of `honest_request`, and thinks for 1 to 3 seconds after the answer. The attacker sends the
requests of `hostile_requests.py` in turn, and leaves each after `--row-seconds`. The latency of an honest request
counts for the row that was attacked when it began, or else when it ended; the first 5 seconds after a phase with the
attacker count for neither side. After each phase a line shows the latency of its honest requests (seconds, median and
99th percentile), their failures, and the resident memory (MB). A table has the same by row. The last line is JSON;
`ratio` is the 99th percentile of all requests with the attacker over that of all others.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.benchmarks.client import percentile
from tests.benchmarks.hostile import Client, Service, attack_with, memory, serving
from tests.benchmarks.hostile_requests import ROWS, Row, as_json

NUM_HONEST = 32
KEY = "key"
HEADERS = f"Authorization: Bearer {KEY}\r\n"
ALONE, SETTLING = "alone", "settling"
SETTLING_SECONDS = 5.0
# The first row is no attack: one more client, who generates without pauses. What it costs the others is the least that
# an attacker can cost them.
HARMLESS = "0 one stream"
ONE_STREAM = as_json("/generate", {"prompt": [1, 2], "max_tokens": 450, "ignore_eos": True})
ATTACKS = {HARMLESS: Row(lambda _: [ONE_STREAM] * 100)} | {
    name: row for name, row in ROWS.items() if "--compare-directory" not in row.options
}


def honest_request(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A route and a body of mixed load: generations of 16 to 200 tokens, streamed or not, logits, and a traced pass."""
    prompt = [chance.randrange(1, 4000) for _ in range(chance.choice([3, 10, 40, 150]))]
    greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": chance.choice([16, 50, 100, 200])}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"prompt": prompt} | greedy),
        ("/generate", {"prompt": prompt, "stream": True} | greedy),
        ("/v1/completions", {"prompt": prompt, "logprobs": 2} | greedy),
        ("/logits", {"prompt": prompt, "top_k": 5}),
        ("/forward", {"prompt": prompt[:40], "stages": ["*.resid_post"], "detail": "summary"}),
    ]
    return chance.choice(requests)


def attack(port: int, names: Sequence[str], orders: Connection) -> None:
    """Attack with a row whenever its name and the most seconds for it arrive, and answer when it has ended.

    This runs in a process of its own: what the attacker computes must not delay the clocks of the honest clients.
    """
    with tempfile.TemporaryDirectory() as directory:
        made = {name: list(ATTACKS[name].make(Path(directory))) for name in names}
    orders.send(None)
    while True:
        name, seconds = orders.recv()
        asyncio.run(attack_with(Client(port), made[name], HEADERS, seconds))
        orders.send(None)


class Load:
    """The honest clients, and the latencies of their requests by the row that was attacked meanwhile."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.row = ALONE
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.outcomes: Counter[str] = Counter()

    async def be_honest(self, chance: random.Random) -> None:
        while True:
            await asyncio.sleep(chance.uniform(1, 3))
            path, body = honest_request(chance)
            row, began = self.row, time.perf_counter()
            status, _ = await self.service.ask(path, json.dumps(body).encode(), headers=HEADERS)
            self.seconds[row if row != ALONE else self.row].append(time.perf_counter() - began)
            self.outcomes[f"{path} {status}"] += 1

    async def be_attacked(self, attacker: Connection, rows: Iterator[str], end: float, row_seconds: float) -> None:
        while (left := end - time.monotonic()) > 0:
            self.row = next(rows)
            attacker.send((self.row, min(left, row_seconds)))
            await asyncio.to_thread(attacker.recv)
        self.row = SETTLING

    def line(self, name: str, seconds: Sequence[float]) -> str:
        return f"{name:36} {len(seconds):6} {percentile(seconds, 50):7.3f} {percentile(seconds, 99):7.3f}"


async def measure(
    service: Service, names: Sequence[str], seconds: float, phase_seconds: float, row_seconds: float
) -> dict[str, Any]:
    load = Load(service)
    honest = [asyncio.create_task(load.be_honest(random.Random(index))) for index in range(NUM_HONEST)]
    sizes: list[int] = []
    context = multiprocessing.get_context("spawn")
    attacker, orders = context.Pipe()
    process = context.Process(target=attack, args=(service.port, names, orders), daemon=True)
    process.start()
    await asyncio.to_thread(attacker.recv)  # the requests are made
    rows = cycle(names)
    for phase in range(max(2, round(seconds / phase_seconds))):
        number = {row: len(values) for row, values in load.seconds.items()}
        if phase % 2:
            await load.be_attacked(attacker, rows, time.monotonic() + phase_seconds, row_seconds)
        else:
            settling = SETTLING_SECONDS if phase else 0
            await asyncio.sleep(settling)
            load.row = ALONE
            await asyncio.sleep(phase_seconds - settling)
        found = [each for row, values in load.seconds.items() for each in values[number.get(row, 0) :]]
        sizes.append(round(memory(service.process.pid)))
        line = load.line("attacker" if phase % 2 else ALONE, found)
        sys.stdout.write(f"{line} {dict(load.outcomes)} {sizes[-1]} MB\n")
        sys.stdout.flush()
    process.terminate()
    for task in honest:
        task.cancel()
    for row, values in load.seconds.items():
        sys.stdout.write(load.line(row, values) + "\n")
    alone = percentile(load.seconds.pop(ALONE), 99)
    load.seconds.pop(SETTLING, None)
    attacked = percentile([each for values in load.seconds.values() for each in values], 99)
    return {
        "p99_alone": round(alone, 3),
        "p99_attacker": round(attacked, 3),
        "ratio": round(attacked / alone, 3),
        "outcomes": dict(load.outcomes),
        "memory_mb": sizes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600, help="duration of all phases")
    parser.add_argument("--phase-seconds", type=float, default=300, help="duration of one phase")
    parser.add_argument("--row-seconds", type=float, default=20, help="the most time for one row")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS), help="rows to attack with")
    parser.add_argument("--model", default="bundled", help="checkpoint of the service")
    arguments = parser.parse_args()
    durations = arguments.seconds, arguments.phase_seconds, arguments.row_seconds
    with serving(arguments.model, "--api-key", KEY) as service:
        result = asyncio.run(measure(service, arguments.only, *durations))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
