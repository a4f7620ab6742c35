"""Tools of POST /v1/chat/completions: enforced as far as possible, described in every template, and never lost."""

import json
import logging
import random
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from forwardscope.local import load
from model.errors import InvalidField
from model.text.grammar.grammars import Grammars
from model.text.grammar.limits import LIMITS
from model.text.grammar.program import SmallVocabulary, read
from model.text.tokenizer import Tokenizer
from service.answers.call_forms import FORMS, MARK_TOKENS, Form
from service.answers.call_rules import argument_schemas, call_rules, enforced_rules
from service.answers.chat_constraints import chat_constraint, free_text, json_begin
from service.answers.chat_pieces import CallBegin, join_pieces
from service.answers.offered_tools import OfferedFunction, read_tools
from service.answers.tool_calls import ToolCallParser
from service.http.openai_schemas import ChatRequest
from tests.service.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.service.running import Running, Start, read_events, running

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
NARROW = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
CLOSED = NARROW | {"additionalProperties": False}
UNENFORCEABLE = {"type": "object", "properties": {"b": {"type": "array", "uniqueItems": True}}}
# The template of a model of Mistral checks the ids of calls, and writes no other part of them.
WITH_IDS = (
    "{% for m in messages %}{% if m.tool_calls %}{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id|length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "[TOOL_CALLS]{{ call.id }} {% endfor %}{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id|length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}={{ m.tool_call_id }} "
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ tools }}"
)
WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPS_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"


def tool(name: str, parameters: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
    function = {"name": name} | fields | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": function}


def start_with(start: Start, directory: Path, template: str) -> Running:
    write_checkpoint(directory, max_position_embeddings=2048)
    (directory / "chat_template.jinja").write_text(template)
    return start(model=str(directory))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = write_checkpoint(tmp_path_factory.mktemp("roomy") / "roomy", max_position_embeddings=2048)
    with running(model=str(directory)) as found:
        yield found


def choice_of(service: Running, **body: Any) -> dict[str, Any]:
    choice: dict[str, Any] = service.answer(CHAT, **{"messages": [USER], "max_tokens": 400, "seed": 1} | body)[
        "choices"
    ][0]
    return choice


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls that are complete."""
    calls = choice["message"].get("tool_calls", []) if choice["finish_reason"] == "tool_calls" else []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def prompt_of(service: Running, **body: Any) -> str:
    answer = service.answer(CHAT, **{"max_tokens": 1, "return_token_ids": True} | body)
    text: str = service.answer("/detokenize", tokens=answer["prompt_token_ids"])["text"]
    return text


ONE_CALL = {"tool_choice": "required", "parallel_tool_calls": False}


def test_a_schema_that_cannot_be_enforced_does_not_fail_the_others(
    service: Running, caplog: pytest.LogCaptureFixture
) -> None:
    tools = [tool("narrow", NARROW), tool("wide", UNENFORCEABLE)]
    body = {"tools": tools, "max_tokens": 150} | ONE_CALL
    with caplog.at_level(logging.INFO):
        found = [call for seed in range(4) for call in calls_of(choice_of(service, seed=seed, **body))]
    narrow = [arguments for name, arguments in found if name == "narrow"]
    assert narrow
    assert all(arguments in ({"a": "x"}, {"a": "y"}) for arguments in narrow)
    logged = [message for message in caplog.messages if "any JSON object" in message]
    reason = "the schema cannot be enforced"
    assert logged == [f"the arguments of the function in tools.1 may be any JSON object: {reason}"] * 4


@pytest.mark.parametrize("tool_choice", ["required", "auto"])
def test_a_strict_schema_that_cannot_be_enforced_is_named_with_its_keyword(service: Running, tool_choice: str) -> None:
    tools = [tool("narrow", NARROW), tool("wide", UNENFORCEABLE, strict=True)]
    response = service.post(CHAT, {"messages": [USER], "tools": tools, "tool_choice": tool_choice})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools.1")
    assert "'wide'" in error["message"]
    assert "uniqueItems" in error["message"]
    assert not re.search(r"arguments_|call_\d|start:|%json|lark", error["message"])


def test_schemas_that_are_too_large_together_are_enforced_as_far_as_they_fit(
    tiny_directory: Path,
) -> None:
    large = {"type": "object", "properties": {"a": {"enum": [f"{'x' * 60}{index}" for index in range(300)]}}}
    schemas = [NARROW, large, large, large, large]
    functions = [
        OfferedFunction(f"tools.{index}", {"name": f"f{index}", "parameters": schema})
        for index, schema in enumerate(schemas)
    ]
    rules = "\n".join(["start: calls", *call_rules("bare", functions, several=False)])
    grammars = Grammars(Tokenizer.from_directory(tiny_directory), VOCAB_SIZE)
    loosened = grammars.lark("tools", rules, argument_schemas(functions)).not_enforced
    assert loosened == {"tools.4": "all schemas together are too large"}, "three of the large schemas fit"
    strict = [OfferedFunction(each.place, each.definition | {"strict": True}) for each in functions]
    with pytest.raises(InvalidField, match="tools: all schemas together are too large"):
        grammars.lark("tools", rules, argument_schemas(strict))


CALLS: dict[Form, list[str]] = {
    "tagged": ["<tool_call>\n{}\n</tool_call>", "a <tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call>"],
    "list": ["[{}]", "[{}, {}]", " [{}]", "a {[TOOL_CALLS] [{}]", 'a"[TOOL_CALLS][{}, {}]'],
    "bare": ["{}", "\n\n{}", "<|python_tag|>{}", "a <|python_tag|> {}"],
}
LOOSE: dict[Form, list[str]] = {
    "tagged": ["<tool_call>{}</tool_call>", "a<tool_call>\n{}", '"<tool_call>\n{}\n</tool_call>'],
    "list": ["{}", " [ {}]", "\t\r\n{}", "a[TOOL_CALLS]{}", "a[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]f{}", "[{};{}"],
    "bare": ["[{}]", " {}", "\n[{}]", "a<|python_tag|>{}", "{}; {}<|python_tag|>{}", '"<|python_tag|>{}'],
}


@pytest.mark.parametrize("form", CALLS)
def test_in_a_free_text_each_call_that_is_read_is_strict(form: Form) -> None:
    function = OfferedFunction("tools.0", {"name": "f", "parameters": CLOSED, "strict": True})
    rules = "\n".join([free_text(form), *call_rules(form, [function], several=True)])
    schemas = {rule: asdict(schema) for rule, schema in argument_schemas([function]).items()}
    tokenizer = LLTokenizer(SmallVocabulary(0, {}))  # type: ignore[arg-type]
    grammar = read(tokenizer, {"rules": rules, "schemas": schemas})["grammar"]
    key = "parameters" if form == "bare" else "arguments"

    def call(value: str) -> str:
        return json.dumps({"name": "f", key: {"a": value}})

    def is_allowed(text: str) -> bool:
        matcher, tokens = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS), list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def is_read(text: str) -> bool:
        parser = ToolCallParser(form, {"f": CLOSED}, lambda: "id")
        return any(isinstance(piece, CallBegin) for piece in [*parser.push(text), *parser.finish()])

    for text in CALLS[form]:
        assert is_allowed(text.replace("{}", call("x"))), text
        assert is_read(text.replace("{}", call("x"))), text
    for text in CALLS[form] + LOOSE[form]:
        assert not is_allowed(text.replace("{}", call("z"))), text
    chance = random.Random(1)
    parts = [call("z"), '{"a": "z"}', "f", "a", '"', " ", "\n", "[", "]", "{", "\u00a0", ";", "[ARGS]", *MARK_TOKENS]
    texts = ["".join(chance.choices(parts, k=chance.randint(1, 6))) for _ in range(3000)]
    assert [text for text in texts if is_read(text) and is_allowed(text)] == []
    assert sum(map(is_read, texts)) > 10
    for prose in ("The set {a}", "a [1]", " a", "1 < 2"):
        assert is_allowed(prose)
    assert json_begin(form).after(b'The set {"a", "b", "a"') is not None, "prose has any keys"
    mark = FORMS[form].begin[0].encode()
    assert json_begin(form).after(b"a" + mark + b' {"a": 1, "a"') is None
    assert (json_begin(form).after(b' {"a": 1, "a"') is None) == (form != "tagged")


PLAIN = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "s": {"type": "string"},
        "b": {"type": "boolean"},
        "e": {"type": "string", "enum": ["x"]},
    },
    "required": ["s"],
}
JSON_CALL = '{"name": "f", "arguments": {"s": "x", "b": true}}'
DEMANDED: dict[Form, tuple[str, list[dict[str, Any]]]] = {
    "tagged": (f"<tool_call>\n{JSON_CALL}\n</tool_call>", [{"s": "x", "b": True}]),
    "xml": (
        '<tool_call>\n<function=f>\n<parameter=s>\nx <y> "\n\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>'
        "\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=s>\n\n</parameter>\n</function>\n</tool_call>",
        [{"s": 'x <y> "\n', "n": 3}, {"s": ""}],
    ),
    "pythonic": ('[f(s="x", n=3, b=True), f(s=")", e="x")]', [{"s": "x", "n": 3, "b": True}, {"s": ")", "e": "x"}]),
    "block": ('```tool_code\nf(s="x")\nf(s="", b=False)\n```', [{"s": "x"}, {"s": "", "b": False}]),
    "list": (f"[TOOL_CALLS][{JSON_CALL}]", [{"s": "x", "b": True}]),
    "piped": (f"<|tool_call|>[{JSON_CALL}]<|/tool_call|>", [{"s": "x", "b": True}]),
    "functools": (f"functools[{JSON_CALL}, {JSON_CALL}]", [{"s": "x", "b": True}] * 2),
}


@pytest.mark.parametrize("form", DEMANDED)
def test_a_demanded_call_is_written_as_the_model_writes_calls(form: Form) -> None:
    function = OfferedFunction("tools.0", {"name": "f", "parameters": PLAIN})
    lines, schemas = enforced_rules(form, [function], None, several=True)
    tokenizer = LLTokenizer(SmallVocabulary(0, {}))  # type: ignore[arg-type]
    source = {
        "rules": "\n".join(["start: calls", *lines]),
        "schemas": {name: asdict(each) for name, each in schemas.items()},
    }
    answer = read(tokenizer, source)
    assert not answer["not_enforced"]

    def is_allowed(text: str) -> bool:
        matcher = LLMatcher(tokenizer, answer["grammar"], log_level=0, limits=LIMITS)
        tokens = list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    text, calls = DEMANDED[form]
    assert is_allowed(text)
    parser = ToolCallParser(form, {"f": PLAIN}, lambda: "id")
    found = join_pieces([*(piece for character in text for piece in parser.push(character)), *parser.finish()])
    assert [json.loads(arguments) for _, arguments in found] == calls
    assert all(isinstance(first, CallBegin) for first, _ in found)
    wrong = {
        "s=": "t=",
        '"s"': '"t"',
        "parameter=s": "parameter=t",
        "true": "1",
        "True": "1",
        "=3": "=x",
        "\n3": "\nx",
        '="x"': "=1",
    }
    changed = {text.replace(each, other) for each, other in wrong.items()} - {text}
    assert len(changed) > 1
    assert not any(map(is_allowed, changed))


def test_a_mark_that_is_a_special_token_begins_a_demanded_call() -> None:
    special: Any = SimpleNamespace(id_of=lambda name: 3, special_name=lambda token_id: "[TOOL_CALLS]")
    lines, schemas = enforced_rules(
        "list", [OfferedFunction("tools.0", {"name": "f", "parameters": CLOSED})], special, several=False
    )
    tokenizer = LLTokenizer(SmallVocabulary(8, {"3": "[TOOL_CALLS]"}))  # type: ignore[arg-type]
    source = {
        "rules": "\n".join(["start: calls", *lines]),
        "schemas": {name: asdict(each) for name, each in schemas.items()},
    }
    matcher = LLMatcher(tokenizer, read(tokenizer, source)["grammar"], log_level=0, limits=LIMITS)
    tokens = [3, *(8 + byte for byte in b'[{"name": "f", "arguments": {"a": "x"}}]')]
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


@pytest.mark.parametrize("form", ["xml", "block"])
def test_arguments_that_depend_on_each_other_are_json(form: Form) -> None:
    function = OfferedFunction("tools.0", {"name": "f", "parameters": {"anyOf": [NARROW, PLAIN]}})
    lines, _ = enforced_rules(form, [function], None, several=False)
    assert any('"name' in line for line in lines)


def test_a_broken_schema_of_the_answer_is_still_named(service: Running) -> None:
    broken = {"type": "json_schema", "json_schema": {"schema": {"type": "cat"}}}
    response = service.post(CHAT, {"messages": [USER], "tools": [tool("narrow", NARROW)], "response_format": broken})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


def test_a_schema_that_is_not_in_its_field_is_refused(service: Running) -> None:
    wrong = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}}
    response = service.post(CHAT, {"messages": [USER], "response_format": wrong})
    assert response.status_code == 400
    assert "json_schema.schema" in response.json()["error"]["message"]


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object", "properties": {}}], ids=str)
def test_a_function_without_parameters_takes_no_arguments(service: Running, parameters: Any) -> None:
    assert calls_of(choice_of(service, tools=[tool("now", parameters)], **ONE_CALL)) == [("now", {})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [3, 400])
def test_a_required_call_is_given_or_the_text_is_cut(service: Running, max_tokens: int, stream: bool) -> None:
    """Stop strings, which would end the text inside the call, are left out and named."""
    body = {"messages": [USER], "tools": [tool("narrow", NARROW)], "stop": ['"', "x", "<"], "max_tokens": max_tokens}
    for seed in range(5):
        response = service.post(CHAT, body | ONE_CALL | {"seed": seed, "stream": stream})
        assert response.headers["x-ignored-fields"] == "stop"
        if stream:
            choices = [event["choices"][0] for event in read_events(response.content)]
            calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
            reason = choices[-1]["finish_reason"]
        else:
            (choice,) = response.json()["choices"]
            calls, reason = choice["message"].get("tool_calls", []), choice["finish_reason"]
        assert reason == ("tool_calls" if calls else "length")
        assert bool(calls) == (max_tokens == 400)


CHOICES: list[tuple[Any, str]] = [
    ("any", "fg"),
    ({"type": "any"}, "fg"),
    ({"type": "required"}, "fg"),
    ({"type": "function", "function": {"name": "g"}}, "g"),
    ({"type": "function", "name": "g"}, "g"),
    ({"type": "tool", "name": "g"}, "g"),
    ({"function": {"name": "g"}}, "g"),
    (
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]},
        },
        "g",
    ),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, "f"),
]


@pytest.mark.parametrize(("tool_choice", "names"), CHOICES, ids=str)
def test_a_choice_in_the_form_of_any_api_is_understood(service: Running, tool_choice: Any, names: str) -> None:
    body = {"tools": [tool("f", None), tool("g", None)], "tool_choice": tool_choice, "parallel_tool_calls": False}
    num_seeds = 6 if len(names) > 1 else 1
    assert {name for seed in range(num_seeds) for name, _ in calls_of(choice_of(service, seed=seed, **body))} == {
        *names
    }


def test_functions_are_tools_in_an_older_form(service: Running) -> None:
    """One call in the fields that OpenAI's SDK knows, whole and in a stream, which has the same text."""
    functions = [tool("f", CLOSED)["function"], tool("g", CLOSED)["function"]]
    body = {"messages": [USER], "functions": functions, "function_call": {"name": "g"}, "max_tokens": 400, "seed": 1}
    newer = choice_of(service, tools=[{"function": each} for each in functions], tool_choice={"name": "g"})
    whole = service.post(CHAT, body)
    assert "x-ignored-fields" not in whole.headers
    (choice,) = ChatCompletion.model_validate(whole.json(), strict=True).choices
    call = choice.message.function_call
    assert call is not None
    assert choice.message.tool_calls is None
    assert {"name": call.name, "arguments": call.arguments} == newer["message"]["tool_calls"][0]["function"]
    chunks = [
        ChatCompletionChunk.model_validate(event, strict=True).choices[0]
        for event in read_events(service.post(CHAT, body | {"stream": True}).content)
    ]
    deltas = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call is not None]
    assert [delta.name for delta in deltas] == ["g"] + [None] * (len(deltas) - 1)
    assert "".join(delta.arguments or "" for delta in deltas) == call.arguments
    assert choice.finish_reason == chunks[-1].finish_reason == "function_call"
    assert all(chunk.delta.tool_calls is None for chunk in chunks)


@pytest.mark.parametrize("function_call", ["auto", None])
def test_with_functions_a_grammar_allows_one_call_and_any_text(function_call: Any) -> None:
    """The answer has no place for another call."""
    body = ChatRequest.model_validate(
        {"messages": [USER], "functions": [{"name": "f"}], "function_call": function_call}
    )
    compile_rules = chat_constraint(body, read_tools(body), "tagged", None)
    assert compile_rules is not None
    found: Any = compile_rules(SimpleNamespace(lark=lambda *arguments: arguments))  # type: ignore[arg-type]
    schemas = {rule: asdict(schema) for rule, schema in found[2].items()}
    tokenizer = LLTokenizer(SmallVocabulary(0, {}))  # type: ignore[arg-type]
    grammar = read(tokenizer, {"rules": found[1], "schemas": schemas})["grammar"]

    def is_allowed(text: str) -> bool:
        matcher, tokens = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS), list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert [is_allowed(text) for text in ("a", call, f"a{call}")] == [True] * 3
    assert [is_allowed(text) for text in (f"{call}\n{call}", f"{call}a", f"a{call}b{call}")] == [False] * 3


def test_function_calls_in_messages_are_calls_of_tools(tmp_path: Path, start: Start) -> None:
    """A template that checks ids gets the same one for the call and its result."""
    service = start_with(start, tmp_path / "older", WITH_IDS)
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    prompt = prompt_of(service, messages=[USER, call, {"role": "function", "name": "f", "content": "b"}])
    assert re.search(r"\[TOOL_CALLS\](\w{9}) =\1 ", prompt)
    both = call | {"tool_calls": [{"function": call["function_call"]}]}
    error = service.post(CHAT, {"messages": [USER, both]}).json()["error"]
    assert error["param"] == "messages.1.function_call"
    assert "tool_calls" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}], "function_call": {"name": "fly"}}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tools": [tool("f", None)], "function_call": "none"}, "function_call"),
        ({"functions": [{"name": "f"}], "tools": [tool("f", None)]}, "functions"),
        ({"functions": [{"name": "f"}], "tool_choice": "auto"}, "functions"),
        ({"functions": [{"name": "f"}], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions.1"),
    ],
    ids=str,
)
def test_a_choice_in_the_older_form_that_cannot_be_made_is_a_400(
    service: Running, fields: dict[str, Any], param: str
) -> None:
    response = service.post(CHAT, {"messages": [USER]} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("tool_choice", ["auto", None, {"type": "auto"}, "none", {"type": "none"}], ids=str)
def test_a_choice_that_demands_nothing_constrains_nothing(service: Running, tool_choice: Any) -> None:
    found = choice_of(service, tools=[tool("f", None)], tool_choice=tool_choice, max_tokens=5, ignore_eos=True)
    assert found["finish_reason"] == "length"
    assert "tool_calls" not in found["message"]
    prompt = prompt_of(service, messages=[USER], tools=[tool("f", None)], tool_choice=tool_choice)
    assert ('"name": "f"' in prompt) == (tool_choice not in ("none", {"type": "none"}))


@pytest.mark.parametrize(
    "tool_choice",
    [
        {"type": "function", "function": {"name": "fly"}},
        {"type": "function"},
        {"type": "mcp", "server_label": "x"},
        {"type": "allowed_tools", "tools": [{"type": "function", "name": "fly"}]},
    ],
    ids=str,
)
def test_a_choice_that_cannot_be_made_is_a_400(service: Running, tool_choice: Any) -> None:
    response = service.post(CHAT, {"messages": [USER], "tools": [tool("f", None)], "tool_choice": tool_choice})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"schema": CLOSED}},
        {"type": "json_schema", "schema": CLOSED},
        {"type": "json_object", "schema": CLOSED},
    ],
    ids=str,
)
def test_a_schema_is_read_in_each_form(service: Running, response_format: dict[str, Any]) -> None:
    found = choice_of(service, response_format=response_format)
    assert json.loads(found["message"]["content"]) in ({"a": "x"}, {"a": "y"})


HISTORY: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_9fk2m3", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "call_9fk2m4", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_9fk2m3", "content": "b"},
    {"role": "tool", "tool_call_id": "call_9fk2m4", "content": "c"},
]


def test_ids_of_calls_fit_a_template_that_checks_them(tmp_path: Path, start: Start) -> None:
    """Those of the answers, and those that another server gave."""
    service = start_with(start, tmp_path / "ids", WITH_IDS)
    choice = choice_of(service, tools=[tool("f", None)], **ONE_CALL)
    (call,) = choice["message"]["tool_calls"]
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", call["id"])
    prompt = prompt_of(service, messages=HISTORY)
    found = re.findall(r"\[TOOL_CALLS\](\w{9}) |=(\w{9}) ", prompt)
    assert [pair[0] or pair[1] for pair in found[:2]] == [pair[1] for pair in found[2:]]
    own = [USER, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "b"}]
    assert prompt_of(service, messages=own).count(call["id"]) == 2


@pytest.mark.parametrize("template", [WITHOUT_SYSTEM, DROPS_SYSTEM], ids=["refuses system", "drops system"])
def test_a_template_without_a_system_role_has_the_tools_in_the_first_message(
    tmp_path: Path, start: Start, template: str
) -> None:
    service = start_with(start, tmp_path / "user", template)
    for system in ([], [{"role": "system", "content": "Be kind."}]):
        prompt = prompt_of(service, messages=[*system, *HISTORY], tools=[tool("find_it", NARROW)])
        assert prompt.startswith("<user>")
        assert '"name": "find_it"' in prompt.partition("<assistant>")[0]
        assert ("Be kind." in prompt) == bool(system)
        assert prompt.count("<user>") == 2, "both results are one message"


@pytest.mark.parametrize("template", [WITHOUT_SYSTEM, DROPS_SYSTEM], ids=["refuses system", "drops system"])
def test_system_messages_at_any_place_are_text_of_the_user(tmp_path: Path, start: Start, template: str) -> None:
    """In the library, too."""
    service = start_with(start, tmp_path / "user", template)
    turns = [("user", "a"), ("system", "b"), ("user", "c"), ("assistant", "d"), ("developer", "e"), ("user", "f")]
    messages = [{"role": role, "content": content} for role, content in turns]
    prompt = prompt_of(service, messages=messages)
    assert prompt == "<user>a\n\nb\n\nc<assistant>d<user>e\n\nf"
    model = load(str(tmp_path / "user"))
    usage = service.answer(CHAT, messages=messages, max_tokens=1)["usage"]
    assert model.chat(messages, max_tokens=1).usage.prompt_tokens == usage["prompt_tokens"]


def test_a_template_with_another_name_for_tools_writes_them(tmp_path: Path, start: Start) -> None:
    """That of SmolLM3 reads `xml_tools`, and no calls: those of earlier answers become text."""
    template = "{% if xml_tools %}<tools>{{ xml_tools }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    service = start_with(start, tmp_path / "xml", template + "{% endfor %}")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "a"},
    ]
    prompt = prompt_of(service, messages=messages, tools=[tool("f", None)])
    assert prompt.startswith("<tools>[{'type': 'function', 'function': {'name': 'f'")
    assert "You can call" not in prompt
    assert '<assistant><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' in prompt


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be kind."}]])
def test_a_template_with_tools_in_the_system_message_writes_them(
    tmp_path: Path, start: Start, system: list[dict[str, Any]]
) -> None:
    """That of Phi-4-mini."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'system' and 'tools' in m %}<|tool|>"
        "{{ m.tools }}<|/tool|>{% endif %}<|end|>{% endfor %}"
    )
    service = start_with(start, tmp_path / "phi", template)
    prompt = prompt_of(service, messages=[*system, USER], tools=[tool("f", None)])
    text = "Be kind." if system else ""
    assert prompt.startswith(f'<|system|>{text}<|tool|>[{{"name": "f", "parameters"')
    assert prompt.endswith("]<|/tool|><|end|><|user|>a<|end|>")
    assert prompt_of(service, messages=[USER]) == "<|user|>a<|end|>"


def test_marks_that_are_special_tokens_are_seen_in_the_text(tmp_path: Path, start: Start) -> None:
    """In a vocabulary of Mistral the mark has no text. The answer here is forced with a bias, token by token."""
    directory = write_checkpoint(tmp_path / "mark", extra_token="[TOOL_CALLS]", max_position_embeddings=2048)
    content = json.loads((directory / "tokenizer.json").read_text())
    next(token for token in content["added_tokens"] if token["content"] == "[TOOL_CALLS]")["special"] = True
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}{{ tools }}[TOOL_CALLS]")
    service = start(model=str(directory))
    tokenizer = service.checkpoint.tokenizer
    assert tokenizer is not None
    mark = tokenizer.id_of("[TOOL_CALLS]")
    found = choice_of(
        service, tools=[tool("f", None)], logit_bias={str(mark): 100}, max_tokens=2, temperature=0, ignore_eos=True
    )
    assert found["message"]["content"] == "[TOOL_CALLS][TOOL_CALLS]", "the marks were seen; they begin no call here"
