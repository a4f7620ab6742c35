"""How a decoding step would scale on more cores than this machine has, by simulation.

    python -m tests.benchmarks.many_cores --model PATH [--dtype bfloat16] [--quantize none] [--streams 1]
        [--bandwidth 400] [--core-bandwidth 20] [--transfer 100]

The kernel calls of a real step are noted, each with its tasks and the bytes of weights that it reads. Then the
algorithm of thread_pool.cpp runs on a model of a machine:

- A task takes as long as it takes to read its share of the weights, but at least 0.2 microseconds. A core reads
  `--core-bandwidth` GB/s at most, and all of them together `--bandwidth`. The arithmetic is not modelled: with few
  streams, memory is slower.
- The counters of a call lie in a cache line. To change one, a core takes the line from the core that changed it last,
  which takes `--transfer` nanoseconds, and cores do so one after the other.
- Weights are spread evenly over the memory of all sockets, as `numactl --interleave=all` does it.

The table has a line for each number of threads: the milliseconds of the step, those that reading the weights alone
would take, and for the threads that this machine has, the measured ones. Python's share of a step is not modelled.
"""

import argparse
import heapq
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import forwardscope
from model.ops.cpu import launch
from model.ops.cpu.layout import num_linear_tasks

THREADS = (1, 2, 4, 8, 16, 32, 64, 128)
WEIGHTS = ("w", "integers", "scales")  # arguments that are read from memory in every step
SHORTEST_TASK = 2e-7  # seconds
STEPS = 64


@dataclass(frozen=True)
class Call:
    """A kernel call: its tasks, and the bytes of weights that they read. Of a product also its rows and outputs."""

    kernel: str
    num_tasks: int
    num_bytes: int
    num_rows: int
    num_outputs: int

    def tasks(self, num_threads: int) -> int:
        """The tasks into which it would be divided for so many threads."""
        with patch.object(torch, "get_num_threads", return_value=num_threads):
            num_tasks = num_linear_tasks(self.num_outputs) if self.num_outputs else self.num_tasks
            return max(1, min(num_tasks, launch.most_tasks()))


@dataclass(frozen=True)
class Machine:
    """`bandwidth` of all cores together and `core_bandwidth` of one, in bytes per second; `transfer`: the seconds in
    which a core takes a cache line from another."""

    bandwidth: float
    core_bandwidth: float
    transfer: float

    def read_seconds(self, num_bytes: int, num_threads: int) -> float:
        """The time in which so many threads read so many bytes."""
        return num_bytes / min(self.bandwidth, num_threads * self.core_bandwidth)

    def call_seconds(self, call: Call, num_threads: int) -> float:
        num_tasks = call.tasks(num_threads)
        active = min(num_threads, num_tasks)
        task = max(SHORTEST_TASK, self.read_seconds(call.num_bytes, active) / num_tasks * active)
        transfer = self.transfer if num_threads > 1 else 0.0
        threads = [0.0] * num_threads  # when each of them is ready for its next task
        taken = done = 0.0  # when the two counters were changed last
        for _ in range(num_tasks):
            taken = max(heapq.heappop(threads), taken) + transfer
            done = max(taken + task, done) + transfer
            heapq.heappush(threads, done)
        return done + transfer  # until the others see that the last task is done


def note_step(model: forwardscope.LocalModel, num_streams: int) -> tuple[list[Call], float]:
    """The calls of a step of so many streams, and its median seconds."""
    calls: list[Call] = []
    record = launch._record

    def note(kernel: Any, num_tasks: int, table: bytes, arguments: Mapping[str, Any]) -> bytes:
        weights = [arguments[name] for name in WEIGHTS if isinstance(arguments.get(name), Tensor)]
        num_rows, num_outputs = (arguments["M"], arguments["N"]) if weights else (0, 0)
        calls.append(Call(kernel.name, num_tasks, sum(each.nbytes for each in weights), num_rows, num_outputs))
        return record(kernel, num_tasks, table, arguments)

    with patch.object(launch, "_record", note):
        seconds = measure(model, num_streams)
    starts = [index for index, call in enumerate(calls) if call.kernel.startswith("take_rows")]
    steps = [calls[start:end] for start, end in itertools.pairwise([*starts, len(calls)])]
    return [step for step in steps if all(call.num_rows in (0, num_streams) for call in step)][-1], seconds


def measure(model: forwardscope.LocalModel, num_streams: int) -> float:
    """The median seconds of a step of so many streams."""
    prompts = [f"Once upon a time, in town {index}," for index in range(num_streams)]

    def run(num_tokens: int) -> float:
        start = time.perf_counter()
        model.generate(prompts, max_tokens=num_tokens, temperature=1.5, seed=1, ignore_eos=True)
        return time.perf_counter() - start

    run(8)
    return statistics.median((run(8 + STEPS) - run(8)) / STEPS for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--bandwidth", type=float, default=400, help="of all cores together, in GB/s")
    parser.add_argument("--core-bandwidth", type=float, default=20, help="of one core, in GB/s")
    parser.add_argument("--transfer", type=float, default=100, help="of a cache line between cores, in nanoseconds")
    options = parser.parse_args()
    machine = Machine(options.bandwidth * 1e9, options.core_bandwidth * 1e9, options.transfer * 1e-9)
    measured: dict[int, float] = {}
    for num_threads in range(1, (os.cpu_count() or 1) + 1):
        torch.set_num_threads(num_threads)
        model = forwardscope.load(options.model, dtype=options.dtype, quantize=options.quantize)
        calls, measured[num_threads] = note_step(model, options.streams)
    num_bytes = sum(call.num_bytes for call in calls)
    lines = [
        f"a step of {len(calls)} calls, which read {num_bytes / 1e6:.0f} MB of weights",
        "threads  step (ms)  memory alone (ms)  measured here (ms)",
    ]
    rows = []
    for num_threads in THREADS:
        step = sum(machine.call_seconds(call, num_threads) for call in calls) * 1e3
        memory = machine.read_seconds(num_bytes, num_threads) * 1e3
        here = measured[num_threads] * 1e3 if num_threads in measured else None
        rows.append({"threads": num_threads, "step": step, "memory": memory, "measured": here})
        lines.append(f"{num_threads:7}  {step:9.2f}  {memory:17.2f}  {'' if here is None else f'{here:.2f}':>18}")
    sys.stdout.write("\n".join([*lines, json.dumps(rows)]) + "\n")


if __name__ == "__main__":
    main()
