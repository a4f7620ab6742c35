"""POST /forward: one pass over a prompt, every stage of it, of the served checkpoint or of a worked example."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from fastapi import APIRouter, Request, Response
from torch import Tensor

from model.checkpoint import DTYPES, Checkpoint
from model.stages import Stage, sizes_of, stages_of
from model.trace import Network, Selection, StageTrace, Trace, predict, trace
from model.worked_examples import WORKED_EXAMPLES, WorkedExample, worked_example
from service.bodies import JsonRoute
from service.encoding import cast, safetensors_bytes, to_json, value_bytes
from service.errors import ApiError, invalid
from service.openapi import BINARY, answers
from service.passes import SAFETENSORS, Budget, answer_pass, text_bytes, wants_safetensors
from service.published import published_answer, worked_example_answer
from service.schemas import ForwardAnswer, ForwardRequest
from service.shown import prediction_answers, select_stages, stage_answer
from service.state import (
    State,
    StateDep,
    check_ids,
    check_indices,
    longest_token_bytes,
    prepare,
    prompt_ids,
    served_checkpoint,
    token_text,
)

router = APIRouter(route_class=JsonRoute, tags=["inside"])
DEFAULT_TOP_K = 10
MAX_EXAMPLE_TEXT = 10_000  # characters, of which the examples hold a few words
PUBLISHED_BYTES = 1 << 16  # all that an article prints, and what follows from it


@dataclass(frozen=True)
class Subject:
    """What is run: the served checkpoint or a worked example, seen alike."""

    name: str
    network: Network
    stages: Sequence[Stage]
    sizes: Callable[[int], Mapping[str, int]]
    ids: list[int]
    text_of: Callable[[int], str | None]
    longest_token_bytes: int
    dtype: torch.dtype
    device: torch.device
    example: WorkedExample | None = None


@dataclass(frozen=True)
class Plan:
    """A checked request: nothing left in it can be wrong."""

    subject: Subject
    targets: list[int | None]
    selection: Selection
    sizes: Mapping[str, int]
    top_k: int
    dtype: torch.dtype | None
    encoding: Literal["json", "base64", "safetensors"]

    @property
    def rows(self) -> Sequence[int]:
        positions = self.selection.positions
        return range(len(self.subject.ids)) if positions is None else positions


@router.post(
    "/forward",
    summary="Every stage of one forward pass",
    response_model=None,
    responses=answers(ForwardAnswer, SAFETENSORS, BINARY),
)
async def forward(body: ForwardRequest, request: Request, state: StateDep) -> Response:
    as_safetensors = wants_safetensors(request)
    subject = await find_subject(body, request, state)
    plan = await prepare(state, len(body.stages), lambda: make_plan(body, subject, as_safetensors))
    narrow = "stages, positions, heads, detail, top_k or the prompt"
    return await answer_pass(
        request,
        state,
        lambda waited: run(plan, waited),
        num_tokens=len(plan.subject.ids),
        budget=Budget(estimate_bytes(plan), working_bytes(plan), narrow),
        as_safetensors=as_safetensors,
    )


def make_plan(body: ForwardRequest, subject: Subject, as_safetensors: bool) -> Plan:
    """The request, checked against what it is to run on."""
    num_tokens = len(subject.ids)
    sizes = subject.sizes(num_tokens)
    targets = find_targets(body, subject, sizes)
    stages = select_stages(subject.stages, body.stages, "stages")
    check_indices(body.positions, num_tokens, "positions", "tokens")
    check_indices(body.heads, sizes["head"], "heads", "heads")
    if body.top_k is not None and body.top_k > sizes["d_vocab"]:
        raise invalid("top_k", f"{body.top_k} is more than the vocabulary of {sizes['d_vocab']}")
    if as_safetensors and body.encoding == "base64":
        raise invalid("encoding", "base64 is of JSON answers; leave it out to get safetensors")
    detail = "values" if as_safetensors and "detail" not in body.model_fields_set else body.detail
    return Plan(
        subject=subject,
        targets=targets,
        selection=Selection(
            stages=stages,
            detail=detail,
            positions=body.positions,
            heads=body.heads,
        ),
        sizes=sizes,
        top_k=min(DEFAULT_TOP_K, sizes["d_vocab"]) if body.top_k is None else body.top_k,
        dtype=None if body.dtype is None else DTYPES[body.dtype],
        encoding="safetensors" if as_safetensors else body.encoding,
    )


async def find_subject(body: ForwardRequest, request: Request, state: State) -> Subject:
    name = body.model
    if name in WORKED_EXAMPLES and name is not None:
        return example_subject(worked_example(name), body.prompt)
    checkpoint = served_checkpoint(state)
    if name is not None and name != checkpoint.name:
        known = ", ".join([checkpoint.name, *WORKED_EXAMPLES])
        raise ApiError(404, f"model: {name!r} is not served; there are {known}", param="model", code="model_not_found")
    return checkpoint_subject(checkpoint, await prompt_ids(request, state, checkpoint, body.prompt))


def checkpoint_subject(checkpoint: Checkpoint, ids: list[int]) -> Subject:
    config, weight = checkpoint.model.config, checkpoint.model.embed.weight
    return Subject(
        name=checkpoint.name,
        network=checkpoint.model,
        stages=stages_of(config),
        sizes=lambda num_tokens: sizes_of(config, num_tokens),
        ids=ids,
        text_of=lambda token_id: token_text(checkpoint, token_id),
        longest_token_bytes=longest_token_bytes(checkpoint),
        dtype=weight.dtype,
        device=weight.device,
    )


def example_subject(example: WorkedExample, prompt: str | list[int]) -> Subject:
    if isinstance(prompt, list):
        check_ids(prompt, len(example.vocabulary), "prompt")
        ids = prompt
    else:
        if len(prompt) > MAX_EXAMPLE_TEXT:
            raise invalid("prompt", f"is longer than {MAX_EXAMPLE_TEXT} characters", "context_length")
        try:
            ids = example.encode(prompt)
        except ValueError as error:
            raise invalid("prompt", str(error), "unknown_word") from None
    if not ids:
        raise invalid("prompt", "is empty; send at least one token", "empty")
    if len(ids) > example.max_positions:
        message = f"has {len(ids)} tokens, {example.name} holds {example.max_positions}"
        raise invalid("prompt", message, "context_length")
    return Subject(
        name=example.name,
        network=example,
        stages=example.stages,
        sizes=example.sizes,
        ids=ids,
        text_of=lambda token_id: example.vocabulary[token_id],
        longest_token_bytes=max(len(word.encode()) for word in example.vocabulary),
        dtype=torch.float64,
        device=torch.device("cpu"),
        example=example,
    )


def find_targets(body: ForwardRequest, subject: Subject, sizes: Mapping[str, int]) -> list[int | None]:
    if body.targets is None:
        if subject.example is not None and subject.ids == subject.example.prompt_ids:
            return list(subject.example.targets)
        return [*subject.ids[1:], None]
    if len(body.targets) != len(subject.ids):
        raise invalid("targets", f"has {len(body.targets)} entries for {len(subject.ids)} tokens")
    check_ids(body.targets, sizes["d_vocab"], "targets")
    return body.targets


def estimate_bytes(plan: Plan) -> int:
    """An upper bound of the answer's size, from shapes alone."""
    selection, subject = plan.selection, plan.subject
    total = text_bytes(
        len(selection.stages),
        len(subject.ids) + len(plan.rows) * (plan.top_k + 1),
        subject.longest_token_bytes,
        as_safetensors=plan.encoding == "safetensors",
    )
    if subject.example is not None:
        total += PUBLISHED_BYTES
    if selection.detail != "values":
        return total
    dtype = plan.dtype or torch.promote_types(plan.subject.dtype, torch.float32)
    num_values = sum(math.prod(selection.shape(stage, plan.sizes)) for stage in selection.stages)
    return total + value_bytes(num_values, dtype, plan.encoding)


def working_bytes(plan: Plan) -> int:
    """The largest tensors of the pass: logits with what is made of them, and the scores of one block where they are
    asked for, each thrice (before, during and after the mask and the softmax)."""
    sizes = plan.sizes
    itemsize = torch.promote_types(plan.subject.dtype, torch.float32).itemsize
    num_values = sizes["position"] * sizes["d_vocab"]
    if any("key" in stage.dims for stage in plan.selection.stages):
        num_values += sizes["head"] * sizes["query"] * sizes["key"]
    return 3 * itemsize * num_values


def run(plan: Plan, waited: float) -> bytes | memoryview:
    """The pass and its answer, encoded. On the network's thread."""
    start = time.perf_counter()
    subject = plan.subject
    result = trace(subject.network, subject.ids, plan.targets, plan.selection, plan.sizes, subject.device)
    seconds = time.perf_counter() - start
    values = {kept.stage.name: cast_values(plan, kept) for kept in result.stages}
    answer: dict[str, Any] = {
        "model": subject.name,
        "tokens": [
            {"id": token_id, "text": subject.text_of(token_id), "position": position}
            for position, token_id in enumerate(subject.ids)
        ],
        "stages": [described(plan, kept, values[kept.stage.name]) for kept in result.stages],
        "predictions": predictions(plan, result),
        "loss": loss_answer(result.loss),
        "timings": {"queue_seconds": waited, "forward_seconds": seconds},
    }
    if subject.example is not None and subject.ids == subject.example.prompt_ids:
        answer["worked_example"] = worked_example_answer(subject.example)
    if plan.encoding != "safetensors":
        return to_json(answer)
    return safetensors_bytes({name: tensor for name, tensor in values.items() if tensor is not None}, answer)


def described(plan: Plan, kept: StageTrace, values: Tensor | None) -> dict[str, Any]:
    """A stage's answer, with what its article prints where it is a worked example's."""
    answer = stage_answer(kept, values, plan.encoding)
    example = plan.subject.example
    if example is not None and plan.subject.ids == example.prompt_ids:
        published = published_answer(example, kept.stage, plan.selection)
        if published is not None:
            answer["published"] = published
    return answer


def cast_values(plan: Plan, kept: StageTrace) -> Tensor | None:
    if kept.values is None or plan.dtype is None or plan.dtype == kept.values.dtype:
        return kept.values
    return cast(kept.values, plan.dtype, kept.stage.name)


def predictions(plan: Plan, result: Trace) -> list[dict[str, Any]]:
    """The likeliest next tokens of each kept position, over the whole vocabulary."""
    if plan.top_k == 0:
        return []
    found = predict(result.logits[list(plan.rows)], plan.top_k)
    return prediction_answers(plan.rows, found, plan.subject.text_of)


def loss_answer(loss: Tensor) -> dict[str, Any]:
    counted = loss[~loss.isnan()].double()
    mean = float(counted.mean()) if len(counted) else None
    perplexity = None if mean is None else float(counted.mean().exp())
    return {"per_token": loss.tolist(), "mean": mean, "perplexity": perplexity}
