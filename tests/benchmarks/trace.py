"""Compare the time of `POST /forward` with that of a plain forward pass, and with other tools for the same purpose.

    python -m tests.benchmarks.trace [--tokens 16 64 128 512] [--rounds 5] [--threads 2] [--only plain interp_engine]
        [--kernels torch] [--peer-python PYTHON]

All use the same random weights of GPT-2 small, in float32. These are measured:

- our network in this process, without tracing and traced as the service traces it
- our service over HTTP
- TransformerLens: `run_with_cache`
- nnsight: saving the inputs and outputs of its modules (attention scores are not among them)
- the server of interp-engine over HTTP: capturing every point that it has for this network; a tensor with two names
  is captured once. `/forward, shared` returns the same tensors; the other measures of `/forward` return more stages

Answers have no predictions (`top_k` 0). HTTP requests are timed to the last byte, and answers are not decoded. Figures
are medians over alternating rounds. Ratios are those of measurements that follow each other, or of the same round.
Whatever is refused, takes too long or is not installed is skipped and reported. The environment of `--peer-python`
needs:

    pip install torch transformer-lens nnsight 'interp-engine[server]'
"""

import argparse
import json
import os
import platform
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from model.analysis.forward_trace import TracedPass
from model.network.transformer import Transformer
from model.tracing.selection import Selection
from model.tracing.stages import sizes_of, stages_of
from service.loading import load_model
from service.settings import Settings
from tests.benchmarks.serve import end_as_a_whole, serving
from tests.benchmarks.trace_peers import CHECKED, LIBRARIES, Measure, Skipped, interp_engine, library, posted

ONLY = ("plain", "forward", *LIBRARIES, "interp_engine")
MAX_SECONDS = 20.0  # a measure that takes longer is skipped
MAX_RESPONSE_BYTES = 2 << 30
PAIRS = 10  # per round, of a plain pass and a traced one
VOCAB, WIDTH, LAYERS, POSITIONS = 50257, 768, 12, 1024
SHAPE = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_positions": POSITIONS,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
# The points of interp-engine and our stages. Its attn_out_post and mlp_out_post equal attn_out and mlp_out here.
ONCE = {"embeddings": "embed", "final_norm": "ln_final.out", "lm_head": "logits"}
A_LAYER = {
    "resid_pre": "resid_pre",
    "attn_in": "ln1.out",
    "value": "attn.v",
    "attn_scores": "attn.attn_scores",
    "attn_probs": "attn.pattern",
    "z": "attn.z",
    "attn_out": "attn_out",
    "resid_mid": "resid_mid",
    "mlp_in": "ln2.out",
    "mlp_pre": "mlp.pre",
    "mlp_act": "mlp.post",
    "mlp_out": "mlp_out",
    "resid_post": "resid_post",
}
POINTS = [*ONCE, *(f"{point}.{layer}" for layer in range(LAYERS) for point in A_LAYER)]
SHARED = [*ONCE.values(), *(f"blocks.*.{stage}" for stage in A_LAYER.values())]
PLAIN, SUMMARIES, CAPTURE = "ours, plain", "ours, trace of summaries", "interp-engine, /v1/capture"

Taken = dict[str, list[tuple[float, int]]]
"""for each measure: the seconds and bytes of each round"""
Figures = dict[str, dict[str, float]]
"""for each measure or ratio: median, min, max, ..."""


def write_random_checkpoint(directory: Path) -> None:
    """Write random weights of GPT-2 small in Hugging Face layout, and a tokenizer, which interp-engine needs."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 0.02 * torch.randn(rows, columns, generator=generator)

    weights = {"wte.weight": matrix(VOCAB, WIDTH), "wpe.weight": matrix(POSITIONS, WIDTH)}
    widths = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    for of in (f"h.{layer}" for layer in range(LAYERS)):
        weights |= {f"{of}.{name}.weight": matrix(i * WIDTH, o * WIDTH) for name, (i, o) in widths.items()}
        weights |= {f"{of}.{name}.bias": torch.zeros(o * WIDTH) for name, (_, o) in widths.items()}
    for norm in ("ln_f", *(f"h.{layer}.ln_{i}" for layer in range(LAYERS) for i in (1, 2))):
        weights |= {f"{norm}.weight": torch.ones(WIDTH), f"{norm}.bias": torch.zeros(WIDTH)}
    named = {f"transformer.{name}": tensor for name, tensor in weights.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    words = {f"token{token_id}": token_id for token_id in range(VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="token0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(SHAPE))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "token0", "unk_token": "token0"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))


def in_process(model: Transformer) -> dict[str, Measure]:
    """Measures of the network alone and traced, without HTTP or encoding."""

    @torch.inference_mode()
    def plain(ids: list[int]) -> tuple[float, int]:
        start = time.perf_counter()
        model(torch.tensor([ids]))
        return time.perf_counter() - start, 0

    def traced(selection: Selection) -> Measure:
        def measure(ids: list[int]) -> tuple[float, int]:
            start = time.perf_counter()
            found = TracedPass(model, ids, [*ids[1:], None], selection, sizes_of(model.config, len(ids))).compute()
            seconds = time.perf_counter() - start
            return seconds, sum(stage.values.nbytes for stage in found.stages if stage.values is not None)

        return measure

    stages = stages_of(model.config)
    return {
        PLAIN: plain,
        SUMMARIES: traced(Selection(stages=stages, detail="summary")),
        "ours, trace of values": traced(Selection(stages=stages, detail="values")),
    }


def forward(port: int) -> dict[str, Measure]:
    """Measures of `POST /forward`."""
    bodies: dict[str, dict[str, Any]] = {
        "loss alone": {"detail": "none", "stages": ["loss"]},
        "summaries": {"detail": "summary"},
        "values as JSON": {"detail": "values"},
        "values as base64": {"detail": "values", "encoding": "base64"},
        "values as safetensors": {"accept": "x-safetensors"},
        "shared as safetensors": {"accept": "x-safetensors", "stages": SHARED},
    }
    return {f"/forward, {name}": posted(port, "/forward", "prompt", **body, top_k=0) for name, body in bodies.items()}


class Subjects:
    """Everything that is measured, with versions and differences between logits; and what is skipped, with reasons."""

    def __init__(self, stack: ExitStack, arguments: argparse.Namespace, directory: Path) -> None:
        self.measures: dict[str, Measure] = {}
        self.versions: dict[str, dict[str, str]] = {"ours": {"torch": torch.__version__}}
        self.differences: dict[str, float] = {}
        self.skipped: dict[str, str] = {}
        settings = Settings(model=str(directory), device="cpu", dtype="float32", kernels=arguments.kernels)
        checkpoint = load_model(settings)  # like the service
        assert checkpoint is not None
        with torch.inference_mode():
            largest = checkpoint.model(torch.tensor([CHECKED]))[0, -1].max().item()
        if "plain" in arguments.only:
            self.measures |= in_process(checkpoint.model)
        if "forward" in arguments.only:
            options = [
                "--dtype=float32",
                f"--kernels={arguments.kernels}",
                f"--max-response-bytes={MAX_RESPONSE_BYTES}",
            ]
            self.measures |= forward(stack.enter_context(serving(directory, arguments.threads, *options)))
        peer_arguments = (arguments.peer_python, directory, arguments.threads)
        for name in (name for name in ONLY[2:] if name in arguments.only):
            is_library = name in LIBRARIES
            start = library(name, *peer_arguments) if is_library else interp_engine(POINTS, *peer_arguments)
            try:
                peer = stack.enter_context(start)
            except (Skipped, OSError) as error:
                self.skipped[name] = str(error)
                continue
            self.measures |= peer.measures
            self.versions[name] = peer.versions
            self.differences[name] = abs(peer.largest_logit - largest)


def random_ids(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(VOCAB) for _ in range(count)]


def alternate(subjects: Subjects, num_tokens: int, rounds: int) -> Taken:
    """Take every measure once to warm up, then in rounds. A measure that fails or takes too long is skipped."""
    generator = random.Random(num_tokens)
    taken: Taken = {}
    for name, measure in subjects.measures.items():
        try:
            seconds, _ = measure(random_ids(generator, num_tokens))
            if seconds > MAX_SECONDS:
                raise Skipped(f"takes {seconds:.0f} s")
            taken[name] = []
        except (Skipped, OSError) as error:
            subjects.skipped[f"{name}, {num_tokens} tokens"] = str(error)
    for _ in range(rounds):
        ids = random_ids(generator, num_tokens)
        for name, of in taken.items():
            of.append(subjects.measures[name](ids))
    return taken


def spread(values: Sequence[float], digits: int) -> dict[str, float]:
    named = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in named.items()}


def figures_of(taken: Taken) -> Figures:
    """Milliseconds, and megabytes of the tensors or answers."""
    return {
        name: spread([1e3 * seconds for seconds, _ in of], 1) | {"mb": round(of[-1][1] / 1e6, 3)}
        for name, of in taken.items()
    }


def ratios_of(subjects: Subjects, taken: Taken, num_tokens: int, pairs: int) -> Figures:
    ratios = {}
    if SUMMARIES in taken:
        ids, end = random_ids(random.Random(0), num_tokens), time.perf_counter() + MAX_SECONDS
        plain, summaries = subjects.measures[PLAIN], subjects.measures[SUMMARIES]
        found = [summaries(ids)[0] / plain(ids)[0] for _ in range(pairs) if time.perf_counter() < end]
        ratios[f"{SUMMARIES} over plain"] = spread(found, 3)
    for name in ("/forward, shared as safetensors", "/forward, values as safetensors"):
        if name in taken and CAPTURE in taken:
            both = zip(taken[name], taken[CAPTURE], strict=True)
            ratios[f"{name} over interp-engine"] = spread([ours / theirs for (ours, _), (theirs, _) in both], 3)
    return ratios


def cpu() -> str:
    path = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", path.read_text()) if path.exists() else None
    return f"{named[1] if named else platform.machine()}, {os.cpu_count()} cores"


def show(num_tokens: int, figures: Figures, ratios: Figures) -> None:
    sys.stdout.write(f"{f'{num_tokens} tokens':44} {'median ms':>10} {'min':>10} {'max':>10} {'MB':>10}\n")
    for name, of in figures.items():
        sys.stdout.write(f"{name:44} {of['median']:10.1f} {of['min']:10.1f} {of['max']:10.1f} {of['mb']:10.3f}\n")
    for name, of in ratios.items():
        sys.stdout.write(f"{name:55} {of['median']:.3f} ({of['min']:.3f}-{of['max']:.3f})\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 128, 512], help="lengths of prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each network")
    parser.add_argument("--only", choices=ONLY, nargs="+", default=list(ONLY))
    parser.add_argument("--kernels", choices=["auto", "torch"], default="auto", help="kernels of our network")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the packages of the peers")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    end_as_a_whole()
    figures: dict[int, Figures] = {}
    ratios: dict[int, Figures] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        write_random_checkpoint(Path(temporary))
        subjects = Subjects(stack, arguments, Path(temporary))
        for count in arguments.tokens:
            taken = alternate(subjects, count, arguments.rounds)
            figures[count] = figures_of(taken)
            ratios[count] = ratios_of(subjects, taken, count, PAIRS * arguments.rounds)
            show(count, figures[count], ratios[count])
    for name, reason in subjects.skipped.items():
        sys.stdout.write(f"skipped: {name}: {reason}\n")
    result = {
        "benchmark": "trace",
        "model": "random GPT-2 small",
        "dtype": "float32",
        "kernels": arguments.kernels,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "cpu": cpu(),
        "versions": subjects.versions,
        "largest_logit_differs_by": subjects.differences,
        "milliseconds": figures,
        "ratios": ratios,
        "skipped": subjects.skipped,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
