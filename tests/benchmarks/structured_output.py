"""Measure what structured output costs: tokens per second with a JSON schema on every sequence, and without any.

    python -m tests.benchmarks.structured_output [--streams 8] [--tokens 96] [--rounds 5] [--threads 2]

SmolLM2-135M generates all sequences together, in bfloat16 and on our own kernels where there are any. The two kinds
take turns, run by run: `constrained` requests have a JSON schema, and `unconstrained` ones do not. The schema asks for
a list of more objects than fit, so that every sequence generates the same number of tokens in both. `greedy` takes the
most likely tokens, and `sampled` draws with temperature 1. Drafts are off, as they depend on the text.

After a warm-up run of each, `ratio` is the median of constrained tokens per second divided by that of unconstrained
ones. `compile_ms` is the median time to compile the schema for one request, and `mask_us` that to fill one mask.
"""

import argparse
import json
import statistics
import sys
import time

import torch

from model.checkpoints.load import load_checkpoint
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.ops.torch_ops import TORCH
from model.text.constraint import Constraint, GrammarState, token_masks
from model.text.grammar.grammars import Grammars
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams
from tests.benchmarks.trace import cpu
from tests.published_models import smollm2

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "format": "email"},
            "role": {"enum": ["admin", "editor", "reader"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
            "active": {"type": "boolean"},
        },
        "required": ["name", "age", "email", "role", "tags", "active"],
        "additionalProperties": False,
    },
}
PROMPT = "Here is a list of persons in JSON, number {index}:\n"


def requests(
    prompts: list[list[int]], num_tokens: int, temperature: float, constraint: Constraint | None
) -> list[Request]:
    params = [
        GenerationParams(
            max_tokens=num_tokens,
            constraint=constraint,
            sampling=SamplingParams(temperature=temperature, seed=index),
        )
        for index in range(len(prompts))
    ]
    return [Request(id=str(i), prompt_ids=ids, params=params[i]) for i, ids in enumerate(prompts)]


def tokens_per_second(engine: Engine, made: list[Request], num_tokens: int) -> float:
    """Run all requests; only steps in which every sequence gets one token are counted."""
    for request in made:
        engine.add(request)
    count, seconds, num_generated = 0, 0.0, 0
    while engine.has_work:
        step = engine.step()
        if step.num_sequences == step.num_tokens == len(made):
            count, seconds = count + step.num_tokens, seconds + step.seconds
        num_generated += sum(len(output.tokens) for output in step.outputs)
    assert num_generated == len(made) * num_tokens, "a sequence ended early"
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96, help="tokens that each sequence generates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = load_checkpoint(str(smollm2()), dtype="bfloat16", kernels="auto")
    tokenizer, vocab_size = checkpoint.tokenizer, checkpoint.model.config.vocab_size
    assert tokenizer is not None
    grammars = Grammars(tokenizer, vocab_size)
    compile_seconds = []
    for _ in range(11):
        begun = time.perf_counter()
        constraint = grammars.json_schema("json", SCHEMA)
        compile_seconds.append(time.perf_counter() - begun)
    prompts = [tokenizer.encode(PROMPT.format(index=index)) for index in range(arguments.streams)]
    config = EngineConfig(max_sequences=arguments.streams, cache_bytes=1 << 28, speculates=False)
    engine = Engine(checkpoint.model, tokenizer, config)
    figures: dict[str, dict[str, float]] = {}
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        rates: dict[bool, list[float]] = {False: [], True: []}
        for run in range(arguments.rounds + 1):
            for is_constrained in (False, True):
                made = requests(prompts, arguments.tokens, temperature, constraint if is_constrained else None)
                rate = tokens_per_second(engine, made, arguments.tokens)
                if run > 0:
                    rates[is_constrained].append(rate)
        without, with_schema = statistics.median(rates[False]), statistics.median(rates[True])
        figures[kind] = {
            "unconstrained": round(without, 1),
            "constrained": round(with_schema, 1),
            "ratio": round(with_schema / without, 3),
        }
        sys.stdout.write(f"{kind:8} {without:10.1f} {with_schema:10.1f} tokens/s {with_schema / without:8.3f}\n")
        sys.stdout.flush()
    result = {
        "benchmark": "structured output",
        "model": "SmolLM2-135M-Instruct",
        "dtype": "bfloat16",
        "kernels": checkpoint.model.backend is not TORCH,
        "threads": arguments.threads,
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        "cpu": cpu(),
        "torch": torch.__version__,
        "compile_ms": round(1e3 * statistics.median(compile_seconds), 2),
        "mask_us": round(1e6 * mask_seconds(constraint, tokenizer.encode('[{"name": "Ann'), vocab_size), 1),
        "figures": figures,
    }
    sys.stdout.write(json.dumps(result) + "\n")


def mask_seconds(constraint: Constraint, ids: list[int], vocab_size: int) -> float:
    """The median time of one mask, over the states of a text."""
    seconds = []
    for _ in range(50):
        state = GrammarState(constraint)
        for token_id in ids:
            begun = time.perf_counter()
            token_masks([(state, ())], vocab_size)
            seconds.append(time.perf_counter() - begun)
            state.append(token_id)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
