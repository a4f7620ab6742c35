"""What a traced /generate shows: the request's `trace` checked, its size before anything runs, each step's answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from model.checkpoint import Checkpoint
from model.engine.tracing import StepTrace, TraceParams
from model.generation import GenerationParams
from model.stages import sizes_of, stages_of
from model.trace import Selection
from service.encoding import value_bytes
from service.errors import invalid
from service.passes import LOGITS_BYTES, STAGE_BYTES, Budget, text_bytes
from service.schemas import TraceRequest
from service.shown import TextOf, prediction_answers, select_stages, stage_answer, top_answer
from service.state import check_indices, longest_token_bytes

DEFAULT_LENS_TOP = 5


@dataclass(frozen=True)
class TracePlan:
    """A checked `trace`."""

    params: TraceParams
    encoding: Literal["json", "base64"]


def plan_trace(body: TraceRequest, checkpoint: Checkpoint, num_positions: int) -> TracePlan:
    """400 where a field means nothing for a sequence that computes `num_positions`."""
    config = checkpoint.model.config
    globs = body.stages or ([] if body.logit_lens else ["*"])
    stages = select_stages(stages_of(config), globs, "trace.stages")
    check_indices(body.positions, num_positions, "trace.positions", "positions that are computed")
    check_indices(body.heads, config.num_heads, "trace.heads", "heads")
    if body.top_k is not None and body.top_k > config.vocab_size:
        raise invalid("trace.top_k", f"{body.top_k} is more than the vocabulary of {config.vocab_size}")
    lens_top = min(DEFAULT_LENS_TOP, config.vocab_size) if body.top_k is None else body.top_k
    params = TraceParams(
        selection=Selection(stages=stages, detail=body.detail, positions=body.positions, heads=body.heads),
        top_k=body.top_k or 0,
        logit_lens=lens_top if body.logit_lens else None,
    )
    return TracePlan(params, body.encoding)


def budget_of(
    plan: TracePlan | None, params: GenerationParams, checkpoint: Checkpoint, num_prompt: int, max_step_tokens: int
) -> Budget:
    """What is shown of all steps together, at most, and the largest tensors of one step."""
    config = checkpoint.model.config
    num_step_tokens = min(max_step_tokens, num_prompt)
    pass_bytes = LOGITS_BYTES * num_step_tokens * config.vocab_size if params.needs_prompt_logits else 0
    num_tokens = params.max_tokens + (num_prompt if params.echo else 0)
    # Of each token an event, and the token itself with its likeliest ones; text alone has no limit but the context.
    token_bytes = text_bytes(0, 2 + (params.logprobs or 0), longest_token_bytes(checkpoint), as_safetensors=False)
    tokens_bytes = params.n * num_tokens * token_bytes if plan is not None or params.logprobs is not None else 0
    if plan is None:
        return Budget(tokens_bytes, pass_bytes, "prompt, echo, logprobs, n or max_tokens")
    selection, top_k, lens_top = plan.params.selection, plan.params.top_k, plan.params.logit_lens
    num_positions = num_prompt + params.max_tokens - 1
    num_shown = num_positions if selection.positions is None else len(selection.positions)
    sizes = sizes_of(config, num_shown) | {"key": num_positions}
    shown = Selection(stages=selection.stages, heads=selection.heads)
    num_entries = num_shown * top_k
    text = text_bytes(0, 0, 0, as_safetensors=False) + STAGE_BYTES * len(selection.stages)
    total = num_shown * text
    if lens_top is not None:
        num_entries += params.max_tokens * config.num_layers * (lens_top + 1)
        total += params.max_tokens * STAGE_BYTES
    total += text_bytes(0, num_entries, longest_token_bytes(checkpoint), as_safetensors=False)
    if selection.detail == "values":
        num_values = sum(math.prod(shown.shape(stage, sizes)) for stage in selection.stages)
        dtype = torch.promote_types(checkpoint.model.embed.weight.dtype, torch.float32)
        total += value_bytes(num_values, dtype, plan.encoding)
    if plan.params.needs_logits:
        pass_bytes = LOGITS_BYTES * num_step_tokens * config.vocab_size
    if any("key" in stage.dims for stage in selection.stages):
        pass_bytes += LOGITS_BYTES * config.num_heads * num_step_tokens * num_positions
    return Budget(
        tokens_bytes + params.n * total, pass_bytes, "trace.stages, positions, heads, detail or top_k, or max_tokens"
    )


def trace_answer(trace: StepTrace, plan: TracePlan, text_of: TextOf) -> dict[str, Any]:
    return {
        "positions": trace.positions,
        "stages": [stage_answer(kept, kept.values, plan.encoding) for kept in trace.stages],
        "predictions": prediction_answers(trace.positions, trace.predictions, text_of) if trace.predictions else [],
        "logit_lens": None if trace.logit_lens is None else lens_answer(trace, text_of),
    }


def lens_answer(trace: StepTrace, text_of: TextOf) -> Sequence[dict[str, Any]]:
    return [
        {
            "layer": guess.layer,
            "top": top_answer(guess.top, text_of),
            "chosen_probability": guess.chosen_probability,
        }
        for guess in trace.logit_lens or ()
    ]
