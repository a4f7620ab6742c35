"""POST /logits: next-token logits of a prompt, the whole row or the likeliest tokens."""

import time
from typing import Any

import torch
from fastapi import APIRouter, Request, Response
from torch import Tensor

from model.checkpoint import Checkpoint
from service.bodies import JsonRoute
from service.encoding import json_array, safetensors_bytes, to_json, value_bytes
from service.errors import invalid
from service.openapi import BINARY, answers
from service.passes import LOGITS_BYTES, SAFETENSORS, Budget, answer_pass, text_bytes, wants_safetensors
from service.schemas import LogitsAnswer, LogitsRequest
from service.state import (
    CheckpointDep,
    StateDep,
    check_indices,
    longest_token_bytes,
    positioned,
    prompt_ids,
    token_text,
)

router = APIRouter(route_class=JsonRoute, tags=["inside"])


@router.post(
    "/logits", summary="Next-token logits", response_model=None, responses=answers(LogitsAnswer, SAFETENSORS, BINARY)
)
async def logits(body: LogitsRequest, request: Request, state: StateDep, checkpoint: CheckpointDep) -> Response:
    as_safetensors = wants_safetensors(request)
    ids = await prompt_ids(request, state, checkpoint, body.prompt)
    rows = find_rows(body, len(ids))
    vocab_size = checkpoint.model.config.vocab_size
    if body.top_k is not None and body.top_k > vocab_size:
        raise invalid("top_k", f"{body.top_k} is more than the vocabulary of {vocab_size}")
    num_values = len(rows) * (body.top_k or vocab_size) * (2 if body.logprobs else 1)
    num_texts = len(ids) + len(rows) * (1 + (body.top_k or 0))
    response_bytes = value_bytes(num_values, torch.float32, "safetensors" if as_safetensors else "json")
    response_bytes += text_bytes(0, num_texts, longest_token_bytes(checkpoint), as_safetensors=as_safetensors)
    pass_bytes = LOGITS_BYTES * len(rows) * vocab_size
    return await answer_pass(
        request,
        state,
        lambda waited: run(checkpoint, ids, rows, body, as_safetensors, waited),
        num_tokens=len(ids),
        budget=Budget(response_bytes, pass_bytes, "positions, top_k or logprobs"),
        as_safetensors=as_safetensors,
    )


def find_rows(body: LogitsRequest, num_tokens: int) -> list[int]:
    if body.positions == "last":
        return [num_tokens - 1]
    if body.positions == "all":
        return list(range(num_tokens))
    if not body.positions:
        raise invalid("positions", "is empty; name at least one, or leave it out")
    check_indices(body.positions, num_tokens, "positions", "tokens")
    return body.positions


def run(
    checkpoint: Checkpoint, ids: list[int], rows: list[int], body: LogitsRequest, as_safetensors: bool, waited: float
) -> bytes | memoryview:
    """The pass and its answer, encoded. On the network's thread."""
    start = time.perf_counter()
    with torch.inference_mode():
        device = checkpoint.model.embed.weight.device
        found = checkpoint.model(torch.tensor([ids], device=device), rows=rows)[0].float()  # (rows, V)
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
        "model": checkpoint.name,
        "tokens": positioned(ids, checkpoint),
        "positions": positions,
        "timings": {"queue_seconds": waited, "forward_seconds": seconds},
    }
    return safetensors_bytes(tensors, answer) if as_safetensors else to_json(answer)
