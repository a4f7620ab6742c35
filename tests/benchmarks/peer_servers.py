"""Serve engines that have no server of their own, in the format of our service; or measure an engine in this process.

    python -m tests.benchmarks.peer_servers serve KIND MODEL --variant V [--threads 2] [--port 8000]
    python -m tests.benchmarks.peer_servers measure KIND MODEL --variant V [--threads 2] [OPTION OF OUR SERVICE]...
    python -m tests.benchmarks.peer_servers versions

An engine gets requests and emits tokens. It decodes greedily and continues after an end of sequence. An engine that
cannot take a request while others run gets the requests that arrived together, of equal lengths, as one batch. This is
the best case for such an engine.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

CACHE_GIB = "BENCHMARK_CACHE_GIB"  # environment variable: the size of the cache, as that of our service
QUIET_SECONDS = 0.01  # after this time without a new request, the requests that have arrived are a batch
STATIC_LENGTH = 256  # lengths of static caches are multiples of it, so that similar lengths share a cache
PREFILLS = (512, 1500)
PACKAGES = ("torch", "transformers", "openvino", "openvino-genai", "optimum-intel", "ctranslate2", "vllm")


@dataclass(frozen=True, eq=False)
class Request:
    ids: list[int]
    num_out: int
    tokens: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


Emit = Callable[[list[tuple[Request, int]]], object]


class Engine(Protocol):
    batches: bool  # whether the engine only takes batches of requests that arrived together

    def generate(self, requests: Sequence[Request], emit: Emit, more: Callable[[], list[Request]]) -> None:
        """Run requests to their ends. An engine without `batches` also runs those that `more` returns meanwhile."""


class Ours:
    """Our own engine, loaded as the service loads it, from the same options."""

    batches = False

    def __init__(self, model: str, variant: str, threads: int, options: Sequence[str]) -> None:
        import torch

        from service.commands.options import read_settings
        from service.loading import build_engine, load_model

        torch.set_num_threads(threads)
        settings = read_settings(["--model", model, "--threads", str(threads), *options])
        checkpoint = load_model(settings)
        assert checkpoint is not None
        self.config = checkpoint.model.config
        self._engine = build_engine(checkpoint, settings)

    def generate(self, requests: Sequence[Request], emit: Emit, more: Callable[[], list[Request]]) -> None:
        from model.engine import request as engine
        from model.text.sampling import SamplingParams
        from model.text.transcript import GenerationParams

        by_id = {str(index): request for index, request in enumerate(requests)}
        for key, request in by_id.items():
            params = GenerationParams(max_tokens=request.num_out, sampling=SamplingParams(temperature=0.0))
            self._engine.add(engine.Request(id=key, prompt_ids=request.ids, params=params))
        while self._engine.has_work:
            outputs = self._engine.step().outputs
            emit([(by_id[output.request_id], token.token_id) for output in outputs for token in output.tokens])


class Transformers:
    """The model of `transformers`, called in a loop, which takes less time than its `generate`.

    If compiled, only the decoding step is compiled, with a static cache that is made once for each number of sequences.
    """

    batches = True

    def __init__(self, model: str, variant: str, threads: int, options: Sequence[str]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        dtype, _, mode = variant.partition("-")
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._decode = self._model.forward
        if mode == "compiled":  # chooses the fastest kernel and layout of weights, which takes 30 seconds per shape
            import torch._inductor.config as inductor

            inductor.freezing, inductor.max_autotune = True, True  # has no effect as an option of one compilation
            inductor.max_autotune_gemm_backends = "CPP,ATEN"
            self._decode = torch.compile(self._model.forward, dynamic=False)
        self._static: dict[tuple[int, int], Any] | None = {} if mode == "compiled" else None

    def generate(self, requests: Sequence[Request], emit: Emit, more: Callable[[], list[Request]]) -> None:
        import torch

        num_out = requests[0].num_out
        with torch.inference_mode():
            ids = torch.tensor([request.ids for request in requests])
            cache = self._new_cache(len(requests), ids.shape[1] + num_out)
            logits = self._model(ids, None, None, cache, logits_to_keep=1).logits
            for count in range(1, num_out + 1):
                tokens = logits[:, -1].argmax(-1, keepdim=True)
                emit(list(zip(requests, tokens[:, 0].tolist(), strict=True)))
                if count < num_out:
                    logits = self._decode(tokens, None, None, cache, logits_to_keep=1).logits

    def _new_cache(self, num_sequences: int, length: int) -> Any:
        from transformers import DynamicCache, StaticCache

        if self._static is None:
            return DynamicCache(config=self._model.config)
        length = -(-length // STATIC_LENGTH) * STATIC_LENGTH
        if (num_sequences, length) not in self._static:
            cache = StaticCache(config=self._model.config, max_cache_len=length)
            self._static[num_sequences, length] = cache
        self._static[num_sequences, length].reset()
        return self._static[num_sequences, length]


class OpenVino:
    """`ContinuousBatchingPipeline` of OpenVINO GenAI.

    The precision hint is set for unquantized weights; for int8 and int4, OpenVINO chooses the precision for the CPU.
    """

    batches = False

    def __init__(self, model: str, variant: str, threads: int, options: Sequence[str]) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = int(os.environ.get(CACHE_GIB, "1"))
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if not variant.startswith("int"):
            properties["INFERENCE_PRECISION_HINT"] = {"float32": "f32", "bfloat16": "bf16"}[variant]
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._num_requests = 0

    def generate(self, requests: Sequence[Request], emit: Emit, more: Callable[[], list[Request]]) -> None:
        import numpy as np
        import openvino
        import openvino_genai as genai

        running: dict[Request, Any] = {}
        num_left: dict[Request, int] = {}
        while requests or running:
            for request in requests:
                config = genai.GenerationConfig(max_new_tokens=request.num_out, ignore_eos=True, do_sample=False)
                prompt = openvino.Tensor(np.array([request.ids], dtype=np.int64))
                self._num_requests += 1
                running[request] = self._pipeline.add_request(self._num_requests, prompt, config)
                num_left[request] = request.num_out
            self._pipeline.step()
            emitted = []
            for request, handle in list(running.items()):
                while handle.can_read():
                    emitted += [(request, token) for output in handle.read().values() for token in output.generated_ids]
                    num_left[request] -= 1
                if not num_left[request]:
                    del running[request]
            emit(emitted)
            requests = more()


class CTranslate2:
    """`Generator.generate_batch` of CTranslate2, with a callback for every token."""

    batches = True

    def __init__(self, model: str, variant: str, threads: int, options: Sequence[str]) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(model, compute_type=variant, intra_threads=threads, inter_threads=1)
        self._words = json.loads((Path(model) / "vocabulary.json").read_text())

    def generate(self, requests: Sequence[Request], emit: Emit, more: Callable[[], list[Request]]) -> None:
        num_out = requests[0].num_out

        def on_token(result: Any) -> bool:
            emit([(requests[result.batch_id], result.token_id)])
            return False  # continue

        self._generator.generate_batch(
            [[self._words[token_id] for token_id in request.ids] for request in requests],
            max_length=num_out,
            min_length=num_out,
            include_prompt_in_result=False,
            callback=on_token,
        )


ENGINES: dict[str, type] = {
    "ours": Ours,
    "transformers": Transformers,
    "openvino": OpenVino,
    "ctranslate2": CTranslate2,
}


def serve(engine: Engine, port: int) -> None:
    """Serve POST /generate, which takes `prompt` and `max_tokens` and streams like our service, and GET /ready."""
    import fastapi
    import uvicorn
    from fastapi.responses import StreamingResponse

    @asynccontextmanager
    async def lifespan(_: fastapi.FastAPI) -> AsyncIterator[None]:
        Thread(target=work, args=[asyncio.get_running_loop()], daemon=True).start()
        yield

    app = fastapi.FastAPI(lifespan=lifespan)
    inbox: SimpleQueue[Request] = SimpleQueue()

    def take(seconds: float) -> list[Request]:
        """Take requests from the inbox, until none arrives for `seconds`."""
        taken = []
        try:
            while True:
                taken.append(inbox.get(timeout=seconds) if seconds else inbox.get_nowait())
        except Empty:
            return taken

    def work(loop: asyncio.AbstractEventLoop) -> None:
        def deliver(emitted: list[tuple[Request, int]]) -> None:
            for request, token in emitted:
                request.tokens.put_nowait(token)

        while True:
            requests = [inbox.get(), *take(QUIET_SECONDS if engine.batches else 0)]
            engine.generate(requests, lambda emitted: loop.call_soon_threadsafe(deliver, emitted), lambda: take(0))

    async def events(request: Request) -> AsyncIterator[str]:
        for _ in range(request.num_out):
            yield f'data: {{"token":{{"id":{await request.tokens.get()}}}}}\n\n'
        yield "data: [DONE]\n\n"

    @app.post("/generate")
    async def generate(body: dict[str, Any]) -> StreamingResponse:
        request = Request(body["prompt"], body["max_tokens"])
        inbox.put(request)
        return StreamingResponse(events(request), media_type="text/event-stream")

    @app.get("/ready")
    async def ready() -> None:
        """Always ready: the engine was loaded before the server started."""

    uvicorn.run(app, port=port, log_level="warning")


def prefills(engine: Engine) -> dict[int, float]:
    """For each prompt length, tokens per second: the best of two runs after a first one that warms up."""
    draw = random.Random(0)

    def seconds(num_in: int) -> float:
        request = Request([draw.randrange(1000, 49000) for _ in range(num_in)], 1)
        start = time.perf_counter()
        engine.generate([request], lambda emitted: None, list)
        return time.perf_counter() - start

    return {num_in: num_in / min([seconds(num_in) for _ in range(3)][1:]) for num_in in PREFILLS}


def versions() -> dict[str, str]:
    """The versions of the packages that this interpreter has."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["serve", "measure", "versions"])
    parser.add_argument("kind", choices=list(ENGINES), nargs="?", help="engine")
    parser.add_argument("model", nargs="?", help="checkpoint, in the format of the engine")
    parser.add_argument("--variant", default="float32", help="precision, as the engine names it")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the engine")
    parser.add_argument("--port", type=int, default=8000)
    arguments, options = parser.parse_known_args()
    if arguments.command == "versions":
        sys.stdout.write(json.dumps(versions()) + "\n")
        return
    engine = ENGINES[arguments.kind](arguments.model, arguments.variant, arguments.threads, options)
    if arguments.command == "serve":
        serve(engine, arguments.port)
    else:
        sys.stdout.write(json.dumps({"prefill": prefills(engine)}) + "\n")


if __name__ == "__main__":
    main()
