"""Convert the JSON of answers to results. Unknown fields are ignored, because a newer server may send more fields."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from forwardscope.results import (
    AppliedEdit,
    Attribution,
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
    Patterns,
    Prediction,
    ServedModel,
    ServiceStatus,
    Stage,
    StageChange,
    StepTrace,
    StoredVector,
    StreamEvent,
    SweepCell,
    Token,
    TokenLogprob,
    Trace,
    Usage,
)
from forwardscope.tensor_files import NumpyArray, json_array, nested_array, read_base64

Json = dict[str, Any]
Record = TypeVar("Record")


def record(kind: type[Record], answer: Mapping[str, Any], **replaced: Any) -> Record:
    """A dataclass from the answer's fields of the same names. A field with a default may be missing in the answer."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # `kind` is a dataclass
    return kind(**{name: answer[name] for name in names - replaced.keys() if name in answer}, **replaced)


# POST /forward and POST /logits


BASELINE = "baseline/"  # the beginning of the names of the arrays of the pass without edits


def trace(arrays: dict[str, NumpyArray], answer: Json, positions: Sequence[int] | None) -> Trace[NumpyArray]:
    baseline = answer.get("baseline")
    tokens = tuple(record(Token, token) for token in answer["tokens"])
    return Trace(
        edits=applied_edits(answer),
        baseline=None if baseline is None else trace(of_baseline(arrays), without_edits(answer) | baseline, positions),
        changes=stage_changes(answer.get("changes")),
        stages=read_stages(answer["stages"]),
        arrays={stage["name"]: arrays[stage["name"]] for stage in answer["stages"] if stage["name"] in arrays},
        model=answer["model"],
        tokens=tokens,
        positions=tuple(range(len(tokens)) if positions is None else [place % len(tokens) for place in positions]),
        predictions=tuple(read_predictions(entry["top"]) for entry in answer["predictions"]),
        loss=record(Loss, answer["loss"], per_token=json_array(answer["loss"]["per_token"])),
    )


def logits(arrays: dict[str, NumpyArray], answer: Json) -> Logits[NumpyArray]:
    baseline = answer.get("baseline")
    return Logits(
        edits=applied_edits(answer),
        baseline=None if baseline is None else logits(of_baseline(arrays), without_edits(answer) | baseline),
        changes=stage_changes(answer.get("changes")),
        model=answer["model"],
        tokens=tuple(record(Token, token) for token in answer["tokens"]),
        positions=tuple(entry["position"] for entry in answer["positions"]),
        logits=arrays["logits"],
        ids=arrays.get("ids"),
        logprobs=arrays.get("logprobs"),
    )


def patterns(answer: Json) -> Patterns[NumpyArray]:
    size, maps = answer["size"], answer["maps"]
    layers, heads = (tuple(dict.fromkeys(each[name] for each in maps)) for name in ("layer", "head"))
    arrays = [read_base64(each["values"], answer["dtype"], (size, size)) for each in maps]
    values = np.stack(arrays).reshape(len(layers), len(heads), size, size)
    return Patterns(
        model=answer["model"],
        tokens=tuple(record(Token, token) for token in answer["tokens"]),
        stage=answer["stage"],
        layers=layers,
        heads=heads,
        block=answer["block"],
        values=values if answer["dtype"] != "uint8" else values.astype(np.float32) * np.float32(answer["scale"]),
        edits=applied_edits(answer),
    )


def applied_edits(answer: Json) -> tuple[AppliedEdit, ...]:
    """What the edits matched; empty without edits."""
    return tuple(
        AppliedEdit(tuple(each["stages"]), positions if isinstance(positions, str) else tuple(map(ends, positions)))
        for each in answer.get("edits") or ()
        for positions in (each["positions"],)
    )


def ends(position: Any) -> Any:
    """An index, or the two ends of a range."""
    return tuple(position) if isinstance(position, list) else position


def of_baseline(arrays: dict[str, NumpyArray]) -> dict[str, NumpyArray]:
    return {name.removeprefix(BASELINE): array for name, array in arrays.items() if name.startswith(BASELINE)}


def without_edits(answer: Json) -> Json:
    return answer | {"edits": None, "baseline": None, "changes": None}


def stage_changes(entries: Sequence[Json] | None) -> dict[str, StageChange]:
    return {each["name"]: StageChange(number(each["norm"]), each["relative"]) for each in entries or ()}


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


# POST /attribute


def attribution(answer: Json) -> Attribution[NumpyArray]:
    entries = answer.get("stages") or []
    arrays = {}
    for entry in entries:
        values = entry.get("values")
        if isinstance(values, str):
            arrays[entry["name"]] = read_base64(values, entry["dtype"], entry["shape"])
        elif values is not None:
            arrays[entry["name"]] = nested_array(values, entry["shape"])
    return Attribution(
        stages=read_stages([{"dtype": answer["dtype"]} | entry for entry in entries]),
        arrays=arrays,
        method=answer["method"],
        model=answer["model"],
        tokens=tuple(record(Token, token) for token in answer["tokens"]),
        answer={name: value for name, value in answer.items() if name not in ("tokens", "stages")},
    )


def sweep_cells(answer: Json) -> list[SweepCell]:
    """The cells of an event; none for the first and the last event of a sweep."""
    return [record(SweepCell, cell, value=number(cell["value"])) for cell in answer.get("cells", ())]


# POST /generate


def generation(answer: Json) -> Generation[NumpyArray]:
    choices = tuple(map(choice, answer["choices"] or [answer]))
    return Generation(
        **{field.name: getattr(choices[0], field.name) for field in fields(Choice)},
        id=answer["id"],
        model=answer["model"],
        choices=choices,
        timings=answer["timings"],
        edits=applied_edits(answer),
        baseline=tuple(map(choice, (answer.get("baseline") or {"choices": ()})["choices"])),
        changes=tuple(stage_changes(each["stages"]) for each in answer.get("changes") or ()),
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
        finish = record(Finish, answer, usage=usage(answer["usage"]), edits=applied_edits(answer))
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
        edits=applied_edits(first),
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


def stored_vector(answer: Json) -> StoredVector:
    shapes = {each["name"]: tuple(each["shape"]) for each in answer["tensors"]}
    return StoredVector(answer["name"], answer["uploaded"], answer["by_stage"], shapes, answer["bytes"])


def stored_vectors(answer: Json) -> list[StoredVector]:
    return list(map(stored_vector, answer["vectors"]))


def service_status(answer: Json) -> ServiceStatus:
    return record(ServiceStatus, answer)


def served_models(answer: Json) -> list[ServedModel]:
    return [
        ServedModel(entry["name"], entry["kind"], entry.get("title"), (entry.get("prompt") or {}).get("text"))
        for entry in answer["models"]
    ]


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
