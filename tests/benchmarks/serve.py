"""Measure latency and throughput of the service over HTTP, and what a long prompt costs the running streams.

    python -m tests.benchmarks.serve [--dtype bfloat16] [--kernels torch] [--threads 2] [--rounds 3] [--model DIRECTORY]

There are 1, 8 and 32 streams, in turn with the same engine in this process. Without `--model`, the weights are random,
with the 123.6M Llama shape of articles/001. Every prompt is different and decoding is greedy. Drafts are off
(`--no-speculate`), because texts of random weights repeat themselves. Figures are medians over alternating rounds.
Other options are passed to the service.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvloop
from safetensors.torch import save_file

from model.checkpoints.load import DTYPES
from tests.benchmarks.client import Timed, generate, percentile, summarize
from tests.benchmarks.peer_servers import Ours, Request

ROOT = Path(__file__).resolve().parents[2]
NUM_IN, NUM_OUT = 16, 128
STREAMS = (1, 8, 32)
ENTERING = 1500  # tokens of the long prompt
BEFORE_ENTERING = 32  # tokens that each stream has before the long prompt is sent
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50257,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_random_checkpoint(directory: Path) -> None:
    """Write random weights of a common size, in Hugging Face layout."""
    generator = torch.Generator().manual_seed(0)
    width, inner, num_layers = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_hidden_layers"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 0.02 * torch.randn(rows, columns, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(SHAPE["vocab_size"], width), "model.norm.weight": torch.ones(width)}
    for layer in range(num_layers):
        of = f"model.layers.{layer}"
        weights |= {f"{of}.self_attn.{name}_proj.weight": matrix(width, width) for name in "qkvo"}
        weights |= {f"{of}.mlp.{name}_proj.weight": matrix(inner, width) for name in ("gate", "up")}
        weights[f"{of}.mlp.down_proj.weight"] = matrix(width, inner)
        weights |= {f"{of}.{name}_layernorm.weight": torch.ones(width) for name in ("input", "post_attention")}
    (directory / "config.json").write_text(json.dumps(SHAPE))
    save_file(weights, directory / "model.safetensors")


@contextmanager
def serving(directory: Path, threads: int, *options: str) -> Iterator[int]:
    """Start the service in a process of its own, and yield its port when the service is ready."""
    command = [sys.executable, "-m", "service", "--model", str(directory), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "--threads", str(threads), *options], stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        assert process.stderr is not None
        try:
            port = next(int(found[1]) for line in process.stderr if (found := re.search(r"http://\S+:(\d+)", line)))
            threading.Thread(
                target=process.stderr.read, daemon=True
            ).start()  # or the service blocks when the pipe is full
            while not is_ready(port):
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()


def end_as_a_whole() -> None:
    """Exit on SIGTERM in a way that also ends the servers that this process started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError:
        return False


class Prompts:
    """Makes prompts of random tokens, so that no prompt is sent twice."""

    def __init__(self, vocab_size: int) -> None:
        self._random = random.Random(0)
        self._vocab_size = vocab_size

    def body(self, num_in: int, num_out: int) -> dict[str, Any]:
        ids = [self._random.randrange(self._vocab_size) for _ in range(num_in)]
        return {"prompt": ids, "max_tokens": num_out, "temperature": 0, "ignore_eos": True}


async def streams(port: int, prompts: Prompts, count: int) -> list[Timed]:
    return await asyncio.gather(*(generate(port, prompts.body(NUM_IN, NUM_OUT)) for _ in range(count)))


async def entering(port: int, prompts: Prompts, count: int, num_in: int, num_out: int) -> dict[str, float]:
    """Run `count` streams and send a long prompt; compare the gaps between tokens meanwhile with their median."""
    running = [Timed(time.perf_counter()) for _ in range(count)]
    tasks = [asyncio.create_task(generate(port, prompts.body(NUM_IN, num_out), into=timed)) for timed in running]
    while any(len(timed.tokens) < BEFORE_ENTERING for timed in running):  # noqa: ASYNC110 (there is no event to await)
        await asyncio.sleep(0.01)
    long = await generate(port, prompts.body(num_in, 2))
    await asyncio.gather(*tasks)
    entered = long.tokens[0]
    if any(timed.tokens[-1] < entered for timed in running):
        raise SystemExit("the streams ended before the first token of the long prompt: the context is too short")
    gaps = [(after, gap) for timed in running for after, gap in zip(timed.tokens[1:], timed.gaps, strict=True)]
    during = [gap for after, gap in gaps if long.sent < after <= entered]
    median = statistics.median([gap for _, gap in gaps])
    return {
        "streams": count,
        "prompt": num_in,
        "ttft_ms": 1e3 * long.first,
        "itl_p50_ms": 1e3 * median,
        "itl_p50_during_ms": 1e3 * statistics.median(during),
        "itl_p99_during_ms": 1e3 * percentile(during, 99),
        "itl_p99_ms": 1e3 * percentile([gap for _, gap in gaps], 99),
        "p99_over_median": percentile([gap for _, gap in gaps], 99) / median,
        "p99_during_over_median": percentile(during, 99) / median,
    }


def in_process(engine: Ours, prompts: Prompts, count: int) -> float:
    """Tokens per second of the same engine without HTTP, JSON and a second process."""
    requests = [Request(prompts.body(NUM_IN, NUM_OUT)["prompt"], NUM_OUT) for _ in range(count)]
    start = time.perf_counter()
    engine.generate(requests, lambda made: None, list)
    return count * NUM_OUT / (time.perf_counter() - start)


def median_of(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(found[name] for found in rounds), 2) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a checkpoint; default: random weights")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--kernels", choices=["auto", "torch"], default="auto", help="as for the service")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the network")
    parser.add_argument("--rounds", type=int, default=3, help="measurements per figure")
    arguments, options = parser.parse_known_args()
    torch.set_num_threads(arguments.threads)
    end_as_a_whole()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.model or Path(temporary)
        if arguments.model is None:
            write_random_checkpoint(directory)
        options = ["--dtype", arguments.dtype, "--kernels", arguments.kernels, "--no-speculate", *options]
        engine = Ours(str(directory), "", arguments.threads, options)
        prompts = Prompts(engine.config.vocab_size)
        with serving(directory, arguments.threads, *options) as port:
            found: dict[int, list[dict[str, float]]] = {count: [] for count in STREAMS}
            for count, rounds in found.items():
                uvloop.run(streams(port, prompts, count))
                in_process(engine, prompts, count)
                for _ in range(arguments.rounds):
                    own = in_process(engine, prompts, count)
                    of_service = summarize(uvloop.run(streams(port, prompts, count)))
                    over = of_service["tokens_per_second"] / own
                    rounds.append({**of_service, "in_process": own, "over_in_process": over})
            num_in = min(ENTERING, engine.config.max_positions - 2)
            num_out = engine.config.max_positions - NUM_IN
            entries = [
                uvloop.run(entering(port, prompts, 4, num_in, min(num_out, 600))) for _ in range(arguments.rounds)
            ]
    report(arguments, {count: median_of(rounds) for count, rounds in found.items()}, median_of(entries))


def report(arguments: argparse.Namespace, by_count: dict[int, dict[str, float]], entry: dict[str, float]) -> None:
    one = by_count[1]["tokens_per_second"]
    result = {
        "benchmark": "serve",
        "model": str(arguments.model or "random 123.6M"),
        "dtype": arguments.dtype,
        "kernels": arguments.kernels,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "eight_streams_over_one": round(by_count[8]["tokens_per_second"] / one, 2),
        "streams": by_count,
        "entering": entry,
    }
    columns = list(by_count[1])
    sys.stdout.write("  ".join(["streams", *columns]) + "\n")
    for count, figures in by_count.items():
        sys.stdout.write("  ".join([f"{count:7}", *(f"{figures[name]:{len(name)}.2f}" for name in columns)]) + "\n")
    sys.stdout.write(f"entering: {entry}\n")
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
