"""Measure what OpenTelemetry traces cost: tokens per second through HTTP with and without a collector.

    python -m tests.benchmarks.otel [--dtype bfloat16] [--threads 2] [--rounds 4] [--streams 8]

Two services with SmolLM2-135M-Instruct run at the same time, one of which sends its spans to a collector in this
process. They are driven in turn, so only one of them computes at a time. Every prompt is different, decoding is greedy,
and drafts are off. The figures are medians of tokens per second, and of the ratio to the plain service in each round.
Needs the extra `otel`.
"""

import argparse
import json
import statistics
import sys

import torch
import uvloop

from tests.benchmarks.openai_routes import NUM_OUT, seconds
from tests.benchmarks.serve import end_as_a_whole, serving
from tests.benchmarks.trace import cpu
from tests.published_models import smollm2
from tests.service.otlp_receiver import receiving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the network")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=8)
    arguments = parser.parse_args()
    end_as_a_whole()
    options = ("--dtype", arguments.dtype, "--no-speculate")
    speeds: dict[str, list[float]] = {"plain": [], "traced": []}
    with (
        receiving() as collector,
        serving(smollm2(), arguments.threads, *options) as plain,
        serving(smollm2(), arguments.threads, *options, "--otlp-endpoint", collector.url) as traced,
    ):
        ports, number = {"plain": plain, "traced": traced}, 1000
        for round_index in range(arguments.rounds + 1):
            for name in list(ports) if round_index % 2 else list(ports)[::-1]:
                number += arguments.streams  # no prompt is in the prefix cache
                elapsed = uvloop.run(seconds(ports[name], "generate", arguments.streams, number))
                if round_index:  # the first round warms up
                    speeds[name].append(arguments.streams * NUM_OUT / elapsed)
    ratios = [with_spans / without for with_spans, without in zip(speeds["traced"], speeds["plain"], strict=True)]
    result = {
        "benchmark": "otel",
        "cpu": cpu(),
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
        "streams": arguments.streams,
        "tokens_per_second": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "spans_received": len(collector.spans),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
