"""POST /patterns: attention maps of many heads, small enough to show all of them at once."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from fastapi import APIRouter, Request, Response
from torch import Tensor

from forwardscope.results.passes import PassTimings, PatternMap, PatternMeans, Patterns
from model.tracing.stages import Stage
from model.tracing.tap import Chain, Recorder
from service.answers.call import RouteCall
from service.answers.passes import PassAnswer, PreparedAnswer
from service.answers.pattern_maps import STEPS, PatternPlan, encode_map, mean_weights, plan_patterns, reduce_blocks
from service.answers.prompt_passes import PromptInputs, answer_prompts
from service.answers.subject import find_subject
from service.http.bodies import JsonRoute
from service.http.encoding import NAMES
from service.http.openapi import error_answers
from service.http.pattern_schemas import PatternsRequest
from service.state import StateDep

router = APIRouter(route_class=JsonRoute, tags=["inside"])


@router.post("/patterns", summary="Attention maps of many heads", response_model=Patterns, responses=error_answers())
async def patterns(body: PatternsRequest, request: Request, state: StateDep) -> Response:
    subject = find_subject(state, body.model, body.adapter)
    inputs = PromptInputs(RouteCall(request, state), subject, body, [body.prompt])
    return await answer_prompts(inputs, partial(plan_patterns, body), prepare_answer)


class LayerMaps(NamedTuple):
    """The reduced maps (H, S, S) of a layer, and the means of each head."""

    values: Tensor
    means: list[PatternMeans] | None


def prepare_answer(plan: PatternPlan) -> PreparedAnswer:
    """The pass. It reduces each map at once, and computes the logits of one position only: no map depends on them."""
    sizes = plan.subject.sizes(len(plan.ids))

    def keep(stage: Stage, tensor: Tensor) -> LayerMaps:
        maps = plan.selection.take(stage, tensor, sizes)[0]
        means = mean_weights(maps, plan.ids) if plan.body.stage == "pattern" else None
        return LayerMaps(reduce_blocks(maps, plan.block), means)

    recorder = Recorder(plan.stages, keep)
    rows = [len(plan.ids) - 1] if plan.subject.example is None else None  # a worked example is small
    edits = plan.tap(rows)
    prompt_pass = plan.prompt_pass(recorder if edits is None else Chain(edits, recorder), rows)
    return PreparedAnswer([prompt_pass], lambda _, timings: make_answer(plan, recorder.kept, timings))


@torch.inference_mode()
def make_answer(plan: PatternPlan, computed: Mapping[str, LayerMaps], timings: PassTimings) -> PassAnswer:
    """Describe the maps of each stage."""
    dtype: Any = plan.body.dtype or NAMES[next(iter(computed.values())).values.dtype]
    maps = tuple(
        PatternMap(layer, head, None if found.means is None else found.means[index], values)
        for layer, stage in zip(plan.layers, plan.stages, strict=True)
        for found in [computed[stage.name]]
        for index, head in enumerate(plan.heads)
        for values in [encode_map(plan, stage, found.values[index])]
    )
    answer = Patterns(
        **plan.head(timings),
        stage=plan.body.stage,
        size=plan.size,
        block=plan.block,
        dtype=dtype,
        scale=1 / STEPS if dtype == "uint8" else 1.0,
        maps=maps,
    )
    return PassAnswer(answer, {})
