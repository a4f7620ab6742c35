"""POST /patterns: attention maps of many heads, small enough to show all of them at once."""

import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from fastapi import APIRouter, Request, Response
from torch import Tensor

from model.network.adapted_network import AdaptedNetwork
from model.network.transformer import Transformer
from model.tracing.stages import Stage
from model.tracing.tap import Chain, Recorder, Tap
from service.answers.edits import bind_edits, edit_answers, read_edits
from service.answers.pattern_maps import STEPS, Plan, encode_map, make_budget, make_plan, mean_weights, reduce_blocks
from service.answers.single_pass import Pass, PassAnswer, answer_passes
from service.answers.subject import find_subject
from service.http.bodies import JsonRoute
from service.http.encoding import NAMES
from service.http.errors import invalid
from service.http.openapi import answers_json
from service.http.pattern_schemas import PatternsAnswer, PatternsRequest
from service.state import StateDep, run_plan

router = APIRouter(route_class=JsonRoute, tags=["inside"])


@router.post(
    "/patterns",
    summary="Attention maps of many heads",
    response_model=None,
    responses=answers_json(PatternsAnswer, "The maps"),
)
async def patterns(body: PatternsRequest, request: Request, state: StateDep) -> Response:
    arrived = time.perf_counter()
    subject = find_subject(state, body.model, body.adapter)
    ids = await subject.read_prompt(request, state, body.prompt, "prompt")
    planner = None
    if subject.checkpoint is not None:
        planner = await read_edits(body.edits, [ids], request, state, subject.checkpoint)
    elif body.edits:
        raise invalid("edits", f"change the served model, but not the worked example {subject.name!r}; leave them out")
    num_checks = 1 if planner is None else planner.num_checks
    plan = await run_plan(state, num_checks, lambda: make_plan(body, subject, ids, planner))
    budget = make_budget(plan)
    if plan.edits is not None:
        budget.check(state)  # before the passes of sources
        assert subject.checkpoint is not None
        (bound,) = await bind_edits([plan.edits], request, state, subject.checkpoint, subject.adapter, arrived)
        plan = replace(plan, bound_edits=bound)
    passes = [Pass(len(ids), partial(run, plan))]
    return await answer_passes(
        request, state, passes, budget=budget, is_list=False, as_safetensors=False, arrived=arrived
    )


def run(plan: Plan, waited: float) -> PassAnswer:
    """Run the pass, and describe its maps. Called on the network's thread."""
    start = time.perf_counter()
    computed = compute_maps(plan)
    seconds = time.perf_counter() - start
    name = plan.body.dtype or NAMES[next(iter(computed.values())).values.dtype]
    answer: dict[str, Any] = {
        "model": plan.subject.name,
        "tokens": [
            {"id": token_id, "text": plan.subject.text_of(token_id), "position": position}
            for position, token_id in enumerate(plan.ids)
        ],
        "stage": plan.body.stage,
        "size": plan.size,
        "block": plan.block,
        "dtype": name,
        "scale": 1 / STEPS if name == "uint8" else 1.0,
        "maps": [
            {
                "layer": layer,
                "head": head,
                "means": None if maps.means is None else maps.means[index],
                "values": encode_map(plan, stage, maps.values[index]),
            }
            for layer, stage in zip(plan.layers, plan.stages, strict=True)
            for maps in [computed[stage.name]]
            for index, head in enumerate(plan.heads)
        ],
        "timings": {"queue_seconds": waited, "forward_seconds": seconds},
    }
    if plan.edits is not None:
        answer["edits"] = edit_answers(plan.edits)
    return PassAnswer(answer, {})


class LayerMaps(NamedTuple):
    """The reduced maps (H, S, S) of a layer, and the means of each head."""

    values: Tensor
    means: list[dict[str, float | None]] | None


@torch.inference_mode()
def compute_maps(plan: Plan) -> dict[str, LayerMaps]:
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
    tap: Tap = recorder
    if plan.bound_edits is not None:
        tap = Chain(plan.bound_edits.tap(0, len(plan.ids), last, network.backend.network), recorder)
    ids = torch.tensor([plan.ids], device=subject.device)
    if isinstance(network, (Transformer, AdaptedNetwork)):
        network(ids, tap=tap, rows=last)
    else:  # a worked example, which is small
        network(ids, tap=tap)
    return recorder.kept
