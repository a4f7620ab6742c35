"""The rules that a JSON schema becomes: each stands for the values that satisfy several schemas, and has options.

A value satisfies a rule if it satisfies one of the options. A rule is named by its index; parts of a value refer to the
rules for them.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from model.text.grammar.contains import Search
from model.text.grammar.limits import InvalidGrammar
from model.text.grammar.schema import Schema, SchemaReader


@dataclass(frozen=True)
class TextOption:
    """A value that has no parts, as an expression of Lark."""

    expression: str
    is_terminal: bool = False


@dataclass(frozen=True)
class ArrayOption:
    prefix: tuple[int, ...]  # rules
    rest: int
    low: int
    high: float


@dataclass(frozen=True)
class ObjectOption:
    """Members with a name in their order, then others, whose keys are terminals."""

    members: tuple[tuple[str, int, bool], ...]  # the key as an expression, the rule, and whether it is required
    extras: tuple[tuple[str, int], ...]
    low: int
    high: float


Option = TextOption | ArrayOption | Search | ObjectOption


@dataclass
class Rule:
    schemas: tuple[Schema, ...]
    place: str  # of its first schema: $.items[*].name
    options: list[Option] = field(default_factory=list)
    can_end: bool = False


class RuleTable:
    """All rules of a schema, the first one for the whole value."""

    def __init__(self, reader: SchemaReader) -> None:
        self.rules: list[Rule] = []
        self.place = ""  # in the schema, of the rule that is read
        self.reason = ""  # why the first option without a value has none
        self._reader = reader
        self._indices: dict[tuple[int, ...], int] = {}

    def index(self, schemas: Sequence[Schema], part: str) -> int:
        """The index of the rule for values that satisfy all these schemas, of a part of the place that is read."""
        interned = dict.fromkeys(id(self._reader.intern(schema)) for schema in schemas if schema not in (True, {}))
        key = tuple(interned)
        if key not in self._indices:
            self._indices[key] = len(self.rules)
            self.rules.append(Rule(tuple(self._reader.intern(schema) for schema in schemas), self.place + part))
        return self._indices[key]

    def note_empty(self, reason: str) -> None:
        """Note why an option has no value. The first reason is told if the whole schema has none."""
        self.reason = self.reason or reason

    def find_ends(self) -> None:
        """Find the rules that allow a text. A rule allows one if the rules of all its necessary parts do."""
        has_changed = True
        while has_changed:
            has_changed = False
            for rule in reversed(self.rules):
                if not rule.can_end and any(map(self.can_end, rule.options)):
                    rule.can_end = has_changed = True

    def can_end(self, option: Option) -> bool:
        """Whether the option allows a text, as far as `find_ends` has come."""
        if isinstance(option, ArrayOption):
            if option.low > option.high:
                return False
            necessary = option.prefix[: option.low] + (option.rest,) * (option.low > len(option.prefix))
            return all(self.rules[rule].can_end for rule in necessary)
        if isinstance(option, Search):
            return bool(option.states(self.is_possible))
        if isinstance(option, ObjectOption):
            num_required = sum(is_required for _, _, is_required in option.members)
            possible = sum(self.is_possible(rule) for _, rule, _ in option.members)
            num_possible = math.inf if any(self.is_possible(rule) for _, rule in option.extras) else possible
            return max(num_required, option.low) <= min(option.high, num_possible) and all(
                self.is_possible(rule) for _, rule, is_required in option.members if is_required
            )
        return True

    def is_possible(self, rule: int) -> bool:
        """Whether a part of a value can be there. A rule below 0 stands for a member without a value."""
        return rule < 0 or self.rules[rule].can_end


def spelled(value: Any) -> str:
    """The one text for a value that the schema lists."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise InvalidGrammar("contains half of a surrogate pair, which no text can contain") from None
    return text


def quoted(text: str) -> str:
    """A text as a string literal of Lark."""
    return json.dumps(text, ensure_ascii=False)
