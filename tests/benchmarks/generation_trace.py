"""The cost of a trace during generation, and of summaries in `POST /forward`, without HTTP.

    python -m tests.benchmarks.generation_trace [MODEL] [--tokens 64] [--rounds 3] [--prompts 16 64 128 512]

MODEL is a checkpoint directory; by default SmolLM2-135M-Instruct, which is downloaded. Two engines with the same
network take steps in turn, one of them traced, so that both meet the same load of the machine. Each trace is measured
with one stream, and with eight streams of which one is traced. A ratio of one stream is tokens per second over those of
plain decoding. A ratio of eight streams is the median or mean time of a step over that of an untraced step, which is
the latency between two tokens of the other seven. A stream with a logit lens takes part in every third step only. With
`--encode`, the time to describe each trace as JSON is counted too; the service does that on another thread. Prompts are
traced as `POST /forward` does, with summaries of all stages, and compared with a plain pass. The last line is the
result as JSON.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import torch

from model.analysis.forward_trace import TracedPass
from model.checkpoints.load import load_checkpoint
from model.engine.cache import bytes_of_token
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.engine.trace_params import TraceParams
from model.network.transformer import Transformer
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams
from model.tracing.selection import Selection
from model.tracing.stages import Stage, select, sizes_of, stages_of
from service.answers.step_trace_answers import trace_answer
from service.http.encoding import to_json
from tests.published_models import smollm2

NUM_PROMPT, NUM_STREAMS, PAIRS = 16, 8, 8


def traces_of(model: Transformer) -> Mapping[str, TraceParams]:
    stages = stages_of(model.config)

    def chosen(*globs: str) -> Sequence[Stage]:
        return select(stages, globs)

    residuals = chosen("blocks.*.resid_post")
    return {
        "residual summaries of every block": TraceParams(selection=Selection(stages=residuals)),
        "attention patterns as values": TraceParams(selection=Selection(stages=chosen("*.pattern"), detail="values")),
        "logit lens, top token": TraceParams(selection=Selection(stages=()), logit_lens=1),
        "logit lens, top 5": TraceParams(selection=Selection(stages=()), logit_lens=5),
        "summaries of all stages": TraceParams(selection=Selection(stages=stages)),
        "values of all stages": TraceParams(selection=Selection(stages=stages, detail="values")),
    }


class Streams:
    """Some decoding streams of one engine, of which the first is traced with `params`."""

    def __init__(self, engine: Engine, num_streams: int, num_tokens: int, params: TraceParams | None, encode: bool):
        self._engine = engine
        self._encodes = params is not None and encode
        self.step_seconds: list[float] = []
        generation = GenerationParams(max_tokens=num_tokens, sampling=SamplingParams(temperature=1.0, seed=1))
        for index in range(num_streams):
            ids = random_ids(engine._model, NUM_PROMPT, index)
            own = params if index == 0 else None
            engine.add(Request(id=str(index), prompt_ids=ids, params=generation, trace=own))
        started: set[str] = set()
        while len(started) < num_streams:
            started |= {output.request_id for output in engine.step().outputs}

    def step(self) -> None:
        begun = time.perf_counter()
        for output in self._engine.step().outputs:
            if output.trace is not None and self._encodes:
                to_json(trace_answer(output.trace, "json", str))
        self.step_seconds.append(time.perf_counter() - begun)

    def finish(self) -> None:
        while self._engine.has_work:
            self._engine.step()


def random_ids(model: Transformer, count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(model.config.vocab_size) for _ in range(count)]


def measure(
    engines: Sequence[Engine], params: TraceParams, options: argparse.Namespace, num_streams: int
) -> tuple[float, float]:
    """The ratios of the median and of the mean step of a traced engine over those of a plain one.

    Their steps alternate.
    """
    both = [
        Streams(engine, num_streams, options.tokens, own, options.encode)
        for engine, own in zip(engines, (None, params), strict=True)
    ]
    for index in range(options.tokens - 2):
        for streams in both if index % 2 else reversed(both):
            streams.step()
    for streams in both:
        streams.finish()
    plain, traced = (median(streams.step_seconds) for streams in both)
    plain_mean, traced_mean = (fmean(streams.step_seconds) for streams in both)
    if options.verbose:
        sys.stdout.write(f"    {1e3 * plain:.2f} ms, traced {1e3 * traced:.2f} ms\n")
    return traced / plain, traced_mean / plain_mean


@torch.inference_mode()
def forward_ratio(model: Transformer, num_tokens: int, pairs: int) -> float:
    """The median time of a pass with summaries of all stages over that of a plain pass."""
    config, selection = model.config, Selection(stages=stages_of(model.config))
    ids = random_ids(model, num_tokens, 0)
    seconds: dict[str, list[float]] = {"plain": [], "traced": []}
    for _ in range(pairs):
        begun = time.perf_counter()
        model(torch.tensor([ids]))
        middle = time.perf_counter()
        TracedPass(model, ids, [*ids[1:], None], selection, sizes_of(config, num_tokens)).compute()
        seconds["plain"].append(middle - begun)
        seconds["traced"].append(time.perf_counter() - middle)
    return median(seconds["traced"]) / median(seconds["plain"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="*", default=[16, 64, 128, 512])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, NUM_STREAMS])
    parser.add_argument("--only", nargs="*", help="beginnings of the names of traces")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--encode", action="store_true", help="also describe each trace as JSON")
    parser.add_argument("--verbose", action="store_true", help="show the milliseconds of each round")
    options = parser.parse_args()
    model = load_checkpoint(options.model or str(smollm2()), dtype=options.dtype, kernels="auto").model
    config = EngineConfig(cache_bytes=4096 * bytes_of_token(model.config, model.embed.weight.dtype), speculates=False)
    engines = [Engine(model, None, config) for _ in range(2)]
    traces = {
        name: params
        for name, params in traces_of(model).items()
        if options.only is None or name.startswith(tuple(options.only))
    }
    found: dict[str, list[float]] = {}
    for index in range(options.rounds + 1):
        for num_streams in options.streams:
            for name, params in traces.items():
                ratio, ratio_of_means = measure(engines, params, options, num_streams)
                if index:  # the first round records steps
                    found.setdefault(f"{name}, {num_streams} streams", []).append(ratio)
                if index and num_streams > 1:
                    found.setdefault(f"{name}, {num_streams} streams, mean", []).append(ratio_of_means)
        for num_tokens in options.prompts:
            ratio = forward_ratio(model, num_tokens, PAIRS)
            if index:
                found.setdefault(f"/forward, {num_tokens} tokens", []).append(ratio)
    for name, ratios in found.items():
        speed = [1 / ratio for ratio in ratios] if name.endswith(" 1 streams") else ratios
        sys.stdout.write(f"{name:50} {median(speed):.3f} ({min(speed):.3f}-{max(speed):.3f})\n")
    result = {
        "benchmark": "generation_trace",
        "model": options.model or "SmolLM2-135M-Instruct",
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "encoded": options.encode,
        "time_ratios": {name: [round(ratio, 3) for ratio in ratios] for name, ratios in found.items()},
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
