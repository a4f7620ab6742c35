"""What edits cost: tokens per second of decoding streams, edited and plain.

    python -m tests.benchmarks.edits [MODEL] [--streams 8] [--tokens 128] [--dtype bfloat16]

MODEL is a checkpoint directory, or `gpt2` for a network of GPT-2's 124M shape with random weights; by default
SmolLM2-135M-Instruct, which is downloaded. A round runs every case once, each between two runs of plain streams, whose
mean it is compared with. The last line is the result as JSON: the median tokens per second of each case, and the median
of its ratios to the plain streams of its own round.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import torch

from model.checkpoints.load import load_checkpoint
from model.config import ModelConfig
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

NUM_PROMPT, ROUNDS = 16, 7
GPT2 = ModelConfig(
    vocab_size=50257,
    d_model=768,
    num_layers=12,
    num_heads=12,
    d_mlp=3072,
    max_positions=1024,
    norm="layer",
    norm_eps=1e-5,
    positions="learned",
    activation="gelu_tanh",
    gated=False,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
)
Case = Sequence[Sequence[Edit]]
"""The edits of stream i are entry i % length."""


def random_gpt2(dtype: str) -> Transformer:
    model = Transformer(GPT2)
    model.initialize(torch.Generator().manual_seed(0))
    return prepare_model(GPT2, model.to(getattr(torch, dtype)).state_dict())


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


def measure(engine: Engine, case: Case, num_streams: int, num_tokens: int) -> float:
    """Tokens per second, from the first token of all streams on."""
    config = engine._model.config
    params = GenerationParams(max_tokens=num_tokens, sampling=SamplingParams(temperature=1.0, seed=1))
    for index in range(num_streams):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(config.vocab_size, (NUM_PROMPT,), generator=generator).tolist()
        edits = case[index % len(case)] if case else ()
        plan = plan_edits(edits, config, stages_of(config), ids, NUM_PROMPT + num_tokens)
        engine.add(Request(id=str(index), prompt_ids=ids, params=params, edits=plan.bind() if edits else None))
    counts = dict.fromkeys(map(str, range(num_streams)), 0)
    begun, at_start = 0.0, 0
    while engine.has_work:
        for output in engine.step().outputs:
            counts[output.request_id] = output.num_generated
        if not begun and all(counts.values()):
            begun, at_start = time.perf_counter(), sum(counts.values())
    return (sum(counts.values()) - at_start) / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    if options.model == "gpt2":
        model = random_gpt2(options.dtype)
    else:
        model = load_checkpoint(options.model or str(smollm2()), dtype=options.dtype).model
    num_bytes = 8192 * bytes_of_token(model.config, model.embed.weight.dtype)
    engine = Engine(model, None, EngineConfig(cache_bytes=num_bytes))
    cases = cases_of(model)
    speeds: dict[str, list[float]] = {case: [] for case in cases}
    ratios: dict[str, list[float]] = {case: [] for case in cases}
    plain_speeds: list[float] = []
    for round_index in range(options.rounds + 1):
        plain = measure(engine, (), options.streams, options.tokens)
        for case, edits in cases.items():
            speed = measure(engine, edits, options.streams, options.tokens)
            after = measure(engine, (), options.streams, options.tokens)
            if round_index:  # the first round records steps
                speeds[case].append(speed)
                ratios[case].append(speed / ((plain + after) / 2))
                plain_speeds.append(after)
            plain = after
    result = {
        "benchmark": "edits",
        "model": options.model or "SmolLM2-135M-Instruct",
        "dtype": options.dtype,
        "streams": options.streams,
        "plain_tokens_per_second": round(statistics.median(plain_speeds), 1),
        "tokens_per_second": {case: round(statistics.median(found), 1) for case, found in speeds.items()},
        "ratio": {case: round(statistics.median(found), 3) for case, found in ratios.items()},
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
