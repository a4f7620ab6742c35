"""Stages and predictions in answers of POST /forward and of traced generations: their selection and JSON form.

`select_stages` finds the stages that the globs of a request match. model/tracing/selection.py describes the rest of the
path from a stage name to its tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from model.tracing.predictions import Predictions
from model.tracing.selection import StageTrace
from model.tracing.stages import Stage, UnknownStage, select
from service.http.encoding import NAMES, Encoding, base64_text, json_array
from service.http.errors import invalid

TextOf = Callable[[int], str | None]
"""The text of a token id; None if there is none."""


def select_stages(stages: Sequence[Stage], globs: Sequence[str], param: str) -> list[Stage]:
    """The stages that any glob matches, in the order of computation. 400 for the first glob that matches none."""
    try:
        return select(stages, globs)
    except UnknownStage as error:
        raise invalid(f"{param}.{error.index}", str(error), "unknown_stage") from None


def stage_answer(kept: StageTrace, values: Tensor | None, encoding: Encoding) -> dict[str, Any]:
    """Describe one stage. `values` are None if they are not asked for; safetensors answers hold them elsewhere."""
    answer: dict[str, Any] = {
        "name": kept.stage.name,
        "shape": kept.shape,
        "dims": kept.stage.dims,
        "dtype": NAMES[kept.dtype if values is None else values.dtype],
    }
    if kept.summary is not None:
        answer["summary"] = kept.summary._asdict()
    if values is not None and encoding != "safetensors":
        answer["values"] = json_array(values) if encoding == "json" else base64_text(values)
    return answer


def prediction_answers(
    positions: Sequence[int], predictions: Sequence[Predictions], text_of: TextOf
) -> list[dict[str, Any]]:
    """Describe the predictions of several positions."""
    return [
        {"position": position, "top": top_answer(prediction, text_of)}
        for position, prediction in zip(positions, predictions, strict=True)
    ]


def top_answer(predictions: Predictions, text_of: TextOf) -> list[dict[str, Any]]:
    """Describe the most likely tokens of one position."""
    return [
        {"id": token_id, "text": text_of(token_id), "logit": logit, "probability": probability}
        for token_id, logit, probability in zip(
            predictions.token_ids, predictions.logits, predictions.probabilities, strict=True
        )
    ]
