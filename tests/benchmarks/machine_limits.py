"""The limits of a machine, and the shortest possible times of prompts and decoding at these limits."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Shape:
    """The multiplications of a network.

    `blocks` parameters are multiplied with every token, `head` parameters only where a next token is predicted, and
    `attention` numbers for every pair of a query and a key.
    """

    blocks: int
    head: int
    attention: int

    @classmethod
    def read(cls, checkpoint: Path) -> "Shape":
        """The shape of a network of the Llama family, from the configuration of its checkpoint."""
        config = json.loads((checkpoint / "config.json").read_text())
        width, num_layers = config["hidden_size"], config["num_hidden_layers"]
        num_heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or width // num_heads
        num_rows = (2 * num_heads + 2 * config["num_key_value_heads"]) * head_size + 3 * config["intermediate_size"]
        return cls(num_layers * width * num_rows, config["vocab_size"] * width, 2 * num_layers * num_heads * head_size)


def measure_machine() -> dict[str, float]:
    """Measure the bandwidth of memory (bytes per second), and for each dtype the operations per second of square
    matrices."""

    def best(work: Callable[[], Any], times: int = 10) -> float:
        work()
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    large = torch.ones(1 << 28)  # 1 GiB
    found = {"bandwidth": large.nbytes / best(large.sum)}
    size = 2048
    square = torch.randn(size, size)
    dense = square.to_mkldnn()  # uses oneDNN, which is up to twice as fast as the library behind `@`
    half, ints = square.bfloat16(), torch.randint(-128, 127, (size, size), dtype=torch.int8)
    found["float32"] = 2 * size**3 / best(lambda: F.linear(dense, dense))
    # A CPU without products of bfloat16 can still convert the numbers to float32.
    found["bfloat16"] = max(found["float32"], 2 * size**3 / best(lambda: half @ half.T))
    found["int8"] = 2 * size**3 / best(lambda: torch._int_mm(ints, ints.T))
    return found


def prompt_seconds(shape: Shape, rate: float, num_in: int) -> float:
    """The shortest possible time for one prompt with its attention, at `rate` operations per second."""
    attention = shape.attention * num_in**2  # scores and weighted sums, for the half below the diagonal
    return (2 * (shape.blocks * num_in + shape.head) + attention) / rate


def scenario_seconds(
    shape: Shape, rate: float, seconds_to_read: float, streams: int, num_in: int, num_out: int
) -> float:
    """The shortest possible time for a scenario: its prompts, then its steps, limited by memory or multiplication.

    `seconds_to_read` is the time to read all weights once.
    """
    step = max(seconds_to_read, streams * 2 * (shape.blocks + shape.head) / rate)
    return max(streams * prompt_seconds(shape, rate, num_in), seconds_to_read) + (num_out - 1) * step


def cpu_model() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else "unknown"
