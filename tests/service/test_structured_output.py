"""Tests of structured output over HTTP: texts that fit, errors that name the field, and what a trace reports."""

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.service.running import Running

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SPECS: dict[str, Any] = {
    "json": SCHEMA,
    "regex": "[a-f]{2,4}-[0-9]{3}",
    "choice": ["the cat", "the dog"],
    "grammar": 'start: ("a" | "bb") ("," ("a" | "bb"))~2',
}


def check(kind: str, text: str) -> None:
    if kind == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif kind == "choice":
        assert text in SPECS["choice"]
    else:
        assert re.fullmatch({"regex": SPECS["regex"], "grammar": "(a|bb),(a|bb),(a|bb)"}[kind], text)


@pytest.mark.parametrize("kind", SPECS)
def test_the_text_fits_whole_or_streamed(tiny: Running, kind: str) -> None:
    body: dict[str, Any] = {"prompt": [1, 2], "structured_outputs": {kind: SPECS[kind]}, "seed": 3, "max_tokens": 60}
    answer = tiny.answer("/generate", **body)
    events = tiny.stream(**body)
    assert "".join(event.get("text", "") for event in events) == answer["text"]
    texts = [choice["text"] for choice in tiny.answer("/generate", **body | {"n": 4, "ignore_eos": True})["choices"]]
    endings = [choice["finish_reason"] for choice in tiny.answer("/generate", **body | {"n": 4})["choices"]]
    for text, ending in [(answer["text"], answer["finish_reason"]), *zip(texts, endings, strict=True)]:
        assert ending in ("stop", "length")
        if ending == "stop":
            check(kind, text)
    assert kind == "json" or "stop" in endings


@pytest.mark.parametrize(
    ("asked", "status", "param", "message"),
    [
        ({}, 422, "structured_outputs", "exactly one of"),
        ({"regex": "a", "choice": ["a"]}, 422, "structured_outputs", "exactly one of"),
        ({"regx": "a"}, 422, "structured_outputs.regx", "did you mean 'regex'?"),
        ({"regex": ""}, 422, "structured_outputs.regex", "at least 1 item"),
        ({"choice": []}, 422, "structured_outputs.choice", "at least 1 item"),
        ({"choice": ["a", 1]}, 422, "structured_outputs.choice.1", "valid string"),
        ({"choice": ["a"] * 1025}, 422, "structured_outputs.choice", "the limit is 1024"),
        ({"json": "a"}, 400, "structured_outputs.json", "not JSON"),
        ({"json": "[1]"}, 400, "structured_outputs.json", "not that of a JSON object"),
        ({"regex": "(a"}, 400, "structured_outputs.regex", "unclosed group"),
        ({"grammar": "start: b"}, 400, "structured_outputs.grammar", "unknown name"),
        ({"json": {"not": {"format": "date"}}}, 400, "structured_outputs.json", "cannot be enforced"),
        ({"json": {"enum": ["x" * 70_000]}}, 400, "structured_outputs.json", "the limit is 65536"),
        ({"json": {"type": "integer", "multipleOf": 7654321}}, 400, "structured_outputs.json", "too complex"),
    ],
)
def test_a_wrong_constraint_is_refused_with_its_field_and_reason(
    tiny: Running, asked: Any, status: int, param: str, message: str
) -> None:
    response = tiny.post("/generate", {"prompt": [1], "max_tokens": 2, "structured_outputs": asked})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_constraint_that_becomes_too_complex_is_400_and_names_its_field(tiny: Running) -> None:
    keys = {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(900)}}
    grammar = f'start: "x" %json {json.dumps(keys)}'
    body = {"prompt": [1], "max_tokens": 20, "structured_outputs": {"grammar": grammar}}
    response = tiny.post("/generate", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs.grammar"
    assert "after" in response.json()["error"]["message"]
    stream = tiny.post("/generate", body | {"stream": True})
    (line,) = (line for line in stream.text.splitlines() if '"error"' in line)
    assert json.loads(line.removeprefix("data: "))["error"]["param"] == "structured_outputs.grammar"


def test_a_trace_reports_what_the_grammar_changed_for_each_token(tiny: Running) -> None:
    body: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 9, "logprobs": 0, "trace": {"stages": ["embed"]}}
    answer = tiny.answer("/generate", **body, structured_outputs={"choice": ["the cat", "the dog"]})
    effects = [step["constraint"] for step in answer["trace"] if step["constraint"] is not None]
    assert [effect["logprob"] for effect in effects] == pytest.approx(
        [entry["logprob"] for entry in answer["logprobs"]], abs=1e-5
    )
    for effect in effects:
        assert 0 <= effect["removed_mass"] <= 1
        assert effect["logprob"] < effect["constrained_logprob"] <= 0
    plain = tiny.answer("/generate", **body)
    assert {step["constraint"] for step in plain["trace"]} == {None}


@pytest.mark.slow
def test_other_requests_are_served_while_a_constraint_compiles(tiny: Running) -> None:
    """A hostile constraint costs at most two seconds of CPU time, in another process."""
    hostile = {"json": {"anyOf": [{"type": "integer", "multipleOf": number} for number in range(89_980, 89_990)]}}
    with tiny.send("/generate", {"prompt": [1], "structured_outputs": hostile}) as connection:
        answer = tiny.answer("/generate", prompt=[1, 2], max_tokens=3, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 3
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(1)
        connection.setblocking(True)
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
