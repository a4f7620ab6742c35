"""Bound the size of the answer of a generation, traced or not, before it runs."""

import math

import torch

from model.checkpoints.load import Checkpoint
from model.engine.prompt_lookup import MAX_DRAFT
from model.engine.request import Request
from model.tracing.selection import Selection
from model.tracing.stages import sizes_of
from service.answers.budget import Budget, ResponseContents, pass_bytes
from service.answers.prompts import longest_token_bytes
from service.http.encoding import Encoding

# The fields that can make a request smaller, without and with `trace`:
TEXT_FIELDS = "prompt, echo, logprobs, prompt_logprobs, n or max_tokens"
TRACE_FIELDS = (
    "trace.stages, trace.positions, trace.heads, trace.detail, trace.top_k, prompt, echo, logprobs, n or max_tokens"
)


def make_budget(request: Request, encoding: Encoding, checkpoint: Checkpoint, max_step_tokens: int) -> Budget:
    """Bound the answer of a generation, over all its steps, and the largest tensors of one step.

    Without traces and log-probabilities, an answer holds only text and ids. Their size is limited by `n` and the
    context, so they are not counted.
    """
    config, params, trace, num_prompt = checkpoint.model.config, request.params, request.trace, len(request.prompt_ids)
    num_step_tokens = min(max_step_tokens, max(num_prompt, 1 + MAX_DRAFT))
    num_records = num_predictions = num_values = num_scores = 0
    needs_logits = params.prompt_logprobs is not None
    if trace is not None or params.logprobs is not None:
        num_records += params.max_tokens
        # For each token: its id, its log-probability, and the most likely tokens.
        num_predictions += params.max_tokens * (1 + 1 + (params.logprobs or 0))
    if params.prompt_logprobs is not None:
        num_scored = num_prompt - params.prompt_logprobs_start
        num_records += num_scored
        num_predictions += num_scored * (1 + 1 + params.prompt_logprobs)
    if trace is not None:
        num_positions = num_prompt + params.max_tokens - 1
        selection, lens_top = trace.selection, trace.logit_lens
        num_traced = num_positions if selection.positions is None else len(selection.positions)
        num_records += 1 + num_traced * (1 + len(selection.stages))
        if params.constraint is not None:
            num_records += params.max_tokens  # a step of its own for each token, and what the grammar changed for it
        num_predictions += num_traced * trace.top_k
        if lens_top is not None:
            num_records += params.max_tokens
            num_predictions += params.max_tokens * config.num_layers * (1 + lens_top)
        if selection.detail == "values":
            sizes = sizes_of(config, num_traced) | {"key": num_positions}
            # Without positions, because `sizes` counts only the traced ones.
            head_selection = Selection(stages=selection.stages, heads=selection.heads)
            num_values = sum(math.prod(head_selection.shape(stage, sizes)) for stage in selection.stages)
        needs_logits |= trace.needs_logits
        if any("key" in stage.dims for stage in selection.stages):
            num_scores = config.num_heads * num_step_tokens * num_positions
    contents = ResponseContents(
        num_records=num_records,
        num_predictions=num_predictions,
        token_bytes=longest_token_bytes(checkpoint),
        num_values=num_values,
        dtype=torch.promote_types(checkpoint.model.embed.weight.dtype, torch.float32),
        encoding=encoding,
        num_choices=params.n,
    )
    num_logits = num_step_tokens * config.vocab_size if needs_logits else 0
    return Budget(
        contents.num_bytes,
        pass_bytes(num_logits=num_logits, num_scores=num_scores),
        TEXT_FIELDS if trace is None else TRACE_FIELDS,
    )
