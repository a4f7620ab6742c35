"""Compare the throughput of the routes of other APIs with that of POST /generate, over the same prompts.

    python -m tests.benchmarks.openai_routes [--dtype bfloat16] [--threads 2] [--rounds 5]

SmolLM2-135M-Instruct streams 128 tokens to 1, 8 and 32 clients. Each round asks all routes in turn for the same
texts: /generate gets the conversation as a text, with the special tokens that the chat template writes. Decoding is
greedy, and drafts are off. The figures are medians of tokens per second, of the ratio to /generate in its round, and of
the CPU time of the whole server for a token, which depends less on other programs.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
import urllib.request
from typing import Any

import torch
import uvloop

from service.metrics import TEXT_SECONDS
from tests.benchmarks.client import Dialect, generate
from tests.benchmarks.serve import end_as_a_whole, serving
from tests.benchmarks.trace import cpu
from tests.published_models import smollm2

STREAMS = (1, 8, 32)
NUM_OUT = 128
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
DIALECTS = {
    "generate": Dialect("/generate", re.compile(rb'"token":\{"id":(\d+)'), b"[DONE]"),
    "completions": Dialect("/v1/completions", re.compile(rb'"choices":\[\{"index":(\d+)'), b"[DONE]"),
    "chat": Dialect("/v1/chat/completions", re.compile(rb'"index":(\d+)'), b"[DONE]"),
    "responses": Dialect(
        "/v1/responses", re.compile(rb'text\.delta","sequence_number":(\d+)'), b'"type":"response.incomplete"'
    ),
    "messages": Dialect("/v1/messages", re.compile(rb'"type":"text_delta"()'), b'"type":"message_stop"'),
}


def body(route: str, number: int) -> dict[str, Any]:
    """A request for a conversation that no other request of the round has."""
    question = f"Question {number}: what do you know of the number {number}?"
    fields: dict[str, Any] = {"max_tokens": NUM_OUT, "temperature": 0, "ignore_eos": True}
    if route == "responses":
        del fields["max_tokens"]
        return fields | {"input": question, "max_output_tokens": NUM_OUT}
    if route in ("chat", "messages"):
        return fields | {"messages": [{"role": "user", "content": question}]}
    text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return fields | {"prompt": text}


async def seconds(port: int, route: str, count: int, first: int) -> float:
    """The time in which `count` clients have read their streams to the end."""
    start = time.perf_counter()
    timed = await asyncio.gather(
        *(generate(port, body(route, first + i), dialect=DIALECTS[route]) for i in range(count))
    )
    errors = [each.error for each in timed if each.error is not None]
    if errors:
        raise SystemExit(errors[0])
    return time.perf_counter() - start


def cpu_seconds(port: int) -> float:
    """The CPU time that the server has taken so far."""
    time.sleep(1.1 * TEXT_SECONDS)  # the text of the metrics is kept for a while
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        found = re.search(rb"^process_cpu_seconds_total (\S+)", response.read(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the network")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    end_as_a_whole()
    speeds: dict[int, dict[str, list[float]]] = {count: {route: [] for route in DIALECTS} for count in STREAMS}
    cpu_times: dict[int, dict[str, list[float]]] = {count: {route: [] for route in DIALECTS} for count in STREAMS}
    with serving(smollm2(), arguments.threads, "--dtype", arguments.dtype, "--no-speculate") as port:
        number = 1000
        for count, by_route in speeds.items():
            for round_index in range(arguments.rounds + 1):
                order = list(DIALECTS) if round_index % 2 else list(DIALECTS)[::-1]
                for route in order:
                    number += count  # no prompt is in the prefix cache
                    before = cpu_seconds(port)
                    found = count * NUM_OUT / uvloop.run(seconds(port, route, count, number))
                    cpu_time = cpu_seconds(port) - before
                    if round_index:  # the first round warms up
                        by_route[route].append(found)
                        cpu_times[count][route].append(cpu_time / (count * NUM_OUT))
    result = {
        "benchmark": "openai_routes",
        "cpu": cpu(),
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
        "streams": {
            count: {
                route: {
                    "tokens_per_second": round(statistics.median(values), 1),
                    "ratio": round(
                        statistics.median(x / y for x, y in zip(values, by_route["generate"], strict=True)), 3
                    ),
                    "cpu_us_per_token": round(1e6 * statistics.median(cpu_times[count][route])),
                }
                for route, values in by_route.items()
            }
            for count, by_route in speeds.items()
        },
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
