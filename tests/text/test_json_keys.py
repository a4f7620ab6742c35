"""No JSON object has a key twice, whatever the tokens are and however the text is divided into them."""

import json
import random
from typing import Any

import pytest

from model.text.constraint import GrammarState
from model.text.grammar.grammars import EmbeddedSchema, Grammars
from model.text.json_keys import JsonPlace
from model.text.tokenizer import Tokenizer
from tests.text.test_constraint import allowed, grammars, tokenizer  # noqa: F401  # fixtures

# ruff: noqa: F811  # arguments that are fixtures
ANY = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('{"a":1,"b":{"a":1},"c":[{"a":1},{"a":2}],"d":"a","e":["a","a"]}', True),
        ('{"a":1,"b":2,"a"', False),
        ('{"x":{"a":1,"a"', False),
        ('[{"a":{}},{"a":1,"b":[],"a"', False),
        ('{"a\\"":1,"a":2,"a\\\\":3}', True),
        ('{"a\\"":1,"a\\""', False),
        ('{"":1,""', False),
        ('{"k":"}{\\"","k2":1}', True),
        ('"{\\"a\\":1,\\"a\\":2}"', True),
    ],
)
def test_a_key_that_is_there_is_found_however_the_text_is_divided(text: str, is_right: bool) -> None:
    for size in (1, 2, 3, 5, 100):
        place: JsonPlace | None = JsonPlace(b"")
        for begin in range(0, len(text), size):
            assert place is not None
            place = place.after(text[begin : begin + size].encode())
        assert (place is not None) == is_right


def test_json_begins_after_each_marker_only() -> None:
    place = JsonPlace(b"<call>").after(b'{"a":1,"a":2} <call>\n{"a":1} {"a":1,"a":2} <call>{"b"')
    assert place is not None
    assert place.after(b':1,"b"') is None
    assert place.after(b':1,"c"') is not None


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('The set {"a", "b", "a"} of {"a":1,"a":2}', True),
        (' "{"a":1,"a":2}"', True),
        ('[{"a":1,"a"', False),
        (' \n{"a":1,"a"', False),
        ('The set {"a","a"}. <call>{"a":1,"a"', False),
        ('<call> [{"a":1,"a"', False),
        ('<call>no {"a":1,"a":1}', True),
    ],
)
def test_prose_before_json_is_not_read_as_json(text: str, is_right: bool) -> None:
    for size in (1, 3, 100):
        place: JsonPlace | None = JsonPlace(b"<call>", b"<call>")
        for begin in range(0, len(text), size):
            assert place is not None
            place = place.after(text[begin : begin + size].encode())
        assert (place is not None) == is_right


def state_after(text: str, state: GrammarState, tokenizer: Tokenizer) -> GrammarState:
    for token_id in tokenizer.encode(text):
        assert token_id in allowed(state)[0]
        state.append(token_id)
    return state


def test_no_token_that_completes_a_key_again_is_allowed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = state_after('{"a":1,"ab":2,"a', GrammarState(grammars.json_schema("json", ANY)), tokenizer)
    quote, letter = tokenizer.encode('"')[0], tokenizer.encode("b")[0]
    ids = allowed(state)[0]
    assert not any(tokenizer.decode_inside([token_id]).startswith('"') for token_id in ids)
    assert letter in ids
    state.append(letter)
    assert quote not in allowed(state)[0]
    state_after('c":3}', state, tokenizer)
    assert state.is_complete


def test_a_draft_ends_before_a_key_that_is_there(grammars: Grammars, tokenizer: Tokenizer) -> None:
    state = state_after('{"a":1,', GrammarState(grammars.json_schema("json", ANY)), tokenizer)
    draft = tuple(tokenizer.encode('"a":2}'))
    masks = allowed(state, draft)
    assert draft[0] in masks[0]
    assert draft[1] in masks[1]
    assert draft[2] not in masks[2], "the closing quote of the key"
    assert allowed(state) == masks[:1], "nothing of the draft remains"


def test_arguments_of_calls_have_no_key_twice(grammars: Grammars, tokenizer: Tokenizer) -> None:
    rules = 'start: TEXT "<tool_call>" arguments\nTEXT: /[^<]*/'
    constraint = grammars.lark(
        "tools", rules, {"arguments": EmbeddedSchema(ANY, "tools.0", "f")}, JsonPlace(b"<tool_call>")
    )
    state = state_after('{"a":1,"a":2} <tool_call>{"a":1,"a', GrammarState(constraint), tokenizer)
    assert tokenizer.encode('"')[0] not in allowed(state)[0]


def test_named_properties_need_no_filter(grammars: Grammars) -> None:
    closed = grammars.json_schema("json", {"type": "object", "properties": {"a": {}}}, is_closed=True)
    assert closed.key_filter is not None, "its value may be any object"
    closed = grammars.json_schema("json", {"type": "object", "properties": {"a": {"type": "null"}}}, is_closed=True)
    assert closed.key_filter is None


def limited(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": {"type": "integer"}, **keywords}


def test_an_object_whose_keys_are_used_up_ends(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = limited(patternProperties={"^a$": {"type": "null"}}, additionalProperties=False)
    state = state_after('{"a":null', GrammarState(grammars.json_schema("json", schema)), tokenizer)
    texts = {tokenizer.decode_inside([token_id]).strip() for token_id in allowed(state)[0]}
    assert texts == {"", "}"}
    state = GrammarState(grammars.json_schema("json", schema | {"minProperties": 2}))  # nothing fits this schema
    state_after('{"a":null,"a', state, tokenizer)
    with pytest.raises(AssertionError, match="already has each key"):
        allowed(state)


@pytest.mark.parametrize(
    "schema",
    [
        limited(patternProperties={"^k[0-3]$": {"type": "boolean"}}, additionalProperties=False),
        limited(propertyNames={"pattern": "^a{1,3}$"}),
        limited(propertyNames={"maxLength": 1, "pattern": "[a-d]"}, minProperties=4),
    ],
    ids=["patternProperties", "propertyNames", "minProperties"],
)
def test_texts_with_few_keys_are_completed(schema: dict[str, Any], grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Random tokens, but no white space, and the end of an object only where nothing else can follow."""
    for seed in range(10):
        state, choose, text = GrammarState(grammars.json_schema("json", schema)), random.Random(seed), ""
        while not state.is_complete:
            tokens = {i: tokenizer.decode_inside([i]) for i in allowed(state)[0]}
            visible = [i for i, token in tokens.items() if token.strip()]
            token_id = choose.choice([i for i in visible if "}" not in tokens[i]] or visible)
            text += tokens[token_id]
            state.append(token_id)
        keys = [key for key, _ in json.loads(text, object_pairs_hook=list)]
        assert len(set(keys)) == len(keys) > 2
