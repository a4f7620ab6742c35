"""POST /logits: next-token logits of a prompt, for the whole vocabulary or the most likely tokens.

With edits, the logits are those of the edited pass. With `baseline`, a plain pass runs before it, and both are
compared.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, Request, Response
from torch import Tensor

from model.analysis.edit_changes import change_of
from model.checkpoints.load import Checkpoint
from model.ops.torch_ops import TORCH
from model.tracing.edits import BoundEdits, EditPlan
from service.answers.budget import Budget, ResponseContents, pass_bytes, response_bytes, total
from service.answers.edits import (
    EditPlanner,
    answer_bytes,
    bind_edits,
    check_baseline,
    edit_answers,
    read_edits,
)
from service.answers.prompts import (
    as_list,
    find_positions,
    longest_token_bytes,
    param_of,
    prompt_ids,
    token_answers,
    token_text,
)
from service.answers.single_pass import SAFETENSORS_MEDIA_TYPE, Pass, PassAnswer, answer_passes, wants_safetensors
from service.answers.subject import adapted_network
from service.http.bodies import JsonRoute
from service.http.encoding import json_array
from service.http.errors import invalid
from service.http.logits_schemas import LogitsAnswer, LogitsAnswers, LogitsRequest
from service.http.openapi import BINARY, answers
from service.state import CheckpointDep, StateDep, find_adapter, run_plan

router = APIRouter(route_class=JsonRoute, tags=["inside"])


@dataclass(frozen=True)
class Plan:
    """A checked request, for one of its prompts.

    `rows` are the positions whose logits are asked for. `bound_edits` are set when the passes of sources have run.
    """

    body: LogitsRequest
    checkpoint: Checkpoint
    adapter: str | None
    ids: list[int]
    rows: list[int]
    as_safetensors: bool
    edits: EditPlan | None
    bound_edits: BoundEdits | None = None


@router.post(
    "/logits",
    summary="Next-token logits",
    response_model=None,
    responses=answers(LogitsAnswer | LogitsAnswers, SAFETENSORS_MEDIA_TYPE, BINARY),
)
async def logits(body: LogitsRequest, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    adapter = find_adapter(checkpoint, body.model, body.adapter)
    arrived, as_safetensors = time.perf_counter(), wants_safetensors(request)
    check_baseline(body.baseline, body.edits)
    vocab_size = checkpoint.model.config.vocab_size
    if body.top_k is not None and body.top_k > vocab_size:
        raise invalid("top_k", f"{body.top_k} is more than the vocabulary of {vocab_size} tokens")
    prompts, is_list = as_list(body.prompt)
    ids = [
        await prompt_ids(request, state, checkpoint, prompt, param_of("prompt", index, is_list))
        for index, prompt in enumerate(prompts)
    ]
    planner = await read_edits(body.edits, ids, request, state, checkpoint)
    plans = await run_plan(
        state,
        0 if planner is None else len(ids) * planner.num_checks,
        lambda: [
            make_plan(body, checkpoint, adapter, each, as_safetensors, planner, param_of("prompt", index, is_list))
            for index, each in enumerate(ids)
        ],
    )
    budget = total([make_budget(plan) for plan in plans])
    edit_plans = [plan.edits for plan in plans if plan.edits is not None]
    if edit_plans:
        budget.check(state)  # before the passes of sources
        bound = await bind_edits(edit_plans, request, state, checkpoint, adapter, arrived)
        plans = [replace(plan, bound_edits=edits) for plan, edits in zip(plans, bound, strict=True)]
    passes = [Pass(len(plan.ids), partial(run, plan)) for plan in plans]
    return await answer_passes(
        request, state, passes, budget=budget, is_list=is_list, as_safetensors=as_safetensors, arrived=arrived
    )


def make_plan(
    body: LogitsRequest,
    checkpoint: Checkpoint,
    adapter: str | None,
    ids: list[int],
    as_safetensors: bool,
    planner: EditPlanner | None,
    prompt_param: str,
) -> Plan:
    """Check a request for one of its prompts. Raises 400 for a wrong field."""
    rows = find_rows(body, len(ids))
    edits = None if planner is None else planner.plan(ids, len(ids), prompt_param)
    return Plan(body, checkpoint, adapter, ids, rows, as_safetensors, edits)


def find_rows(body: LogitsRequest, num_tokens: int) -> list[int]:
    """The positions whose logits are asked for. Raises 400 for wrong ones."""
    if body.positions == "last":
        return [num_tokens - 1]
    if body.positions == "all":
        return list(range(num_tokens))
    if not body.positions:
        raise invalid("positions", "is empty; send at least one position, or leave the field out")
    return find_positions(body.positions, num_tokens, "positions")


def make_budget(plan: Plan) -> Budget:
    """Bound the answer, and the logits of the passes."""
    body, vocab_size, num_rows = plan.body, plan.checkpoint.model.config.vocab_size, len(plan.rows)
    num_runs = 2 if body.baseline else 1
    # The tokens of the prompt; for each row, the object around it and its most likely tokens.
    num_tokens = len(plan.ids) + num_rows * (1 + (body.top_k or 0))
    contents = ResponseContents(
        num_records=2,
        num_predictions=num_tokens,
        text_bytes=num_tokens * longest_token_bytes(plan.checkpoint),
        num_values=num_rows * (body.top_k or vocab_size) * (2 if body.logprobs else 1),
        encoding="safetensors" if plan.as_safetensors else "json",
        extra_bytes=0 if plan.edits is None else answer_bytes(plan.edits),
        num_choices=num_runs,
    )
    return Budget(
        response_bytes(contents),
        num_runs * pass_bytes(num_logits=num_rows * vocab_size),
        "positions, top_k or logprobs",
    )


def run(plan: Plan, waited: float) -> PassAnswer:
    """Run the pass, or with a baseline both passes, and describe them. Called on the network's thread."""
    start = time.perf_counter()
    with torch.inference_mode():
        plain = run_pass(plan, None) if plan.body.baseline else None
        found = run_pass(plan, plan.bound_edits)
    seconds = time.perf_counter() - start
    answer: dict[str, Any] = {
        "model": plan.adapter or plan.checkpoint.name,
        "tokens": token_answers(plan.ids, plan.checkpoint),
    }
    tensors = select(plan, found)
    answer["positions"] = describe(plan, tensors)
    answer["timings"] = {"queue_seconds": waited, "forward_seconds": seconds}
    if plan.edits is not None:
        answer["edits"] = edit_answers(plan.edits)
    if plain is not None:
        plain_tensors = select(plan, plain)
        answer["baseline"] = {"positions": describe(plan, plain_tensors)}
        norm, relative = change_of(plain, found)
        answer["changes"] = [{"name": "logits", "norm": norm, "relative": relative}]
        tensors |= {f"baseline/{name}": tensor for name, tensor in plain_tensors.items()}
    return PassAnswer(answer, tensors if plan.as_safetensors else {})


def run_pass(plan: Plan, edits: BoundEdits | None) -> Tensor:
    """The logits of the rows, (rows, V)."""
    network = adapted_network(plan.checkpoint, plan.adapter)
    tap = None if edits is None else edits.tap(0, len(plan.ids), plan.rows, network.backend.network)
    ids = torch.tensor([plan.ids], device=plan.checkpoint.model.embed.weight.device)
    logits: Tensor = network(ids, rows=plan.rows, tap=tap)[0].float()
    return logits


@torch.inference_mode()
def select(plan: Plan, logits: Tensor) -> dict[str, Tensor]:
    """The numbers that a request asks for, by their names in the answer: whole rows, or those of the top tokens."""
    tensors: dict[str, Tensor] = {"logits": logits}
    if plan.body.logprobs:
        tensors["logprobs"] = logits.log_softmax(-1)
    if plan.body.top_k is None:
        return tensors
    top_ids = TORCH.summaries.top(logits, plan.body.top_k).indices
    return {name: tensor.gather(-1, top_ids) for name, tensor in tensors.items()} | {"ids": top_ids}


def describe(plan: Plan, tensors: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Describe each row. In a safetensors answer, the numbers are elsewhere."""
    positions: list[dict[str, Any]] = [{"position": row} for row in plan.rows]
    if plan.as_safetensors:
        return positions
    for name, tensor in tensors.items():
        for position, numbers in zip(positions, json_array(tensor), strict=True):
            position[name] = numbers
            if name == "ids":
                position["texts"] = [token_text(plan.checkpoint, token_id) for token_id in numbers.tolist()]
    return positions
