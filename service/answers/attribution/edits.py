"""The edits of the passes that POST /attribute explains: planned and bound for each of its prompts."""

from collections.abc import Sequence

from model.tracing.edits import BoundEdits, EditPlan
from service.answers.attribution.question import Question
from service.answers.edits import read_edits
from service.answers.source_passes import bind_edits
from service.http.edit_schemas import Edit
from service.state import run_plan


async def plan_edits(question: Question, edits: Sequence[Edit], *prompts: Sequence[int]) -> list[EditPlan]:
    """Check the edits for each prompt. Empty without edits."""
    ids = [list(each) for each in prompts]
    planner = await read_edits(edits, ids, question.request, question.state, question.checkpoint)
    if planner is None:
        return []
    num_checks = len(prompts) * planner.num_checks
    return await run_plan(question.state, num_checks, lambda: [planner.plan(each, len(each)) for each in ids])


async def bind(question: Question, plans: Sequence[EditPlan]) -> list[BoundEdits]:
    """Run the passes from which the edits take values."""
    if not plans:
        return []
    return await bind_edits(
        plans, question.request, question.state, question.checkpoint, question.adapter, question.arrived
    )
