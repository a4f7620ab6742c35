"""Measure decoding and prompts on a GPU, in an engine, with random weights of published shapes in bfloat16.

    python -m tests.benchmarks.gpu [--shapes 1.24B 8B] [--device cuda] [--kernels auto invariant]

`bandwidth` is the share of the GPU's own memory bandwidth (a large copy, measured first) with which one stream reads
the weights and its keys and values. Times are medians of steps, in milliseconds. `forward` is one pass over 2,048
tokens without an engine, plain and with summaries of all stages.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch

from model.choices import Kernels
from model.config import ModelConfig
from model.engine.cache import bytes_of_token
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.engine.trace_params import TraceParams
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams
from model.tracing.selection import Selection, StageCollector
from model.tracing.stages import Stage, select, stages_of
from model.tracing.tap import Recorder

LLAMA: dict[str, Any] = {"max_positions": 8192, "num_kv_heads": 8, "rope_theta": 5e5, "vocab_size": 128256}
SHAPES = {
    "tiny": ModelConfig(d_model=256, num_layers=2, num_heads=8, d_mlp=512, **LLAMA | {"vocab_size": 1000}),
    "1.24B": ModelConfig(d_model=2048, num_layers=16, num_heads=32, d_mlp=8192, **LLAMA),
    "8B": ModelConfig(d_model=4096, num_layers=32, num_heads=32, d_mlp=14336, tied_head=False, **LLAMA),
}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        wait(device)
        start = time.perf_counter()
        target.copy_(source)
        wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.numel() / min(seconds)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_network(config: ModelConfig, device: torch.device, kernels: Kernels) -> Transformer:
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in Transformer(config).state_dict().items() if name != "head.weight"}
        if not config.tied_head:
            shapes["head.weight"] = torch.Size((config.vocab_size, config.d_model))
    generator = torch.Generator(device).manual_seed(0)
    weights: dict[str, Any] = {}
    for name, shape in shapes.items():
        x = torch.empty(shape, dtype=torch.bfloat16, device=device)
        weights[name] = x.normal_(0, 0.02, generator=generator) if len(shape) > 1 else x.fill_(1)
    return prepare_model(config, weights, kernels=kernels)


def request(name: str, num_prompt: int, num_out: int, config: ModelConfig, trace: TraceParams | None = None) -> Request:
    ids = torch.randint(
        config.vocab_size, (num_prompt,), generator=torch.Generator().manual_seed(len(name) + num_prompt)
    )
    params = GenerationParams(max_tokens=num_out, sampling=SamplingParams(temperature=0))
    return Request(id=name, prompt_ids=ids.tolist(), params=params, trace=trace)


def steps(engine: Engine, requests: list[Request]) -> tuple[list[float], list[float]]:
    """The times of all steps with prompts, and of all later ones."""
    prompts, decoding, first = list[float](), list[float](), set[str]()
    for each in requests:
        engine.add(each)
    while engine.has_work:
        start = time.perf_counter()
        outputs = engine.step().outputs
        seconds = time.perf_counter() - start
        for output in outputs:
            assert output.error is None, output.error
        (decoding if len(first) == len(requests) else prompts).append(seconds)
        first |= {output.request_id for output in outputs if output.tokens}
    return prompts, decoding


def forward_ms(model: Transformer, summarized: Sequence[Stage]) -> float:
    """The time of one pass over 2,048 tokens, with summaries of these stages."""
    device, times = model.embed.weight.device, list[float]()
    ids = torch.arange(2048, device=device)[None] % model.config.vocab_size
    for _ in range(7):
        wait(device)
        start = time.perf_counter()
        collector = StageCollector(Selection(stages=summarized), {}, model.backend.summaries)
        with torch.inference_mode():
            model(ids, tap=Recorder(summarized, collector) if summarized else None, rows=[2047])
        collector.finish()
        wait(device)
        times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times[2:]), 3)


def measure(name: str, device: torch.device, bandwidth: float, kernels: Kernels) -> dict[str, Any]:
    config = SHAPES[name]
    model = random_network(config, device, kernels)
    weight_bytes = sum(x.nbytes for x in {x.data_ptr(): x for x in model.parameters()}.values())
    token_bytes = bytes_of_token(config, torch.bfloat16)
    engine = Engine(
        model, None, EngineConfig(cache_bytes=40000 * token_bytes, max_step_tokens=2048 + 64, speculates=False)
    )
    stages = stages_of(config)

    def traced(*globs: str) -> TraceParams:
        return TraceParams(selection=Selection(stages=select(stages, globs)))

    steps(engine, [request("warm", 512, 16, config)])
    result: dict[str, Any] = {"shape": name, "weights_gb": round(weight_bytes / 1e9, 3), "kernels": engine.kernels}

    def median(found: list[float]) -> float:
        return round(1e3 * statistics.median(found[2:]), 3)

    _, alone = steps(engine, [request("one", 512, 130, config)])
    result["step_ms"] = median(alone)
    floor = 1e3 * (weight_bytes + 576 * token_bytes) / bandwidth
    result["bandwidth"] = round(floor / result["step_ms"], 3)
    for count in (8, 64):
        many = [request("s" * (index + 1), 64, 66, config) for index in range(count)]
        steps(engine, [replace(each, id=f"warm {each.id}", prompt_ids=each.prompt_ids[1:]) for each in many])
        result[f"step_ms_{count}"] = median(steps(engine, many)[1])
        result[f"tokens_per_second_{count}"] = round(1e3 * count / result[f"step_ms_{count}"])
    for kind, globs in (("residual summaries", ("*.resid_post",)), ("patterns", ("*.pattern",)), ("all", ("*",))):
        _, times = steps(engine, [request(f"traced {kind}", 512, 40, config, traced(*globs))])
        result[f"{kind} over plain"] = round(result["step_ms"] / median(times), 3)
    prompts = [steps(engine, [request("p" * (index + 2), 2040 + index, 1, config)])[0] for index in range(5)]
    result["prompt_2048_ms"] = median([sum(each) for each in prompts])
    result["forward_ms"] = forward_ms(model, ())
    result["forward with summaries over plain"] = round(forward_ms(model, stages) / result["forward_ms"], 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.24B", "8B"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", nargs="+", choices=get_args(Kernels), default=["auto"])
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    bandwidth = copy_bandwidth(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    sys.stdout.write(json.dumps({"device": name, "copy_tb_per_second": round(bandwidth / 1e12, 3)}) + "\n")
    for kernels in arguments.kernels:
        for shape in arguments.shapes:
            sys.stdout.write(json.dumps(measure(shape, device, bandwidth, kernels)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
