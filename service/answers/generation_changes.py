"""The `changes` of a generation with a baseline: how far the edits move the residuals, over all computed positions.

After the generation, one plain and one edited pass run over the prompt and the generated tokens of each edited choice.
The last token was never an input of the network, so it is left out. Both passes compute the same tokens, so a change is
an effect of the edits on the activations alone, and not of other tokens.
"""

from collections.abc import Sequence
from functools import partial

from forwardscope.local_results import describe_changes
from forwardscope.results.passes import StageChange
from forwardscope.results.records import Named
from model.analysis.edit_changes import residuals
from model.tracing.edits import BoundEdits
from model.tracing.stages import last_residuals
from service.answers.budget import Budget, ResponseContents
from service.answers.call import ModelCall
from service.answers.source_passes import run_jobs, stage_bytes
from service.answers.subject import adapted_network
from service.http.errors import ApiError

FIELDS = "baseline, prompt, n or max_tokens"


def make_changes_budget(call: ModelCall, num_positions: int, num_choices: int) -> Budget:
    """Bound the changes in the answer, and the stages of the two passes. Raises 413 for too long passes."""
    limit, checkpoint = call.state.settings.max_pass_tokens, call.checkpoint
    if num_positions > limit:
        message = (
            f"baseline: prompt and max_tokens have up to {num_positions} positions, but one pass takes at most {limit};"
            " shorten them, or start the server with a larger --max-pass-tokens"
        )
        raise ApiError(413, message, param="baseline", code="prompt_too_long")
    stages = last_residuals(checkpoint.model.config)
    contents = ResponseContents(num_records=1 + len(stages), num_choices=num_choices)
    return Budget(contents.num_bytes, 2 * stage_bytes(stages, num_positions, checkpoint), FIELDS)


async def changes_answer(call: ModelCall, edits: BoundEdits, ids: Sequence[int]) -> Named[StageChange]:
    """Describe the changes of one choice, whose computed positions have the tokens `ids`."""
    run = partial(residuals, adapted_network(call.checkpoint, call.adapter), call.checkpoint.model.config, ids)
    plain, edited = await run_jobs(call, [run, partial(run, edits=edits)])
    return describe_changes(plain, edited)
