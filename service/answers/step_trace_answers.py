"""Traced generations: check the `trace` of a request, and describe each traced step."""

from collections.abc import Sequence
from typing import Any

from forwardscope.local_results import TextOf, describe_predictions, describe_top
from forwardscope.results import generations
from model.checkpoints.load import Checkpoint
from model.engine.step_tracer import StepTrace
from model.engine.trace_params import TraceParams
from model.tracing.selection import Selection
from model.tracing.stages import Stage
from service.answers.prompts import check_selected_heads, find_positions
from service.answers.stage_answers import select_stages, stage_answer
from service.http.encoding import Encoding
from service.http.errors import invalid
from service.http.generate_schemas import TraceRequest

DEFAULT_LENS_TOP = 5
MAX_LENS_TOKENS = 1 << 15  # of all layers of a step, which takes another 0.02 seconds


def traced_stages(body: TraceRequest, checkpoint: Checkpoint) -> list[Stage]:
    """The stages that a request traces. Raises 400 for a glob that matches none."""
    globs = body.stages or ([] if body.logit_lens else ["*"])
    return select_stages(checkpoint.stages, globs, "trace.stages")


def plan_trace(
    body: TraceRequest, stages: Sequence[Stage], checkpoint: Checkpoint, num_positions: int, num_prompt: int
) -> TraceParams:
    """Check the `trace` of a request; each of its sequences computes `num_positions` positions.

    The first `num_prompt` of them are the prompt. Negative positions count from the end of the prompt, because it is
    not known yet how many tokens follow. Raises 400 for a wrong field.
    """
    config = checkpoint.model.config
    positions = body.positions
    if positions is not None:
        positions = find_positions(
            positions, num_prompt, "trace.positions", size=num_positions, items="computed positions"
        )
    check_selected_heads(body.heads, config.num_heads, stages, "trace.heads")
    if body.top_k is not None and body.top_k > config.vocab_size:
        raise invalid("trace.top_k", f"{body.top_k} is more than the vocabulary of {config.vocab_size} tokens")
    lens_top = min(DEFAULT_LENS_TOP, config.vocab_size) if body.top_k is None else body.top_k
    if body.logit_lens and lens_top * config.num_layers > MAX_LENS_TOKENS:
        reason = (
            f"{lens_top} tokens of each of {config.num_layers} layers are more than the {MAX_LENS_TOKENS} that a step "
            f"may report; send at most {MAX_LENS_TOKENS // config.num_layers}"
        )
        raise invalid("trace.top_k", reason, "too_many")
    return TraceParams(
        selection=Selection(stages=stages, detail=body.detail, positions=positions, heads=body.heads),
        top_k=body.top_k or 0,
        logit_lens=lens_top if body.logit_lens else None,
    )


def trace_answer(trace: StepTrace, encoding: Encoding, text_of: TextOf) -> generations.StepTrace[Any]:
    """Describe the trace of one step."""
    lens, effect = trace.logit_lens, trace.constraint
    layers = [
        generations.LensLayer(each.layer, describe_top(each.top, text_of), each.chosen_probability)
        for each in lens or ()
    ]
    return generations.StepTrace(
        positions=tuple(trace.positions),
        stages=tuple(stage_answer(kept, kept.values, encoding) for kept in trace.stages),
        predictions=describe_predictions(trace.positions, trace.predictions, text_of),
        logit_lens=None if lens is None else tuple(layers),
        constraint=None if effect is None else generations.ConstraintEffect(**vars(effect)),
    )
