"""Load the network that drafts tokens: a copy of the served network in fewer bits, or another checkpoint."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.checkpoints.load import Checkpoint, Contents, load_checkpoint, read_contents
from model.checkpoints.locate import Location, locate
from model.checkpoints.memory import Need, PlannedNetwork, require_memory
from model.choices import Quantization
from model.engine.cache import bytes_of_token
from model.errors import short_repr
from model.network.parameters import count_parameters
from model.network.transformer import Transformer
from model.ops.quantization import ROUNDED, LayerFormats
from service.settings import Settings

logger = logging.getLogger(__name__)
MIN_COMMON = 0.95  # of the tokens: versions of a tokenizer may differ in a few added tokens


@dataclass(frozen=True)
class DraftModel:
    """The network that drafts. `weight_bytes` is its memory, and `token_bytes` that of its keys and values of a token.

    A copy has no keys and values of its own (`is_copy`).
    """

    name: str
    model: Transformer
    weight_bytes: int
    token_bytes: int
    is_copy: bool


def load_draft(
    checkpoint: Checkpoint, settings: Settings, other_needs: Callable[[int], Sequence[Need]] = lambda token_bytes: ()
) -> DraftModel | None:
    """Load the network that the settings name for drafts. Raises `ValueError` if it cannot draft for the served one.

    `other_needs` gives the memory that will be allocated later, for a draft network with so many bytes of keys and
    values for each token. It is checked together with the weights.
    """
    draft, served = settings.draft, checkpoint.model
    if draft == "none":
        return None
    if served.backend.paged_attention is None:
        raise ValueError(f"draft {draft!r} needs our own kernels, which do not compute here; leave it out")
    is_copy = draft in ROUNDED
    quantize: Quantization | LayerFormats
    if is_copy:  # the head, too: a wrong draft costs only time
        quantize = dict.fromkeys((name for name, _ in served.named_modules()), ROUNDED[draft])
    else:
        location = locate_draft(draft)
        _check_contents(checkpoint, read_contents(location), location.name)
        quantize = "stored" if location.weights.suffix == ".gguf" else "int8"
    planned: list[PlannedNetwork] = []

    def check_memory(plan: PlannedNetwork) -> None:
        planned.append(plan)
        token_bytes = 0 if is_copy else bytes_of_token(plan.config, plan.dtype, settings.kv_cache_dtype)
        own = Need("the network that drafts", plan.num_bytes, ("--draft none",))
        require_memory([own, *other_needs(token_bytes)], plan.device)

    loaded = load_checkpoint(
        settings.model if is_copy else draft,
        dtype=str(served.embed.weight.dtype).removeprefix("torch."),
        quantize=quantize,
        kernels=settings.kernels,
        revision=settings.revision if is_copy else None,
        check_memory=check_memory,
    )
    model, weight_bytes = loaded.model, planned[0].num_bytes
    if is_copy:
        logger.info("a copy of the network in %s drafts tokens, %.1f MB", draft, weight_bytes / 1e6)
        return DraftModel(draft, model, weight_bytes, token_bytes=0, is_copy=True)
    if model.backend.paged_attention is None:
        raise ValueError(f"draft {draft!r}: our own kernels cannot compute this network; give another one")
    context, reached = served.config.max_positions, model.config.max_positions
    if reached < context:
        logger.info("the draft network has a context of %d of %d tokens, and drafts up to there", reached, context)
    token_bytes = bytes_of_token(model.share, model.embed.weight.dtype, settings.kv_cache_dtype)
    logger.info(
        "%s drafts tokens: %s parameters, %.1f MB, and %d bytes of the cache for each token",
        loaded.name,
        f"{loaded.parameters.total:,}",
        weight_bytes / 1e6,
        token_bytes,
    )
    return DraftModel(loaded.name, model, weight_bytes, token_bytes, is_copy=False)


def locate_draft(source: str) -> Location:
    """Find the checkpoint of a draft network. Raises `ValueError` if there is none."""
    try:
        return locate(source)
    except ValueError as error:
        raise ValueError(f"draft {error}; for a copy of the network, give one of {', '.join(ROUNDED)}") from None


def _check_contents(served: Checkpoint, draft: Contents, name: str) -> None:
    """Raise `ValueError` unless both checkpoints have the same tokens. One of them may have a few more.

    A warning says if the draft network is not smaller.
    """
    num_own, num_other = served.parameters.total, count_parameters(draft.model_config).total
    if num_other >= num_own:
        logger.warning(
            "the draft network %s has %s parameters, and the served one %s: such drafts save no time",
            name,
            f"{num_other:,}",
            f"{num_own:,}",
        )
    if served.tokenizer is None or draft.tokenizer is None:
        sizes = served.model.config.vocab_size, draft.model_config.vocab_size
        if served.tokenizer is not draft.tokenizer or sizes[0] != sizes[1]:
            reason = "without a tokenizer.json, both networks must have none, and equally many tokens"
            raise ValueError(f"draft {name}: {reason}; give another one")
        return
    own, other = served.tokenizer.texts_of_ids(), draft.tokenizer.texts_of_ids()
    common = own.keys() & other.keys()
    different = min((token_id for token_id in common if own[token_id] != other[token_id]), default=None)
    if different is not None:
        reason = f"token {different} is {short_repr(other[different])} there and {short_repr(own[different])} here"
    elif len(common) < MIN_COMMON * max(len(own), len(other)):
        reason = f"{len(other)} tokens there and {len(own)} here"
    else:
        return
    raise ValueError(f"draft {name} has another tokenizer: {reason}; give a network with the same tokens")
