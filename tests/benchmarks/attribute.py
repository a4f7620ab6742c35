"""The cost of attributions to decoding streams: inter-token latencies without and with jobs of POST /attribute.

    python -m tests.benchmarks.attribute [MODEL] [--rounds 4] [--streams 8] [--tokens 96] [--threads 2]
        [--dtype bfloat16]

MODEL is a checkpoint directory; by default SmolLM2-135M-Instruct, which is downloaded. In each round, the same streams
run alone, then while one client asks for integrated gradients again and again, then during patching sweeps. The last
line is the result as JSON: percentiles in milliseconds over all rounds, the ratios to the streams alone, and how many
jobs were answered beside the streams. The first request copies the network, before the first round.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.client import generate, percentile
from tests.benchmarks.serve import end_as_a_whole, serving
from tests.published_models import smollm2

PROMPT = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"
LOGIT = {"prompt": PROMPT, "token": " Mary", "minus": " John"}
JOBS: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "gradients": {"method": "integrated_gradients", **LOGIT, "steps": 8},
    "sweep": {"method": "patching", **LOGIT, "corrupted": CORRUPTED, "stages": ["*.resid_pre"]},
}


async def repeat(client: httpx.AsyncClient, body: dict[str, Any], seconds: list[float]) -> None:
    """Send a request again and again, and note how long each answer takes."""
    while True:
        begun = time.perf_counter()
        response = await client.post("/attribute", json=body)
        assert response.status_code == 200, response.text
        seconds.append(time.perf_counter() - begun)


async def streams_with(
    port: int, client: httpx.AsyncClient, job: dict[str, Any] | None, num_streams: int, num_tokens: int, seed: int
) -> tuple[list[float], list[float]]:
    """The gaps between the tokens of all streams, and the seconds of the jobs beside them."""
    seconds: list[float] = []
    beside = None if job is None else asyncio.create_task(repeat(client, job, seconds))
    bodies = [
        {
            "prompt": f"Number {seed}, {index}: once upon a time",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "seed": index,
        }
        for index in range(num_streams)
    ]
    timed = await asyncio.gather(*(generate(port, body) for body in bodies))
    if beside is not None:
        beside.cancel()
    assert all(each.error is None for each in timed)
    return [gap for each in timed for gap in each.gaps], seconds


async def measure(port: int, rounds: int, num_streams: int, num_tokens: int) -> dict[str, dict[str, float]]:
    gaps: dict[str, list[float]] = {name: [] for name in JOBS}
    jobs: dict[str, list[float]] = {name: [] for name in JOBS}
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        for name, job in JOBS.items():
            if job is not None:
                begun = time.perf_counter()
                (await client.post("/attribute", json=job)).raise_for_status()
                first = time.perf_counter() - begun
                begun = time.perf_counter()
                (await client.post("/attribute", json=job)).raise_for_status()
                sys.stdout.write(
                    f"{name}: first {first:.2f} s, then {time.perf_counter() - begun:.2f} s without streams\n"
                )
        for index in range(rounds):
            for name, job in JOBS.items():
                found, seconds = await streams_with(port, client, job, num_streams, num_tokens, index)
                gaps[name] += found
                jobs[name] += seconds
    figures = {}
    for name in JOBS:
        figures[name] = {f"p{p}_ms": round(1e3 * percentile(gaps[name], p), 2) for p in (50, 90, 99)}
        figures[name] |= {"max_ms": round(1e3 * max(gaps[name]), 2), "jobs": len(jobs[name])}
        if jobs[name]:
            figures[name]["job_seconds"] = round(sum(jobs[name]) / len(jobs[name]), 2)
        for p in (50, 99):
            figures[name][f"p{p}_ratio"] = round(figures[name][f"p{p}_ms"] / figures["alone"][f"p{p}_ms"], 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    end_as_a_whole()
    with serving(arguments.model or smollm2(), arguments.threads, f"--dtype={arguments.dtype}") as port:
        figures = asyncio.run(measure(port, arguments.rounds, arguments.streams, arguments.tokens))
    for name, of in figures.items():
        sys.stdout.write(f"{name:10} " + ", ".join(f"{key} {value:g}" for key, value in of.items()) + "\n")
    sys.stdout.write(json.dumps({"benchmark": "attribute", "dtype": arguments.dtype, "figures": figures}) + "\n")


if __name__ == "__main__":
    main()
