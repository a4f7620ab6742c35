"""What /forward and a traced /generate show alike: which stages, and how a stage and its predictions are answered."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from model.stages import Stage, UnknownStage, select
from model.trace import Predictions, StageTrace
from service.encoding import NAMES, base64_text, json_array
from service.errors import invalid

Encoding = Literal["json", "base64", "safetensors"]
TextOf = Callable[[int], str | None]


def select_stages(stages: Sequence[Stage], globs: Sequence[str], param: str) -> list[Stage]:
    """The stages that any glob matches, in firing order. 400 naming the first glob that matches none."""
    try:
        return select(stages, globs)
    except UnknownStage as error:
        raise invalid(f"{param}.{error.index}", str(error), "unknown_stage") from None


def stage_answer(kept: StageTrace, values: Tensor | None, encoding: Encoding) -> dict[str, Any]:
    """`values` as they are to be sent, None where they are not, or not here."""
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
    return [
        {"position": position, "top": top_answer(prediction, text_of)}
        for position, prediction in zip(positions, predictions, strict=True)
    ]


def top_answer(predictions: Predictions, text_of: TextOf) -> list[dict[str, Any]]:
    return [
        {"id": token_id, "text": text_of(token_id), "logit": logit, "probability": probability}
        for token_id, logit, probability in zip(
            predictions.token_ids, predictions.logits, predictions.probabilities, strict=True
        )
    ]
