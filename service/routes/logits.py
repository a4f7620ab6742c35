"""POST /logits: next-token logits of a prompt, for the whole vocabulary or the most likely tokens."""

import time
from functools import partial
from typing import Any

import torch
from fastapi import APIRouter, Request, Response
from torch import Tensor

from model.checkpoints.load import Checkpoint
from service.answers.budget import Budget, ResponseContents, pass_bytes, response_bytes, total
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
from service.http.openapi import BINARY, answers
from service.http.schemas import LogitsAnswer, LogitsAnswers, LogitsRequest
from service.state import CheckpointDep, StateDep, find_adapter

router = APIRouter(route_class=JsonRoute, tags=["inside"])


@router.post(
    "/logits",
    summary="Next-token logits",
    response_model=None,
    responses=answers(LogitsAnswer | LogitsAnswers, SAFETENSORS_MEDIA_TYPE, BINARY),
)
async def logits(body: LogitsRequest, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    adapter = find_adapter(checkpoint, body.model, body.adapter)
    as_safetensors = wants_safetensors(request)
    vocab_size = checkpoint.model.config.vocab_size
    if body.top_k is not None and body.top_k > vocab_size:
        raise invalid("top_k", f"{body.top_k} is more than the vocabulary of {vocab_size} tokens")
    prompts, is_list = as_list(body.prompt)
    passes, budgets = [], []
    for index, prompt in enumerate(prompts):
        ids = await prompt_ids(request, state, checkpoint, prompt, param_of("prompt", index, is_list))
        rows = find_rows(body, len(ids))
        passes.append(Pass(len(ids), partial(run, checkpoint, adapter, ids, rows, body, as_safetensors)))
        budgets.append(make_budget(checkpoint, ids, rows, body, as_safetensors))
    return await answer_passes(
        request, state, passes, budget=total(budgets), is_list=is_list, as_safetensors=as_safetensors
    )


def find_rows(body: LogitsRequest, num_tokens: int) -> list[int]:
    """The positions whose logits are asked for. Raises 400 for wrong ones."""
    if body.positions == "last":
        return [num_tokens - 1]
    if body.positions == "all":
        return list(range(num_tokens))
    if not body.positions:
        raise invalid("positions", "is empty; send at least one position, or leave the field out")
    return find_positions(body.positions, num_tokens, "positions")


def make_budget(
    checkpoint: Checkpoint, ids: list[int], rows: list[int], body: LogitsRequest, as_safetensors: bool
) -> Budget:
    """Bound the answer, and the logits of the pass."""
    vocab_size = checkpoint.model.config.vocab_size
    # The tokens of the prompt; for each row, the object around it and its most likely tokens.
    num_tokens = len(ids) + len(rows) * (1 + (body.top_k or 0))
    contents = ResponseContents(
        num_records=1,
        num_predictions=num_tokens,
        text_bytes=num_tokens * longest_token_bytes(checkpoint),
        num_values=len(rows) * (body.top_k or vocab_size) * (2 if body.logprobs else 1),
        encoding="safetensors" if as_safetensors else "json",
    )
    return Budget(
        response_bytes(contents), pass_bytes(num_logits=len(rows) * vocab_size), "positions, top_k or logprobs"
    )


def run(
    checkpoint: Checkpoint,
    adapter: str | None,
    ids: list[int],
    rows: list[int],
    body: LogitsRequest,
    as_safetensors: bool,
    waited: float,
) -> PassAnswer:
    """Run the pass and describe it. Called on the network's thread."""
    start = time.perf_counter()
    with torch.inference_mode():
        device = checkpoint.model.embed.weight.device
        network = adapted_network(checkpoint, adapter)
        found = network(torch.tensor([ids], device=device), rows=rows)[0].float()  # (rows, V)
        tensors: dict[str, Tensor] = {"logits": found}
        if body.logprobs:
            tensors["logprobs"] = found.log_softmax(-1)
        if body.top_k is not None:
            top_ids = found.topk(body.top_k, dim=-1).indices
            tensors = {name: tensor.gather(-1, top_ids) for name, tensor in tensors.items()} | {"ids": top_ids}
    seconds = time.perf_counter() - start

    positions: list[dict[str, Any]] = [{"position": row} for row in rows]
    if not as_safetensors:
        for name, tensor in tensors.items():
            for position, numbers in zip(positions, json_array(tensor), strict=True):
                position[name] = numbers
                if name == "ids":
                    position["texts"] = [token_text(checkpoint, token_id) for token_id in numbers.tolist()]
    answer = {
        "model": adapter or checkpoint.name,
        "tokens": token_answers(ids, checkpoint),
        "positions": positions,
        "timings": {"queue_seconds": waited, "forward_seconds": seconds},
    }
    return PassAnswer(answer, tensors if as_safetensors else {})
