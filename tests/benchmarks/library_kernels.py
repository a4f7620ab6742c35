"""Compare our CPU kernels with those of PyTorch's libraries, for the shapes of SmolLM2-135M.

    python -m tests.benchmarks.library_kernels [--threads 2] [--rounds 5] [--only TEXT]

For each product and number of rows M, the kernels take turns in every round. Printed is the median over the rounds of a
kernel's time over ours (above 1: ours is faster), and whether the kernel is batch-invariant: whether a row has the same
bits alone as among the other rows. Weights are cycled through many copies, so that they are read from memory, as in a
network. All kernels are called from Python, as outside of recorded steps. `_int_mm` starts from inputs that are bytes
already; ours rounds its inputs, too.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.ops.cpu.cpu_ops import find_backend
from model.ops.cpu.packed_linear import pack_linear
from model.ops.quantization import INT4, INT8
from model.ops.torch_attention import CausalMask, ScoreRule
from model.ops.weight_formats import WeightFormat

NUM_ROWS = (1, 8, 32, 512)
SHAPES = {"mlp.up": (1536, 576), "mlp.down": (576, 1536), "head": (49152, 576)}  # outputs, inputs
HEADS, KV_HEADS, D_HEAD, NUM_KEYS = 9, 3, 64, 512
COPIED_BYTES = 96 << 20  # of float32 weights: more than the caches hold
ROUND_SECONDS = 0.02
CPU = torch.device("cpu")
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32

Multiply = Callable[[Tensor], Tensor]


@dataclass
class Contest:
    """Kernels that compute the same: `ours`, and others by name. Each takes x (M, ...) and returns (M, ...)."""

    name: str
    inputs: Tensor
    ours: list[Multiply]  # the same kernel with several copies of the weight
    others: dict[str, list[Multiply]] = field(default_factory=dict)
    is_attention: bool = False

    def add(self, name: str, make: Callable[[], Multiply], num_copies: int) -> None:
        """Add a kernel, unless this build of PyTorch does not have it."""
        try:
            copies = [make() for _ in range(num_copies)]
            copies[0](self.inputs[:2])
            self.others[name] = copies
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            sys.stderr.write(f"{self.name}: {name} is not available here: {str(error).splitlines()[0][:100]}\n")


def our_layers(weight: Tensor, format: WeightFormat | None, num_copies: int) -> list[Multiply]:
    layers = [pack_linear(weight, None, weight.dtype, format) for _ in range(num_copies)]
    kernels = [layer for layer in layers if layer is not None]
    if len(kernels) < num_copies:
        raise SystemExit("there are no kernels for this machine")
    return list(kernels)


def plain(weight: Tensor) -> Multiply:
    copy = weight.clone()
    return lambda x: F.linear(x, copy)


def packed_onednn(weight: Tensor) -> Multiply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def int_mm(weight: Tensor) -> Multiply:
    integers = (weight.float() * 10).round().clamp(-127, 127).to(torch.int8)
    return lambda x: torch._int_mm(x.to(torch.int8), integers.T)


def int8pack_mm(weight: Tensor) -> Multiply:
    integers = (weight.float() * 10).round().clamp(-127, 127).to(torch.int8)
    scales = torch.full((len(weight),), 0.1, dtype=BFLOAT16)
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, integers, scales)


def int4pack_mm(weight: Tensor) -> Multiply:
    integers = torch.randint(16, weight.shape, dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
    scales = torch.rand(weight.shape[1] // 32, len(weight), 2).to(BFLOAT16)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, scales)


def dyn_quant_4bit(weight: Tensor) -> Multiply:
    N, K = weight.shape
    integers = torch.randint(256, (N, K // 2), dtype=torch.uint8)
    scales = torch.rand(N, K // 32).to(BFLOAT16)
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(integers, scales, None, 32, K, N)
    return lambda x: torch.ops.aten._dyn_quant_matmul_4bit(x, packed, 32, K, N)


LINEAR: dict[str, tuple[torch.dtype, WeightFormat | None, dict[str, Callable[[Tensor], Multiply]]]] = {
    "float32": (FLOAT32, None, {"F.linear (MKL)": plain}),
    "bfloat16": (BFLOAT16, None, {"F.linear (oneDNN)": plain, "oneDNN, packed weight": packed_onednn}),
    "int8": (BFLOAT16, INT8, {"_int_mm": int_mm, "_weight_int8pack_mm": int8pack_mm}),
    "int4": (BFLOAT16, INT4, {"_weight_int4pack_mm_for_cpu": int4pack_mm}),
    "int4, float32 inputs": (FLOAT32, INT4, {"_dyn_quant_matmul_4bit": dyn_quant_4bit}),
}


def linear_contests() -> Iterator[Contest]:
    for layer, (N, K) in SHAPES.items():
        num_copies = max(1, COPIED_BYTES // (4 * N * K))
        for name, (dtype, format, others) in LINEAR.items():
            weight = torch.randn(N, K).to(dtype)
            x = torch.randn(max(NUM_ROWS), K).to(dtype)
            contest = Contest(f"{layer}, {name}", x, our_layers(weight, format, num_copies))
            for other, make in others.items():
                contest.add(other, partial(make, weight), num_copies)
            yield contest


def our_attention(k: Tensor, v: Tensor) -> Multiply:
    backend = find_backend(k.dtype, D_HEAD)
    if backend is None:
        raise SystemExit("there are no kernels for this machine")
    network, rule = backend.ops, ScoreRule(D_HEAD**-0.5, None)

    def attend(x: Tensor) -> Tensor:
        mask = CausalMask(NUM_KEYS - len(x), len(x), None, CPU)
        return network.fused_attention(x[None], k, v, mask, rule)[0]

    return attend


def library_attention(k: Tensor, v: Tensor) -> Multiply:
    keys, values = k.transpose(1, 2), v.transpose(1, 2)

    def attend(x: Tensor) -> Tensor:
        is_causal, mask = len(x) == NUM_KEYS, None
        if 1 < len(x) < NUM_KEYS:
            mask = torch.ones(len(x), NUM_KEYS, dtype=torch.bool).tril(NUM_KEYS - len(x))
        queries = x[None].transpose(1, 2)
        out = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2)[0]

    return attend


def attention_contests() -> Iterator[Contest]:
    """The last M of 512 positions attend to all positions before them."""
    for name, dtype in (("float32", FLOAT32), ("bfloat16", BFLOAT16)):
        q = torch.randn(NUM_KEYS, HEADS, D_HEAD).to(dtype)
        k, v = (torch.randn(1, NUM_KEYS, KV_HEADS, D_HEAD).to(dtype) for _ in range(2))
        contest = Contest(f"attention, {name}", q, [our_attention(k, v)], is_attention=True)
        contest.add("scaled_dot_product_attention", partial(library_attention, k, v), 1)
        yield contest


def is_invariant(contest: Contest, multiply: Multiply) -> bool:
    """Whether a row has the same bits alone as behind other rows and, except for attention, as before other rows."""
    x = contest.inputs
    last = all(torch.equal(multiply(x[-M:])[-1], multiply(x[-1:])[0]) for M in NUM_ROWS)
    return last and (contest.is_attention or all(torch.equal(multiply(x[:M])[0], multiply(x[:1])[0]) for M in NUM_ROWS))


def run_all(kernels: list[Multiply], x: Tensor, num_passes: int) -> float:
    start = time.perf_counter()
    for _ in range(num_passes):
        for kernel in kernels:
            kernel(x)
    return (time.perf_counter() - start) / num_passes


def relative_times(contest: Contest, M: int, num_rounds: int) -> dict[str, float]:
    """The time of each other kernel over ours."""
    x = contest.inputs[-M:]
    limit = len(contest.ours) if M <= 8 else 4
    kernels = {"ours": contest.ours[:limit]} | {name: copies[:limit] for name, copies in contest.others.items()}
    passes = {
        name: max(1, int(ROUND_SECONDS / max(run_all(copies, x, 1) for _ in range(2))))
        for name, copies in kernels.items()
    }
    ratios: dict[str, list[float]] = {name: [] for name in contest.others}
    for _ in range(num_rounds):
        seconds = {name: run_all(copies, x, passes[name]) for name, copies in kernels.items()}
        for name, found in ratios.items():
            found.append(seconds[name] / seconds["ours"])
    return {name: statistics.median(found) for name, found in ratios.items()}


def run(contest: Contest, num_rounds: int) -> Iterator[dict[str, Any]]:
    """A result for each kernel. The head is never computed for a whole prompt."""
    assert is_invariant(contest, contest.ours[0])
    num_rows = [M for M in NUM_ROWS if M <= 32 or not contest.name.startswith("head")]
    times = {M: relative_times(contest, M, num_rounds) for M in num_rows}
    for name, copies in contest.others.items():
        ratios = {M: round(times[M][name], 3) for M in num_rows}
        invariant = is_invariant(contest, copies[0])
        yield {"contest": contest.name, "kernel": name, "invariant": invariant, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="run only the products with this in their name")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = []
    columns = ("", "kernel", "batch-invariant", *(f"M = {M}" for M in NUM_ROWS))
    sys.stdout.write(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
    with torch.inference_mode():
        for contest in chain(attention_contests(), linear_contests()):
            for result in run(contest, options.rounds) if options.only in contest.name else ():
                cells = (f"{result['ratios'][M]:.2f}" if M in result["ratios"] else "" for M in NUM_ROWS)
                invariant = "yes" if result["invariant"] else "no"
                sys.stdout.write(f"| {result['contest']} | {result['kernel']} | {invariant} | {' | '.join(cells)} |\n")
                sys.stdout.flush()
                results.append(result)
    sys.stdout.write(json.dumps({"threads": options.threads, "rounds": options.rounds, "results": results}) + "\n")


if __name__ == "__main__":
    main()
