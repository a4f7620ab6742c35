"""The loops with which `harvest.py` compares: activations with transformers and with TransformerLens.

This file runs in the interpreter of the library and does not need Forwardscope:

    python tests/benchmarks/harvest_peers.py {transformers,transformer_lens} DIRECTORY THREADS DTYPE CLOCK

It reads token ids (contexts, tokens) as JSON from standard input, and writes a line of JSON: the seconds for the
residual after the last block, and for those of all blocks. Each context is a pass, and rows are stored in
safetensors files of 64 contexts.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONTEXTS_PER_FILE = 64
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Pass = Callable[[Tensor], dict[str, Tensor]]
"""ids (1, T) -> the rows of each stage (T, C)"""


def transformers(directory: str, dtype: torch.dtype) -> dict[str, Pass]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def run(ids: Tensor, layers: slice) -> dict[str, Tensor]:
        states = model(ids, output_hidden_states=True).hidden_states[1:]
        return {str(layer): states[layer][0] for layer in range(len(states))[layers]}

    return {"last": lambda ids: run(ids, slice(-1, None)), "all": lambda ids: run(ids, slice(None))}


def transformer_lens(directory: str, dtype: torch.dtype) -> dict[str, Pass]:
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(directory, device="cpu", dtype=dtype)
    last = f"blocks.{bridge.cfg.n_layers - 1}.hook_resid_post"

    def run(ids: Tensor, wants: Callable[[str], bool]) -> dict[str, Tensor]:
        _, cache = bridge.run_with_cache(ids, names_filter=wants)
        return {name: cache[name][0] for name in cache.keys() if wants(name)}  # noqa: SIM118 (no mapping)

    return {
        "last": lambda ids: run(ids, lambda name: name == last),
        "all": lambda ids: run(ids, lambda name: name.endswith("hook_resid_post")),
    }


LIBRARIES = {"transformers": (transformers, "transformers"), "transformer_lens": (transformer_lens, "transformer-lens")}


@torch.no_grad()
def harvest(run: Pass, contexts: list[list[int]], directory: Path, clock: str) -> float:
    """Store the rows of all contexts, and return the seconds."""
    start = CLOCKS[clock]()
    for first in range(0, len(contexts), CONTEXTS_PER_FILE):
        found = [run(torch.tensor([ids])) for ids in contexts[first : first + CONTEXTS_PER_FILE]]
        rows = {name: torch.cat([each[name] for each in found]) for name in found[0]}
        save_file(rows, directory / f"{first}.safetensors")
    return CLOCKS[clock]() - start


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # keeps the output of libraries away from the answer
    name, directory, threads, dtype, clock = sys.argv[1:]
    torch.set_num_threads(int(threads))
    load, package = LIBRARIES[name]
    contexts = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        passes = load(directory, getattr(torch, dtype))
        answer = {"versions": {used: version(used) for used in (package, "torch")}, "seconds": {}}
        with tempfile.TemporaryDirectory() as temporary:
            for stages, run in passes.items():
                harvest(run, contexts[:1], Path(temporary), clock)
                answer["seconds"][stages] = harvest(run, contexts, Path(temporary), clock)
    except Exception as error:  # whatever the library raises: it is skipped
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
