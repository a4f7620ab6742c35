"""The edits of the passes that POST /attribute explains: planned and bound for each of its prompts."""

from collections.abc import Sequence

from model.tracing.edits import BoundEdits, EditPlan
from service.answers.attribution.question import Question
from service.answers.edits import answer_bytes, bind_edits, read_edits
from service.http.edit_schemas import Edit

Plans = Sequence[EditPlan | None]
"""The plan of each prompt of a request; all are None without edits. The answer describes the first one."""


async def plan_edits(question: Question, edits: Sequence[Edit], *prompts: Sequence[int]) -> Plans:
    """Check the edits for each prompt."""
    runs = [(list(each), None) for each in prompts]
    edit_planner = await read_edits(edits, runs, question)
    if edit_planner is None:
        return [None] * len(prompts)
    num_checks = len(prompts) * edit_planner.num_checks
    return await question.run_here_or_on_thread(
        num_checks, lambda: [edit_planner.plan(ids, len(ids)) for ids, _ in runs]
    )


def edits_bytes(plans: Plans) -> int:
    """The bytes of `edits` in an answer."""
    return 0 if plans[0] is None else answer_bytes(plans[0])


async def bind(question: Question, plans: Plans) -> Sequence[BoundEdits | None]:
    """Bind the edits of each prompt; None without edits."""
    own = [plan for plan in plans if plan is not None]
    return await bind_edits(own, question) if own else [None] * len(plans)
