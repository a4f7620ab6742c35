"""What a worked example's article prints, beside what was computed, as parts of the answer of POST /forward."""

from dataclasses import asdict
from typing import Any

from model.stages import Stage
from model.trace import Selection
from model.worked_examples import WorkedExample, compare
from service.encoding import json_array


def published_answer(example: WorkedExample, stage: Stage, selection: Selection) -> dict[str, Any] | None:
    """A stage's printed numbers, cut like its values; None where the article prints none."""
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
        else {"max_difference": previous.max_difference, "agrees": not previous.slips},
    }


def worked_example_answer(example: WorkedExample) -> dict[str, Any]:
    """The printed results of the whole pass, and the printed numbers that do not follow from those before them."""
    comparison = compare(example)
    return {
        "title": example.title,
        "source": example.source,
        "results": [asdict(result) for result in comparison.results],
        "slips": [asdict(slip) for slip in comparison.slips],
    }
