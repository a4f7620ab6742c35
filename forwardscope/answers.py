"""Convert the JSON of answers to results. Unknown fields are ignored, because a newer server may send more fields."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from forwardscope.results import (
    ChatAnswer,
    ChatEvent,
    Choice,
    ComparedStage,
    Comparison,
    Finish,
    Generation,
    Hint,
    LensLayer,
    Logits,
    Loss,
    ModelInfo,
    Prediction,
    ServedModel,
    Stage,
    StepTrace,
    StreamEvent,
    Token,
    TokenLogprob,
    Trace,
    Usage,
)
from forwardscope.tensor_files import NumpyArray, json_array, read_base64

Json = dict[str, Any]
Record = TypeVar("Record")


def record(kind: type[Record], answer: Mapping[str, Any], **replaced: Any) -> Record:
    """A dataclass from the answer's fields of the same names. A field with a default may be missing in the answer."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # `kind` is a dataclass
    return kind(**{name: answer[name] for name in names - replaced.keys() if name in answer}, **replaced)


# POST /forward and POST /logits


def trace(arrays: dict[str, NumpyArray], answer: Json, positions: Sequence[int] | None) -> Trace[NumpyArray]:
    tokens = tuple(record(Token, token) for token in answer["tokens"])
    return Trace(
        stages=read_stages(answer["stages"]),
        arrays={stage["name"]: arrays[stage["name"]] for stage in answer["stages"] if stage["name"] in arrays},
        model=answer["model"],
        tokens=tokens,
        positions=tuple(range(len(tokens)) if positions is None else [place % len(tokens) for place in positions]),
        predictions=tuple(read_predictions(entry["top"]) for entry in answer["predictions"]),
        loss=record(Loss, answer["loss"], per_token=json_array(answer["loss"]["per_token"])),
    )


def logits(arrays: dict[str, NumpyArray], answer: Json) -> Logits[NumpyArray]:
    return Logits(
        model=answer["model"],
        tokens=tuple(record(Token, token) for token in answer["tokens"]),
        positions=tuple(entry["position"] for entry in answer["positions"]),
        logits=arrays["logits"],
        ids=arrays.get("ids"),
        logprobs=arrays.get("logprobs"),
    )


def read_stages(entries: Sequence[Json]) -> tuple[Stage, ...]:
    return tuple(record(Stage, entry, dims=tuple(entry["dims"]), shape=tuple(entry["shape"])) for entry in entries)


def read_predictions(entries: Sequence[Json]) -> tuple[Prediction, ...]:
    """Read predictions. A null, which stands for a number that is not finite, becomes NaN."""
    return tuple(
        record(Prediction, entry, logit=number(entry["logit"]), probability=number(entry["probability"]))
        for entry in entries
    )


def number(value: float | None) -> float:
    return math.nan if value is None else value


# POST /generate


def generation(answer: Json) -> Generation[NumpyArray]:
    choices = tuple(map(choice, answer["choices"] or [answer]))
    return Generation(
        **{field.name: getattr(choices[0], field.name) for field in fields(Choice)},
        id=answer["id"],
        model=answer["model"],
        choices=choices,
        timings=answer["timings"],
    )


def choice(answer: Json) -> Choice[NumpyArray]:
    return record(
        Choice,
        answer,
        tokens=tuple(answer["tokens"]),
        usage=usage(answer["usage"]),
        logprobs=None if answer["logprobs"] is None else tuple(map(token_logprob, answer["logprobs"])),
        trace=None if answer["trace"] is None else tuple(map(step_trace, answer["trace"])),
    )


def usage(answer: Json) -> Usage:
    details = answer.get("prompt_tokens_details") or {}  # where OpenAI's API has the cached tokens
    return record(Usage, answer, cached_tokens=answer.get("cached_tokens") or details.get("cached_tokens") or 0)


def token_logprob(entry: Json) -> TokenLogprob:
    return TokenLogprob(
        entry["id"], entry.get("text"), entry.get("logprob"), tuple(map(token_logprob, entry.get("top") or ()))
    )


def step_trace(answer: Json) -> StepTrace[NumpyArray]:
    lens = answer["logit_lens"]
    return StepTrace(
        stages=read_stages(answer["stages"]),
        arrays={
            entry["name"]: read_base64(entry["values"], entry["dtype"], entry["shape"])
            for entry in answer["stages"]
            if entry.get("values") is not None
        },
        positions=tuple(answer["positions"]),
        predictions=tuple(read_predictions(entry["top"]) for entry in answer["predictions"]),
        logit_lens=None
        if lens is None
        else tuple(
            LensLayer(layer["layer"], read_predictions(layer["top"]), number(layer["chosen_probability"]))
            for layer in lens
        ),
    )


def stream_events(answer: Json) -> list[StreamEvent[NumpyArray]]:
    if "finish_reason" in answer:
        finish = record(Finish, answer, usage=usage(answer["usage"]))
        return [StreamEvent(choice=answer["choice"], text="", finish=finish)]
    token, steps = answer["token"], answer.get("trace")
    return [
        StreamEvent(
            choice=answer["choice"],
            text=answer["text"],
            token=None if token is None else token_logprob(token | {"text": answer["text"]}),
            trace=None if steps is None else step_trace(steps),
        )
    ]


# POST /v1/chat/completions


def chat_answer(answer: Json) -> ChatAnswer:
    first = answer["choices"][0]
    return ChatAnswer(
        id=answer["id"],
        model=answer["model"],
        text=first["message"].get("content"),
        message=first["message"],
        finish_reason=first["finish_reason"],
        usage=usage(answer["usage"]),
    )


def chat_events(answer: Json) -> list[ChatEvent]:
    """The change of each choice. A chunk without choices has only the usage."""
    return [
        ChatEvent(text=entry["delta"].get("content") or "", delta=entry["delta"], finish_reason=entry["finish_reason"])
        for entry in answer["choices"]
    ]


# GET


def model_info(answer: Json) -> ModelInfo:
    stages = tuple((stage["name"], tuple(stage["dims"])) for stage in answer["stages"])
    return record(ModelInfo, answer, stages=stages, eos_token_ids=tuple(answer["eos_token_ids"]))


def served_models(answer: Json) -> list[ServedModel]:
    return [ServedModel(entry["name"], entry["kind"], entry.get("title")) for entry in answer["models"]]


# POST /compare


def comparison(answer: Json) -> Comparison:
    verdict = answer["verdict"]
    return Comparison(
        a=answer["a"],
        b=answer["b"],
        dtype=answer["dtype"],
        num_tokens=answer["num_tokens"],
        differs=verdict["differs"],
        first_stage=verdict["first_stage"],
        last_equal_stage=verdict["last_equal_stage"],
        differing_stages=tuple(verdict["differing_stages"]),
        hints=tuple(record(Hint, hint) for hint in verdict["hints"]),
        logits=answer["logits"],
        stages={stage["name"]: compared_stage(stage) for stage in answer["stages"]},
        not_compared=tuple(answer["not_compared"]),
    )


def compared_stage(answer: Json) -> ComparedStage:
    lists = ("max_index", "per_position", "per_head")
    return record(ComparedStage, answer | {name: tuple(answer[name]) for name in lists if answer.get(name) is not None})
