"""Calls of functions in the text of a model: they are read from any pieces of the text, and nothing is lost."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.engine.request import Output
from model.text.transcript import End, FinishReason, TokenOutput
from service.answers.generation import ChoiceOutput, Generation
from service.answers.tool_calls import BEGIN, END, Form, ToolCallParser, as_text, closed, form_of, without_tools
from service.http.openai_schemas import ChatRequest
from service.routes.openai.chat import Writer

NAMES = ["get_weather", "get_time"]
CALL = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
TAGGED = f"{BEGIN}\n{CALL}\n{END}"


def read(form: Form, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls of a text that arrives in pieces."""
    parser = ToolCallParser(form, NAMES)
    deltas = [*map(parser.push, pieces), parser.finish()]
    calls = [call for delta in deltas for call in delta.calls]
    assert parser.num_calls == len(calls) == len({call.id for call in calls})
    return "".join(delta.content for delta in deltas), [(call.name, json.loads(call.arguments)) for call in calls]


WEATHER = ("get_weather", {"city": "Zürich"})
TEXTS: list[tuple[Form, str, str, list[Any]]] = [
    ("tagged", TAGGED, "", [WEATHER]),
    ("tagged", f"I look.\n{TAGGED}\n{TAGGED}", "I look.\n", [WEATHER, WEATHER]),
    ("tagged", f"{BEGIN}{CALL}", "", [WEATHER]),
    ("tagged", f"{BEGIN}\n{CALL[:-3]}", f"{BEGIN}\n{CALL[:-3]}", []),
    ("tagged", TAGGED.replace("get_weather", "fly"), TAGGED.replace("get_weather", "fly"), []),
    ("tagged", "5 < 6 and <tool", "5 < 6 and <tool", []),
    ("tagged", CALL, CALL, []),
    ("tagged", TAGGED.replace("Zürich", END), "", [("get_weather", {"city": END})]),
    ("tagged", TAGGED.replace("Zürich", "\\ud800"), TAGGED.replace("Zürich", "\\ud800"), []),
    ("tagged", TAGGED.replace('"Zürich"', "NaN"), TAGGED.replace('"Zürich"', "NaN"), []),
    ("tagged", TAGGED.replace('"Zürich"', "1e999"), TAGGED.replace('"Zürich"', "1e999"), []),
    ("bare", f"{CALL}; {CALL}", "", [WEATHER, WEATHER]),
    ("bare", '{"name": "get_time", "arguments": "{}"}', "", [("get_time", {})]),
    ("bare", '{"name": "get_time", "arguments": "now"}', '{"name": "get_time", "arguments": "now"}', []),
    ("list", f"[{CALL}, {CALL}]", "", [WEATHER, WEATHER]),
    ("list", "[1, 2]", "[1, 2]", []),
    ("list", "no call", "no call", []),
    ("bare", CALL.replace("arguments", "parameters"), "", [WEATHER]),
    ("bare", '{"name": "get_time"}', "", [("get_time", {})]),
    ("bare", '{"name": 3}', '{"name": 3}', []),
    ("bare", f"Well: {CALL}", f"Well: {CALL}", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
@pytest.mark.parametrize("length", [1, 2, 7, 1000])
def test_calls_are_read_from_pieces_of_any_length(
    form: Form, text: str, content: str, calls: list[Any], length: int
) -> None:
    pieces = [text[start : start + length] for start in range(0, len(text), length)]
    assert read(form, pieces) == (content, calls)


@given(
    form=st.sampled_from(["tagged", "list", "bare"]),
    pieces=st.lists(st.sampled_from([BEGIN, END, CALL, "[", "]", "{", "<", "<tool_", "a", "\n", ","]), max_size=9),
)
def test_a_text_without_a_whole_call_is_returned_as_it_is(form: Form, pieces: list[str]) -> None:
    content, calls = read(form, pieces)
    if not calls:
        assert content == "".join(pieces)


def test_content_that_cannot_begin_a_call_is_not_kept_back() -> None:
    parser = ToolCallParser("tagged", NAMES)
    assert [parser.push(piece).content for piece in ("Hello", " <", "b>", "<tool_c", "an")] == [
        "Hello",
        " ",
        "<b>",
        "",
        "<tool_can",
    ]


def test_the_form_of_calls_follows_from_the_template() -> None:
    assert form_of("{{ tools }} <tool_call>") == "tagged"
    assert form_of("{{ tools }} [TOOL_CALLS]") == "list"
    assert form_of("{{ tools }} <|python_tag|>") == "bare"
    assert form_of("{{ messages }}") == "tagged"


def test_a_conversation_for_a_template_without_tools_has_them_as_text() -> None:
    call = {"id": "c", "type": "function", "function": json.loads(CALL)}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "The weather"}}]
    system, user, assistant, result = without_tools(messages, tools)
    assert system["content"].startswith("Be kind.\n\n")
    assert json.dumps(tools[0]["function"]) in system["content"]
    assert user == messages[1]
    assert read("tagged", [assistant["content"]]) == ("", [WEATHER])
    assert "tool_calls" not in assistant
    assert result == {"role": "user", "content": "<tool_response>\nrain\n</tool_response>"}
    assert without_tools(messages[1:], [])[0] == as_text(messages[1]) == messages[1]
    assert without_tools(messages[1:], tools)[0]["role"] == "system"


NAMED = {"type": "object", "properties": {"a": {"type": "string"}}}


def test_enforced_arguments_have_only_the_properties_that_the_schema_names() -> None:
    only = NAMED | {"additionalProperties": False}
    assert closed(NAMED) == only
    nested = {
        "$defs": {"A": NAMED},
        "properties": {"x": {"items": NAMED}, "y": {"anyOf": [NAMED, {"$ref": "#/$defs/A"}]}},
    }
    assert closed(nested) == {
        "$defs": {"A": only},
        "properties": {"x": {"items": only}, "y": {"anyOf": [only, {"$ref": "#/$defs/A"}]}},
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        NAMED | {"additionalProperties": True},
        NAMED | {"patternProperties": {"^b": {}}},
        {"allOf": [NAMED, {"properties": {"b": {}}}]},
        {"anyOf": 5, "items": [3], "$defs": None},
        {"properties": {"x": {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}}},
        {"properties": {"x": {"$ref": "#/$defs/A", "properties": {"b": {}}}}, "$defs": {"A": NAMED}},
    ],
    ids=str,
)
def test_a_schema_that_speaks_of_other_properties_is_not_changed(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


@pytest.mark.parametrize(("ended", "reason"), [("stop", "tool_calls"), ("length", "length")])
def test_an_answer_that_is_cut_off_after_a_complete_call_says_so(ended: FinishReason, reason: str) -> None:
    generation = SimpleNamespace(
        id="c", model_name="m", num_choices=1, checkpoint=SimpleNamespace(tokenizer=None), edit_answers=lambda index: {}
    )
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Weather?"}], "stream": True})
    writer = Writer(body, cast(Generation, generation), [ToolCallParser("tagged", NAMES)])
    step = Output("c", 0, tokens=[TokenOutput(1, TAGGED)], end=End(ended))
    *_, last = writer.events(ChoiceOutput(0, step, None))
    (choice,) = json.loads(last.removeprefix(b"data: "))["choices"]
    assert choice["finish_reason"] == reason
    assert [call["function"]["name"] for call in choice["delta"]["tool_calls"]] == ["get_weather"]
