"""The loops with which `harvest.py` compares: activations with transformers, TransformerLens and SAELens.

This file runs in the interpreter of the library and does not need Forwardscope:

    python tests/benchmarks/harvest_peers.py {transformers,transformer_lens,sae_lens} DIRECTORY THREADS DTYPE CLOCK

It reads token ids (contexts, tokens) as JSON from standard input, and writes a line of JSON: the seconds for the
residual after the last block, and for those of all blocks, which the runner of SAELens does not store. Each context is
a pass, and rows are stored in safetensors files of 64 contexts, by SAELens in a data set of Arrow.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONTEXTS_PER_FILE = 64
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Pass = Callable[[Tensor], dict[str, Tensor]]
"""ids (1, T) -> the rows of each stage (T, C)"""
Harvest = Callable[[list[list[int]], Path], None]
"""Stores the rows of contexts in a directory that is empty."""


def transformers(directory: str, dtype: torch.dtype) -> dict[str, Harvest]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def run(ids: Tensor, layers: slice) -> dict[str, Tensor]:
        states = model(ids, output_hidden_states=True).hidden_states[1:]
        return {str(layer): states[layer][0] for layer in range(len(states))[layers]}

    layers = {"last": slice(-1, None), "all": slice(None)}
    return {kind: partial(store, partial(run, layers=each)) for kind, each in layers.items()}


def transformer_lens(directory: str, dtype: torch.dtype) -> dict[str, Harvest]:
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(directory, device="cpu", dtype=dtype)
    last = f"blocks.{bridge.cfg.n_layers - 1}.hook_resid_post"

    def run(ids: Tensor, wants: Callable[[str], bool]) -> dict[str, Tensor]:
        _, cache = bridge.run_with_cache(ids, names_filter=wants)
        return {name: cache[name][0] for name in cache.keys() if wants(name)}  # noqa: SIM118 (no mapping)

    wanted = {"last": lambda name: name == last, "all": lambda name: name.endswith("hook_resid_post")}
    return {kind: partial(store, partial(run, wants=wants)) for kind, wants in wanted.items()}


def sae_lens(directory: str, dtype: torch.dtype) -> dict[str, Harvest]:
    import sae_lens.cache_activations_runner as runner
    from datasets import Dataset
    from sae_lens import CacheActivationsRunnerConfig
    from sae_lens.load_model import HookedProxyLM
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    hook = f"transformer.h.{model.config.n_layer - 1}"
    hooked = HookedProxyLM(model, SimpleNamespace(bos_token_id=0), hook_names=[hook])  # the contexts are ids
    runner.load_model = lambda **_: hooked

    def run(contexts: list[list[int]], out: Path) -> None:
        num_tokens = len(contexts) * len(contexts[0])
        options = CacheActivationsRunnerConfig(
            dataset_path="ids",
            model_name="gpt2",
            model_class_name="AutoModelForCausalLM",
            model_batch_size=1,
            hook_name=hook,
            d_in=model.config.n_embd,
            training_tokens=num_tokens,
            context_size=len(contexts[0]),
            new_cached_activations_path=str(out),
            shuffle=False,
            dtype=str(dtype).removeprefix("torch."),
            device="cpu",
            buffer_size_gb=num_tokens * model.config.n_embd * dtype.itemsize / 1e9,
            prepend_bos=False,
            streaming=False,
        )
        runner.CacheActivationsRunner(options, Dataset.from_dict({"input_ids": contexts})).run()

    return {"last": run}


LIBRARIES = {
    "transformers": (transformers, "transformers"),
    "transformer_lens": (transformer_lens, "transformer-lens"),
    "sae_lens": (sae_lens, "sae-lens"),
}


@torch.no_grad()
def store(run: Pass, contexts: list[list[int]], directory: Path) -> None:
    for first in range(0, len(contexts), CONTEXTS_PER_FILE):
        found = [run(torch.tensor([ids])) for ids in contexts[first : first + CONTEXTS_PER_FILE]]
        rows = {name: torch.cat([each[name] for each in found]) for name in found[0]}
        save_file(rows, directory / f"{first}.safetensors")


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # keeps the output of libraries away from the answer
    name, directory, threads, dtype, clock = sys.argv[1:]
    torch.set_num_threads(int(threads))
    load, package = LIBRARIES[name]
    contexts = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        harvests = load(directory, getattr(torch, dtype))
        answer = {"versions": {used: version(used) for used in (package, "torch")}, "seconds": {}}
        for kind, harvest in harvests.items():
            for some in (contexts[:1], contexts):  # the first time without a clock
                with tempfile.TemporaryDirectory() as temporary:
                    start = CLOCKS[clock]()
                    harvest(some, Path(temporary))
                    answer["seconds"][kind] = CLOCKS[clock]() - start
    except Exception as error:  # whatever the library raises: it is skipped
        answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
