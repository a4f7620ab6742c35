"""Compare the speed of harvesting with that of plain passes, and with the loops of other libraries.

    python -m tests.benchmarks.harvest [--contexts 24] [--tokens 512] [--rounds 3] [--dtype float32] [--threads 2]
        [--clock wall] [--peer-python PYTHON]

All use the same random weights of GPT-2 small and the same token ids, in full contexts, and store the residual after
the last block ("last") or after every block ("all") as safetensors in the dtype of the network. These are measured, in
this order in each round:

- plain passes of our network, which compute the logits of the last position only, as a prefill does
- `harvest`
- transformers: `AutoModelForCausalLM` with `output_hidden_states=True`; TransformerLens: `run_with_cache` with
  `names_filter`; SAELens: `CacheActivationsRunner`, for the last block only. Each context is a pass, and each library
  has a process of its own

The environment of `--peer-python` needs: pip install torch transformer-lens sae-lens
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from model.analysis.harvest.harvest import HarvestOptions, harvest
from model.analysis.harvest.passes import local_model
from model.checkpoints.load import Checkpoint, load_checkpoint
from tests.benchmarks.harvest_peers import CLOCKS, LIBRARIES
from tests.benchmarks.trace import LAYERS, VOCAB, cpu, write_random_checkpoint

STAGES = {"last": f"blocks.{LAYERS - 1}.resid_post", "all": "blocks.*.resid_post"}
PEERS = Path(__file__).with_name("harvest_peers.py")


@torch.inference_mode()
def plain(checkpoint: Checkpoint, contexts: list[list[int]], clock: str) -> float:
    """The seconds of plain passes."""
    start = CLOCKS[clock]()
    for ids in contexts:
        checkpoint.model(torch.tensor([ids]), rows=[len(ids) - 1])
    return CLOCKS[clock]() - start


def harvested(checkpoint: Checkpoint, contexts: list[list[int]], stages: str, clock: str) -> float:
    options = HarvestOptions(context=len(contexts[0]), packed=False)
    with tempfile.TemporaryDirectory() as directory:
        start = CLOCKS[clock]()
        harvest(local_model(checkpoint), contexts, [stages], Path(directory) / "out", options)
        return CLOCKS[clock]() - start


def peer(name: str, python: str, directory: str, contexts: list[list[int]], options: argparse.Namespace) -> Any:
    """The answer of a library in a process of its own, for one round."""
    command = [python, str(PEERS), name, directory, str(options.threads), options.dtype, options.clock]
    done = subprocess.run(command, input=json.dumps(contexts), capture_output=True, text=True)
    return json.loads(done.stdout or '{"error": "it ended without an answer"}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: CPU seconds, on a machine that others use as well"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the packages of the peers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = random.Random(0)
    contexts = [[generator.randrange(VOCAB) for _ in range(options.tokens)] for _ in range(options.contexts)]
    seconds: dict[str, list[float]] = {}
    versions: dict[str, Any] = {"torch": torch.__version__}
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        write_random_checkpoint(Path(directory))
        checkpoint = load_checkpoint(directory, dtype=options.dtype, kernels="auto")
        plain(checkpoint, contexts[:2], options.clock)
        for _ in range(options.rounds):
            seconds.setdefault("plain passes", []).append(plain(checkpoint, contexts, options.clock))
            for kind, stages in STAGES.items():
                seconds.setdefault(f"harvest, {kind}", []).append(
                    harvested(checkpoint, contexts, stages, options.clock)
                )
            for name in LIBRARIES:
                found = peer(name, options.peer_python, directory, contexts, options)
                if "error" in found:
                    skipped[name] = found["error"]
                    continue
                versions[name] = found["versions"]
                for kind, taken in found["seconds"].items():
                    seconds.setdefault(f"{name}, {kind}", []).append(taken)
    num_tokens = options.contexts * options.tokens
    rates = {name: num_tokens / statistics.median(taken) for name, taken in seconds.items()}
    ratios = {
        f"harvest, {kind} over {other}": rates[f"harvest, {kind}"] / rates[name]
        for kind in STAGES
        for other in ("plain passes", *LIBRARIES)
        if (name := other if other == "plain passes" else f"{other}, {kind}") in rates
    }
    for name, rate in rates.items():
        sys.stdout.write(f"{name:28} {rate:8.0f} tokens/s\n")
    for name, ratio in ratios.items():
        sys.stdout.write(f"{name:44} {ratio:.2f}\n")
    for name, reason in skipped.items():
        sys.stdout.write(f"skipped: {name}: {reason}\n")
    result = {
        "benchmark": "harvest",
        "model": "random GPT-2 small",
        "dtype": options.dtype,
        "threads": options.threads,
        "clock": options.clock,
        "contexts": options.contexts,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "cpu": cpu(),
        "versions": versions,
        "tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "skipped": skipped,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
