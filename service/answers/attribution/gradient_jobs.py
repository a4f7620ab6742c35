"""Run the jobs of POST /attribute beside the network: gradients, on a thread that yields to all others.

Their cost is checked before: the tokens of all passes, the memory of one differentiated pass, and the response.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fastapi import Response

from forwardscope.results.attributions import Attribution, method_of
from model.analysis.attribution.gradients import gradient_bytes
from model.network.float_copy import FloatNetwork
from model.network.joint_passes import AdaptedNetwork
from model.tracing.edits import BoundEdits
from model.tracing.pauses import pause
from model.tracing.stages import sizes_of
from service.answers.attribution.question import Plans, Question
from service.answers.budget import Budget, check_num_tokens
from service.answers.edits import answer_bytes
from service.http.encoding import to_json
from service.http.errors import ApiError, invalid

FIELDS = "prompt, stages, positions, heads, detail or steps"
NEEDS_WHOLE_WEIGHTS = (
    "this method needs whole weights, but with --tensor-parallel each process has a share of them; use a server "
    "without the option"
)


@dataclass(frozen=True)
class Copied:
    """The copy of the network that a job uses, with the adapter of its request, and the edits of its passes."""

    network: AdaptedNetwork
    edits: Sequence[BoundEdits | None]  # of each prompt


def float_network_of(question: Question) -> FloatNetwork:
    """The network for gradients. Raises 400 if gradients are off, or if this process has only a share of it."""
    network = question.state.float_network
    if network is None and question.state.ranks is not None:
        raise invalid("method", NEEDS_WHOLE_WEIGHTS, "tensor_parallel")
    if network is None:
        reason = "this method needs gradients, which are off on this server; start it with --gradients float32"
        raise invalid("method", reason, "gradients_off")
    return network


def check_tokens(question: Question, num_passes: int) -> None:
    """Raise 413 if the passes of a request are too long or too many."""
    settings, num_tokens = question.state.settings, len(question.ids)
    check_num_tokens("prompt", num_tokens, settings.max_pass_tokens)
    if num_tokens * num_passes > settings.max_gradient_tokens:
        message = (
            f"{num_passes} passes over {num_tokens} tokens are {num_tokens * num_passes} tokens, and the limit is "
            f"{settings.max_gradient_tokens}; send a shorter prompt or fewer steps, or start the server with a larger "
            "--max-gradient-tokens"
        )
        raise ApiError(413, message, param="prompt", code="too_many_tokens")


async def answer_gradients(
    question: Question,
    kind: type[Attribution[Any]],
    job: Callable[[Copied], dict[str, Any]],
    *,
    num_passes: int,
    num_logits: int,
    response_bytes: int,
    edits: Plans,
) -> Response:
    """Check the cost of a job, run it, and return its response. `edits` are those of each prompt.

    The job returns the fields that only answers of this `kind` have. It runs `num_passes` passes over the prompt, each
    with `num_logits` rows of logits.
    """
    state, network, method = question.state, float_network_of(question), method_of(kind)
    check_tokens(question, num_passes)
    response_bytes += answer_bytes(edits[0])
    config = question.checkpoint.model.config
    num_bytes = gradient_bytes(config, sizes_of(config, len(question.ids)), num_logits, network.dtype)
    Budget(response_bytes, num_bytes, FIELDS).check(state)
    bound = await question.bind(edits)
    num_tokens = len(question.ids) * num_passes
    question.note_tokens(num_tokens)

    def run() -> bytes:
        began = time.perf_counter()
        copied = Copied(AdaptedNetwork(network.copy, network.adapter(question.adapter)), bound)
        pause()
        with torch.no_grad():
            fields = job(copied)
        seconds = time.perf_counter() - began
        head = question.head(method, network.dtype, began - question.arrived, seconds, edits)
        content = to_json(kind(**head, **fields))
        state.metrics.gradient_seconds.observe(seconds)
        return content

    response = await question.respond(response_bytes, lambda: state.worker.executors.run_long("gradients", run))
    state.metrics.num_prompt_tokens += num_tokens
    state.metrics.attributions.labels(method).inc()
    return response
