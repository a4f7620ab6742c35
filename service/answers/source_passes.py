"""The passes of other prompts from which edits of a request take their values."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from model.analysis.edit_sources import compute_source
from model.checkpoints.load import Checkpoint
from model.tracing.edits import SourcePass
from model.tracing.stages import Stage, sizes_of
from service.answers.budget import Budget, pass_bytes
from service.answers.call import ModelCall
from service.answers.subject import adapted_network
from service.http.disconnects import unless_disconnected
from service.http.errors import ApiError

Result = TypeVar("Result")


async def run_sources(sources: Mapping[Any, SourcePass], call: ModelCall) -> Mapping[Any, Mapping[str, Tensor]]:
    """Run the passes of sources, each as a job of its own, and return the values of each by its key.

    If the client disconnects, the remaining passes do not run. Raises 429 if too much waits, and 503 after the timeout.
    """
    if not sources:
        return {}
    num_tokens = sum(len(each.ids) for each in sources.values())
    call.state.worker.check_room(num_tokens)
    network = adapted_network(call.checkpoint, call.adapter)
    jobs = [partial(compute_source, network, each) for each in sources.values()]
    found = await unless_disconnected(call.request, run_jobs(call, jobs))
    call.state.metrics.num_prompt_tokens += num_tokens
    return dict(zip(sources, found, strict=True))


def source_key(source: SourcePass) -> Any:
    return tuple(source.ids), tuple(stage.name for stage in source.stages), tuple(source.positions)


def check_sources(sources: Iterable[SourcePass], call: ModelCall) -> None:
    """Raise 413 if the pass of a source is too large."""
    limit, checkpoint = call.state.settings.max_pass_tokens, call.checkpoint
    for source in sources:
        if len(source.ids) > limit:
            message = (
                f"edits: a source has {len(source.ids)} tokens, but one pass takes at most {limit}; shorten its "
                "prompt, or start the server with a larger --max-pass-tokens"
            )
            raise ApiError(413, message, param="edits", code="prompt_too_long")
        num_logits = len(source.positions) * checkpoint.model.config.vocab_size if source.has_selected_rows else 0
        num_bytes = stage_bytes(source.stages, len(source.ids), checkpoint) + pass_bytes(num_logits=num_logits)
        Budget(0, num_bytes, "the stages of edits with a source, or the prompts of sources").check(call.state)


def stage_bytes(stages: Sequence[Stage], num_tokens: int, checkpoint: Checkpoint) -> int:
    """The bytes of whole stages of a pass."""
    sizes = sizes_of(checkpoint.model.config, num_tokens)
    itemsize = torch.promote_types(checkpoint.model.embed.weight.dtype, torch.float32).itemsize
    return itemsize * sum(math.prod(stage.shape(sizes)) for stage in stages)


async def run_jobs(call: ModelCall, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run jobs of one request on the network's thread, one after the other. Raises as `RouteCall.series` does."""
    async with call.series():
        return [await call.state.worker.run(job) for job in jobs]
