"""Load what the settings name: the checkpoint with its adapters, lens and vectors; then build the engine."""

import gc
import logging
import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial

import torch

from model.analysis.auto_quantization import resolve
from model.checkpoints.adapters import find_adapter, load_adapter
from model.checkpoints.load import DTYPES, Checkpoint, load_checkpoint
from model.checkpoints.memory import Need, PlannedNetwork, require_memory
from model.checkpoints.translators import Translators, find_translators, load_translators
from model.checkpoints.vector_files import NamedVector, find_vectors, read_vectors
from model.config import ModelConfig
from model.control_groups import read_limits
from model.device import find_device
from model.engine.block_files import BlockFiles
from model.engine.cache import bytes_of_token
from model.engine.engine import Engine, EngineConfig, OpenStore
from model.engine.network_identity import network_identity
from model.engine.tensor_parallel.leading_network import LeadingNetwork
from model.errors import InvalidField
from model.network.adapters import Adapter
from model.network.float_copy import FloatNetwork, copy_bytes
from model.network.ranks import LostRank, Place, Ranks
from model.network.tensor_parallel import prepare_share
from model.network.transformer import Transformer
from model.ops.quantization import ROUNDED
from model.ops.stored_weights import Weight
from model.text.grammar.grammars import Grammars
from model.worked_examples import WORKED_EXAMPLES
from service.drafts import DraftModel, load_draft, locate_draft
from service.network_thread import NetworkThread
from service.settings import Settings
from service.state import State
from service.stored_prefixes import StoredPrefixes

logger = logging.getLogger(__name__)
POPULATE_PAUSE_SECONDS = 0.1
# Prompt tokens that fit into a step beside `max_num_seqs` sequences with one token each.
CPU_PROMPT_TOKENS, CUDA_PROMPT_TOKENS = 512, 2048


async def load(state: State, on_failure: Callable[[], None] | None) -> None:
    """Load the checkpoint, then become ready. Until then, `check_ready` refuses requests for the checkpoint."""
    try:
        threads = num_threads(state.settings)
        await state.worker.run(lambda: set_num_threads(threads))
        checkpoint = await state.worker.run_detached(lambda: load_model(state.settings, state.ranks))
        if checkpoint is not None:
            await set_up(state, checkpoint, on_failure)
    except Exception as error:  # a service that will never be ready must end, whatever the reason
        expected = isinstance(error, (ValueError, OSError))
        reason = str(error).removeprefix(f"{state.settings.model}: ")
        logger.error("cannot serve %s: %s", state.settings.model, reason, exc_info=None if expected else error)
        fail(state, f"{error}", on_failure)
        return
    gc.collect()
    gc.freeze()  # otherwise each full collection visits all loaded objects, which stops every thread for 0.2 seconds
    state.loaded.set()
    if state.engine is not None:
        await state.worker.run_detached(partial(populate_cache, state.engine, state.worker.network_thread))


def populate_cache(engine: Engine, network_thread: NetworkThread) -> None:
    """Let the system provide the memory of the cache, which takes up to seconds: slowly while requests compute."""
    for _ in engine.populate_cache():
        if not network_thread.is_idle:
            time.sleep(POPULATE_PAUSE_SECONDS)


async def set_up(state: State, checkpoint: Checkpoint, on_failure: Callable[[], None] | None) -> None:
    """Build the engine of a loaded checkpoint, and everything else that its requests need."""
    state.checkpoint = checkpoint
    state.translators = await state.worker.run_detached(lambda: load_lens(checkpoint, state.settings))
    state.float_network = float_network(checkpoint, state.settings) if state.ranks is None else None
    state.vectors.preload(await state.worker.run_detached(lambda: load_vectors(checkpoint, state.settings)))
    if (tokenizer := checkpoint.tokenizer) is not None:
        # Now, because llguidance reads a large vocabulary with Python's lock.
        read = partial(Grammars, tokenizer, checkpoint.model.config.vocab_size)
        state.slow_grammars = await state.worker.run_detached(read)
        state.grammars = state.slow_grammars.quick()
    draft = state.draft = await state.worker.run_detached(lambda: load_drafting(checkpoint, state.settings))
    state.engine = await state.worker.run_detached(lambda: build_engine(checkpoint, state.settings, draft))
    state.worker.use_engine(state.engine, lambda: fail(state, "the engine failed", on_failure))


def num_threads(settings: Settings) -> int:
    """The number of threads for the network: that of the settings, or else torch's choice.

    torch's choice is limited to the CPUs that the control groups of this process (version 2) may use. With more
    threads, the system would stop some of them while the others wait for their results.
    """
    if settings.threads is not None:
        return settings.threads
    chosen = torch.get_num_threads()
    for limit in read_limits("cpu.max"):
        quota, _, period = limit.partition(" ")
        if quota.isdigit() and period.isdigit():
            chosen = min(chosen, int(quota) // int(period))
    return max(1, chosen)


def set_num_threads(threads: int) -> None:
    """Set the number of threads for the calling thread, and keep it if another thread sets its own number later.

    PyTorch adopts the number that was set last, by any thread, when a thread first reads the number or computes.
    """
    torch.set_num_threads(threads)
    torch.get_num_threads()


def fail(state: State, message: str, on_failure: Callable[[], None] | None) -> None:
    """Record that the service cannot go on, and call `on_failure`."""
    state.failure = message
    if on_failure is not None:
        on_failure()


def build_engine(checkpoint: Checkpoint, settings: Settings, draft: DraftModel | None = None) -> Engine:
    """Build the engine that the settings describe. Settings that are not given get defaults for the device.

    `draft` is the network that drafts tokens, which `load_draft` has loaded.
    """
    weight = checkpoint.model.embed.weight
    is_cuda = weight.device.type == "cuda"
    if is_cuda and settings.cache_bytes is None:
        cache_bytes = int(0.8 * torch.cuda.mem_get_info(weight.device)[0])
    else:
        draft_token_bytes = 0 if draft is None else draft.token_bytes
        cache_bytes = cache_bytes_for(checkpoint.model.share, weight.dtype, settings, draft_token_bytes)
    num_prompt_tokens = CUDA_PROMPT_TOKENS if is_cuda else CPU_PROMPT_TOKENS
    engine = Engine(
        checkpoint.model,
        checkpoint.tokenizer,
        EngineConfig(
            cache_bytes=cache_bytes,
            kv_cache_dtype=settings.kv_cache_dtype,
            max_sequences=settings.max_num_seqs,
            max_step_tokens=settings.max_step_tokens or num_prompt_tokens + settings.max_num_seqs,
            max_stretch=settings.max_step_stretch,
            target_itl_seconds=None if settings.target_itl_ms is None else settings.target_itl_ms / 1000,
            speculates=settings.speculate,
        ),
        checkpoint.adapters,
        None if draft is None else draft.model,
        open_store(checkpoint, settings),
        drafts_from_own_keys=draft is not None and not draft.is_copy,
    )
    logger.info("cache of %d tokens, at most %d sequences per step", engine.num_cache_tokens, settings.max_num_seqs)
    return engine


def open_store(checkpoint: Checkpoint, settings: Settings) -> OpenStore | None:
    """Open the store for computed prefixes that the settings name, if any."""
    directory, model = settings.prefix_cache_directory, checkpoint.model
    if directory is None:
        return None
    weight, size = model.embed.weight, EngineConfig.block_size
    if weight.device.type != "cpu":
        raise InvalidField("prefix_cache_directory", f"is not implemented on {weight.device}; leave it out")
    block_bytes = size * bytes_of_token(model.config, weight.dtype, settings.kv_cache_dtype)
    identity = network_identity(model, checkpoint.files, settings.kv_cache_dtype, size)
    files = BlockFiles(directory, identity, block_bytes, settings.prefix_cache_bytes)
    return partial(StoredPrefixes, files)


def cache_bytes_for(config: ModelConfig, dtype: torch.dtype, settings: Settings, draft_token_bytes: int = 0) -> int:
    """The size of the cache that the settings give, or else one for the maximum number of sequences, at most 1 GiB.

    A draft network's keys and values of each token are a part of it.
    """
    if settings.cache_bytes is not None:
        return settings.cache_bytes
    size = EngineConfig.block_size
    num_tokens = settings.max_num_seqs * -(-config.max_positions // size) * size
    return min(1 << 30, num_tokens * (bytes_of_token(config, dtype, settings.kv_cache_dtype) + draft_token_bytes))


def check_memory(planned: PlannedNetwork, settings: Settings) -> None:
    """Check that there is memory for the weights, the cache and the copy for gradients of a network.

    Raises `CheckpointError` if there is too little for the weights and the cache.
    """
    needs = [planned.weights("--quantize {}")]
    if settings.draft in ROUNDED:  # load_draft checks the memory of another network
        num_bytes = planned.quantized.get(settings.draft, planned.num_bytes)
        needs.append(Need("the copy that drafts", num_bytes, ("--draft none",)))
    needs += needs_beside_weights(planned.config, planned.dtype, planned.device, settings)
    require_memory(needs, planned.device)


def needs_beside_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, settings: Settings, draft_token_bytes: int = 0
) -> list[Need]:
    """The memory for the cache and the copy for gradients of a network, which are allocated after its weights."""
    needs = []
    if device.type == "cpu" or settings.cache_bytes is not None:
        cache_bytes = cache_bytes_for(config, dtype, settings, draft_token_bytes)
        needs.append(Need("the key-value cache", cache_bytes, ("a lower --cache-bytes",)))
    if settings.gradients != "off":
        copied = copy_bytes(config, DTYPES[settings.gradients])
        needs.append(Need("the copy for gradients", copied, ("--gradients off",), is_later=True))
    return needs


def load_drafting(checkpoint: Checkpoint, settings: Settings) -> DraftModel | None:
    """Load the network that drafts for a loaded checkpoint, and check that there is memory for the cache, too."""
    model, weight = checkpoint.model, checkpoint.model.embed.weight
    needs = partial(needs_beside_weights, model.config, weight.dtype, weight.device, settings)
    return load_draft(checkpoint, settings, needs)


def device_of(settings: Settings) -> str:
    """The device that the settings name, with tensor parallelism one for each process of the machine.

    Raises `ValueError` if it cannot be used.
    """
    device = settings.device
    if device == "auto":
        device = find_device("auto")
    place = Place.of_environment() if settings.tensor_parallel > 1 else None
    if place is not None and device.startswith("cuda"):
        if device != "cuda":
            raise ValueError(f"device {device!r}: with --tensor-parallel each process has a GPU of its own; give cuda")
        device = f"cuda:{place.local_rank}"
    return find_device(device)


def load_model(settings: Settings, ranks: Ranks | None = None) -> Checkpoint | None:
    """Load the checkpoint that the settings name, or this rank's share of it. None if the setting is "none"."""
    if settings.model == "none":
        logger.info("no checkpoint is served; POST /forward runs the worked examples")
        return None
    device = device_of(settings)
    find_named_files(settings)
    source = settings.model
    checkpoint = load_checkpoint(
        source,
        dtype=settings.dtype,
        device=device,
        name=settings.model_name,
        quantize=resolve(source, settings.quantize, settings.quantize_loss, settings.kernels, settings.revision),
        kernels=settings.kernels,
        chat_template=settings.chat_template,
        revision=settings.revision,
        prepare=None if ranks is None else partial(prepare_own_share, settings=settings, ranks=ranks),
        check_memory=partial(check_memory, settings=settings) if ranks is None else lambda _: None,
    )
    network = checkpoint.model
    logger.info(
        "serving %s: %s parameters, %s, %s, context %d",
        checkpoint.name,
        f"{checkpoint.parameters.total:,}",
        network.embed.weight.device,
        str(network.embed.weight.dtype).removeprefix("torch."),
        network.config.max_positions,
    )
    return replace(checkpoint, adapters=load_adapters(checkpoint, settings))


def find_named_files(settings: Settings) -> None:
    """Find the files that settings name beside the checkpoint, so that a wrong path is an error before it is loaded.

    Raises `ValueError` if one does not exist.
    """
    if settings.draft not in ("none", *ROUNDED):
        locate_draft(settings.draft)
    for path in settings.adapters.values():
        find_adapter(path)
    if settings.lens is not None:
        find_translators(settings.lens)
    if settings.vectors is not None:
        find_vectors(settings.vectors)


def prepare_own_share(
    config: ModelConfig, weights: MutableMapping[str, Weight], *, settings: Settings, ranks: Ranks
) -> Transformer:
    """Build the shard of a network that this rank computes."""
    network = partial(LeadingNetwork, ranks=ranks) if ranks.rank == 0 else Transformer
    allows_varlen = settings.kernels == "auto"
    model = prepare_share(config, weights, ranks, network=network, allows_varlen=allows_varlen)
    share = f"{model.share.num_heads} of {config.num_heads} heads"
    logger.info("rank %d of %d computes %s of each layer, with PyTorch", ranks.rank, ranks.size, share)
    return model


def close(state: State) -> None:
    """End the processes that read grammars, the threads, and the other ranks."""
    for grammars in filter(None, (state.grammars, state.slow_grammars)):
        grammars.kill()
    state.worker.close()
    if state.engine is not None:
        state.engine.close()
    end_ranks(state)


def end_ranks(state: State) -> None:
    """End the other ranks, if there are any."""
    if state.ranks is None:
        return
    network = None if state.checkpoint is None else state.checkpoint.model
    try:
        if isinstance(network, LeadingNetwork) and not state.ranks.is_lost:
            network.end()
    except LostRank as error:
        logger.error("%s", error)
        fail(state, str(error), None)
    state.ranks.disconnect()


def load_adapters(checkpoint: Checkpoint, settings: Settings) -> dict[str, Adapter]:
    """Load the adapters that the settings name."""
    adapters = {}
    for name, path in settings.adapters.items():
        if name == checkpoint.name or name in WORKED_EXAMPLES:
            raise ValueError(f"the adapter {name!r} has the name of a model; give it another name")
        adapter = adapters[name] = load_adapter(checkpoint, path, name)
        logger.info(
            "adapter %s: %d layers, rank %s, %.1f MB",
            name,
            len(adapter.layers),
            ", ".join(map(str, adapter.ranks)),
            adapter.num_bytes / 1e6,
        )
    return adapters


def float_network(checkpoint: Checkpoint, settings: Settings) -> FloatNetwork | None:
    """The network for gradients, which copies its weights when it is first used. None if gradients are off."""
    if settings.gradients == "off":
        return None
    network = FloatNetwork(checkpoint.model, checkpoint.adapters, DTYPES[settings.gradients])
    logger.info(
        "the first request for gradients copies the network to %s, which takes up to %.1f MB; --gradients off "
        "refuses such requests",
        settings.gradients,
        network.num_bytes / 1e6,
    )
    return network


def load_lens(checkpoint: Checkpoint, settings: Settings) -> Translators | None:
    """Load the translators of a tuned lens, if the settings name a file."""
    if settings.lens is None:
        return None
    translators = load_translators(settings.lens, checkpoint.model)
    logger.info("tuned lens %s: %d layers, %.1f MB", settings.lens, len(translators), translators.num_bytes / 1e6)
    return translators


def load_vectors(checkpoint: Checkpoint, settings: Settings) -> dict[str, NamedVector]:
    """Read the vectors in the directory that the settings name."""
    if settings.vectors is None:
        return {}
    vectors = read_vectors(settings.vectors, checkpoint.model.config, checkpoint.stages)
    num_bytes = sum(vector.num_bytes for vector in vectors.values())
    logger.info("%d vectors from %s, %.1f MB", len(vectors), settings.vectors, num_bytes / 1e6)
    return vectors
