"""How far a faster setting drifts from float32: at each stage of the pass, in perplexity, and what it gains in speed.

    python -m model.drift --quantize int8 [TEXT...] [--model model/bundled] [--dtype bfloat16] [--kernels torch]

The error of a stage is the size of the difference over the size of the stage, both as root mean squares. Without texts
it takes what the float32 network itself writes, from a fixed seed.
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from model.checkpoint import Checkpoint, load_checkpoint
from model.corpus import Corpus
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.generation import GenerationParams
from model.kernels.operations import use_kernels
from model.perplexity import Predicted, predict_ids
from model.quantization import Quantization, quantize_linears
from model.sampling import SamplingParams
from model.stages import Recorder, stages_of
from model.transformer import Transformer, read_out

GROWTH = 2.0  # over every stage before, and above the rounding of the dtype: there the error grows
NUM_TOKENS = 256  # of a text, whose stages are compared
NUM_WRITTEN = 4  # texts of the network's own


@dataclass(frozen=True)
class StageError:
    """Of one stage: the root mean square of the difference over that of the stage; NaN where either is no number."""

    name: str
    error: float
    is_growth: bool = False


@torch.inference_mode()
def stage_errors(reference: Transformer, other: Transformer, ids: Sequence[int]) -> list[StageError]:
    """Of every stage of a pass over `ids`, in firing order; the first whose error has grown is marked."""
    dtype = other.embed.weight.dtype
    floor = torch.finfo(dtype).eps
    errors, largest, has_grown = [], 0.0, False
    expected, found = _stages(reference, ids), _stages(other, ids)
    for name, tensor in expected.items():
        error = _relative_error(tensor, found[name])
        is_growth = not has_grown and not error <= max(GROWTH * largest, floor)
        has_grown = has_grown or is_growth
        largest = max(largest, error)
        errors.append(StageError(name, error, is_growth))
    return errors


def _stages(model: Transformer, ids: Sequence[int]) -> Mapping[str, Tensor]:
    recorder = Recorder(stages_of(model.config))
    logits = model(torch.tensor([list(ids)]), tap=recorder)
    read_out(logits, [*ids[1:], None], recorder, model.operations)
    return {stage.name: recorder.kept[stage.name] for stage in stages_of(model.config)}


def _relative_error(expected: Tensor, found: Tensor) -> float:
    """Masked scores (-inf in both) and missing targets (NaN in both) do not count."""
    expected, found = expected.double(), found.double()
    same = (expected == found) | (expected.isnan() & found.isnan())
    difference = torch.where(same, 0, found - expected)
    size = torch.linalg.vector_norm(expected[expected.isfinite()])
    return float(torch.linalg.vector_norm(difference) / size) if size > 0 else float(difference.any())


@dataclass(frozen=True)
class Speed:
    """Tokens a second of one stream, and of one prompt."""

    decode: float
    prefill: float


@torch.inference_mode()
def measure_speed(model: Transformer, use_kernels: bool, num_in: int = 256, num_out: int = 64) -> Speed:
    num_in = min(num_in, model.config.max_positions - num_out)
    engine = Engine(model, None, EngineConfig(cache_bytes=1 << 28, use_kernels=use_kernels, speculates=False))
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


def write_texts(checkpoint: Checkpoint, count: int) -> list[list[int]]:
    """What the network writes from one token on, drawn from its own probabilities: as long as its context."""
    model = checkpoint.model
    engine = Engine(model, None, EngineConfig(cache_bytes=1 << 28))
    for seed in range(count):
        params = GenerationParams(max_tokens=model.config.max_positions - 1, sampling=SamplingParams(seed=seed))
        engine.add(Request(id=str(seed), prompt_ids=[seed], params=params))
    texts: dict[str, list[int]] = {str(seed): [seed] for seed in range(count)}
    while engine.has_work:
        for output in engine.step().outputs:
            texts[output.request_id] += [token.token_id for token in output.tokens]
    return list(texts.values())


def report(errors: Sequence[StageError], perplexities: Sequence[Predicted], speeds: Sequence[Speed]) -> str:
    lines = [f"{'stage':32} error"]
    lines += [f"{e.name:32} {e.error:.2e}{'  <- grows here' if e.is_growth else ''}" for e in errors]
    if not any(e.is_growth for e in errors):
        lines.append("no stage is further off than the rounding of its numbers")
    plain, fast = perplexities
    change = 100 * math.expm1(fast.nats_per_token - plain.nats_per_token)
    lines.append(
        f"perplexity of {plain.num_tokens} tokens: {plain.perplexity:.3f} and {fast.perplexity:.3f} ({change:+.3f} %)"
    )
    for name, field in (("one stream", "decode"), ("one prompt", "prefill")):
        before, after = (getattr(speed, field) for speed in speeds)
        lines.append(f"{name}, tokens/s: {before:.1f} and {after:.1f} ({after / before:.2f} times)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path)
    parser.add_argument("--model", default="model/bundled")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--quantize", default="none", choices=get_args(Quantization))
    parser.add_argument("--kernels", default="auto", choices=["auto", "torch"])
    parser.add_argument("--held-out", type=float, default=1.0, help="the share at the end of each text that is read")
    options = parser.parse_args()
    has_kernels = options.kernels == "auto"
    try:
        plain, fast = (load_checkpoint(options.model, dtype=dtype) for dtype in ("float32", options.dtype))
        quantize_linears(fast.model, options.quantize)
        if has_kernels:
            use_kernels(plain.model)
            use_kernels(fast.model)
        texts = read_texts(plain, options.texts, options.held_out)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    longest = max(texts, key=len)
    errors = stage_errors(plain.model, fast.model, longest[: min(NUM_TOKENS, plain.model.config.max_positions)])
    perplexities = [predict_ids(checkpoint.model, texts) for checkpoint in (plain, fast)]
    speeds = [measure_speed(checkpoint.model, has_kernels) for checkpoint in (plain, fast)]
    sys.stdout.write(report(errors, perplexities, speeds) + "\n")


def read_texts(checkpoint: Checkpoint, paths: Sequence[Path], held_out: float) -> list[list[int]]:
    """Token ids of each text; the network's own where there is none. Raises `ValueError`, `OSError`."""
    if not paths:
        return write_texts(checkpoint, NUM_WRITTEN)
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise ValueError(f"{checkpoint.name} has no tokenizer.json to read texts with")
    return [tokenizer.encode(text) for text in Corpus.read(paths, held_out).held_out]


if __name__ == "__main__":
    main()
