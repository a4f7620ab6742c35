"""Tests of what is refused before llguidance compiles it, and of what the compiler of grammars remembers."""

import time
from typing import Any

import pytest

from model.errors import InvalidField
from model.text.grammar import MAX_REMEMBERED, Grammars, NotRemembered
from model.text.grammar_checker import GrammarChecker, NeedsMoreTime
from model.text.grammar_limits import MAX_DIVISOR, MAX_PATTERN_PROPERTIES, check_attributes, check_schema
from tests.text.test_constraint import grammars, tokenizer  # noqa: F401  # fixtures

SLOW = {"allOf": [{"type": "integer", "multipleOf": number} for number in (83, 89, 97)]}


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fields of the grammars that a checking process has compiled."""
    fields: list[str] = []
    check = GrammarChecker.check

    def noted(checker: GrammarChecker, field: str, grammar: str) -> None:
        fields.append(field)
        check(checker, field, grammar)

    monkeypatch.setattr(GrammarChecker, "check", noted)
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
    with pytest.raises(InvalidField, match=r"(temperature|max_tokens) has no effect .* set \1 in the request"):
        check_attributes("grammar", text)


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
    check_attributes("grammar", text)


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": MAX_DIVISOR + 1},
        {"items": [{"properties": {"a": {"multipleOf": (MAX_DIVISOR + 1) / 1000}}}]},
        {"patternProperties": {str(i): {} for i in range(MAX_PATTERN_PROPERTIES + 1)}},
    ],
)
def test_a_schema_over_a_limit_is_refused_with_the_limit(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=f"is too complex.*use at most ({MAX_DIVISOR}|{MAX_PATTERN_PROPERTIES})"):
        check_schema("json", schema)


@pytest.mark.parametrize("divisor", [1, 60, 86_400, MAX_DIVISOR, 0.01, 2.50, 1e-7, 0, "a", True, float("inf")])
def test_usual_divisors_are_allowed(divisor: Any) -> None:
    check_schema("json", {"properties": {"multipleOf": {"multipleOf": divisor}, "patternProperties": {"type": "null"}}})


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
    began = time.process_time()
    check_attributes("grammar", begin + part * 32_000 + "\\")
    assert time.process_time() - began < 0.5  # the square of the length would take ten seconds


def test_the_digits_of_extreme_divisors_are_counted_quickly() -> None:
    began = time.process_time()
    check_schema("json", {"allOf": [{"multipleOf": 5e-324}] * 2600})
    assert time.process_time() - began < 0.5
    with pytest.raises(InvalidField, match="multipleOf"):
        check_schema("json", {"multipleOf": 1e300})


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
