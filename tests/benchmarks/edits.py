"""The cost of edits: tokens per second of decoding streams, edited and plain.

    python -m tests.benchmarks.edits [MODEL] [--streams 8] [--tokens 64] [--dtype bfloat16]

MODEL is a checkpoint directory, or `gpt2` for a network of GPT-2's 124M shape with random weights; by default
SmolLM2-135M-Instruct, which is downloaded. Two engines with the same network take steps in turn, one of them with
edited streams, so that both meet the same load of the machine. Each case is measured in several rounds. The last line
is the result as JSON: for each case the median tokens per second of plain and of edited streams, and the median ratio.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from model.checkpoints.load import load_checkpoint
from model.engine.cache import bytes_of_token
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams
from model.tracing.edits import Edit, plan_edits
from model.tracing.stages import stages_of
from tests.published_models import smollm2
from tests.tiny import GPT2

NUM_PROMPT, ROUNDS = 16, 5
GPT2_SMALL = replace(
    GPT2, vocab_size=50257, d_model=768, num_layers=12, num_heads=12, d_mlp=3072, max_positions=1024, norm_eps=1e-5
)
Case = Sequence[Sequence[Edit]]
"""The edits of stream i are entry i % length."""


def random_gpt2(dtype: str) -> Transformer:
    model = Transformer(GPT2_SMALL)
    model.initialize(torch.Generator().manual_seed(0))
    return prepare_model(GPT2_SMALL, model.to(getattr(torch, dtype)).state_dict())


def cases_of(model: Transformer) -> Mapping[str, Case]:
    layer, size = model.config.num_layers // 2, model.config.d_model
    one, every = f"blocks.{layer}.resid_post", "blocks.*.resid_post"
    vectors = [torch.randn(size, generator=torch.Generator().manual_seed(seed)) / 10 for seed in range(4)]
    add = [[Edit(stage=one, op="add", vector=vector)] for vector in vectors]
    return {
        "add to one layer": add[:1],
        "add to one layer, every other stream": [add[0], []],
        "four vectors": add,
        "remove a direction from every layer": [[Edit(stage=every, op="project", vector=vectors[0])]],
        "zero a head": [[Edit(stage=f"blocks.{layer}.attn.z", op="zero", heads=[0])]],
        "noise on one layer, beside the recording": [[Edit(stage=one, op="noise", std=0.01)]],
    }


def add_streams(engine: Engine, case: Case, num_streams: int, num_tokens: int) -> None:
    """Add streams, and step until all of them decode."""
    config = engine._model.config
    params = GenerationParams(max_tokens=num_tokens, sampling=SamplingParams(temperature=1.0, seed=1))
    for index in range(num_streams):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(config.vocab_size, (NUM_PROMPT,), generator=generator).tolist()
        edits = case[index % len(case)]
        plan = plan_edits(edits, config, stages_of(config), ids, NUM_PROMPT + num_tokens)
        engine.add(Request(id=str(index), prompt_ids=ids, params=params, edits=plan.bind() if edits else None))
    started: set[str] = set()
    while len(started) < num_streams:
        started |= {output.request_id for output in engine.step().outputs}


def measure(plain: Engine, edited: Engine, case: Case, num_streams: int, num_tokens: int) -> tuple[float, float]:
    """Tokens per second of plain and of edited streams, whose steps alternate."""
    add_streams(plain, [[]], num_streams, num_tokens)
    add_streams(edited, case, num_streams, num_tokens)
    seconds, counts = {plain: 0.0, edited: 0.0}, {plain: 0, edited: 0}
    for index in range(num_tokens - 2):
        for engine in (plain, edited) if index % 2 else (edited, plain):
            begun = time.perf_counter()
            counts[engine] += sum(len(output.tokens) for output in engine.step().outputs)
            seconds[engine] += time.perf_counter() - begun
    for engine in (plain, edited):
        while engine.has_work:
            engine.step()
    return counts[plain] / seconds[plain], counts[edited] / seconds[edited]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    if options.model == "gpt2":
        model = random_gpt2(options.dtype)
    else:
        model = load_checkpoint(options.model or str(smollm2()), dtype=options.dtype, kernels="auto").model
    config = EngineConfig(cache_bytes=4096 * bytes_of_token(model.config, model.embed.weight.dtype), speculates=False)
    plain, edited = Engine(model, None, config), Engine(model, None, config)
    cases: dict[str, Case] = {"none": [[]]} | dict(cases_of(model))
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(options.rounds + 1):
        for case, edits in cases.items():
            found[case].append(measure(plain, edited, edits, options.streams, options.tokens))
    measured = {case: pairs[1:] for case, pairs in found.items()}  # the first round records steps
    result = {
        "benchmark": "edits",
        "model": options.model or "SmolLM2-135M-Instruct",
        "dtype": options.dtype,
        "streams": options.streams,
        "threads": torch.get_num_threads(),
        "plain": {case: round(median(plain for plain, _ in pairs), 1) for case, pairs in measured.items()},
        "edited": {case: round(median(edited for _, edited in pairs), 1) for case, pairs in measured.items()},
        "ratio": {
            case: round(median(edited / plain for plain, edited in pairs), 3) for case, pairs in measured.items()
        },
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
