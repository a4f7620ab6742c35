"""Tests of what is refused before llguidance compiles it, and of what the compiler of grammars remembers."""

import ast
import json
import os
import resource
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from model.errors import InvalidField
from model.text.grammar import program
from model.text.grammar.grammars import MAX_REMEMBERED, Grammars, NotRemembered
from model.text.grammar.limits import InvalidGrammar
from model.text.grammar.process import GrammarProcess, NeedsMoreTime, NoAnswer
from model.text.grammar.program import SmallVocabulary, read, read_in_fork
from model.text.grammar.source import check_attributes
from tests.conftest import source_tree
from tests.service.running import PATIENCE_SECONDS
from tests.text.test_constraint import grammars, tokenizer  # noqa: F401  # fixtures

SLOW = {"anyOf": [{"type": "integer", "multipleOf": number} for number in range(89_960, 89_990)]}


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fields of the grammars that a checking process has compiled."""
    fields: list[str] = []
    read = GrammarProcess.read

    def noted(process: GrammarProcess, field: str, source: str) -> dict[str, Any]:
        fields.append(field)
        return read(process, field, source)

    monkeypatch.setattr(GrammarProcess, "read", noted)
    return fields


@pytest.mark.parametrize(
    "text",
    [
        'start[temperature=0.5]: "a"',
        'start: a\na[capture, max_tokens = 3]: "b"',
        'start: "a\\"" b // it\'s\nb[max_tokens=3]: /"/',
        'start: <|"|> b\nb[max_tokens=3]: "c"',
    ],
)
def test_attributes_of_rules_that_would_have_no_effect_are_refused(text: str) -> None:
    with pytest.raises(InvalidGrammar, match=r"(temperature|max_tokens) has no effect .* set \1 in the request"):
        check_attributes(text)


@pytest.mark.parametrize(
    "text",
    [
        'start: "[temperature=0.5]" // max_tokens=3',
        "start: /x[max_tokens=]+\\/temperature=/ # temperature=1",
        'start: %json {"const": "a\\"b[max_tokens=3]"}',
        'start: max_tokens temperature\nmax_tokens: "="\ntemperature: /=/',
        'start[capture]: "a"',
    ],
)
def test_texts_that_look_like_attributes_are_allowed(text: str) -> None:
    check_attributes(text)


def test_a_schema_with_the_fields_of_a_large_program_compiles_quickly(grammars: Grammars) -> None:  # noqa: F811
    kinds = [
        {"type": "string", "format": "date-time"},
        {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1000}, "maxItems": 10},
        {"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
        {"enum": ["a", "b", "c"]},
        {"type": "string", "minLength": 1, "maxLength": 100},
    ]
    schema: dict[str, Any] = {"type": "string"}
    for level in range(4):
        fields = {f"field_{level}_{i}": kinds[i % len(kinds)] for i in range(40)}
        schema = {"type": "object", "properties": {"inner": schema, **fields}, "required": list(fields)}
    assert len(str(schema)) > 10_000
    grammars.json_schema("json", schema)


def test_a_grammar_that_takes_long_needs_more_time_and_is_then_refused(grammars: Grammars) -> None:  # noqa: F811
    with pytest.raises(NeedsMoreTime):
        grammars.quick().json_schema("json", SLOW)
    with pytest.raises(InvalidField, match="is too complex: it takes more than 2 s"):
        grammars.json_schema("json", SLOW)


def test_a_repeated_grammar_is_not_compiled_again_whether_valid_or_not(
    grammars: Grammars,  # noqa: F811
    checks: list[str],
) -> None:
    quick = grammars.quick()
    constraint = quick.regex("regex", "[ab]c")
    for _ in range(3):
        assert quick.regex("regex", "[ab]c") is constraint
        with pytest.raises(InvalidField, match="unknown name"):
            quick.grammar("other", "start: b")
        with pytest.raises(NeedsMoreTime):
            quick.json_schema("slow", SLOW)
    assert checks == ["regex", "other", "slow"]
    assert quick.regex("third", "[ab]c").field == "third"


def test_the_least_recently_used_grammar_is_forgotten(grammars: Grammars, checks: list[str]) -> None:  # noqa: F811
    quick = grammars.quick()
    for i in range(MAX_REMEMBERED):
        quick.choice(f"{i}", ["a"])
    quick.choice("0", ["a"])
    quick.choice("new", ["a"])  # in place of 1
    quick.choice("0", ["a"])
    quick.choice("1", ["a"])
    assert checks == [*map(str, range(MAX_REMEMBERED)), "new", "1"]


def test_a_choice_with_a_nul_character_names_its_field(grammars: Grammars) -> None:  # noqa: F811
    with pytest.raises(InvalidField, match="NUL") as caught:
        grammars.choice("structured_outputs.choice", ["a\0"])
    assert caught.value.field == "structured_outputs.choice"


@pytest.mark.parametrize(
    ("begin", "part"), [('"', '\\"'), ("/", "\\/"), ("", "/"), ('"', "\\"), ("<", "<"), ("temperature", " ")]
)
def test_texts_without_an_end_are_searched_in_proportion_to_their_length(begin: str, part: str) -> None:
    began = time.thread_time()
    check_attributes(begin + part * 32_000 + "\\")
    assert time.thread_time() - began < 0.5  # the square of the length would take ten seconds


def test_what_is_remembered_is_found_without_compiling(grammars: Grammars, checks: list[str]) -> None:  # noqa: F811
    remembered = grammars.remembered()
    ebnf = 'root ::= "a" | "b"'
    for compile_one in (
        lambda each: each.choice("choice", ["remembered"]),
        lambda each: each.grammar("grammar", ebnf),
        lambda each: each.json_schema("json", {"const": "remembered"}),
    ):
        with pytest.raises(NotRemembered):
            compile_one(remembered)
        found, num_checks = compile_one(grammars), len(checks)
        assert compile_one(remembered) is found
        assert len(checks) == num_checks
    for each in (grammars, remembered):
        with pytest.raises(InvalidField, match="regex"):
            each.regex("regex", "(")


def test_only_the_limited_process_loads_the_modules_that_read_grammars() -> None:
    root = source_tree()
    paths = [path for package in ("forwardscope", "model", "service") for path in (root / package).rglob("*.py")]
    imports = {
        (".".join(path.relative_to(root).with_suffix("").parts), node.module)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    package = "model.text.grammar"
    shared = {f"{package}.{name}" for name in ("__init__", "grammars", "limits", "process")}
    private = {f"{package}.{path.stem}" for path in (root / "model/text/grammar").glob("*.py")} - shared
    assert f"{package}.program" in private
    assert {user for user, module in imports if module in private} <= private


def test_a_schema_given_as_text_is_read_like_one_given_as_a_value(grammars: Grammars) -> None:  # noqa: F811
    grammars.json_schema("json", '{"const": 1}')
    for text in ("{", "[1]", "[" * 30_000):
        with pytest.raises(InvalidField, match="is a text"):
            grammars.json_schema("json", text)


def test_a_process_that_is_killed_keeps_no_call_waiting(grammars: Grammars) -> None:  # noqa: F811
    grammars.choice("choice", ["a"])  # the process has started
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(grammars.json_schema, "killed", SLOW)
        time.sleep(0.3)
        grammars.kill()
        with pytest.raises(NoAnswer):
            call.result(PATIENCE_SECONDS)
    assert grammars._process._process is None, "the process has ended, and not only its limited fork"
    assert grammars.choice("choice", ["b"]).field == "choice", "another process has started"


def test_a_process_that_has_ended_is_replaced(grammars: Grammars) -> None:  # noqa: F811
    grammars.choice("choice", ["begin"])
    process = grammars._process._process
    assert process is not None
    process.kill()
    process.wait(PATIENCE_SECONDS)
    assert grammars.choice("choice", ["ended"]).field == "choice"


def test_no_answer_is_not_remembered(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    quick = grammars.quick()
    num_started: list[int] = []

    def start(command: list[str], **pipes: Any) -> Any:
        num_started.append(1)
        return subprocess.Popen(["true"], **pipes)

    with monkeypatch.context() as patch:
        patch.setattr("model.text.grammar.process.subprocess", SimpleNamespace(Popen=start, PIPE=subprocess.PIPE))
        with pytest.raises(NoAnswer):
            quick.choice("choice", ["unanswered"])
        assert len(num_started) == 2, "it was replaced once"
    assert quick.choice("choice", ["unanswered"]).field == "choice"


def test_a_process_that_does_not_answer_in_time_is_ended(
    grammars: Grammars,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = grammars.quick()
    quick.choice("choice", ["in time"])
    process = quick._process._process
    assert process is not None
    with monkeypatch.context() as patch:
        patch.setattr("model.text.grammar.process.MAX_WAIT_SECONDS", 0.0)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(NoAnswer):
            quick.choice("choice", ["late"])
    assert process.returncode == -signal.SIGKILL
    assert quick.choice("choice", ["late"]).field == "choice"


def test_grammars_are_read_where_1024_files_are_open(grammars: Grammars) -> None:  # noqa: F811
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"a process may open only {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    try:
        assert grammars.quick().choice("choice", ["a"]).field == "choice"
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_error_of_the_reader_is_no_property_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = LLTokenizer(SmallVocabulary(0, {}))  # type: ignore[arg-type]  # noqa: F811
    job = {"cpu_seconds": 2, "source": {"choice": ["a"]}}

    def fails(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(program, "read_source", fails)
    failure: BaseException = ZeroDivisionError("a bug")
    assert "cannot be read" in json.loads(read_in_fork(tokenizer, job))["error"]
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err
    failure = MemoryError()
    assert json.loads(read_in_fork(tokenizer, job)) == {"ended": "memory"}
    monkeypatch.setattr(program, "read_source", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert json.loads(read_in_fork(tokenizer, job)) == {"ended": "killed"}


def test_each_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = LLTokenizer(SmallVocabulary(0, {}))  # type: ignore[arg-type]  # noqa: F811
    compiled: list[str] = []

    def matcher(tokenizer: LLTokenizer, text: str, **limits: Any) -> LLMatcher:
        compiled.append(text)
        return LLMatcher(tokenizer, text, **limits)

    monkeypatch.setattr(program, "LLMatcher", matcher)
    schema = {"schema": {"type": "integer"}, "is_closed": True, "is_strict": False, "name": "f", "field": "tools.0"}
    answer = read(tokenizer, {"rules": "start: arguments_0", "schemas": {"arguments_0": schema}})
    assert answer["grammar"] == compiled[-1]
    assert len(compiled) == len(set(compiled)) == 2, "the schema alone, and the whole"
