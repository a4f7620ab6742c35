"""The size of a response and of the tensors of a pass, bounded before anything is computed.

A route describes what its response holds at most as a `ResponseContents`. All sizes follow from it here, and from the
classes of the results.
"""

import types
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch

from forwardscope.results.generations import Logprob
from forwardscope.results.records import Record
from forwardscope.results.stages import PositionedToken, PositionPredictions, Prediction, Published, Stage
from service.http.encoding import Encoding, value_bytes
from service.http.errors import ApiError
from service.state import State

SCALAR_BYTES = {bool: 5, int: 10, float: 25, str: 2, types.NoneType: 4}  # a text counts without its characters
LIST_BYTES = 224  # the lists and names of a record, such as the shape and the dims of a stage
ESCAPED_BYTES = 6  # one byte of a text, if it is a control character
# A pass holds each number up to three times. An attention score: as computed, masked, and after the softmax. A logit:
# as computed, in float32, and as a probability or log-probability.
PASS_COPIES = 3


@dataclass(frozen=True, kw_only=True)
class ResponseContents:
    """Upper bounds of the contents of a response.

    A record is the answer itself, an event, or a stage; a prediction is a token with its logit and probability, or
    what is as large. The text of a token has at most `token_bytes`, and other texts have `text_bytes`, in UTF-8, before
    JSON escapes them. The `num_values` tensor values have `dtype` and are written in `encoding`. `extra_bytes` are the
    bytes of everything else, such as printed numbers. The response holds all of this `num_choices` times.
    """

    num_records: int = 0
    num_predictions: int = 0
    num_tokens: int = 0
    token_bytes: int = 0
    text_bytes: int = 0
    num_values: int = 0
    dtype: torch.dtype = torch.float32
    encoding: Encoding = "json"
    extra_bytes: int = 0
    num_choices: int = 1

    @property
    def num_bytes(self) -> int:
        """Bound the bytes of the response."""
        size = (json_bytes(Stage) - json_bytes(Published) + LIST_BYTES) * self.num_records
        size += max(map(json_bytes, (Prediction, Logprob, PositionPredictions))) * self.num_predictions
        size += json_bytes(PositionedToken) * self.num_tokens
        size += ESCAPED_BYTES * (self.text_bytes + self.token_bytes * (self.num_predictions + self.num_tokens))
        if self.encoding == "safetensors":
            size *= 2  # JSON inside the JSON of the header, where every quote is escaped
        size += value_bytes(self.num_values, self.dtype, self.encoding)
        return self.num_choices * (size + self.extra_bytes)


@cache
def json_bytes(hint: Any) -> int:
    """The most bytes that a value of a type takes in JSON with a comma, its texts and lists counted as empty."""
    args = get_args(hint)
    if isinstance(hint, type) and issubclass(hint, Record):
        hints = get_type_hints(hint)
        return 3 + sum(len(each.name) + 3 + json_bytes(hints[each.name]) for each in fields(cast(Any, hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return max(map(json_bytes, args))
    if get_origin(hint) is Literal:
        return max(len(word) for word in args) + 3
    return SCALAR_BYTES.get(hint, SCALAR_BYTES[types.NoneType]) + 1


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


def check_num_tokens(
    param: str, num_tokens: int, limit: int, job: str = "one pass", option: str = "--max-pass-tokens"
) -> None:
    """Raise 413 if a prompt is longer than the limit of a job, which an option of the server sets."""
    if num_tokens > limit:
        message = (
            f"{param}: has {num_tokens} tokens, but {job} takes at most {limit}; shorten the prompt, or start the "
            f"server with a larger {option}"
        )
        raise ApiError(413, message, param=param, code="prompt_too_long")


def total(budgets: Sequence[Budget]) -> Budget:
    """The budget of a request with several passes, which run one after the other."""
    return Budget(
        sum(budget.response_bytes for budget in budgets),
        max(budget.pass_bytes for budget in budgets),
        budgets[0].fields,
    )
