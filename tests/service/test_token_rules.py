"""Fields that say which tokens a generation may choose, and where its text ends."""

from typing import Any

import pytest

from model.text.token_rules import TokenRules
from tests.service.running import Running
from tests.service.test_bad_input import check_error

IDS = [5, 9, 77, 200, 31, 8]
BODY: dict[str, Any] = {"prompt": IDS, "max_tokens": 8, "seed": 3, "temperature": 1.5}


def tokens_of(service: Running, **fields: Any) -> list[int]:
    tokens: list[int] = service.answer("/generate", **BODY | fields)["tokens"]
    return tokens


def test_no_other_tokens_than_the_allowed_ones_are_chosen(tiny: Running) -> None:
    plain, allowed = tokens_of(tiny, ignore_eos=True), [7, 60, 61]
    assert not set(plain) <= set(allowed)
    for temperature in (0, 1.5):
        chosen = tokens_of(tiny, allowed_token_ids=allowed, temperature=temperature, ignore_eos=True)
        assert len(chosen) == 8
        assert set(chosen) <= set(allowed)


def test_a_stop_token_is_chosen_only_after_the_minimum(tiny: Running) -> None:
    body: dict[str, Any] = {"stop_token_ids": [7], "allowed_token_ids": [7, 60], "logit_bias": {"7": 100}}
    assert tokens_of(tiny, **body) == [7]
    assert tokens_of(tiny, **body, min_tokens=3) == [60, 60, 60, 7]
    assert tokens_of(tiny, **body, min_tokens=8) == [60] * 8


def test_a_stop_string_counts_only_after_the_minimum_and_may_be_in_the_text(tiny: Running) -> None:
    cat = tiny.answer("/tokenize", text="a")["tokens"][0]["id"]
    body = {**BODY, "allowed_token_ids": [cat], "stop": ["aa"], "ignore_eos": True}
    assert tiny.answer("/generate", **body)["text"] == ""
    assert tiny.answer("/generate", **body, include_stop_str_in_output=True)["text"] == "aa"
    found = tiny.answer("/generate", **body, min_tokens=4, include_stop_str_in_output=True)
    assert (found["text"], found["finish_reason"], len(found["tokens"])) == ("a" * 6, "stop", 6)


def test_special_tokens_are_text_only_on_request(tiny: Running) -> None:
    body = {**BODY, "allowed_token_ids": [0], "max_tokens": 2}
    shown = body | {"skip_special_tokens": False}
    assert tiny.answer("/generate", **body, ignore_eos=True)["text"] == ""
    assert tiny.answer("/generate", **shown, ignore_eos=True)["text"] == "<eos><eos>"
    assert tiny.answer("/generate", **shown)["text"] == ""
    assert tiny.answer("/generate", **shown, include_stop_str_in_output=True)["text"] == "<eos>"


def test_bad_words_are_not_written(tiny: Running) -> None:
    cat, dog = (tiny.answer("/tokenize", text=f" {word}")["tokens"][0]["id"] for word in ("cat", "dog"))
    body: dict[str, Any] = {"allowed_token_ids": [cat, dog], "logit_bias": {str(cat): 50}, "ignore_eos": True}
    assert tokens_of(tiny, **body) == [cat] * 8
    assert tokens_of(tiny, **body, bad_words=["cat"]) == [dog] * 8


def test_the_last_token_of_a_banned_sequence_may_follow_other_tokens() -> None:
    rules = TokenRules(banned=[(1, 2, 3)])
    assert rules.excluded([9, 1, 2], 1) == [3]
    assert rules.excluded([9, 2, 2], 1) == rules.excluded([2], 1) == []


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"min_tokens": 9}, 400, "min_tokens"),
        ({"min_tokens": -1}, 422, "min_tokens"),
        ({"allowed_token_ids": []}, 422, "allowed_token_ids"),
        ({"allowed_token_ids": [284]}, 400, "allowed_token_ids.0"),
        ({"allowed_token_ids": [0], "min_tokens": 1}, 400, "allowed_token_ids"),
        ({"bad_words": [""]}, 422, "bad_words.0"),
        ({"bad_words": ["a"] * 65}, 422, "bad_words"),
        ({"include_stop_str_in_output": 1}, 422, "include_stop_str_in_output"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(
    tiny: Running, body: dict[str, Any], status: int, param: str
) -> None:
    check_error(tiny.post("/generate", BODY | body), status, param)


def test_a_grammar_that_the_rules_contradict_ends_with_an_error_that_names_them(tiny: Running) -> None:
    body = BODY | {"structured_outputs": {"regex": "[ab]+"}, "allowed_token_ids": [7]}
    check_error(tiny.post("/generate", body), 400, "allowed_token_ids")
    edit = {"stage": "blocks.0.attn_out", "op": "scale", "factor": 0.5}
    check_error(tiny.post("/generate", body | {"edits": [edit]}), 400, "allowed_token_ids")
