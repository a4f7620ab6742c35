"""The size of a response and of the tensors of a pass, bounded before anything is computed.

A route describes what its response holds at most as a `ResponseContents`. All sizes follow from it here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from service.http.encoding import Encoding, value_bytes
from service.http.errors import ApiError
from service.state import State

# The most bytes that a part of a response takes in JSON, without its texts:
RECORD_BYTES = 512  # the answer itself, an event, or a stage with its name, shape, dims and summary
PREDICTION_BYTES = 160  # a token with its logit and probability, or log-probability
TOKEN_BYTES = 56  # a token with its id and position
ESCAPED_BYTES = 6  # one byte of a text, if it is a control character
# A pass holds each number up to three times. An attention score: as computed, masked, and after the softmax. A logit:
# as computed, in float32, and as a probability or log-probability.
PASS_COPIES = 3


@dataclass(frozen=True, kw_only=True)
class ResponseContents:
    """What a response holds at most.

    `text_bytes` are the bytes of all texts in UTF-8, before JSON escapes them. The `num_values` tensor values have
    `dtype` and are written in `encoding`. `extra_bytes` are the bytes of everything else. The response holds all of
    this `num_choices` times.
    """

    num_records: int = 0
    num_predictions: int = 0
    num_tokens: int = 0
    text_bytes: int = 0
    num_values: int = 0
    dtype: torch.dtype = torch.float32
    encoding: Encoding = "json"
    extra_bytes: int = 0
    num_choices: int = 1


def response_bytes(contents: ResponseContents) -> int:
    """Bound the bytes of a response."""
    size = RECORD_BYTES * contents.num_records
    size += PREDICTION_BYTES * contents.num_predictions
    size += TOKEN_BYTES * contents.num_tokens
    size += ESCAPED_BYTES * contents.text_bytes
    if contents.encoding == "safetensors":
        size *= 2  # JSON inside the JSON of the header, where every quote is escaped
    size += value_bytes(contents.num_values, contents.dtype, contents.encoding)
    return contents.num_choices * (size + contents.extra_bytes)


def pass_bytes(*, num_logits: int, num_scores: int = 0, itemsize: int = 4) -> int:
    """Bound the bytes of the largest tensors of a pass or step: its logits, and the attention scores of one block."""
    return PASS_COPIES * itemsize * (num_logits + num_scores)


@dataclass(frozen=True)
class Budget:
    """The bytes that a request will take at most. `fields` lists the fields that can make the request smaller."""

    response_bytes: int
    pass_bytes: int
    fields: str

    def check(self, state: State) -> None:
        """Raise 413 if a size is over its limit; the message has the size, the limit and the fields to reduce."""
        settings = state.settings
        if self.response_bytes > settings.max_response_bytes:
            what, size, limit = "response", self.response_bytes, settings.max_response_bytes
        elif self.pass_bytes > settings.max_pass_bytes:
            what, size, limit = "pass", self.pass_bytes, settings.max_pass_bytes
        else:
            return
        state.metrics.budget_refusals.inc()
        message = f"the {what} would take up to {size} bytes, the limit is {limit}; reduce {self.fields}"
        raise ApiError(413, message, code=f"{what}_too_large")


def total(budgets: Sequence[Budget]) -> Budget:
    """The budget of a request with several passes, which run one after the other."""
    return Budget(
        sum(budget.response_bytes for budget in budgets),
        max(budget.pass_bytes for budget in budgets),
        budgets[0].fields,
    )
