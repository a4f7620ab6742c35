"""POST /forward: the selected stages of one forward pass of the served checkpoint or of a worked example."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fastapi import APIRouter, Request, Response
from torch import Tensor

from model.analysis.forward_trace import Network, Trace, trace
from model.checkpoints.load import DTYPES, Checkpoint
from model.tracing.predictions import predict
from model.tracing.selection import Selection, StageTrace
from model.tracing.stages import Stage, sizes_of, stages_of
from model.worked_examples import WORKED_EXAMPLES, WorkedExample, worked_example
from service.answers.budget import Budget, ResponseContents, pass_bytes, response_bytes
from service.answers.prompts import check_ids, check_indices, longest_token_bytes, prompt_ids, token_text
from service.answers.single_pass import SAFETENSORS_MEDIA_TYPE, answer_pass, wants_safetensors
from service.answers.stage_answers import prediction_answers, select_stages, stage_answer
from service.answers.worked_example_answers import published_answer, worked_example_answer
from service.http.bodies import JsonRoute
from service.http.encoding import Encoding, cast, safetensors_bytes, to_json
from service.http.errors import ApiError, invalid
from service.http.openapi import BINARY, answers
from service.http.schemas import ForwardAnswer, ForwardRequest
from service.state import State, StateDep, run_plan, served_checkpoint

router = APIRouter(route_class=JsonRoute, tags=["inside"])
DEFAULT_TOP_K = 10
MAX_EXAMPLE_TEXT = 10_000  # characters; the longest prompt that a worked example accepts is a few words
PUBLISHED_BYTES = 1 << 16  # the most bytes of an article's printed numbers and their comparisons


@dataclass(frozen=True)
class Subject:
    """The network to run, with its prompt: the served checkpoint or a worked example."""

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
    """A checked request."""

    subject: Subject
    targets: list[int | None]
    selection: Selection
    sizes: Mapping[str, int]
    top_k: int
    dtype: torch.dtype | None
    encoding: Encoding

    @property
    def rows(self) -> Sequence[int]:
        """The selected positions."""
        positions = self.selection.positions
        return range(len(self.subject.ids)) if positions is None else positions


@router.post(
    "/forward",
    summary="The selected stages of one forward pass",
    response_model=None,
    responses=answers(ForwardAnswer, SAFETENSORS_MEDIA_TYPE, BINARY),
)
async def forward(body: ForwardRequest, request: Request, state: StateDep) -> Response:
    as_safetensors = wants_safetensors(request)
    subject = await find_subject(body, request, state)
    plan = await run_plan(state, len(body.stages), lambda: make_plan(body, subject, as_safetensors))
    return await answer_pass(
        request,
        state,
        lambda waited: run(plan, waited),
        num_tokens=len(plan.subject.ids),
        budget=make_budget(plan),
        as_safetensors=as_safetensors,
    )


def make_plan(body: ForwardRequest, subject: Subject, as_safetensors: bool) -> Plan:
    """Check a request against the network that it will run on. Raises 400 for a wrong field."""
    num_tokens = len(subject.ids)
    sizes = subject.sizes(num_tokens)
    targets = find_targets(body, subject, sizes)
    stages = select_stages(subject.stages, body.stages, "stages")
    check_indices(body.positions, num_tokens, "positions", "tokens")
    check_indices(body.heads, sizes["head"], "heads", "heads")
    if body.top_k is not None and body.top_k > sizes["d_vocab"]:
        raise invalid("top_k", f"{body.top_k} is more than the vocabulary of {sizes['d_vocab']} tokens")
    if as_safetensors and body.encoding == "base64":
        raise invalid("encoding", "base64 is for JSON answers; leave the field out to get safetensors")
    detail = "values" if as_safetensors and "detail" not in body.model_fields_set else body.detail
    return Plan(
        subject=subject,
        targets=targets,
        selection=Selection(stages=stages, detail=detail, positions=body.positions, heads=body.heads),
        sizes=sizes,
        top_k=min(DEFAULT_TOP_K, sizes["d_vocab"]) if body.top_k is None else body.top_k,
        dtype=None if body.dtype is None else DTYPES[body.dtype],
        encoding="safetensors" if as_safetensors else body.encoding,
    )


async def find_subject(body: ForwardRequest, request: Request, state: State) -> Subject:
    """The network that the request names, with the ids of its prompt. Raises 404 for an unknown name."""
    name = body.model
    if name is not None and name in WORKED_EXAMPLES:
        return example_subject(worked_example(name), body.prompt)
    checkpoint = served_checkpoint(state)
    if name is not None and name != checkpoint.name:
        known = ", ".join([checkpoint.name, *WORKED_EXAMPLES])
        raise ApiError(
            404, f"model: {name!r} is not served; known models are {known}", param="model", code="model_not_found"
        )
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
        reason = f"has {len(ids)} tokens, but {example.name} takes at most {example.max_positions}"
        raise invalid("prompt", reason, "context_length")
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
    """A target for each position: those of the request, or of the worked example, or else the prompt's next tokens."""
    if body.targets is None:
        if subject.example is not None and subject.ids == subject.example.prompt_ids:
            return list(subject.example.targets)
        return [*subject.ids[1:], None]
    if len(body.targets) != len(subject.ids):
        raise invalid("targets", f"has {len(body.targets)} entries for {len(subject.ids)} tokens")
    check_ids(body.targets, sizes["d_vocab"], "targets")
    return body.targets


def make_budget(plan: Plan) -> Budget:
    """Bound the answer and the largest tensors of the pass, from shapes alone."""
    selection, subject, sizes = plan.selection, plan.subject, plan.sizes
    computed_dtype = torch.promote_types(subject.dtype, torch.float32)
    # For each position, its token with its loss; for each selected one, its predictions and the object around them.
    num_predictions = len(subject.ids) + len(plan.rows) * (plan.top_k + 1)
    has_values, has_scores = selection.detail == "values", any("key" in stage.dims for stage in selection.stages)
    contents = ResponseContents(
        num_records=1 + len(selection.stages),
        num_predictions=num_predictions,
        text_bytes=num_predictions * subject.longest_token_bytes,
        num_values=sum(math.prod(selection.shape(stage, sizes)) for stage in selection.stages) if has_values else 0,
        dtype=plan.dtype or computed_dtype,
        encoding=plan.encoding,
        extra_bytes=0 if subject.example is None else PUBLISHED_BYTES,
    )
    largest_tensors = pass_bytes(
        num_logits=sizes["position"] * sizes["d_vocab"],
        num_scores=sizes["head"] * sizes["query"] * sizes["key"] if has_scores else 0,
        itemsize=computed_dtype.itemsize,
    )
    return Budget(response_bytes(contents), largest_tensors, "stages, positions, heads, detail, top_k or the prompt")


def run(plan: Plan, waited: float) -> bytes | memoryview:
    """Run the pass and encode its answer. Called on the network's thread."""
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
        "stages": [describe_stage(plan, kept, values[kept.stage.name]) for kept in result.stages],
        "predictions": predictions(plan, result),
        "loss": loss_answer(result.loss),
        "timings": {"queue_seconds": waited, "forward_seconds": seconds},
    }
    if subject.example is not None and subject.ids == subject.example.prompt_ids:
        answer["worked_example"] = worked_example_answer(subject.example)
    if plan.encoding != "safetensors":
        return to_json(answer)
    return safetensors_bytes({name: tensor for name, tensor in values.items() if tensor is not None}, answer)


def describe_stage(plan: Plan, kept: StageTrace, values: Tensor | None) -> dict[str, Any]:
    """Describe a stage, with its printed numbers if the subject is a worked example on its own prompt."""
    answer = stage_answer(kept, values, plan.encoding)
    example = plan.subject.example
    if example is not None and plan.subject.ids == example.prompt_ids:
        published = published_answer(example, kept.stage, plan.selection)
        if published is not None:
            answer["published"] = published
    return answer


def cast_values(plan: Plan, kept: StageTrace) -> Tensor | None:
    """The values of a stage in the dtype that the request asks for."""
    if kept.values is None or plan.dtype is None or plan.dtype == kept.values.dtype:
        return kept.values
    return cast(kept.values, plan.dtype, kept.stage.name)


def predictions(plan: Plan, result: Trace) -> list[dict[str, Any]]:
    """The most likely next tokens of each selected position, over the whole vocabulary."""
    if plan.top_k == 0:
        return []
    found = predict(result.logits[list(plan.rows)], plan.top_k)
    return prediction_answers(plan.rows, found, plan.subject.text_of)


def loss_answer(loss: Tensor) -> dict[str, Any]:
    """Loss (T,) in nats for each position, NaN where there is no target, with its mean and the perplexity."""
    counted = loss[~loss.isnan()].double()
    mean = float(counted.mean()) if len(counted) else None
    perplexity = None if mean is None else float(counted.mean().exp())
    return {"per_token": loss.tolist(), "mean": mean, "perplexity": perplexity}
