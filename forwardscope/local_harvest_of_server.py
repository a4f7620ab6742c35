"""Harvests of a running server: each context is a POST /forward, so that its other requests go on."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forwardscope import requests
from forwardscope.call import Call
from model.analysis.harvest.passes import HarvestedModel, Keep
from model.text.tokenizer import Spans
from model.tracing.stages import Stage

Send = Callable[[Call[Any]], Any]
"""Sends a request of a client, and returns its result."""


def served_model(send: Send) -> HarvestedModel:
    """The model of a server."""
    found = send(requests.model())

    def run(ids: Tensor, stages: Sequence[Stage], keep: Keep) -> None:
        trace = send(requests.run(ids.tolist(), [stage.name for stage in stages], top_k=0))
        for stage, kept in zip(stages, trace.stages, strict=True):
            keep(stage, torch.from_numpy(kept.values).to(getattr(torch, kept.dtype)))  # numpy has no bfloat16

    return HarvestedModel(
        name=found.name,
        dtype=getattr(torch, found.dtype),
        quantization=found.quantization,
        stages=[Stage(name, tuple(dims)) for name, dims in found.stages],
        sizes={dim: 1 if size == "T" else int(size) for dim, size in found.sizes.items()},
        max_positions=min(found.limits.max_positions, found.limits.max_pass_tokens),
        end_id=next(iter(found.eos_token_ids), None),
        tokenizer=ServerTokenizer(send) if found.capabilities.tokenizer else None,
        run=run,
    )


class ServerTokenizer:
    """The tokenizer of a server."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def encode_with_spans(self, text: str) -> tuple[list[int], Spans]:
        found = self._send(requests.to_spans(text))
        offsets: Spans = [None if each is None else (each[0], each[1]) for each in found.offsets]
        return [token.id for token in found.tokens], offsets
