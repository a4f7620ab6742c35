"""Calls of functions in the text of a model: they are read from any pieces of the text, and nothing is lost."""

import json
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model.engine.request import Output
from model.text.roles import without_system_role
from model.text.transcript import End, FinishReason, TokenOutput
from service.answers.call_forms import BEGIN, END, FORMS, Form, form_of
from service.answers.call_ids import demands_short_ids, new_call_id, with_short_ids
from service.answers.chat_pieces import CallArguments, CallBegin, Content, join_pieces, text_of
from service.answers.chat_stream import ChatStream
from service.answers.generation import ChoiceOutput, Generation
from service.answers.tool_calls import ToolCallParser
from service.answers.tools_as_text import as_text, without_tools
from service.http.openai_schemas import ChatRequest
from service.routes.openai.chat import Writer

LIST_MARK = "[TOOL_CALLS]"
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hours": {"type": "array"},
        "is_metric": {"type": ["boolean", "null"]},
    },
}
FUNCTIONS: dict[str, dict[str, Any]] = {"get_weather": WEATHER_SCHEMA, "get_time": {"type": "object"}}
CALL = '{"name": "get_weather", "arguments": {"city": "Zürich"}}'
TAGGED = f"{BEGIN}\n{CALL}\n{END}"


def new_parser(form: Form) -> ToolCallParser:
    return ToolCallParser(form, FUNCTIONS, partial(new_call_id, is_short=False))


def read(form: Form, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls of a text that arrives in pieces."""
    content, calls = message_of(new_parser(form), pieces)
    assert len(calls) == len({call.id for call, _ in calls})
    return content, [(call.name, json.loads(arguments)) for call, arguments in calls]


def message_of(parser: ToolCallParser, parts: Iterable[str]) -> tuple[str, list[tuple[CallBegin, str]]]:
    """The content of a text that arrives in parts, and its calls with their arguments."""
    pieces = [*(piece for part in parts for piece in parser.push(part)), *parser.finish()]
    calls = [(first, text) for first, text in join_pieces(pieces) if isinstance(first, CallBegin)]
    return text_of(pieces, Content), calls


WEATHER = ("get_weather", {"city": "Zürich"})
FORECAST = ("get_weather", {"city": "Zürich", "days": 3, "hours": [6, 12], "is_metric": True})
FORECAST_JSON = (
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3, "hours": [6, 12], "is_metric": true}}'
)
FORECAST_XML = (
    "<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=hours>\n[6, 12]\n</parameter>\n<parameter=is_metric>\nTrue\n</parameter>\n</function>"
)
FORECAST_PYTHON = "get_weather(city='Zürich', days=3, hours=[6, 12], is_metric=True)"
LINES = 'if a < b:\n    print("</p>")\n'
# As the model cards and templates of these families show their calls:
PUBLISHED: list[tuple[Form, str, str, list[Any]]] = [
    ("tagged", f"{BEGIN}\n{FORECAST_JSON}\n{END}", "", [FORECAST]),  # Hermes, Qwen, SmolLM3, Granite 4
    ("tagged", f"I look.\n{BEGIN}\n{FORECAST_JSON}\n{END}\n{TAGGED}", "I look.\n", [FORECAST, WEATHER]),
    ("xml", f"I look.\n\n{BEGIN}\n{FORECAST_XML}\n{END}", "I look.\n\n", [FORECAST]),  # Qwen3-Coder
    ("xml", f"{FORECAST_XML}\n{BEGIN}\n<function=get_time>\n</function>\n{END}", "", [FORECAST, ("get_time", {})]),
    ("list", f"{LIST_MARK}[{FORECAST_JSON}]", "", [FORECAST]),  # Mistral
    ("list", f'Sure.{LIST_MARK}get_weather[CALL_ID]a1b2c3d4e[ARGS]{{"city": "Zürich"}}', "Sure.", [WEATHER]),
    ("piped", f"<|tool_call|>[{FORECAST_JSON}, {CALL}]", "", [FORECAST, WEATHER]),  # Granite 3
    ("piped", f"<|tool_call|>{FORECAST_JSON}<|/tool_call|>", "", [FORECAST]),  # Phi-4-mini
    ("functools", f"functools[{FORECAST_JSON}, {CALL}]", "", [FORECAST, WEATHER]),  # Phi-4-mini
    ("function_call", f"<function_call> {FORECAST_JSON}", "", [FORECAST]),  # Granite 20B
    ("bare", FORECAST_JSON.replace("arguments", "parameters"), "", [FORECAST]),  # Llama 3
    ("bare", f"<|python_tag|>{FORECAST_JSON.replace('arguments', 'parameters')}", "", [FORECAST]),
    ("pythonic", f"[{FORECAST_PYTHON}, get_time()]", "", [FORECAST, ("get_time", {})]),  # Llama 3.2
    ("pythonic", f"<|python_start|>[{FORECAST_PYTHON}]<|python_end|>", "", [FORECAST]),  # Llama 4
    ("block", f"Yes:\n```tool_code\n{FORECAST_PYTHON}\n```", "Yes:\n", [FORECAST]),  # Gemma
    ("block", f"```tool_code\nprint({FORECAST_PYTHON})\nget_time()\n```", "", [FORECAST, ("get_time", {})]),
]
TEXTS: list[tuple[Form, str, str, list[Any]]] = [
    *PUBLISHED,
    ("tagged", f"{BEGIN}{CALL}", "", [WEATHER]),
    ("tagged", TAGGED.replace("get_weather", "fly"), TAGGED.replace("get_weather", "fly"), []),
    ("tagged", "5 < 6 and <tool", "5 < 6 and <tool", []),
    ("tagged", CALL, CALL, []),
    ("tagged", TAGGED.replace("Zürich", END), "", [("get_weather", {"city": END})]),
    ("tagged", TAGGED.replace("Zürich", "\\ud800"), "", [("get_weather", {"city": "\ufffd"})]),
    ("tagged", TAGGED.replace("Zürich", "\\ud83d\\ude00\\\\ud800"), "", [("get_weather", {"city": "😀\\ud800"})]),
    ("tagged", f"{TAGGED}\n\nDone.", "Done.", [WEATHER]),
    ("bare", f"{CALL}; {CALL}", "", [WEATHER, WEATHER]),
    ("bare", f"{CALL}; so", "; so", [WEATHER]),
    ("bare", '{"name": "get_time", "arguments": "{}"}', "", [("get_time", {})]),
    ("list", f"[{CALL}, {CALL}]", "", [WEATHER, WEATHER]),
    ("list", "[1, 2]", "[1, 2]", []),
    ("list", "no call", "no call", []),
    ("bare", '{"arguments": {"city": "Zürich"}, "id": 3, "name": "get_weather"}', "", [WEATHER]),
    ("bare", '{"name": "get_time"}', "", [("get_time", {})]),
    ("bare", '{"name": 3}', '{"name": 3}', []),
    ("bare", f"Well: {CALL}", f"Well: {CALL}", []),
    # A mention of a mark, and then a call:
    ("tagged", f"I write {BEGIN} and {END}.\n{TAGGED}", f"I write {BEGIN} and {END}.\n", [WEATHER]),
    ("tagged", f"`{BEGIN}` begins it. {TAGGED}", f"`{BEGIN}` begins it. ", [WEATHER]),
    ("tagged", f'{BEGIN}{{"name": "fly"}}{END} {TAGGED}', f'{BEGIN}{{"name": "fly"}}{END} ', [WEATHER]),
    ("tagged", f'{BEGIN}{{"name": ... {TAGGED}', f'{BEGIN}{{"name": ... ', [WEATHER]),
    ("tagged", f'{BEGIN}{{"name": "… {TAGGED}', f'{BEGIN}{{"name": "… ', [WEATHER]),
    ("tagged", f"{BEGIN}{CALL}{BEGIN}{CALL}{END}", "", [WEATHER, WEATHER]),
    ("tagged", f"{BEGIN}[{CALL}, {CALL}]{END}", "", [WEATHER, WEATHER]),
    ("tagged", f"{BEGIN}{BEGIN}{BEGIN}\n{CALL}{END}", f"{BEGIN}{BEGIN}", [WEATHER]),
    ("list", f"Use {LIST_MARK} for it.{LIST_MARK} [{CALL}]", f"Use {LIST_MARK} for it.", [WEATHER]),
    ("list", f"[1] says so.{LIST_MARK}[{CALL}]", "[1] says so.", [WEATHER]),
    (
        "list",
        f'Sure.{LIST_MARK}get_time[ARGS]{{}}{LIST_MARK}get_weather{{"city": "Zürich"}}',
        "Sure.",
        [("get_time", {}), WEATHER],
    ),
    ("list", f"{LIST_MARK}get_times[ARGS]{{}}", f"{LIST_MARK}get_times[ARGS]{{}}", []),
    ("bare", '{"name": "get_time", "parameters": null}', "", [("get_time", {})]),
    ("pythonic", "[1, 2] and [fly()]", "[1, 2] and [fly()]", []),
    ("pythonic", "[get_weather('Zürich, (CH)', 3)]", "", [("get_weather", {"city": "Zürich, (CH)", "days": 3})]),
    ("pythonic", '[get_weather(city="""a \'b\', \\n""")]', "", [("get_weather", {"city": "a 'b', \n"})]),
    ("pythonic", "[get_weather(city=Zürich)]", "", [WEATHER]),
    ("block", "```python\nget_time()\n```", "```python\nget_time()\n```", []),
    (
        "xml",
        f"{BEGIN}<function=get_weather><parameter=city>\n{LINES}\n</parameter><parameter=other>x</parameter>{END}",
        "",
        [("get_weather", {"city": LINES, "other": "x"})],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
@pytest.mark.parametrize("length", [1, 2, 7, 1000])
def test_calls_are_read_from_pieces_of_any_length(
    form: Form, text: str, content: str, calls: list[Any], length: int
) -> None:
    pieces = [text[start : start + length] for start in range(0, len(text), length)]
    assert read(form, pieces) == (content, calls)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 1.0, "b": 1e5, "c": 12345678901234567890, "d": -0}',
        '{ "z" : [ 1,2 ],\n  "a" : "\\u00fc\\/" }',
        '{"a": 1, "a": 2}',
        "{}",
    ],
)
@pytest.mark.parametrize("form", ["tagged", "list", "bare"])
@pytest.mark.parametrize("is_text", [False, True])
def test_arguments_are_the_text_that_the_model_wrote(form: Form, arguments: str, is_text: bool) -> None:
    """The numbers, the order of the keys, the spaces and the escapes."""
    written = json.dumps(arguments) if is_text else arguments
    call = f'{{"name": "get_weather", "arguments": {written}}}'
    text = {"tagged": f"{BEGIN}{call}{END}", "list": f"[{call}]", "bare": call}[form]
    _, calls = message_of(new_parser(form), [text])
    assert [written for _, written in calls] == [arguments]


@pytest.mark.parametrize(("form", "text", "content", "calls"), PUBLISHED)
def test_a_call_arrives_while_it_is_written(form: Form, text: str, content: str, calls: list[Any]) -> None:
    """The name comes before the text of the arguments is there, and the arguments before their end."""
    parser = new_parser(form)
    steps = [(len(text[:end]), piece) for end in range(len(text)) for piece in parser.push(text[end : end + 1])]
    begin = next(place for place, piece in steps if isinstance(piece, CallBegin))
    arguments = [(place, piece.text) for place, piece in steps if isinstance(piece, CallArguments) and piece.index == 0]
    assert begin <= text.index(calls[0][0]) + len(calls[0][0]) + len("[CALL_ID]a1b2c3d4e[ARGS]")
    assert len(arguments) > 3
    assert begin <= arguments[0][0] < arguments[-1][0]


@pytest.mark.parametrize("properties", [[1], {"city": 7}, {"city": {"type": 5, "anyOf": 3}}, {"city": {"oneOf": [1]}}])
def test_any_schema_of_a_client_may_have_arguments_that_are_text(properties: Any) -> None:
    functions = {"get_weather": {"type": "object", "properties": properties}}
    text = "<function=get_weather><parameter=city>Zürich</parameter></function>"
    _, [(_, arguments)] = message_of(ToolCallParser("xml", functions, lambda: "id"), [text])
    assert arguments == '{"city": "Zürich"}'


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (f"{BEGIN}\n{CALL[:-4]}", "", '{"city": "Züric'),
        (TAGGED.replace('"Zürich"', "NaN"), "", '{"city": NaN}'),
        (TAGGED.replace("}}", ""), "", '{"city": "Zürich"\n'),
        (TAGGED.replace("}}", "}"), "", '{"city": "Zürich"}'),
        (TAGGED.replace("}}", "}.}") + " So", ".}\n</tool_call> So", '{"city": "Zürich"}'),
    ],
)
def test_a_broken_call_has_the_arguments_that_were_written(text: str, content: str, arguments: str) -> None:
    found, calls = message_of(new_parser("tagged"), text)
    assert (found, [written for _, written in calls]) == (content, [arguments])


OPEN = f'{BEGIN}{{"'  # a text of JSON begins, in which marks do not count
MARKS_IN_TEXT = f'{BEGIN}{{\\"'


@pytest.mark.parametrize(
    ("begin", "piece", "end"),
    [
        ("", BEGIN, ""),
        ("", OPEN, ""),
        ("", f"{BEGIN}[", ""),
        ("", f"{END}{BEGIN}{{", ""),
        ("", f'{BEGIN}{{"a": "{END}"', ""),
        (OPEN, MARKS_IN_TEXT, ""),
        (OPEN, MARKS_IN_TEXT, f'"{END}'),
        (OPEN, f"{BEGIN}x", f'"{END}'),
        (OPEN, f"{BEGIN}{{", f'"{END}'),
        (BEGIN, " ", ""),
    ],
)
@pytest.mark.parametrize("length", [1, 100, 100_100])
def test_a_long_text_of_marks_is_read_in_linear_time(begin: str, piece: str, end: str, length: int) -> None:
    """Quadratic work on these texts would take many seconds."""
    text = begin + piece * ((40_000 if length == 1 else 100_000) // len(piece)) + end
    parts = (text[start : start + length] for start in range(0, len(text), length))
    assert message_of(new_parser("tagged"), parts) == (text, [])


def test_calls_behind_many_broken_ones_are_read() -> None:
    broken = f'{BEGIN}{{"a": "{BEGIN}"}}{END}'
    assert read("tagged", [broken * 50 + TAGGED]) == (broken * 50, [WEATHER])


@example(form="list", pieces=["[", "]", ","])
@given(
    form=st.sampled_from(["tagged", "list", "bare"]),
    pieces=st.lists(st.sampled_from([BEGIN, END, CALL, "[", "]", "{", "<", "<tool_", "a", "\n", ","]), max_size=9),
)
def test_a_text_without_a_whole_call_is_returned_as_it_is(form: Form, pieces: list[str]) -> None:
    content, calls = read(form, pieces)
    if not calls:
        assert content == "".join(pieces)


ATOMS = [
    *(mark for marks in FORMS.values() for mark in (*marks.begin, marks.end) if mark),
    *("get_time", "get_weather", "fly", "city=", "'a'", '"name": "get_weather"', '"arguments": {', '"parameters": "{'),
    *("<function=get_weather>", "<parameter=city>", "<parameter=days>", "</parameter>", "</function>", "[ARGS]"),
    *("[CALL_ID]x", "print(", "\\ud83d", *'()=[]{},:;<a \n"\\'),
]


@given(form=st.sampled_from(list(FORMS)), atoms=st.lists(st.sampled_from(ATOMS), max_size=14), length=st.integers(1, 9))
def test_the_parts_of_a_text_do_not_matter(form: Form, atoms: list[str], length: int) -> None:
    text = "".join(atoms)
    parts = [text[start : start + length] for start in range(0, len(text), length)]
    found, whole = (message_of(ToolCallParser(form, FUNCTIONS, lambda: "id"), each) for each in (parts, [text]))
    assert found == whole


@pytest.mark.parametrize("form", FORMS)
def test_a_long_text_in_any_form_is_read_in_linear_time(form: Form) -> None:
    """Quadratic work on these texts would take many seconds."""
    begin = FORMS[form].begin[0]
    for atom in ('{"a": "', "[", "\\ud83d", "get_time(", "<parameter=days>", "'", " "):
        for text in (begin + atom * 3000, (begin + atom) * 3000):
            message_of(new_parser(form), [*text[:300], text[300:]])


def test_content_that_cannot_begin_a_call_is_not_kept_back() -> None:
    parser = new_parser("tagged")
    assert [parser.push(text) for text in ("Hello", " <", "b>", "<tool_c", "an")] == [
        [Content("Hello")],
        [Content(" ")],
        [Content("<b>")],
        [],
        [Content("<tool_can")],
    ]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", "tagged"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "xml"),
        ("[TOOL_CALLS]", "list"),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "piped"),
        ("respond with <|tool_call|> followed by a JSON list of tools used", "piped"),
        ('formatted as functools[{"name": [function name], ...', "functools"),
        ('please output "<function_call> {...}"', "function_call"),
        (
            "[func_name1(params_name1=params_value1...), func_name2(params)] <|python_tag|>",
            "pythonic",
        ),
        ("wrap it in ```tool_code", "block"),
        ("<|python_tag|>", "bare"),
        ("{{ messages }}", "tagged"),
    ],
)
def test_the_form_of_calls_follows_from_the_template(template: str, form: Form) -> None:
    assert form_of("{{ tools }} " + template) == form


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


CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_0123456789", "type": "function", "function": {"name": "get_weather", "arguments": {}}},
            {"id": None, "type": "function", "function": {"name": "get_time", "arguments": {}}},
        ],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "call_0123456789"},
    {"role": "tool", "content": "noon"},
    {"role": "user", "content": "Thanks"},
]


def test_a_template_without_a_system_role_has_the_tools_in_the_first_message_of_the_user() -> None:
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    user, assistant, results = without_system_role(without_tools(CONVERSATION, tools))
    assert (user["role"], assistant["role"], results["role"]) == ("user", "assistant", "user")
    assert user["content"].startswith("Be kind.\n\nYou can call these functions:\n")
    assert json.dumps(tools[0]["function"]) in user["content"]
    assert user["content"].endswith("\n\nWeather?")
    assert results["content"].count("<tool_response>") == 2
    assert results["content"].endswith("\nThanks")
    empty = without_system_role([{"role": "system"}, {"role": "user", "content": "Hi"}])
    assert [each["content"].strip() for each in empty] == ["Hi"]
    alone = without_system_role(without_tools([{"role": "assistant", "content": "Hi"}], tools))
    assert [message["role"] for message in alone] == ["user", "assistant"]


def test_only_results_of_calls_are_joined_with_messages_of_the_user() -> None:
    result = {"role": "tool", "content": "rain"}
    quoted = [{"role": "user", "content": text} for text in ("<tool_response>\nmine\n</tool_response>", "b")]
    assert without_tools(quoted, []) == quoted
    (joined,) = without_tools([quoted[1], result, quoted[1]], [])
    assert joined["content"] == "b\n<tool_response>\nrain\n</tool_response>\nb"


def test_many_results_of_calls_are_joined_in_linear_time() -> None:
    """Quadratic work would copy 40 GB."""
    (joined,) = without_tools([{"role": "tool", "content": "x" * 1024}] * 9000, [])
    assert joined["content"].count("x") == 1024 * 9000


def test_the_ids_of_calls_fit_a_template_that_checks_them() -> None:
    check = "{% if tool_call.id is not defined or tool_call.id|length != 9 %}{{ raise_exception('no') }}{% endif %}"
    assert demands_short_ids(check)
    assert not demands_short_ids("{% if messages|length != 90 %}")
    assert all(len(new_call_id(is_short=True)) == 9 and new_call_id(is_short=True).isalnum() for _ in range(50))
    found = with_short_ids(CONVERSATION)
    first, second = (call["id"] for call in found[2]["tool_calls"])
    assert [found[3]["tool_call_id"], found[4]["tool_call_id"]] == [first, second]
    assert first != second
    assert all(len(each) == 9 and each.isalnum() for each in (first, second))
    assert with_short_ids(found) == found


@pytest.mark.parametrize(("ended", "reason"), [("stop", "tool_calls"), ("length", "length")])
def test_an_answer_that_is_cut_off_after_a_complete_call_says_so(ended: FinishReason, reason: str) -> None:
    generation = SimpleNamespace(
        id="c",
        model_name="m",
        num_choices=1,
        call=SimpleNamespace(checkpoint=SimpleNamespace(tokenizer=None)),
        params=SimpleNamespace(shows_special=False),
        edit_answers=lambda index: (),
    )
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Weather?"}], "stream": True})
    stream = ChatStream(cast(Generation, generation), [new_parser("tagged")])
    step = Output("c", 0, tokens=[TokenOutput(1, TAGGED)], end=End(ended))
    *_, last = Writer(body, stream).chunks(stream.read(ChoiceOutput(0, [], step.tokens, None, step)))
    (choice,) = json.loads(last.removeprefix(b"data: "))["choices"]
    assert choice["finish_reason"] == reason
    begin, arguments = choice["delta"]["tool_calls"]
    assert (begin["function"]["name"], json.loads(arguments["function"]["arguments"])) == WEATHER
