"""The printed numbers of a worked example, compared with the computed ones, for answers of POST /forward."""

from dataclasses import asdict
from typing import Any

from model.tracing.selection import Selection
from model.tracing.stages import Stage
from model.worked_examples import WorkedExample, compare
from service.http.encoding import json_array


def published_answer(example: WorkedExample, stage: Stage, selection: Selection) -> dict[str, Any] | None:
    """The printed numbers of one stage, restricted to the positions and heads of the request.

    None if the article prints no numbers of the stage.
    """
    found = {comparison.stage: comparison for comparison in compare(example).stages}.get(stage.name)
    if found is None:
        return None
    previous = found.from_previous
    sizes = example.sizes(len(example.prompt_ids))
    return {
        "values": json_array(selection.take(stage, found.published.numbers(), sizes)),
        "squared": found.published.squared,
        "max_difference": found.max_difference,
        "agrees": found.agrees,
        "from_previous": None
        if previous is None
        else {"max_difference": previous.max_difference, "agrees": previous.agrees},
    }


def worked_example_answer(example: WorkedExample) -> dict[str, Any]:
    """The printed results of the whole pass, and its slips: printed numbers that do not follow from earlier ones."""
    comparison = compare(example)
    return {
        "title": example.title,
        "source": example.source,
        "results": [asdict(result) for result in comparison.results],
        "slips": [asdict(slip) for slip in comparison.slips],
    }
