"""Measure what stop strings cost: the time of the engine's steps with 200 of them on every sequence, and without any.

    python -m tests.benchmarks.stop_strings [--sequences 64] [--stops 200] [--length 200] [--steps 300] [--rounds 3]
        [--dtype bfloat16] [--threads 2]

The bundled model generates all sequences together. Two engines take turns, step by step: the requests of one have stop
strings, and those of the other do not. No stop string is ever found, so both generate the same text. The kinds of stop
strings:

- random: random letters and spaces.
- English: the beginning of a common phrase, followed by random letters.
- repeated letter: `b`, `ab`, `aab` and so on, in a text in which every token is `a` (because of a bias of 100).
- own text: parts of the text that the sequence will generate, each with a different last character.

After a warm-up round, all steps in which every sequence gets a token are measured. `ratio` is the median step
with stop strings divided by the median step without, over all rounds. `build_ms` is the median time to make the
parameters of one request, which includes the preparation of its stop strings.
"""

import argparse
import json
import random
import statistics
import string
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from model.checkpoints.load import BUNDLED, load_checkpoint
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.ops.torch_ops import TORCH
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams
from tests.benchmarks.trace import cpu

NUM_PROMPT = 16
ONLY_A = 65  # the token of the bundled model for the letter `a`
PHRASES = ("the ", "and ", "he said ", "it was ", "of the ", "in a ", "I ", "she had ", "to be ", ", and ", ". The ")

Stops = Callable[[int, str], list[str]]
"""(number of a sequence, the text that it will generate) -> its stop strings"""


def kinds(count: int, length: int) -> dict[str, Stops]:
    def letters(generator: random.Random, size: int) -> str:
        return "".join(generator.choices(string.ascii_letters + " ", k=size))

    def randomly(sequence: int, text: str) -> list[str]:
        generator = random.Random(sequence)
        return [letters(generator, length) for _ in range(count)]

    def like_english(sequence: int, text: str) -> list[str]:
        generator = random.Random(sequence)
        begun = (PHRASES[index % len(PHRASES)] for index in range(count))
        return [phrase + letters(generator, length - len(phrase)) for phrase in begun]

    def repeated(sequence: int, text: str) -> list[str]:
        return ["a" * (index % length) + "b" for index in range(count)]

    def own_text(sequence: int, text: str) -> list[str]:
        return [text[index : index + length - 1] + "\0" for index in range(count)]

    return {"random": randomly, "English": like_english, "repeated letter": repeated, "own text": own_text}


def requests(num_sequences: int, num_steps: int, vocab_size: int, *, only_a: bool) -> list[Request]:
    generator = random.Random(0)
    made = []
    for index in range(num_sequences):
        sampling = SamplingParams(seed=index, logit_bias={ONLY_A: 100} if only_a else {})
        ids = [generator.randrange(1, vocab_size) for _ in range(NUM_PROMPT)]
        params = GenerationParams(max_tokens=num_steps, sampling=sampling)
        made.append(Request(id=str(index), prompt_ids=ids, params=params))
    return made


def with_stops(request: Request, stops: list[str], build_seconds: list[float]) -> Request:
    begun = time.perf_counter()
    params = replace(request.params, stop=stops)
    build_seconds.append(time.perf_counter() - begun)
    return replace(request, params=params)


def take_turns(
    engines: Sequence[Engine], requests_of: Sequence[Sequence[Request]]
) -> tuple[list[list[float]], list[str]]:
    """Run all requests. Returns the seconds of each engine's full steps, and the texts of the first engine."""
    seconds: list[list[float]] = [[] for _ in engines]
    texts = dict.fromkeys((request.id for request in requests_of[0]), "")
    for engine, of_engine in zip(engines, requests_of, strict=True):
        for request in of_engine:
            engine.add(request)
    while any(engine.has_work for engine in engines):
        for index, engine in enumerate(engines):
            step = engine.step()
            if step.num_sequences == step.num_tokens == len(requests_of[index]):
                seconds[index].append(step.seconds)
            for output in step.outputs:
                assert output.end is None or output.end.finish_reason == "length", output
                if index == 0:
                    texts[output.request_id] += "".join(token.text for token in output.tokens)
    return seconds, list(texts.values())


def measure(
    engines: Sequence[Engine], plain: Sequence[Request], stops_of: Stops | None, rounds: int
) -> dict[str, float]:
    """Without `stops_of`, both engines do the same: the ratio then shows the error of measurement."""
    _, texts = take_turns(engines[:1], [plain])
    build_seconds: list[float] = []
    stopped = list(plain)
    if stops_of is not None:
        all_stops = [stops_of(index, text) for index, text in enumerate(texts)]
        stopped = [with_stops(*pair, build_seconds) for pair in zip(plain, all_stops, strict=True)]
    take_turns(engines, [plain, stopped])
    without, with_them = [], []
    for _ in range(rounds):
        (first, second), _ = take_turns(engines, [plain, stopped])
        without += first
        with_them += second
    return {
        "without_ms": round(1e3 * statistics.median(without), 3),
        "with_ms": round(1e3 * statistics.median(with_them), 3),
        "ratio": round(statistics.median(with_them) / statistics.median(without), 3),
        "build_ms": round(1e3 * statistics.median(build_seconds or [0.0]), 3),
        "steps": len(with_them),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--stops", type=int, default=200, help="stop strings per sequence")
    parser.add_argument("--length", type=int, default=200, help="characters of a stop string")
    parser.add_argument("--steps", type=int, default=300, help="tokens that each sequence generates")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = load_checkpoint(str(BUNDLED), dtype=arguments.dtype, kernels="auto")
    has_kernels = checkpoint.model.backend is not TORCH
    config = EngineConfig(max_sequences=arguments.sequences, cache_bytes=1 << 28)
    engines = [Engine(checkpoint.model, checkpoint.tokenizer, config) for _ in range(2)]
    figures: dict[str, dict[str, float]] = {}
    sys.stdout.write(f"{'stop strings':20} {'without ms':>12} {'with ms':>12} {'ratio':>8} {'build ms':>10}\n")
    wanted: dict[str, Stops | None] = {"none": None, **kinds(arguments.stops, arguments.length)}
    for name, stops_of in wanted.items():
        only_a = name == "repeated letter"
        plain = requests(arguments.sequences, arguments.steps, checkpoint.model.config.vocab_size, only_a=only_a)
        figures[name] = of = measure(engines, plain, stops_of, arguments.rounds)
        sys.stdout.write(
            f"{name:20} {of['without_ms']:12.3f} {of['with_ms']:12.3f} {of['ratio']:8.3f} {of['build_ms']:10.3f}\n"
        )
        sys.stdout.flush()
    result = {
        "benchmark": "stop strings",
        "model": "bundled",
        "dtype": arguments.dtype,
        "kernels": has_kernels,
        "threads": arguments.threads,
        "sequences": arguments.sequences,
        "stops": arguments.stops,
        "length": arguments.length,
        "cpu": cpu(),
        "torch": torch.__version__,
        "figures": figures,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
