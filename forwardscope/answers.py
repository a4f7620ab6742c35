"""Parse the bytes of answers, and the events of streams, to results. Their types describe all but the arrays."""

import json
from collections.abc import Callable
from typing import Any, TypeVar, overload

from forwardscope.reading import Result, read
from forwardscope.results.attributions import AnyAttribution, Attribution, SweepCell, SweepCells, method_of
from forwardscope.results.chats import ChatAnswer, ChatEvent
from forwardscope.results.generations import FinishEvent, Generation, StreamEvent, TokenEvent, Usage
from forwardscope.results.passes import AppliedEdit, LogitRows, Logits, Trace
from forwardscope.results.weights import Weight
from forwardscope.tensor_files import NumpyArray

Json = dict[str, Any]
Other = TypeVar("Other")
BASELINE = "baseline/"  # the beginning of the names of the arrays of the pass without edits
METHODS = {method_of(kind): kind for kind in AnyAttribution.__args__}


@overload
def parser(kind: type[Result]) -> Callable[[bytes], Result]: ...
@overload
def parser(kind: type[Result], take: Callable[[Result], Other]) -> Callable[[bytes], Other]: ...
def parser(kind: type[Result], take: Callable[[Result], Any] = lambda found: found) -> Callable[[bytes], Any]:
    """A function that reads a result from the JSON of an answer, and takes a part of it."""
    return lambda content: take(read(kind, json.loads(content)))


def trace(arrays: dict[str, NumpyArray], answer: Json, body: Json) -> Trace[NumpyArray]:
    """The trace of a safetensors answer, whose arrays are not in its JSON, for the body of its request."""
    for beginning, found in passes(answer):
        for stage in found["stages"]:
            stage["values"] = arrays.get(beginning + stage["name"])
    return read(Trace, answer).at(body.get("positions"), body.get("heads"))


def logits(arrays: dict[str, NumpyArray], answer: Json) -> Logits[NumpyArray]:
    for beginning, found in passes(answer):
        columns: dict[str, Any] = {name: arrays.get(beginning + name) for name in ("logits", "logprobs", "ids")}
        found["positions"] = LogitRows([row["position"] for row in found["positions"]], **columns)
    return read(Logits, answer)


def weight(arrays: dict[str, NumpyArray], answer: Json) -> Weight[NumpyArray]:
    return read(Weight, answer | {"values": arrays.get(answer["name"])})


def passes(answer: Json) -> list[tuple[str, Json]]:
    """The pass of an answer, and the one without edits, each with the beginning of the names of its arrays."""
    plain = answer.get("baseline")
    return [("", answer), *([] if plain is None else [(BASELINE, plain)])]


def attribution(content: bytes, body: Json) -> Attribution[NumpyArray]:
    answer = json.loads(content)
    found: Attribution[NumpyArray] = read(METHODS[answer["method"]], answer)
    return found.at(body.get("positions"), body.get("heads"))


def generation(content: bytes, body: Json) -> Generation[NumpyArray]:
    found = read(Generation, json.loads(content))
    for step in (step for choice in (found, *found.choices) for step in choice.trace or ()):
        step.at(None, body["trace"].get("heads"))
    return found


def sweep_cells(answer: Json, body: Json) -> list[SweepCell]:
    """The cells of an event; none for the first and the last event of a sweep."""
    return list(read(SweepCells, answer).cells) if "cells" in answer else []


def stream_events(answer: Json, body: Json) -> list[StreamEvent]:
    if "finish_reason" in answer:
        return [read(FinishEvent, answer)]
    event = read(TokenEvent, answer)
    if event.trace is not None:
        event.trace.at(None, body["trace"].get("heads"))
    return [event]


# POST /v1/chat/completions


def chat_answer(content: bytes) -> ChatAnswer:
    answer = json.loads(content)
    first, usage = answer["choices"][0], answer["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return ChatAnswer(
        id=answer["id"],
        model=answer["model"],
        text=first["message"].get("content"),
        message=first["message"],
        finish_reason=first["finish_reason"],
        usage=read(Usage, {"cached_tokens": details.get("cached_tokens") or 0} | usage),
        edits=tuple(read(AppliedEdit, each) for each in first.get("edits") or ()),
        reasoning=first["message"].get("reasoning_content"),
    )


def chat_events(answer: Json, body: Json) -> list[ChatEvent]:
    """The change of each choice. A chunk without choices has only the usage."""
    return [
        ChatEvent(
            text=entry["delta"].get("content") or "",
            delta=entry["delta"],
            finish_reason=entry["finish_reason"],
            reasoning=entry["delta"].get("reasoning_content") or "",
        )
        for entry in answer["choices"]
    ]
