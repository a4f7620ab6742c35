"""Compare streams through Ray Serve with streams from the service itself.

    python -m tests.benchmarks.ray_proxy [--model smollm2] [--threads 1] [--rounds 3] [--tokens 96] [NAME=VALUE ...]

One replica behind Ray's proxy and one server of `forwardscope serve` run at the same time, with the same settings. In
each round, 1, 8 and 32 clients stream from one, then from the other; the order changes with each round, and the first
round only warms up. Each prompt is new, decoding is greedy, and drafts are off. `NAME=VALUE` are environment variables
of the cluster, such as RAY_SERVE_THROUGHPUT_OPTIMIZED=1.

The figures are medians over the rounds: tokens per second and time to the first token of both, the ratio of the tokens
per second, and the difference of the times to the first token.
"""

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import ray
import torch
import uvloop

from model.checkpoints.load import BUNDLED
from tests.benchmarks.client import Timed, generate, summarize
from tests.benchmarks.serve import end_as_a_whole, serving
from tests.benchmarks.trace import cpu
from tests.published_models import smollm2
from tests.ray_serve.cluster import cluster

STREAMS = (1, 8, 32)
QUESTION = "Chapter {number}: in which the travellers cross the river for the {number}th time, and"


async def stream(port: int, count: int, first: int, tokens: int) -> list[Timed]:
    """Stream to `count` clients at once, each with a prompt of its own."""
    body: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    bodies = [body | {"prompt": QUESTION.format(number=first + index)} for index in range(count)]
    return list(await asyncio.gather(*(generate(port, each) for each in bodies)))


def measure(ports: dict[str, int], rounds: int, tokens: int) -> dict[int, dict[str, list[dict[str, float]]]]:
    """The figures of each number of streams, of each server, in each round."""
    figures: dict[int, dict[str, list[dict[str, float]]]] = {count: {name: [] for name in ports} for count in STREAMS}
    number = 1000
    for index in range(rounds + 1):
        for count in STREAMS:
            for name in list(ports) if index % 2 else list(ports)[::-1]:
                number += count
                summary = summarize(uvloop.run(stream(ports[name], count, number, tokens)))
                if summary["errors"]:
                    raise SystemExit(f"{name}: {summary['errors']} of {count} streams ended with an error")
                if index:
                    figures[count][name].append(summary)
    return figures


def compare(figures: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Compare both servers, which streamed alternately."""
    direct, proxied = figures["direct"], figures["ray"]
    pairs = list(zip(proxied, direct, strict=True))

    def median(of: list[dict[str, float]], key: str) -> float:
        return round(statistics.median(each[key] for each in of), 1)

    return {
        "direct_tokens_per_second": median(direct, "tokens_per_second"),
        "ray_tokens_per_second": median(proxied, "tokens_per_second"),
        "ratio": round(statistics.median(x["tokens_per_second"] / y["tokens_per_second"] for x, y in pairs), 3),
        "direct_first_token_ms": median(direct, "ttft_p50_ms"),
        "ray_first_token_ms": median(proxied, "ttft_p50_ms"),
        "added_first_token_ms": round(statistics.median(x["ttft_p50_ms"] - y["ttft_p50_ms"] for x, y in pairs), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("bundled", "smollm2"), default="bundled")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the network, of each server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each stream")
    parser.add_argument("environment", nargs="*", help="NAME=VALUE for the cluster")
    arguments = parser.parse_args()
    end_as_a_whole()
    path = Path(BUNDLED) if arguments.model == "bundled" else smollm2()
    settings = {"model": str(path), "dtype": "bfloat16", "threads": arguments.threads, "speculate": False}
    options = ["--dtype", "bfloat16", "--no-speculate"]
    variables = dict(pair.split("=", 1) for pair in arguments.environment)
    with serving(path, arguments.threads, *options) as direct, cluster(**variables) as running:
        running.deploy(replicas=1, settings=settings)
        running.wait_until_deployed()
        figures = measure({"direct": direct, "ray": running.port}, arguments.rounds, arguments.tokens)
    result = {
        "benchmark": "ray_proxy",
        "cpu": cpu(),
        "torch": torch.__version__,
        "ray": ray.__version__,
        "model": arguments.model,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "environment": variables,
        "streams": {count: compare(of_count) for count, of_count in figures.items()},
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
