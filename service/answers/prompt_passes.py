"""Answer a POST /forward, /logits or /patterns: read its prompts, plan a pass for each, bind its edits, and run it.

A route has its own kind of `PromptPlan`, which knows how large its answer may be, and gives two functions: one makes
the plan of a prompt, and `prepare_answer` says how the pass of a plan is run and described.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil
from typing import Any, TypeVar

from fastapi import Response

from forwardscope.local_results import describe_edits, describe_tokens
from forwardscope.results.passes import PassTimings
from model.network.joint_passes import MAX_COST, PromptPass, cost_of
from model.tracing.edits import BoundEdits, EditPlan
from model.tracing.hooks import Hooks
from model.tracing.tap import Chain, Tap
from service.answers.budget import Budget, total
from service.answers.call import RouteCall
from service.answers.edits import bind_edits, read_edits
from service.answers.passes import PendingAnswer, PreparedAnswer, answer_passes
from service.answers.prompts import Prompt, param_of
from service.answers.subject import Subject
from service.http.errors import invalid
from service.http.schemas import MAX_PROMPTS, EditedRequest


@dataclass(frozen=True, kw_only=True)
class PromptPlan:
    """A checked request, for one of its prompts. `hooks` are None over HTTP.

    `bound_edits` are set when the passes of sources have run.
    """

    subject: Subject
    ids: list[int]
    edit_plan: EditPlan | None = None
    bound_edits: BoundEdits | None = None
    hooks: Hooks | None = None

    def tap(self, rows: Sequence[int] | None = None) -> Tap | None:
        """The tap that changes the pass; None without edits and hooks."""
        taps: list[Tap] = []
        if self.bound_edits is not None:
            taps.append(self.bound_edits.whole_pass(self.ids, rows, self.subject.network.backend.ops))
        if self.hooks is not None:
            taps.append(self.hooks.tap(0, len(self.ids), rows))
        return Chain(*taps) if taps else None

    @property
    def cost(self) -> int:
        """The cost of the pass in comparison with others; see `cost_of`."""
        matches = () if self.edit_plan is None else self.edit_plan.matches
        return cost_of(len(self.ids), sum(len(each.stages) for each in matches))

    def prompt_pass(self, tap: Tap | None, rows: Sequence[int] | None = None) -> PromptPass:
        """The pass with a tap."""
        return PromptPass(self.subject.network, self.ids, self.subject.device, tap, rows)

    def make_budget(self) -> Budget:
        """Bound the answer and the largest tensors of the pass, which depend on the length of the prompt alone."""
        raise NotImplementedError

    def head(self, timings: PassTimings) -> dict[str, Any]:
        """The fields of an answer that all routes have."""
        return {
            "model": self.subject.name,
            "tokens": describe_tokens(self.ids, self.subject.text_of),
            "timings": timings,
            "edits": describe_edits(self.edit_plan),
        }


Plan = TypeVar("Plan", bound=PromptPlan)
MakePlan = Callable[[int, PromptPlan], Plan]
"""Checks the fields of a route for the prompt with this index, and adds them to its plan. Raises 400 for wrong ones."""


@dataclass(frozen=True)
class PromptInputs:
    """A request, as its route has read it.

    With `scales`, there is a pass for each of them and each prompt: all scales of the first prompt come first. Its
    plans match `num_globs` globs.
    """

    call: RouteCall
    subject: Subject
    body: EditedRequest
    prompts: Sequence[Prompt]
    is_list: bool = False
    as_safetensors: bool = False
    scales: Sequence[float] | None = None
    num_globs: int = 0


async def answer_prompts(
    inputs: PromptInputs, make_plan: MakePlan[Plan], prepare_answer: Callable[[Plan], PreparedAnswer]
) -> Response:
    """Plan and run a pass for each prompt, and return the response. Raises the errors of all of these steps.

    1. `plan_prompts` tokenizes the prompts, and plans each of them with the `make_plan` of the route.
    2. `bind_edits` (edits.py) binds their edits, and runs the passes that means and patches need.
    3. `answer_passes` (passes.py) calls `prepare_answer`, of the route, for each plan on the network's thread, computes
       the passes of the `PreparedAnswer`, and encodes the answers.
    """
    plans, budget = await plan_prompts(inputs, make_plan)
    edit_plans = [plan.edit_plan for plan in plans if plan.edit_plan is not None]
    if edit_plans:
        budget.check(inputs.call.state)  # before the passes of sources
        model_call = inputs.subject.model_call(inputs.call)
        assert model_call is not None
        bound = await bind_edits(edit_plans, model_call)
        plans = [replace(plan, bound_edits=each) for plan, each in zip(plans, bound, strict=True)]
    settings = inputs.call.state.settings
    used = budget.pass_bytes / settings.max_pass_bytes  # of the memory of a pass

    def cost_of_plan(plan: Plan) -> int:
        if plan.prompt_pass(None).transformer is None:  # the network cannot compute this pass together with others
            return MAX_COST
        share = max(used, len(plan.ids) / settings.max_pass_tokens)  # of the limits of a pass
        return max(plan.cost, ceil(MAX_COST * share))

    return await answer_passes(
        inputs.call,
        [PendingAnswer(len(plan.ids), partial(prepare_answer, plan), cost_of_plan(plan)) for plan in plans],
        budget=budget,
        is_list=inputs.is_list or inputs.scales is not None,
        as_safetensors=inputs.as_safetensors,
    )


async def plan_prompts(inputs: PromptInputs, make_plan: MakePlan[Plan]) -> tuple[list[Plan], Budget]:
    """Check a request for each of its prompts and scales, and bound the cost of all plans together."""
    call, subject, edits = inputs.call, inputs.subject, inputs.body.edits
    scales: Sequence[float | None] = inputs.scales or [None]
    num_plans = len(inputs.prompts) * len(scales)
    if num_plans > MAX_PROMPTS:
        reason = f"{len(scales)} scales of {len(inputs.prompts)} prompts are more than {MAX_PROMPTS} passes"
        raise invalid("scales", f"{reason}; send several requests")
    params = [param_of("prompt", index, inputs.is_list) for index in range(len(inputs.prompts))]
    ids = [await subject.read_prompt(call, prompt, param) for prompt, param in zip(inputs.prompts, params, strict=True)]
    edit_planner = None
    if edits or inputs.scales is not None:
        if (model_call := subject.model_call(call)) is None:
            param = "edits" if edits else "scales"
            reason = f"cannot change the worked example {subject.name!r}, only the served model; leave the field out"
            raise invalid(param, reason)
        edit_planner = await read_edits(edits, list(product(ids, scales)), model_call)
    hooks = call.notes.hooks

    def make_plans() -> tuple[list[Plan], Budget]:
        plans = []
        for (index, each), scale in product(enumerate(ids), scales):
            edit_plan = None if edit_planner is None else edit_planner.plan(each, len(each), params[index], scale)
            prompt = PromptPlan(subject=subject, ids=each, edit_plan=edit_plan, hooks=hooks)
            plans.append(make_plan(index, prompt))
        by_length = {len(plan.ids): plan for plan in plans}
        budgets = {length: plan.make_budget() for length, plan in by_length.items()}
        return plans, total([budgets[len(plan.ids)] for plan in plans])

    num_edit_checks = 0 if edit_planner is None else edit_planner.num_checks
    return await call.run_here_or_on_thread(inputs.num_globs + num_plans * (1 + num_edit_checks), make_plans)
