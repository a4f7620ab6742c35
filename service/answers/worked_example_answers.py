"""The printed numbers of a worked example, compared with the computed ones, for answers of POST /forward."""

from forwardscope.results.passes import PublishedResult, Slip
from forwardscope.results.passes import WorkedExample as WorkedExampleResult
from forwardscope.results.stages import FromPrevious, Published
from model.tracing.selection import Selection
from model.tracing.stages import Stage
from model.worked_examples import WorkedExample, compare
from service.http.encoding import json_array


def published_answer(example: WorkedExample, stage: Stage, selection: Selection) -> Published | None:
    """The printed numbers of one stage, restricted to the positions and heads of the request.

    None if the article prints no numbers of the stage.
    """
    found = {comparison.stage: comparison for comparison in compare(example).stages}.get(stage.name)
    if found is None:
        return None
    previous = found.from_previous
    sizes = example.sizes(len(example.prompt_ids))
    return Published(
        values=json_array(selection.take(stage, found.published.numbers(), sizes)),
        squared=found.published.squared,
        max_difference=found.max_difference,
        agrees=found.agrees,
        from_previous=None if previous is None else FromPrevious(previous.max_difference, previous.agrees),
    )


def worked_example_answer(example: WorkedExample) -> WorkedExampleResult:
    """The printed results of the whole pass, and its slips: printed numbers that do not follow from earlier ones."""
    comparison = compare(example)
    results = tuple(PublishedResult(**vars(each)) for each in comparison.results)
    return WorkedExampleResult(
        example.title, example.source, results, tuple(Slip(**vars(each)) for each in comparison.slips)
    )
