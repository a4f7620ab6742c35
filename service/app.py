"""The application: routes, limits, errors, and the checkpoint that is loaded while `/health` already answers."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

import model
from model.checkpoint import Checkpoint, load_checkpoint
from model.engine.cache import bytes_of_token
from model.engine.engine import Engine, EngineConfig
from model.kernels.operations import use_kernels
from model.quantization import QuantizedLinear, quantize_linears
from service.errors import Failures, install_error_handlers
from service.gate import Gate
from service.memory import trim_forever
from service.metrics import HttpMetrics
from service.openapi import errors
from service.routes import forward, generate, health, logits, tokenize
from service.routes import model as model_route
from service.settings import Settings
from service.state import State

logger = logging.getLogger(__name__)
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # microseconds, or "max", and of how many
BUNDLED = Path(model.__file__).parent / "bundled"
DESCRIPTION = """A see-through inference server: every number of every stage of the forward pass.

`POST /forward` reads a pass, `POST /logits` its outcome, `POST /generate` continues a prompt, whole or streamed.
Every example on this page works as it stands."""


def create_app(settings: Settings, on_failure: Callable[[], None] | None = None) -> FastAPI:
    """An application that loads its checkpoint when it starts; `on_failure` is called where that fails."""
    state = State(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        work = (load(state, on_failure), trim_forever(state.worker, state.buffers))
        tasks = [asyncio.create_task(part) for part in work]
        yield
        for task in tasks:
            task.cancel()
        state.worker.close()

    app = FastAPIOffline(  # its pages load nothing from elsewhere
        title="Forwardscope", version="0.1.0", description=DESCRIPTION, lifespan=lifespan, redirect_slashes=False
    )
    app.state.forwardscope = state
    install_error_handlers(app)
    for route in (forward, logits, generate, tokenize):
        app.include_router(route.router, responses=errors())
    app.include_router(model_route.router)
    app.include_router(health.router)
    app.add_middleware(
        Gate,
        routes=app.routes,
        buffers=state.buffers,
        api_key=None if settings.api_key is None else settings.api_key.get_secret_value(),
        allowed_hosts=settings.host_names,
        max_body_bytes=settings.max_body_bytes,
        body_seconds=settings.body_timeout_seconds,
    )
    app.add_middleware(Failures)
    app.add_middleware(HttpMetrics, metrics=state.metrics, paths=app.openapi()["paths"])
    return app


async def load(state: State, on_failure: Callable[[], None] | None) -> None:
    """Load the checkpoint, then be ready; the worked examples answer meanwhile."""
    try:
        threads = num_threads(state.settings)  # a setting of the thread that runs the network
        await state.worker.run(lambda: torch.set_num_threads(threads))
        state.checkpoint = await state.worker.run_apart(lambda: load_model(state.settings))
        if state.checkpoint is not None:
            checkpoint = state.checkpoint
            state.engine = await state.worker.run_apart(lambda: build_engine(checkpoint, state.settings))
            state.worker.serve(state.engine, lambda: fail(state, "the engine failed", on_failure))
    except Exception as error:  # whatever it is, a service that will never be ready must end
        expected = isinstance(error, (ValueError, OSError))
        logger.error("cannot serve %s: %s", state.settings.model, error, exc_info=None if expected else error)
        fail(state, f"{error}", on_failure)
        return
    gc.collect()
    gc.freeze()  # else each full collection looks at all that was loaded, and stops every thread for 0.2 seconds
    state.loaded.set()


def num_threads(settings: Settings) -> int:
    """Those that the settings ask for, else torch's choice, but no more than the processors' time that a container may
    take (cgroup v2): more would be stopped in the midst of what the others wait for."""
    if settings.threads is not None:
        return settings.threads
    chosen = torch.get_num_threads()
    quota, _, period = CPU_MAX.read_text().strip().partition(" ") if CPU_MAX.exists() else ("max", "", "")
    is_limited = quota.isdigit() and period.isdigit()
    return max(1, min(chosen, int(quota) // int(period))) if is_limited else chosen


def fail(state: State, message: str, on_failure: Callable[[], None] | None) -> None:
    state.failure = message
    if on_failure is not None:
        on_failure()


def build_engine(checkpoint: Checkpoint, settings: Settings) -> Engine:
    """The engine that the settings ask for, with the defaults of the device."""
    weight = checkpoint.model.embed.weight
    is_cuda = weight.device.type == "cuda"
    if settings.cache_bytes is not None:
        cache_bytes = settings.cache_bytes
    elif is_cuda:
        cache_bytes = int(0.8 * torch.cuda.mem_get_info(weight.device)[0])
    else:
        config, size = checkpoint.model.config, EngineConfig.block_size
        num_tokens = settings.max_num_seqs * -(-config.max_positions // size) * size
        cache_bytes = min(1 << 30, num_tokens * bytes_of_token(config, weight.dtype))
    engine = Engine(
        checkpoint.model,
        checkpoint.tokenizer,
        EngineConfig(
            cache_bytes=cache_bytes,
            max_sequences=settings.max_num_seqs,
            max_step_tokens=settings.max_step_tokens or (2048 if is_cuda else 512) + settings.max_num_seqs,
            max_stretch=settings.max_step_stretch,
            speculates=settings.speculate,
            use_kernels=settings.kernels == "auto",
        ),
    )
    logger.info("cache of %d tokens, %d sequences a step", engine.num_cache_tokens, settings.max_num_seqs)
    return engine


def check_device(device: str) -> None:
    """Raises `ValueError` for one that is not there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without it
        raise ValueError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error


def load_model(settings: Settings) -> Checkpoint | None:
    """The checkpoint that the settings name; None for "none"."""
    if settings.model == "none":
        logger.info("no checkpoint: POST /forward runs the worked examples")
        return None
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(device)
    source, name = settings.model, settings.model_name
    if source == "bundled":
        source, name = str(BUNDLED), name or "bundled"
    checkpoint = load_checkpoint(source, dtype=settings.dtype, device=device, name=name)
    network = checkpoint.model
    if settings.quantize != "none":
        num_quantized = quantize_linears(network, settings.quantize)
        logger.info("%d linear layers in %s", num_quantized, settings.quantize)
    if settings.kernels == "auto" and use_kernels(network):
        logger.info("computed by our own kernels")
    if any(isinstance(module, QuantizedLinear) for module in network.modules()):
        logger.warning("no kernel for %s weights here: they are smaller, but not faster", settings.quantize)
    logger.info(
        "serving %s: %s parameters, %s, %s, context %d",
        checkpoint.name,
        f"{checkpoint.parameters.total:,}",
        network.embed.weight.device,
        str(network.embed.weight.dtype).removeprefix("torch."),
        network.config.max_positions,
    )
    return checkpoint
