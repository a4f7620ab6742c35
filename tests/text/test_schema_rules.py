"""Tests of the rules for JSON schemas: which texts they allow, and which schemas are refused."""

import json
import random
from decimal import Decimal
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from model.text.grammar.formats import FORMATS
from model.text.grammar.lark import TERMINALS, schema_rules
from model.text.grammar.limits import LIMITS, InvalidGrammar
from model.text.grammar.number_keywords import MAX_DIVISOR
from model.text.grammar.number_regex import Bound, number_regex
from model.text.grammar.options import MAX_PATTERN_PROPERTIES
from model.text.grammar.program import START, SmallVocabulary

TOKENIZER = LLTokenizer(SmallVocabulary(0, {}))  # type: ignore[arg-type]  # one token for each byte
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/N"}}, "required": ["next"]}
LIST = NODE | {"properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}
TAGGED = {
    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    "discriminator": {"propertyName": "k", "mapping": {"a": "#/$defs/A", "b": "#/$defs/B"}},
    "$defs": {
        "A": {"type": "object", "properties": {"k": {"const": "a"}, "n": {"type": "integer"}}, "required": ["n"]},
        "B": {"type": "object", "properties": {"k": {"const": "b", "default": "b"}}},
    },
}
AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
ABC = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}}


def compiled(rules: str) -> LLMatcher:
    grammars = {"grammars": [{"lark_grammar": START}, {"name": "main", "lark_grammar": rules}]}
    matcher = LLMatcher(TOKENIZER, json.dumps(grammars), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def schema_matcher(schema: dict[str, Any], *, is_closed: bool = False) -> LLMatcher:
    lines, _ = schema_rules("start", schema, is_closed=is_closed)
    return compiled("\n".join([TERMINALS, *lines]))


def allows(matcher: LLMatcher, text: str) -> bool:
    matcher, tokens = matcher.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({}, ["1", "null", '{"a": [1, "x", {}]}', '"a\\n"', "1e10", "[]"], ["1e999", '{"a":1,}', "00", "[1,]", "NaN"]),
    (
        AB | {"required": ["a"]},
        ['{"a":1}', '{ "a" : 1 , "b" : "x"}', '{"a":1,"z":2}', '{"a":1,"c":[],"d":{}}'],
        ["{}", '{"b":"x"}', '{"a":1,"a":2}', '{"a":1,"\\u0061":2}', '{"a":1,"\\u0063":2}', '{"a":1.5}'],
    ),
    (ABC | {"minProperties": 2, "additionalProperties": False}, ['{"a":1,"c":2}', '{"b":1,"c":2}'], ["{}", '{"a":1}']),
    (ABC | {"maxProperties": 1}, ["{}", '{"c":1}', '{"x":1}'], ['{"a":1,"b":2}', '{"a":1,"x":2}', '{"x":1,"y":1}']),
    ({"type": "object", "maxProperties": 0}, ["{}"], ['{"a":1}']),
    (
        {"type": "object", "minProperties": 2, "additionalProperties": {"type": "null"}},
        ['{"a":null,"b":null}', '{"a":null,"b":null,"c":null}'],
        ["{}", '{"a":null}', '{"a":null,"b":1}'],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "null"}},
        ["[]", "[1]", '[1,"a"]', '[1,"a",null,null]'],
        ['["a"]', '[1,"a",2]'],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        ['[1,"a"]'],
        ["[]", "[1]", '[1,"a",2]'],
    ),
    ({"items": {"type": "integer"}, "minItems": 1, "maxItems": 3}, ["[1]", "[1, 2,3]", "{}"], ["[]", "[1,2,3,4]"]),
    ({"enum": ["a", 1, None, {"x": [1]}, "é\n"]}, ['"a"', "1", "null", '{"x": [1]}', '"é\\n"'], ['"b"', "1.0"]),
    ({"enum": ["a", "2020-02-29", "2021-02-29"], "format": "date"}, ['"2020-02-29"'], ['"a"', '"2021-02-29"']),
    ({"enum": ["a", 5, 50], "minimum": 10, "format": "unknown"}, ['"a"', "50"], ["5"]),
    ({"type": "string", "format": "unknown", "const": "a"}, ['"a"'], ['"b"']),
    ({"type": "array", "uniqueItems": False, "contains": {}, "minContains": 0}, ["[1,1]"], []),
    (
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"]}, "minItems": 1},
        ['["a"]', '["a","c"]', '["a", "b", "c"]'],
        ["[]", '["a","a"]'],
    ),
    (TAGGED, ['{"k":"a","n":1}', '{"k":"b"}'], ['{"n":1}', "{}", '{"k":"b","n":1,"k":"a"}']),
    ({"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}]}, ["1", '"a"', "null"], ["true"]),
    ({"$ref": "#/$defs/N", "$defs": {"N": LIST}}, ['{"next":null}', '{"next":{"next":null}}'], ["{}"]),
    ({"properties": {"n": {"$ref": "#/$defs/N"}}, "$defs": {"N": NODE}}, ['{"m":1}', "{}"], ['{"n":{}}']),
    ({"$ref": "#a", "$defs": {"x/y": {"$anchor": "a", "type": "null"}}}, ["null"], ["1"]),
    ({"$ref": "#/$defs/x~1y%20z", "$defs": {"x/y z": {"type": "null"}}}, ["null"], ["1"]),
    ({"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}, ['"1.5"', '"+0"'], ['"-"', '""', '"a"']),
    ({"pattern": "^(?=.*[A-Z])(?=.*\\d).+$", "type": "string", "minLength": 3}, ['"A1b"'], ['"A1"', '"abcd1"']),
    (
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a$", "minLength": 2}}},
        ["{}"],
        ['{"a":"a"}'],
    ),
    ({"type": "string", "pattern": "^[a-z-]+(?<!-)$"}, ['"a-b"'], ['"a-"', '"-"']),
    ({"type": "string", "pattern": "^((?!ab|c).)*$"}, ['"a-b"', '""'], ['"xab"', '"c"']),
    ({"type": "string", "pattern": "(?=.*\\d)[a-z0-9]{3}$"}, ['"ab1"', '"- 1ab"'], ['"abc"', '"1-abc"']),
    ({"type": "string", "pattern": "^((?=a)[a-c]+|b)$"}, ['"abc"', '"b"'], ['"bc"']),
    ({"type": "string", "maxLength": 10**12}, ['"a"'], ["1"]),
    ({"not": {"type": ["string", "integer"]}}, ["null", "[1]", "{}"], ['"a"', "1"]),
    ({"not": {"enum": ["a", "b.c", 1, 2.5, True, None]}}, ['"b"', '"bxc"', "2", "3", "false"], ['"a"', '"b.c"', "1.0"]),
    ({"type": "integer", "not": {"minimum": 3}}, ["2"], ["3"]),
    ({"type": "string", "not": {"pattern": "^a|b$"}}, ['"ba"'], ['"ax"', '"xb"']),
    ({"type": "string", "not": {"minLength": 2, "maxLength": 3}}, ['"a"', '"abcd"'], ['"ab"', '"abc"']),
    (AB | {"not": {"required": ["a", "b"]}}, ["{}", '{"a":1}', '{"b":""}'], ['{"a":1,"b":""}']),
    (AB | {"not": {"properties": {"a": {"const": 1}}}}, ['{"a":2}'], ["{}", '{"a":1}']),
    ({"type": "array", "not": {"items": {"type": "null"}}}, ["[1]", "[null,1]"], ["[]", "[null]"]),
    ({"type": "array", "not": {"contains": {"const": 1}}}, ["[]", "[2]"], ["[1]", "[2,1]"]),
    ({"not": {"not": {"type": "null"}}}, ["null"], ["1"]),
    (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}'],
        ["{}", '{"a":1,"b":1}'],
    ),
    ({"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string"}]}, ['"b"'], ['"a"']),
    ({"oneOf": [{"const": "a"}, {"type": "string", "format": "date"}]}, ['"2024-01-01"'], ['"a"']),
    (
        AB | {"if": {"properties": {"b": {"const": "x"}}}, "then": {"required": ["a"]}, "else": {"maxProperties": 1}},
        ['{"a":1,"b":"x"}', '{"a":1}', '{"b":"y"}'],
        ["{}", '{"b":"x"}', '{"a":1,"b":"y"}'],
    ),
    ({"items": {"type": "integer"}, "contains": {"const": 5}}, ["[5]", "[1,5,2,5]", "{}"], ["[]", "[1]", '[5,"a"]']),
    (
        {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 1}, "minContains": 2, "maxContains": 2},
        ["[1,1]", "[2,1,2,1,2]"],
        ["[1]", "[1,1,1]"],
    ),
    (
        {"type": "array", "maxItems": 3, "allOf": [{"contains": {"const": "x"}}, {"contains": {"const": 1}}]},
        ['["x",1]', '[1,0,"x"]'],
        ['["x"]', "[1,1,1]", '[1,2,3,"x"]'],
    ),
    ({"type": "array", "contains": {"format": "date"}, "items": {"type": "string"}}, ['["2024-01-01"]'], ['["a"]']),
    ({"minLength": 3, "pattern": "^a/"}, ['"a/c"', "5"], ['"bcd"', '"a/"']),
    (
        {"type": "object", "patternProperties": {"^x/": {"type": "integer"}, "y$": {"type": "null"}}},
        ['{"x/2":1,"ay":null,"z":"q"}'],
        ['{"x/2":"a"}', '{"x/y":1}', '{"ay":1}'],
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        ['{"a":1,"b":2}', "{}"],
        ['{"c":1}', '{"a":1,"a":2}', '{"a":""}'],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$", "maxLength": 3}},
        ['{"abc":1}'],
        ['{"abcd":1}', '{"A":1}'],
    ),
    (
        {"allOf": [AB | {"required": ["b"]}], "properties": {"c": {}}, "unevaluatedProperties": False},
        ['{"a":1,"b":"","c":2}', '{"b":""}'],
        ['{"b":"","d":2}', '{"a":1}'],
    ),
    ({"multipleOf": 7, "minimum": 1, "maximum": 20, "type": "number"}, ["7", "14"], ["0", "21", "8"]),
    ({"type": "number", "multipleOf": 0.01}, ["1.25", "3", "-0.5"], ["1.255"]),
    ({"type": "number", "multipleOf": 0.25}, ["1.25", "3"], ["1.3", "1.000000000000000000000000"]),
    ({"type": ["integer", "null"], "minimum": 3, "maximum": 2}, ["null"], ["3"]),
    ({"type": "integer", "exclusiveMinimum": True, "minimum": 1, "maximum": 3}, ["2", "3"], ["1", "4"]),
    (
        AB | {"dependentRequired": {"a": ["b"]}, "additionalProperties": False},
        ["{}", '{"b":""}', '{"a":1,"b":""}'],
        ['{"a":1}'],
    ),
    ({"type": "number", "exclusiveMaximum": 0}, ["-1", "-0.1", "-0.01"], ["0", "-0", "0.0", "-0.0", "-0.00", "1"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["1", "0.1"], ["0", "0.0", "-0", "-0.0", "-1"]),
    ({"type": "number", "minimum": -1, "exclusiveMaximum": 0.0}, ["-1", "-0.5"], ["0", "-0", "-0.0", "-1.1"]),
    ({"type": "number", "maximum": 0}, ["0", "-0", "0.0", "-0.0", "-1"], ["0.1", "1"]),
    ({"type": "number", "minimum": 0}, ["0", "0.0", "1"], ["-1", "-0.1"]),
    ({"type": "integer", "exclusiveMaximum": 0}, ["-1"], ["0", "-0"]),
    ({"type": "number", "multipleOf": 0.01, "exclusiveMaximum": 0}, ["-0.01"], ["0", "-0", "-0.0", "-0.00"]),
    ({"type": "number", "multipleOf": 7, "exclusiveMaximum": 0}, ["-7"], ["0", "-0", "7"]),
    ({"type": "number", "multipleOf": 0.25, "exclusiveMaximum": 0}, ["-0.25"], ["0", "-0", "-0.0"]),
    ({"enum": [0.3, 1.1, 0.25, 4], "multipleOf": 0.1}, ["0.3", "1.1", "4"], ["0.25"]),
    ({"enum": [10**400, 0.5, 2], "multipleOf": 0.5, "minimum": 1}, [str(10**400), "2"], ["0.5"]),
    ({"enum": [10**23], "maximum": 1e23, "minimum": 1e23}, [str(10**23)], []),
    ({"type": "number", "maximum": 10**400, "minimum": -(10**400)}, ["0", "-5.5"], []),
    ({"type": "string", "maxLength": 10**400}, ['"a"'], ["1"]),
    ({"items": {"type": "null"}, "maxItems": 10**400, "type": "array"}, ["[null]"], ["1"]),
    ({"enum": [[1], [True], [1, 1.0]], "const": [True], "type": "array"}, ["[true]"], ["[1]"]),
    ({"enum": [[1, 1.0], [1, True]], "uniqueItems": True}, ["[1, true]"], ["[1, 1.0]"]),
    ({"$ref": "#/anyOf/1", "anyOf": [{"type": "null"}, {"const": 1}]}, ["1"], ["null"]),
    ({"not": False, "if": {}, "nullable": True, "x-vendor": [1], "maxLength": 3.0}, ["1", '"abc"'], ['"abcd"']),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: str(value)[:60])
def test_the_rules_allow_exactly_the_right_texts(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    matcher = schema_matcher(schema)
    assert [text for text in good if not allows(matcher, text)] == []
    assert [text for text in bad if allows(matcher, text)] == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "text"}, "'text' is not a type"),
        ({"not": {"format": "date"}}, "keyword format .* inside of not"),
        ({"not": {"multipleOf": 2}}, "keyword multipleOf .* inside of not"),
        ({"not": {}}, "no text satisfies"),
        ({"not": {"$ref": "#"}}, r"\$ref leads back to itself"),
        ({"not": {"allOf": 1}}, "allOf must be a list"),
        ({"if": {"uniqueItems": True}, "then": {"minItems": 1}}, "keyword uniqueItems .* inside of not, if"),
        ({"type": "array", "items": {"type": "string"}, "contains": {"type": "null"}}, "no text satisfies"),
        ({"contains": {}, "uniqueItems": True}, "keywords uniqueItems and contains"),
        ({"contains": {"const": 1}, "minContains": 99, "maxItems": 99}, "too complex: contains"),
        ({"allOf": [{"contains": {"const": i}} for i in range(5)]}, "too complex: .* contains"),
        ({"type": "array", "uniqueItems": True}, "keyword uniqueItems "),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, r"keyword uniqueItems .* \(at '\$.a\[\*\]'\)"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf .* use anyOf"),
        ({"oneOf": [{"type": "string", "format": "date"}, {"type": "string"}]}, "oneOf .* use anyOf"),
        ({"x-guidance": {"lenient": True}}, "keyword x-guidance "),
        ({"$ref": "http://example.com/schema.json"}, r"\$ref 'http.* \$defs"),
        ({"$ref": "#/$defs/A"}, r"\$ref .* names nothing"),
        ({"$ref": "#/anyOf/-1", "anyOf": [{}]}, r"\$ref .* names nothing"),
        ({"$ref": "#/anyOf/00", "anyOf": [{}]}, r"\$ref .* names nothing"),
        ({"$ref": "#"}, r"\$ref leads back to itself"),
        ({"$ref": "#/$defs/N", "$defs": {"N": NODE}}, "no text satisfies .* never end"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no text satisfies .* minimum and maximum"),
        ({"type": "integer", "minimum": 1, "maximum": 6, "multipleOf": 7}, "no text satisfies .* multipleOf"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no text satisfies .* minLength"),
        ({"enum": [1], "type": "string"}, "no text satisfies .* const or enum"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no text satisfies .* no type"),
        ({"type": "string", "format": "uuid", "maxLength": 5}, "no text satisfies .* formats and lengths"),
        ({"type": "string", "allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}]}, "no text satisfies .* patterns"),
        ({"type": "string", "pattern": "^a$", "not": {"const": "a"}}, "no text satisfies .* patterns"),
        ({"minLength": 10**12}, "minLength is too large"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "no text satisfies"),
        ({"type": "object", "required": ["a"], "maxProperties": 0}, "no text satisfies"),
        ({"minLength": -1}, "minLength cannot have the value -1"),
        ({"minLength": True}, "minLength cannot have the value True"),
        ({"properties": [1]}, "properties cannot have the value"),
        ({"properties": {"a": 5}}, "5 is not a JSON schema"),
        ({"anyOf": []}, "anyOf must be a list"),
        ({"const": float("inf")}, "const .* not finite"),
        ({"type": "integer", "enum": [1, float("inf")]}, "enum .* not finite"),
        ({"maximum": float("inf")}, "maximum .* not finite"),
        ({"minimum": 10**400}, "minimum has more than 30 digits"),
        ({"minLength": 10**400}, "minLength is too large"),
        ({"minLength": float("inf")}, "minLength cannot have the value"),
        ({"const": "\ud800"}, "surrogate"),
        ({"pattern": "(a"}, "pattern '.a' is not supported: unclosed group"),
        ({"pattern": "(a(?=b))c"}, "pattern .* look-around"),
        ({"multipleOf": MAX_DIVISOR + 1}, f"too complex: multipleOf .* at most {MAX_DIVISOR}"),
        ({"items": {"multipleOf": (MAX_DIVISOR + 1) / 1000}}, f"too complex: multipleOf .* at most {MAX_DIVISOR}"),
        ({"allOf": [{"multipleOf": number} for number in (83, 89, 97)]}, "too complex: multipleOf"),
        ({"multipleOf": 1e300}, "too complex: multipleOf"),
        ({"multipleOf": 5e-324}, "too complex: multipleOf"),
        ({"minimum": 1e300}, "minimum has more than 30 digits"),
        (
            {"patternProperties": {str(i): {} for i in range(MAX_PATTERN_PROPERTIES + 1)}},
            f"too complex.*patternProperties; use at most {MAX_PATTERN_PROPERTIES}",
        ),
        ({"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(20)]}, "too complex: anyOf"),
        (ABC | {"properties": {f"p{i}": {} for i in range(100)}, "minProperties": 50}, "too complex: minProperties"),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_keyword(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidGrammar, match=reason):
        schema_rules("start", schema, is_closed=False)


def test_many_conditions_on_one_property_have_few_rules() -> None:
    names = [f"kind{i}" for i in range(40)]
    conditions = [
        {"if": {"properties": {"kind": {"const": name}}}, "then": {"required": [f"of_{name}"]}} for name in names
    ]
    for required in (["kind"], []):
        schema = {"type": "object", "properties": {"kind": {"enum": names}}, "required": required, "allOf": conditions}
        matcher = schema_matcher(schema)
        assert allows(matcher, '{"kind":"kind7","of_kind7":1}')
        assert not allows(matcher, '{"kind":"kind7","of_kind8":1}')
        assert not allows(matcher, "{}")


def test_rules_are_written_alike_each_time() -> None:
    assert schema_rules("start", TAGGED, is_closed=True) == schema_rules("start", TAGGED, is_closed=True)


def test_closed_objects_have_only_the_properties_that_the_schema_names() -> None:
    schemas: list[dict[str, Any]] = [AB, {"allOf": [AB], "type": "object"}, {"$ref": "#/$defs/A", "$defs": {"A": AB}}]
    for schema in schemas:
        assert allows(schema_matcher(schema), '{"a":1,"c":2}')
        matcher = schema_matcher(schema, is_closed=True)
        assert allows(matcher, '{"a":1,"b":"x"}')
        assert not allows(matcher, '{"a":1,"c":2}')
    assert not allows(schema_matcher({"type": "object", "properties": {}}, is_closed=True), '{"c":2}')
    for schema in ({"type": "object"}, AB | {"additionalProperties": True}, AB | {"unevaluatedProperties": {}}):
        assert allows(schema_matcher(schema, is_closed=True), '{"c":2}')
    both = schema_matcher({"allOf": [AB, {"properties": {"d": {"type": "null"}}}], "type": "object"}, is_closed=True)
    assert allows(both, '{"a":1,"d":null}')
    assert not allows(both, '{"a":1,"e":null}')
    patterns = schema_matcher({"type": "object", "patternProperties": {"^x": {}}}, is_closed=True)
    assert allows(patterns, '{"x1":1,"x2":2}')
    assert not allows(patterns, '{"y":1}')


def test_ranges_of_numbers_are_those_of_their_bounds() -> None:
    chance = random.Random(1)
    texts = "0 1 -1 0.5 0.50 0.49 0.51 -0.5 -0.51 3.14 3.13 3.2 10 9.99 10.0 10.01 99 98 100 101 12.34 12.340 12.339 7"
    texts += " -7 -7.0 -6.99 1000 999.9 123456 123457 0.001 0.0009 0.0011 -99.9 -100 0.999 0.9990 0.9989"
    numbers = (
        "0",
        "1",
        "-1",
        "0.5",
        "-0.5",
        "3.14",
        "10",
        "99",
        "100",
        "-99.9",
        "1000",
        "12.34",
        "-7",
        "0.999",
        "1e-3",
    )
    bounds = [None, None, *map(Decimal, numbers)]
    num_ranges = 0
    for _ in range(60):
        low, high = chance.choice(bounds), chance.choice(bounds)
        is_strict, is_integer = chance.random() < 0.5, chance.random() < 0.3
        regex = number_regex(
            None if low is None else Bound(low, is_strict),
            None if high is None else Bound(high, is_strict),
            is_integer=is_integer,
        )
        expected = [
            text
            for text in texts.split()
            if (low is None or Decimal(text) > low or (Decimal(text) == low and not is_strict))
            and (high is None or Decimal(text) < high or (Decimal(text) == high and not is_strict))
            and not (is_integer and "." in text)
        ]
        found = []
        if regex:
            num_ranges += 1
            matcher = compiled(f"start: NUMBER\nNUMBER: {regex}")
            found = [text for text in texts.split() if allows(matcher, text)]
        assert found == expected, (low, high, is_strict, is_integer)
    assert num_ranges > 20


def test_no_number_is_infinite_or_goes_on_for_ever() -> None:
    schemas: list[dict[str, Any]] = [{}, {"type": "integer"}, {"minimum": 0}, {"maximum": 10**20}, {"multipleOf": 0.5}]
    for schema in schemas:
        matcher = schema_matcher({"type": "number"} | schema)
        for begin in ("1", "-1", "0.", "1e", "1e+", "1.5"):
            matcher_after = matcher.deep_copy()
            tokens = list((begin + "9" * 60).encode())
            assert matcher_after.try_consume_tokens(tokens) < 30
        assert not allows(matcher, "1e400")


VALID = {
    "date-time": ["2024-02-29T23:59:59.123456+01:00", "2023-12-31T00:00:00Z"],
    "date": ["2000-02-29", "1999-12-31"],
    "time": ["00:00:00Z", "23:59:59.5-12:30"],
    "duration": ["P1Y2M3DT4H5M6S", "PT5M", "P3W"],
    "email": ["a.b+c@example.co.uk"],
    "hostname": ["a-b.example.com"],
    "ipv4": ["255.0.10.199"],
    "ipv6": ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "1::8"],
    "uri": ["https://example.com:8000/a/b?c=d#e", "s3://bucket.name/x", "mailto:a@b.org", "urn:isbn:1"],
    "uuid": ["123e4567-e89b-42d3-a456-426614174000"],
    "json-pointer": ["", "/a~1b/0"],
    "ipv4network": ["10.0.0.0/8", "1.2.3.4/32"],
    "base64": ["", "YQ==", "YWI=", "YWJj"],
}
INVALID = {
    "date-time": ["2024-02-29T23:59:60Z", "2024-02-30T00:00:00Z", "2024-01-01T24:00:00Z", "2024-01-01"],
    "date": ["1900-02-29", "2023-02-29", "0000-01-01", "2023-04-31"],
    "time": ["12:00:60Z", "12:00:00", "24:00:00Z"],
    "duration": ["P", "PT", "1D"],
    "email": ["a@b", "@example.com", ".a@example.com"],
    "ipv4": ["256.0.0.1", "01.2.3.4", "1.2.3"],
    "ipv6": ["1:2", ":::", "1::2::3", "1:2:3:4:5:6:7:8:9"],
    "uri": ["example.com", "http://", "https://1.2.999/", "a b"],
    "uuid": ["123e4567-e89b-42d3-a456-42661417400"],
    "base64": ["YQ=", "YR==", "a"],
}


def test_known_formats_allow_valid_texts_only() -> None:
    for name in FORMATS:
        matcher = schema_matcher({"type": "string", "format": name})
        assert [text for text in VALID.get(name, []) if not allows(matcher, json.dumps(text))] == [], name
        assert [text for text in INVALID.get(name, []) if allows(matcher, json.dumps(text))] == [], name
    assert VALID.keys() | INVALID.keys() <= FORMATS.keys()
    assert not allows(schema_matcher({"type": "string", "format": "uri", "maxLength": 2083}), '"s3://a.bc/"')


def test_many_properties_are_read_in_little_time_and_few_rules() -> None:
    kinds: list[dict[str, Any]] = [{"type": "string"}, {"type": "integer"}, {"items": {"type": "null"}}]
    schema = {"type": "object", "properties": {f"p{i}": kinds[i % 3] for i in range(900)}}
    lines, _ = schema_rules("start", schema, is_closed=True)
    assert sum(map(len, lines)) < 400_000
    many = schema_matcher({"type": "object", "properties": {f"p{i}": {} for i in range(300)}})
    assert allows(many, '{"p7":1,"p200":2}')
    assert not allows(many, '{"p200":1,"p7":2}')
