"""The cost of LoRA adapters: tokens per second of decoding streams with 0, 1 and more different adapters.

    python -m tests.benchmarks.adapters [MODEL] [--adapters 0 1 4] [--rank 16] [--streams 8]

MODEL is a checkpoint directory; by default SmolLM2-135M-Instruct, which is downloaded. The adapters change all linear
layers and have random matrices. With as many adapters as n, stream i uses adapter i % n. The cases take turns, and the
last line is the result as JSON: the median tokens per second of each case, and its ratio to the case without adapters.
"""

import argparse
import json
import statistics
import sys
import time

import torch

from model.checkpoints.load import load_checkpoint
from model.engine.cache import bytes_of_token
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.network.adapters import Adapter, LowRankLayer
from model.network.transformer import Transformer
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams
from tests.published_models import smollm2

NUM_PROMPT, ROUNDS = 16, 5


def random_adapter(model: Transformer, name: str, rank: int) -> Adapter:
    """An adapter for all linear layers. q, k and v have matrices of their own, and so do the parts of a gated layer."""
    config, dtype = model.config, model.embed.weight.dtype
    num_heads, inner = config.num_heads + 2 * config.num_kv_heads, config.d_mlp * (2 if config.gated else 1)
    sizes = {
        "attn.qkv": (config.d_model, num_heads * config.d_head, 3),
        "attn.out": (config.num_heads * config.d_head, config.d_model, 1),
        "mlp.up": (config.d_model, inner, 2 if config.gated else 1),
        "mlp.down": (config.d_mlp, config.d_model, 1),
    }
    layers = {}
    for layer in range(config.num_layers):
        for place, (num_inputs, num_outputs, num_parts) in sizes.items():
            a = torch.randn(num_parts * rank, num_inputs, dtype=dtype) / num_inputs**0.5
            b = 0.01 * torch.randn(num_outputs, num_parts * rank, dtype=dtype)
            layers[f"blocks.{layer}.{place}"] = LowRankLayer(a, b, model.backend.ops)
    return Adapter(name, layers, [rank])


def measure(engine: Engine, num_adapters: int, num_streams: int, num_tokens: int, vocab_size: int) -> float:
    """Tokens per second, from the first token of all streams on."""
    params = GenerationParams(max_tokens=num_tokens, sampling=SamplingParams(temperature=1.0, seed=1))
    for index in range(num_streams):
        ids = torch.randint(vocab_size, (NUM_PROMPT,), generator=torch.Generator().manual_seed(index)).tolist()
        adapter = str(index % num_adapters) if num_adapters else None
        engine.add(Request(id=str(index), prompt_ids=ids, params=params, adapter=adapter))
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
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 4], help="numbers of different adapters")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--kernels", default="auto", choices=["auto", "torch"])
    options = parser.parse_args()
    checkpoint = load_checkpoint(
        options.model or str(smollm2()), dtype=options.dtype, quantize=options.quantize, kernels=options.kernels
    )
    model = checkpoint.model
    adapters = {str(index): random_adapter(model, str(index), options.rank) for index in range(max(options.adapters))}
    num_bytes = 4096 * bytes_of_token(model.config, model.embed.weight.dtype)
    plain = Engine(model, None, EngineConfig(cache_bytes=num_bytes))
    adapted = Engine(model, None, EngineConfig(cache_bytes=num_bytes), adapters)
    cases = {"none loaded": (plain, 0)} | {str(number): (adapted, number) for number in options.adapters}
    speeds: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(ROUNDS + 1):
        for case, (engine, number) in cases.items():
            speed = measure(engine, number, options.streams, options.tokens, model.config.vocab_size)
            speeds[case].append(speed)
    medians = {case: statistics.median(found[1:]) for case, found in speeds.items()}  # the first round records steps
    result = {
        "benchmark": "adapters",
        "streams": options.streams,
        "rank": options.rank,
        "megabytes_per_adapter": round(next(iter(adapters.values())).num_bytes / 1e6, 1) if adapters else 0,
        "tokens_per_second": {case: round(speed, 1) for case, speed in medians.items()},
        "ratio": {case: round(speed / medians["none loaded"], 3) for case, speed in medians.items()},
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
