"""POST /logits: next-token logits of a prompt, for the whole vocabulary or the most likely tokens.

With edits, the logits are those of the edited pass. With `baseline`, a plain pass runs before it, and both are
compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, Response
from torch import Tensor

from forwardscope.results import passes as results
from forwardscope.results.passes import PassTimings
from forwardscope.results.records import Named
from model.analysis.edit_changes import change_of
from model.ops.torch_ops import TORCH
from model.tracing.pauses import pause, pieces
from service.answers.budget import Budget, ResponseContents, pass_bytes
from service.answers.call import CallDep, model_call
from service.answers.edits import answer_bytes, check_baseline
from service.answers.passes import SAFETENSORS_MEDIA_TYPE, PassAnswer, PreparedAnswer, wants_safetensors
from service.answers.prompt_passes import PromptInputs, PromptPlan, answer_prompts
from service.answers.prompts import as_list, find_positions
from service.answers.subject import checkpoint_subject
from service.http.bodies import JsonRoute
from service.http.encoding import json_array
from service.http.errors import invalid
from service.http.logits_schemas import LogitsRequest
from service.http.openapi import BINARY, also

router = APIRouter(route_class=JsonRoute, tags=["inside"])


@dataclass(frozen=True, kw_only=True)
class LogitsPlan(PromptPlan):
    """A checked request, for one of its prompts. `rows` are the positions whose logits are asked for."""

    body: LogitsRequest
    rows: list[int]
    as_safetensors: bool

    def make_budget(self) -> Budget:
        """Bound the answer, and the logits of the passes."""
        body, vocab_size, num_rows = self.body, self.subject.sizes(len(self.ids))["d_vocab"], len(self.rows)
        num_runs = 2 if body.baseline else 1
        # The tokens of the prompt; for each row, the object around it and its most likely tokens.
        num_tokens = len(self.ids) + num_rows * (1 + (body.top_k or 0))
        contents = ResponseContents(
            num_records=2,
            num_predictions=num_tokens,
            token_bytes=self.subject.longest_token_bytes,
            num_values=num_rows * (body.top_k or vocab_size) * (2 if body.logprobs else 1),
            encoding="safetensors" if self.as_safetensors else "json",
            extra_bytes=answer_bytes(self.edit_plan),
            num_choices=num_runs,
        )
        largest_tensors = num_runs * pass_bytes(num_logits=num_rows * vocab_size)
        return Budget(contents.num_bytes, largest_tensors, "positions, top_k or logprobs")


@router.post(
    "/logits",
    summary="Next-token logits",
    response_model=results.Logits | results.LogitsList,
    responses=also(SAFETENSORS_MEDIA_TYPE, BINARY),
)
async def logits(body: LogitsRequest, route: CallDep) -> Response:
    call, as_safetensors = model_call(body, route), wants_safetensors(route.request)
    if body.baseline:
        check_baseline(body.edits)
    vocab_size = call.checkpoint.model.config.vocab_size
    if body.top_k is not None and body.top_k > vocab_size:
        raise invalid("top_k", f"{body.top_k} is more than the vocabulary of {vocab_size} tokens")
    prompts, is_list = as_list(body.prompt)
    subject = checkpoint_subject(call.checkpoint, call.adapter)
    inputs = PromptInputs(call, subject, body, prompts, is_list, as_safetensors, body.scales)

    def plan(index: int, prompt: PromptPlan) -> LogitsPlan:
        rows = find_rows(body, len(prompt.ids))
        return LogitsPlan(**vars(prompt), body=body, rows=rows, as_safetensors=as_safetensors)

    return await answer_prompts(inputs, plan, prepare_answer)


def find_rows(body: LogitsRequest, num_tokens: int) -> list[int]:
    """The positions whose logits are asked for. Raises 400 for wrong ones."""
    if body.positions == "last":
        return [num_tokens - 1]
    if body.positions == "all":
        return list(range(num_tokens))
    if not body.positions:
        raise invalid("positions", "is empty; send at least one position, or leave the field out")
    return find_positions(body.positions, num_tokens, "positions")


def prepare_answer(plan: LogitsPlan) -> PreparedAnswer:
    """The pass, or with a baseline both passes."""
    passes = [plan.prompt_pass(plan.tap(plan.rows), plan.rows)]
    if plan.body.baseline:
        passes.append(plan.prompt_pass(None, plan.rows))
    return PreparedAnswer(passes, partial(make_answer, plan))


@torch.inference_mode()
def make_answer(plan: LogitsPlan, logits: Sequence[Tensor], timings: PassTimings) -> PassAnswer:
    """Describe the logits (R, V) of each pass."""
    found, *plain = (each.float() for each in logits)
    tensors = select(plan, found)
    fields: dict[str, Any] = {"positions": describe(plan, tensors)}
    if plain:
        plain_tensors = select(plan, plain[0])
        tensors |= {f"baseline/{name}": tensor for name, tensor in plain_tensors.items()}
        fields["baseline"] = results.LogitsPass(positions=describe(plan, plain_tensors))
        fields["changes"] = Named([results.StageChange("logits", *change_of(plain[0], found))])
    return PassAnswer(results.Logits(**plan.head(timings), **fields), tensors)


def select(plan: LogitsPlan, logits: Tensor) -> dict[str, Tensor]:
    """The numbers that a request asks for, by their names in the answer: whole rows, or those of the top tokens."""
    tensors: dict[str, Tensor] = {"logits": logits}
    if plan.body.logprobs:
        tensors["logprobs"] = logits.log_softmax(-1)
    if plan.body.top_k is None:
        return tensors
    count = plan.body.top_k
    top_ids = torch.cat([TORCH.summaries.top(logits[rows], count).indices for rows in pieces(len(logits), count)])
    return {name: tensor.gather(-1, top_ids) for name, tensor in tensors.items()} | {"ids": top_ids}


def describe(plan: LogitsPlan, tensors: dict[str, Tensor]) -> results.LogitRows[Any]:
    """Describe each row. In a safetensors answer, the numbers are elsewhere."""
    if plan.as_safetensors:
        return results.LogitRows(plan.rows)
    texts: list[tuple[str | None, ...]] | None = None
    if "ids" in tensors:
        texts = []
        for row in tensors["ids"]:
            texts.append(tuple(map(plan.subject.text_of, row.tolist())))
            pause()
    return results.LogitRows(plan.rows, **{name: json_array(tensor) for name, tensor in tensors.items()}, texts=texts)
