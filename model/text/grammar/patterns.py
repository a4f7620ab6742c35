"""Convert regular expressions of JSON Schema (ECMA-262, found anywhere in a string) to terminals of Lark, which match
the whole string. Look-ahead at the beginning, look-behind at the end, and `((?!x).)*` become intersections; other
look-around cannot be enforced.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from model.errors import shortened
from model.text.grammar.limits import LIMITS, InvalidGrammar

LOOK_AROUND = re.compile(r"\(\?<?[=!]")
LOOK_AHEAD = re.compile(r"\(\?[=!]")
LOOK_BEHIND = re.compile(r"\(\?<[=!]")
WITHOUT = re.compile(r"\((\?:)?(?=\(\?!)")  # the beginning of ((?!x).)*
ONE_CHARACTER = re.compile(r"\.|\\[dDwWsS]|\[\^?(\\.|[^\]\\])+\]")
PART = re.compile(r"\\.?|\[(?:\\.|[^\]\\])*+\]?|(.)", re.DOTALL)  # an escaped character, a class, or another character
REPEATED = re.compile(r"([*+]|\{\d+(,\d*)?\})\??\$")
ANYTHING = "(?s:.*)"


def needs_terminal(pattern: str) -> bool:
    """Whether llguidance's own reader of schemas cannot read a pattern, but `content_terminal` may."""
    return LOOK_AROUND.search(pattern) is not None


def check_pattern(pattern: str) -> None:
    """Raise `InvalidGrammar` for a pattern that llguidance's own reader of schemas cannot read."""
    if reason := schema_error({"type": "string", "pattern": pattern}):
        raise InvalidGrammar(f"the pattern {shortened(pattern)} is not supported: {reason.rpartition('error: ')[2]}")


def schema_error(schema: Mapping[str, Any]) -> str:
    """The error of llguidance's own reader of schemas; empty if there is none."""
    return str(LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]})))


def is_empty(terminal: str) -> bool:
    """Whether an expression of Lark matches no text."""
    rules = {"grammars": [{"lark_grammar": f"start: TEXT\nTEXT: {terminal}"}]}
    matcher = LLMatcher(_tokenizer(), json.dumps(rules), log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return "NoExtension" in matcher.get_error()


@cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def content_terminal(pattern: str) -> str:
    """The strings in which a pattern is found, as an expression of Lark."""
    return f"({' | '.join(map(_alternative, alternatives(pattern)))})"


def _alternative(pattern: str) -> str:
    """One alternative of a pattern: looks ahead at its beginning and behind at its end, then what is matched."""
    rest = pattern.removeprefix("^")
    is_anchored = rest != pattern
    conditions = []
    while LOOK_AHEAD.match(rest):
        end = _end_of_group(rest)
        ahead = " | ".join(_whole(f"^{each.removeprefix('^')}") for each in alternatives(rest[3:end]))
        conditions.append(f"{'~' if rest[2] == '!' else ''}({ahead})")
        rest = rest[end + 1 :]
    if not is_anchored and conditions:
        return f"/{ANYTHING}/ ({' & '.join([_whole(f'^{rest}'), *conditions])})"
    while (begin := _last_group(rest)) is not None and LOOK_BEHIND.match(rest, begin):
        behind = " | ".join(_whole(f"{each}$") for each in alternatives(rest[begin + 4 : -2]))
        conditions.append(f"{'~' if rest[begin + 3] == '!' else ''}({behind})")
        rest = f"{rest[:begin]}$"
    if is_anchored and (found := WITHOUT.match(rest)):
        end = _end_of_group(rest[found.end() :]) + found.end()
        character = ONE_CHARACTER.match(rest, end + 1)
        if character and rest[character.end() :][:1] == ")" and REPEATED.fullmatch(rest, character.end() + 1):
            excluded = [rf"^[\s\S]*{each}" for each in alternatives(rest[found.end() + 3 : end])]
            conditions.append(f"~({' | '.join(map(_whole, excluded))})")
            rest = rest[: found.end()] + rest[end + 1 :]
    if is_anchored and LOOK_AROUND.search(rest) and rest[:1] == "(" and rest[1:2] != "?" and _last_group(rest) == 0:
        inner = [_alternative(f"^{each.removeprefix('^').removesuffix('$')}$") for each in alternatives(rest[1:-2])]
        return " & ".join([f"({' | '.join(inner)})", *conditions])
    return " & ".join([_whole(f"^{rest}" if is_anchored else rest), *conditions])


def _whole(pattern: str) -> str:
    """An expression for whole strings, from one that may have anchors at its ends."""
    body = pattern.removeprefix("^")
    begin = "" if body != pattern else ANYTHING
    end = ANYTHING
    if body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1:
        body, end = body[:-1], ""
    if any(character in "^$" for _, character, _ in _characters(body)) or LOOK_AROUND.search(body):
        raise InvalidGrammar(f"the pattern {shortened(pattern)} has anchors or look-around that cannot be enforced")
    return f"/{begin}({regex_to_lark(body, use_ascii='dw')}){end}/"


def _characters(pattern: str) -> list[tuple[int, str, int]]:
    """The unescaped characters outside of classes: place, character, and depth of groups."""
    found, depth = [], 0
    for part in PART.finditer(pattern):
        if character := part[1]:
            depth -= character == ")"
            found.append((part.start(), character, depth))
            depth += character == "("
    return found


def alternatives(pattern: str) -> list[str]:
    """The alternatives of a pattern."""
    bars = [place for place, character, depth in _characters(pattern) if character == "|" and depth == 0]
    return [
        pattern[begin:end] for begin, end in zip([0, *(bar + 1 for bar in bars)], [*bars, len(pattern)], strict=True)
    ]


def _end_of_group(pattern: str) -> int:
    for place, character, depth in _characters(pattern):
        if character == ")" and depth == 0:
            return place
    raise InvalidGrammar(f"the pattern {shortened(pattern)} has a group without an end")


def _last_group(pattern: str) -> int | None:
    """The beginning of the group that ends directly before a `$` at the end of a pattern, if there is one."""
    if not pattern.endswith(")$") or (found := _characters(pattern)[-2:])[0][:2] != (len(pattern) - 2, ")"):
        return None
    depth = found[0][2]
    return max(place for place, character, each in _characters(pattern) if character == "(" and each == depth)
