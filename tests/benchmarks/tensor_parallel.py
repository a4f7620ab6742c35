"""Compare one process with several that compute a network together (`--tensor-parallel`): speed and memory.

    python -m tests.benchmarks.tensor_parallel [--processes 2] [--rounds 3] [--dtype float32] [--tokens 32]

The checkpoint has random weights, with a Llama shape of 0.5 billion parameters. Three services run at the same time and
answer in turn: one process with our kernels, one with PyTorch's, and several processes, which always compute with
PyTorch's. One process has as many threads as there are several processes, and each of those has one. Each prompt is
new, decoding is greedy, and drafts are off. The first round only warms up; figures are medians over the others.

The memory of each process is printed at the end of the run, in MiB: its peak (VmHWM, with the pages of the weights'
file that it has read), and its own memory (RssAnon).
"""

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import uvloop
from safetensors.torch import save_file

from model.checkpoints.load import DTYPES
from tests.benchmarks.client import generate, summarize
from tests.benchmarks.serve import ROOT, Prompts, end_as_a_whole, is_ready
from tests.benchmarks.trace import cpu

STREAMS = (1, 8)
NUM_IN = 16
CACHE_BYTES = 64 << 20
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1280,
    "intermediate_size": 3456,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def write_checkpoint(directory: Path, dtype: str) -> int:
    """Write random weights of `SHAPE`. Returns the number of parameters."""
    generator = torch.Generator().manual_seed(0)
    width, inner, vocab_size = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    keys = width // SHAPE["num_attention_heads"] * SHAPE["num_key_value_heads"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (0.02 * torch.randn(rows, columns, generator=generator)).to(DTYPES[dtype])

    def gain() -> torch.Tensor:
        return torch.ones(width, dtype=DTYPES[dtype])

    weights = {"model.embed_tokens.weight": matrix(vocab_size, width), "model.norm.weight": gain()}
    for layer in range(SHAPE["num_hidden_layers"]):
        of = f"model.layers.{layer}"
        weights |= {f"{of}.self_attn.{name}_proj.weight": matrix(width, width) for name in "qo"}
        weights |= {f"{of}.self_attn.{name}_proj.weight": matrix(keys, width) for name in "kv"}
        weights |= {f"{of}.mlp.{name}_proj.weight": matrix(inner, width) for name in ("gate", "up")}
        weights[f"{of}.mlp.down_proj.weight"] = matrix(width, inner)
        weights |= {f"{of}.{name}_layernorm.weight": gain() for name in ("input", "post_attention")}
    (directory / "config.json").write_text(json.dumps(SHAPE | {"torch_dtype": dtype}))
    save_file(weights, directory / "model.safetensors")
    return sum(weight.numel() for weight in weights.values())


@contextmanager
def service(directory: Path, processes: int, threads: int, options: list[str]) -> Iterator[tuple[int, int]]:
    """Start a service of this many processes. Yields its port and the id of the process that was started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        options = [*options, "--tensor-parallel", str(processes)]
    command = ["-m", "service", "serve", str(directory), "--port", str(port), "--threads", str(threads)]
    command += ["--no-speculate", "--cache-bytes", str(CACHE_BYTES), "--log-level", "warning", *options]
    log = directory / f"{port}.log"
    with log.open("w") as file:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([*launcher, *command], cwd=ROOT, env=environment, stderr=file)
    try:
        while not answers(port):
            if process.poll() is not None:
                raise SystemExit(f"the service of {processes} processes has ended:\n{log.read_text()}")
            time.sleep(0.2)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def answers(port: int) -> bool:
    """Whether a service is ready; it may not listen yet."""
    try:
        return is_ready(port)
    except urllib.error.URLError:
        return False


def memory_of(process: int) -> list[dict[str, int]]:
    """The memory of each process of a service in MiB, rank 0 first."""
    found = subprocess.run(["pgrep", "--parent", str(process)], capture_output=True, text=True).stdout.split()
    texts = [Path(f"/proc/{rank}/status").read_text() for rank in found or [str(process)]]
    fields = {"peak": r"VmHWM:\s+(\d+) kB", "own": r"RssAnon:\s+(\d+) kB"}
    return [
        {name: int(match[1]) // 1024 for name, pattern in fields.items() if (match := re.search(pattern, text))}
        for text in texts
    ]


async def stream(port: int, prompts: Prompts, count: int, tokens: int) -> dict[str, float]:
    """The figures of `count` streams at once."""
    done = await asyncio.gather(*(generate(port, prompts.body(NUM_IN, tokens)) for _ in range(count)))
    summary = summarize(done)
    if summary["errors"]:
        raise SystemExit(f"a stream has ended with an error: {next(each.error for each in done if each.error)}")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each stream")
    arguments = parser.parse_args()
    end_as_a_whole()
    prompts = Prompts(SHAPE["vocab_size"])
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        directory = Path(temporary)
        num_parameters = write_checkpoint(directory, arguments.dtype)
        size = arguments.processes
        kinds: dict[str, tuple[int, int, list[str]]] = {
            "one, our kernels": (1, size, []),
            "one, PyTorch": (1, size, ["--kernels", "torch"]),
            f"{size}, PyTorch": (size, 1, []),
        }
        running = {name: stack.enter_context(service(directory, *kind)) for name, kind in kinds.items()}
        speeds: dict[str, dict[int, list[float]]] = {name: {count: [] for count in STREAMS} for name in kinds}
        for index in range(arguments.rounds + 1):
            for count in STREAMS:
                for name in list(kinds) if index % 2 else list(kinds)[::-1]:
                    figures = uvloop.run(stream(running[name][0], prompts, count, arguments.tokens))
                    if index:
                        speeds[name][count].append(figures["tokens_per_second"])
        memory = {name: memory_of(pid) for name, (_, pid) in running.items()}
    result = {
        "benchmark": "tensor_parallel",
        "cpu": cpu(),
        "torch": torch.__version__,
        "parameters": num_parameters,
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
        "tokens_per_second": {
            name: {count: round(statistics.median(of), 2) for count, of in by_count.items()}
            for name, by_count in speeds.items()
        },
        "range": {
            name: {count: [round(min(of), 2), round(max(of), 2)] for count, of in by_count.items()}
            for name, by_count in speeds.items()
        },
        "memory": memory,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
