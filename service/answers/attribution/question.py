"""The subject of a request to POST /attribute: the checked prompt, its token and position, and their JSON form."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forwardscope.local_results import describe_edits
from forwardscope.results import attributions as results
from forwardscope.results.attributions import AttributionTimings
from forwardscope.results.stages import Token
from model.analysis.attribution.gradients import differentiable_stages
from model.analysis.attribution.target import LogitTarget, LossTarget, StageTarget, Target
from model.errors import shortened
from model.network.joint_passes import AdaptedNetwork
from model.tracing.edits import BoundEdits, EditPlan
from model.tracing.edits.operands import read_row
from model.tracing.stages import Stage, UnknownStage, select_rows, sizes_of
from service.answers.budget import ResponseContents
from service.answers.call import ModelCall
from service.answers.edits import bind_edits, find_vector, read_edits
from service.answers.prompts import Prompt, check_ids, longest_token_bytes, prompt_ids, token_answers
from service.answers.stage_answers import select_stages
from service.http.attribute_schemas import LogitRequest, TargetRequest
from service.http.edit_schemas import Edit
from service.http.encoding import NAMES, Encoding
from service.http.errors import invalid

MAX_SHOWN_PIECES = 8  # of a text that is several tokens, in an error message


Plans = Sequence[EditPlan | None]
"""The plans of the edits for each prompt of a request; all are None without edits. Answers describe the first one."""


@dataclass(frozen=True)
class Question(ModelCall):
    """A request with its prompt as token ids."""

    ids: Sequence[int]

    @property
    def network(self) -> AdaptedNetwork:
        """The served network with the adapter of the request."""
        adapter = None if self.adapter is None else self.checkpoint.adapters[self.adapter]
        return AdaptedNetwork(self.checkpoint.model, adapter)

    async def plan_edits(self, edits: Sequence[Edit], *prompts: Sequence[int]) -> Plans:
        """Check the edits of the passes that are explained for each of their prompts."""
        edit_planner = await read_edits(edits, [(ids, None) for ids in prompts], self)
        if edit_planner is None:
            return [None] * len(prompts)
        num_checks = len(prompts) * edit_planner.num_checks
        return await self.run_here_or_on_thread(
            num_checks, lambda: [edit_planner.plan(ids, len(ids)) for ids in prompts]
        )

    async def bind(self, plans: Plans) -> Sequence[BoundEdits | None]:
        """Bind the edits of each prompt; None without edits."""
        own = [plan for plan in plans if plan is not None]
        return await bind_edits(own, self) if own else [None] * len(plans)

    def token_answer(self, token_id: int) -> Token:
        return Token(token_id, self.checkpoint.text_of(token_id))

    def head(self, method: str, dtype: torch.dtype, waited: float, seconds: float, edits: Plans) -> dict[str, Any]:
        """The fields that the answers of all methods have."""
        return {
            "method": method,
            "model": self.adapter or self.checkpoint.name,
            "tokens": token_answers(self.ids, self.checkpoint),
            "dtype": NAMES[dtype],
            "timings": AttributionTimings(waited, seconds),
            "edits": describe_edits(edits[0]),
        }

    def response_bytes(
        self, num_records: int, num_values: int, dtype: torch.dtype = torch.float32, encoding: Encoding = "json"
    ) -> int:
        """Bound an answer with two lists of tokens, some records, such as stages, and numbers."""
        contents = ResponseContents(
            num_records=1 + num_records,
            num_predictions=2 * len(self.ids) + 2,
            token_bytes=longest_token_bytes(self.checkpoint),
            num_values=num_values,
            dtype=dtype,
            encoding=encoding,
        )
        return contents.num_bytes

    def target_answer(self, target: Target) -> results.Target:
        """Describe what is explained."""
        if isinstance(target, LossTarget):
            return results.Target(None, None, None)
        if isinstance(target, StageTarget):
            return results.Target(None, None, target.position, target.stage.name)
        minus = None if target.minus is None else self.token_answer(target.minus)
        return results.Target(self.token_answer(target.token), minus, target.position)


async def second_prompt(question: Question, prompt: Prompt, param: str) -> list[int]:
    """The token ids of a prompt that must have as many tokens as the first one. Raises 400 if it has not."""
    ids = await prompt_ids(question, prompt, param)
    if len(ids) != len(question.ids):
        reason = f"has {len(ids)} tokens, but prompt has {len(question.ids)}; both need as many, position by position"
        raise invalid(param, reason, "length")
    return ids


async def find_stages(
    question: Question, stages: Sequence[Stage], globs: Sequence[str], param: str = "stages"
) -> list[Stage]:
    """The stages that any glob matches, in the order of computation. Raises 400 for a glob that matches none."""
    return await question.run_here_or_on_thread(len(globs), lambda: select_stages(stages, globs, param))


async def read_token(question: Question, token: str | int, param: str) -> int:
    """The id of a token. Raises 400 for an id outside the vocabulary, and for a text that is not one token."""
    tokenizer, vocab_size = question.checkpoint.tokenizer, question.checkpoint.model.config.vocab_size
    if isinstance(token, int):
        if token >= vocab_size:
            raise invalid(param, f"{shortened(token)} is not a token id; the vocabulary has {vocab_size}", "token_id")
        return token
    if tokenizer is None:
        raise invalid(param, "this checkpoint has no tokenizer.json; send a token id", "no_tokenizer")
    encode = partial(tokenizer.encode, token, add_special_tokens=False)
    ids: list[int] = await question.state.worker.run_text(encode, len(token.encode()))
    if len(ids) != 1:
        pieces = ", ".join(f"{tokenizer.token_text(each)!r} ({each})" for each in ids[:MAX_SHOWN_PIECES])
        more = f" and {len(ids) - MAX_SHOWN_PIECES} more" if len(ids) > MAX_SHOWN_PIECES else ""
        found = f"is {len(ids)} tokens: {pieces}{more}" if ids else "has no token"
        hint = "; a word inside a text usually begins with a space" if ids and not token.startswith(" ") else ""
        raise invalid(
            param, f"{shortened(token)} {found}; send a text that is one token, or an id{hint}", "not_a_token"
        )
    check_ids(ids, vocab_size, param)
    return ids[0]


async def read_logit(question: Question, body: LogitRequest | TargetRequest) -> LogitTarget:
    """The logit that a request asks about. Raises 400 for a wrong token or position."""
    assert body.token is not None
    token = await read_token(question, body.token, "token")
    minus = None if body.minus is None else await read_token(question, body.minus, "minus")
    if minus == token:
        raise invalid("minus", "is the same token as `token`, so their difference is always 0; send another token")
    return LogitTarget(token, read_position(question, body), minus)


def read_position(question: Question, body: LogitRequest | TargetRequest) -> int:
    """The position that a request names, counted from the beginning. Raises 400 if there is none."""
    given = -1 if body.position is None else body.position
    position = given + len(question.ids) if given < 0 else given
    if not 0 <= position < len(question.ids):
        reason = f"{shortened(given)} is out of range; there are {len(question.ids)} tokens"
        raise invalid("position", reason, "out_of_range")
    return position


TARGET_FIELDS = {
    "logit": ("token", "minus", "position"),
    "loss": ("targets",),
    "stage": ("stage", "vector", "position"),
}


async def read_target(question: Question, body: TargetRequest) -> Target:
    """The number that a request asks about. Raises 400 for fields that do not fit."""
    own = TARGET_FIELDS[body.of]
    for of, names in TARGET_FIELDS.items():
        for name in names:
            if name not in own and getattr(body, name) is not None:
                raise invalid(name, f"belongs to the {of}; send of: {of}, or leave the field out")
    if body.of == "stage":
        return read_stage(question, body)
    if body.of == "logit":
        if body.token is None:
            raise invalid("token", "is required to explain a logit; send a token, or explain the loss", "missing")
        return await read_logit(question, body)
    targets = [*question.ids[1:], None] if body.targets is None else body.targets
    if len(targets) != len(question.ids):
        raise invalid("targets", f"has {len(targets)} entries for {len(question.ids)} tokens")
    check_ids(targets, question.checkpoint.model.config.vocab_size, "targets")
    if all(target is None for target in targets):
        where = "prompt" if body.targets is None else "targets"
        raise invalid(
            where, "gives no position a next token, so there is no loss; send at least two tokens, or targets"
        )
    return LossTarget(targets)


def read_stage(question: Question, body: TargetRequest) -> StageTarget:
    """The number of a stage that a request asks about. Raises 400 for a wrong stage, vector or position."""
    config = question.checkpoint.model.config
    if body.stage is None or body.vector is None:
        name = "stage" if body.stage is None else "vector"
        raise invalid(name, "is required to explain a number of a stage", "missing")
    try:
        stage = select_rows(differentiable_stages(config), body.stage)
        vector = find_vector(question, body.vector, "vector")
        row = read_row(vector, stage, stage.shape(sizes_of(config, 1))[2:], "vector")
    except UnknownStage as error:
        raise invalid("stage", str(error), "unknown_stage") from None
    return StageTarget(stage, row, read_position(question, body))
