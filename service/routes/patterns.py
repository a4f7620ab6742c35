"""POST /patterns: attention maps of many heads, small enough to show all of them at once."""

import time
from functools import partial
from typing import Any, NamedTuple

import torch
from fastapi import APIRouter, Request, Response
from torch import Tensor

from forwardscope.results.passes import PatternMap, PatternMeans, Patterns
from model.network.adapted_network import AdaptedNetwork
from model.network.transformer import Transformer
from model.tracing.stages import Stage
from model.tracing.tap import Chain, Recorder
from service.answers.passes import PassAnswer
from service.answers.pattern_maps import (
    STEPS,
    PatternPlan,
    encode_map,
    make_budget,
    mean_weights,
    planner,
    reduce_blocks,
)
from service.answers.prompt_passes import answer_prompts
from service.answers.subject import find_subject
from service.http.bodies import JsonRoute
from service.http.encoding import NAMES
from service.http.openapi import error_answers
from service.http.pattern_schemas import PatternsRequest
from service.state import StateDep

router = APIRouter(route_class=JsonRoute, tags=["inside"])


@router.post("/patterns", summary="Attention maps of many heads", response_model=Patterns, responses=error_answers())
async def patterns(body: PatternsRequest, request: Request, state: StateDep) -> Response:
    arrived = time.perf_counter()
    subject = find_subject(state, body.model, body.adapter)
    return await answer_prompts(
        body,
        [body.prompt],
        request,
        state,
        subject,
        arrived,
        planner=partial(planner, body),
        make_budget=make_budget,
        run=run,
    )


def run(plan: PatternPlan, waited: float) -> PassAnswer:
    """Run the pass, and describe its maps. Called on the network's thread."""
    start = time.perf_counter()
    computed = compute_maps(plan)
    seconds = time.perf_counter() - start
    dtype: Any = plan.body.dtype or NAMES[next(iter(computed.values())).values.dtype]
    maps = tuple(
        PatternMap(layer, head, None if found.means is None else found.means[index], values)
        for layer, stage in zip(plan.layers, plan.stages, strict=True)
        for found in [computed[stage.name]]
        for index, head in enumerate(plan.heads)
        for values in [encode_map(plan, stage, found.values[index])]
    )
    answer = Patterns(
        **plan.head(waited, seconds),
        stage=plan.body.stage,
        size=plan.size,
        block=plan.block,
        dtype=dtype,
        scale=1 / STEPS if dtype == "uint8" else 1.0,
        maps=maps,
    )
    return PassAnswer(answer, {})


class LayerMaps(NamedTuple):
    """The reduced maps (H, S, S) of a layer, and the means of each head."""

    values: Tensor
    means: list[PatternMeans] | None


@torch.inference_mode()
def compute_maps(plan: PatternPlan) -> dict[str, LayerMaps]:
    """Run the pass. Returns the maps of each stage by its name.

    The logits of one position only are computed, because no map depends on them.
    """
    subject, selection = plan.subject, plan.selection
    sizes, network = subject.sizes(len(plan.ids)), subject.network

    def keep(stage: Stage, tensor: Tensor) -> LayerMaps:
        maps = selection.take(stage, tensor, sizes)[0]
        means = mean_weights(maps, plan.ids) if plan.body.stage == "pattern" else None
        return LayerMaps(reduce_blocks(maps, plan.block), means)

    recorder = Recorder(plan.stages, keep)
    last = [len(plan.ids) - 1]
    edits = plan.tap(last)
    tap = recorder if edits is None else Chain(edits, recorder)
    ids = torch.tensor([plan.ids], device=subject.device)
    if isinstance(network, (Transformer, AdaptedNetwork)):
        network(ids, tap=tap, rows=last)
    else:  # a worked example, which is small
        network(ids, tap=tap)
    return recorder.kept
