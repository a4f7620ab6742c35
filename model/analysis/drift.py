"""Measure how far a faster setting drifts from float32, at each stage and in perplexity, and how much speed it gains.

    python -m model.analysis.drift --quantize int8 [TEXT...] [--model DIRECTORY] [--dtype bfloat16] [--kernels torch]

The error of a stage is the root mean square of the difference, divided by the root mean square of the float32 stage.
Without texts, the float32 network generates the texts itself, from fixed seeds.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch

from model.analysis.auto_quantization import resolve
from model.analysis.compare.passes import run_pass
from model.analysis.compare.stage_errors import relative_error
from model.analysis.generated_texts import generate_texts
from model.analysis.perplexity import TextScore, score_ids
from model.checkpoints.load import Checkpoint, load_checkpoint
from model.choices import Dtype, Kernels, Quantization
from model.command_line import MODEL_HELP, SHARE, Parser, one_of
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.network.transformer import Transformer
from model.text.corpus import Corpus
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams
from model.tracing.stages import stages_of

GROWTH = 2.0  # the error grows at a stage if it exceeds the largest error before the stage by this factor
NUM_COMPARED_TOKENS = 256  # the stages of at most this many tokens are compared
NUM_GENERATED_TEXTS = 4  # used if no texts are given


@dataclass(frozen=True)
class StageError:
    """The relative error of one stage.

    `error` is the root mean square of the difference, divided by the root mean square of the reference. It is NaN if
    only one of the two networks has a NaN at some entry of the stage. `is_first_growth` marks the first stage at which
    the error grows: it is more than `GROWTH` times every earlier error, and more than the rounding of the dtype.
    """

    name: str
    error: float
    is_first_growth: bool = False


def stage_errors(reference: Transformer, other: Transformer, ids: Sequence[int]) -> list[StageError]:
    """The error of `other` at every stage of a pass over `ids`, in the order of computation."""
    rounding = torch.finfo(other.embed.weight.dtype).eps
    errors, max_error, has_grown = [], 0.0, False
    names = [stage.name for stage in stages_of(reference.config)]
    stages, other_stages = (run_pass(model, ids, names).stages for model in (reference, other))
    for name in names:
        error = relative_error(stages[name], other_stages[name])
        grows = not error <= max(GROWTH * max_error, rounding)  # "not <=" is also true for NaN
        errors.append(StageError(name, error, is_first_growth=grows and not has_grown))
        has_grown = has_grown or grows
        max_error = max(max_error, error)
    return errors


@dataclass(frozen=True)
class Speed:
    """Tokens per second: `decode` while one sequence generates, `prefill` while one prompt is computed."""

    decode: float
    prefill: float


@torch.inference_mode()
def measure_speed(model: Transformer, num_in: int = 256, num_out: int = 64) -> Speed:
    """The best of three requests with `num_in` prompt tokens and `num_out` generated tokens."""
    num_in = min(num_in, model.config.max_positions - num_out)
    engine = Engine(model, None, EngineConfig(cache_bytes=1 << 28, speculates=False))
    prefills, decodes = [], []
    for attempt in range(3):
        ids = torch.randint(model.config.vocab_size, (num_in,), generator=torch.Generator().manual_seed(attempt))
        params = GenerationParams(max_tokens=num_out, sampling=SamplingParams(temperature=0))
        engine.add(Request(id="speed", prompt_ids=ids.tolist(), params=params))
        seconds = []
        while engine.has_work:
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
        prefills.append(num_in / sum(seconds[: -(num_out - 1)]))
        decodes.append((num_out - 1) / sum(seconds[-(num_out - 1) :]))
    return Speed(max(decodes), max(prefills))


def report(errors: Sequence[StageError], scores: Sequence[TextScore], speeds: Sequence[Speed]) -> str:
    """The text to print. `scores` and `speeds` are those of float32, then those of the faster setting."""
    lines = [f"{'stage':32} error"]
    lines += [f"{e.name:32} {e.error:.2e}{'  <- grows here' if e.is_first_growth else ''}" for e in errors]
    if not any(e.is_first_growth for e in errors):
        lines.append("the error grows at no stage")
    reference, other = scores
    change = 100 * math.expm1(other.nats_per_token - reference.nats_per_token)
    lines.append(
        f"perplexity of {reference.num_tokens} tokens: {reference.perplexity:.3f} and {other.perplexity:.3f} "
        f"({change:+.3f} %)"
    )
    for name, field in (("one stream", "decode"), ("one prompt", "prefill")):
        slow, fast = (getattr(speed, field) for speed in speeds)
        lines.append(f"{name}, tokens/s: {slow:.1f} and {fast:.1f} ({fast / slow:.2f} times)")
    return "\n".join(lines)


def make_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("texts", nargs="*", type=Path)
    parser.add_argument("--model", default="bundled", help=MODEL_HELP)
    parser.add_argument("--dtype", default="bfloat16", type=one_of(*get_args(Dtype)), help=", ".join(get_args(Dtype)))
    quantizations = get_args(Quantization)
    parser.add_argument("--quantize", default="none", type=one_of(*quantizations), help=", ".join(quantizations))
    parser.add_argument("--kernels", default="auto", type=one_of(*get_args(Kernels)), help="of both networks")
    parser.add_argument("--held-out", type=SHARE, default=1.0, help="which share of each text to read, from its end")
    return parser


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    try:
        reference = load_checkpoint(options.model, dtype="float32", kernels=options.kernels)
        quantize = resolve(options.model, options.quantize, None, options.kernels)
        other = load_checkpoint(options.model, dtype=options.dtype, quantize=quantize, kernels=options.kernels)
        texts = read_texts(reference, options.texts, options.held_out)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    longest = max(texts, key=len)
    num_compared = min(NUM_COMPARED_TOKENS, reference.model.config.max_positions)
    errors = stage_errors(reference.model, other.model, longest[:num_compared])
    scores = [score_ids(checkpoint.model, texts) for checkpoint in (reference, other)]
    speeds = [measure_speed(checkpoint.model) for checkpoint in (reference, other)]
    sys.stdout.write(report(errors, scores, speeds) + "\n")


def read_texts(checkpoint: Checkpoint, paths: Sequence[Path], held_out: float) -> list[list[int]]:
    """The token ids of each file; without files, of texts that the network generates.

    Raises `ValueError` if the checkpoint has no tokenizer, and `OSError` if a file cannot be read.
    """
    if not paths:
        return generate_texts(checkpoint, NUM_GENERATED_TEXTS)
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise ValueError(f"{checkpoint.name} has no tokenizer.json to read texts with")
    return [tokenizer.encode(text) for text in Corpus.read(paths, held_out).held_out]


if __name__ == "__main__":
    main()
