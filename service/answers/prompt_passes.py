"""Answer a POST /forward, /logits or /patterns: read its prompts, plan a pass for each, bind its edits, and run it.

A route says how one prompt is planned, how large its answer may be, and how its pass is run and described.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil
from typing import Any, TypeVar

from fastapi import Request, Response

from forwardscope.local_results import describe_edits, describe_tokens
from forwardscope.results.passes import PassTimings
from model.network.joint_passes import MAX_COST, PromptPass, cost_of
from model.tracing.edits import BoundEdits, EditPlan
from model.tracing.hooks import Hooks
from model.tracing.tap import Chain, Tap
from service.answers.budget import Budget, total
from service.answers.edits import answer_bytes, read_edits
from service.answers.passes import BegunPass, Pass, answer_passes
from service.answers.prompts import Prompt, param_of
from service.answers.source_passes import bind_edits
from service.answers.subject import Subject
from service.http.errors import invalid
from service.http.schemas import MAX_PROMPTS, EditedRequest
from service.request_notes import notes_of
from service.state import State, run_plan


@dataclass(frozen=True, kw_only=True)
class PromptPlan:
    """A checked request, for one of its prompts. `bound_edits` are set when the passes of sources have run."""

    subject: Subject
    ids: list[int]
    edits: EditPlan | None = None
    bound_edits: BoundEdits | None = None
    hooks: Hooks | None = None

    @property
    def edits_bytes(self) -> int:
        """The bytes of `edits` in the answer."""
        return 0 if self.edits is None else answer_bytes(self.edits)

    def tap(self, rows: Sequence[int] | None = None) -> Tap | None:
        """The tap that changes the pass; None without edits and hooks."""
        taps: list[Tap] = []
        if self.bound_edits is not None:
            taps.append(self.bound_edits.whole_pass(self.ids, rows, self.subject.network.backend.network))
        if self.hooks is not None:
            taps.append(self.hooks.tap(0, len(self.ids), rows))
        return Chain(*taps) if taps else None

    @property
    def cost(self) -> int:
        """The cost of the pass in comparison with others; see `cost_of`."""
        matches = () if self.edits is None else self.edits.matches
        return cost_of(len(self.ids), sum(len(each.stages) for each in matches))

    def prompt_pass(self, tap: Tap | None, rows: Sequence[int] | None = None) -> PromptPass:
        """The pass with a tap."""
        return PromptPass(self.subject.network, self.ids, self.subject.device, tap, rows)

    def head(self, timings: PassTimings) -> dict[str, Any]:
        """The fields of an answer that all routes have."""
        return {
            "model": self.subject.name,
            "tokens": describe_tokens(self.ids, self.subject.text_of),
            "timings": timings,
            "edits": describe_edits(self.edits),
        }


Plan = TypeVar("Plan", bound=PromptPlan)


async def answer_prompts(
    body: EditedRequest,
    prompts: Sequence[Prompt],
    request: Request,
    state: State,
    subject: Subject,
    arrived: float,
    *,
    planner: Callable[[], Callable[[int, PromptPlan], Plan]],
    make_budget: Callable[[Plan], Budget],
    begin: Callable[[Plan], BegunPass],
    num_globs: int = 0,
    is_list: bool = False,
    as_safetensors: bool = False,
    scales: Sequence[float] | None = None,
) -> Response:
    """Plan and run a pass for each prompt, and return the response. Raises the errors of all of these steps.

    With `scales`, there is a pass for each of them and each prompt: all scales of the first prompt come first.

    1. The prompts are tokenized.
    2. `planner`, of the route, checks the fields that do not depend on the prompts; they match `num_globs` globs. It
       returns a function that takes the index of a prompt and the common part of its plan, and returns the whole plan.
    3. `make_budget`, of the route, bounds the cost of a plan.
    4. The passes from which edits take values are run (source_passes.py).
    5. `answer_passes` (passes.py) calls `begin`, of the route, for each plan on the network's thread, computes the
       passes that it returns, and encodes the answers.
    """
    own_scales: Sequence[float | None] = scales or [None]
    if len(prompts) * len(own_scales) > MAX_PROMPTS:
        reason = f"{len(own_scales)} scales of {len(prompts)} prompts are more than {MAX_PROMPTS} passes"
        raise invalid("scales", f"{reason}; send several requests")
    params = [param_of("prompt", index, is_list) for index in range(len(prompts))]
    ids = [
        await subject.read_prompt(request, state, prompt, param) for prompt, param in zip(prompts, params, strict=True)
    ]
    checkpoint = subject.checkpoint
    if checkpoint is None and body.edits:
        raise invalid("edits", f"change the served model, but not the worked example {subject.name!r}; leave them out")
    if checkpoint is None and scales is not None:
        raise invalid("scales", "multiply edits, which worked examples do not have; leave the field out")
    edits = (
        None
        if checkpoint is None
        else await read_edits(body.edits, list(product(ids, own_scales)), request, state, checkpoint)
    )

    hooks = notes_of(request.scope).hooks

    def make_plans() -> tuple[list[Plan], Budget]:
        make_plan, plans = planner(), []
        for (index, each), scale in product(enumerate(ids), own_scales):
            plan = None if edits is None else edits.plan(each, len(each), params[index], scale)
            plans.append(make_plan(index, PromptPlan(subject=subject, ids=each, edits=plan, hooks=hooks)))
        sizes = {len(plan.ids): plan for plan in plans}  # a budget depends on the length of the prompt alone
        budgets = {length: make_budget(plan) for length, plan in sizes.items()}
        return plans, total([budgets[len(plan.ids)] for plan in plans])

    num_checks = num_globs + len(prompts) * len(own_scales) * (1 + (0 if edits is None else edits.num_checks))
    plans, budget = await run_plan(state, num_checks, make_plans)
    edit_plans = [plan.edits for plan in plans if plan.edits is not None]
    if edit_plans:
        budget.check(state)  # before the passes of sources
        assert checkpoint is not None
        bound = await bind_edits(edit_plans, request, state, checkpoint, subject.adapter, arrived)
        plans = [replace(plan, bound_edits=each) for plan, each in zip(plans, bound, strict=True)]
    settings = state.settings
    used = budget.pass_bytes / settings.max_pass_bytes  # of the memory of a pass

    def cost_of_plan(plan: Plan) -> int:
        if plan.prompt_pass(None).transformer is None:
            return MAX_COST
        share = max(used, len(plan.ids) / settings.max_pass_tokens)  # of the limits of a pass
        return max(plan.cost, ceil(MAX_COST * share))

    passes = [Pass(len(plan.ids), partial(begin, plan), cost_of_plan(plan)) for plan in plans]
    returns_list = is_list or scales is not None
    return await answer_passes(
        request, state, passes, budget=budget, is_list=returns_list, as_safetensors=as_safetensors, arrived=arrived
    )
