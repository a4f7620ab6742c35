"""Write JSON schemas as rules in the Lark dialect of llguidance.

The texts that the rules allow are a part of those that the schema allows, such that every reader reads them alike:
keys come in the order of the schema, none is there twice or spelled in two ways, numbers have a bounded number of
digits, and there are at most 40 characters of white space at one place, because small models may repeat it without end.
Strings, and multiples of a number, are left to llguidance's own reader of schemas.
"""

import math
from collections.abc import Mapping
from typing import Any

from model.errors import shortened
from model.text.grammar.contains import Search
from model.text.grammar.limits import InvalidGrammar
from model.text.grammar.options import OptionReader
from model.text.grammar.rules import ArrayOption, ObjectOption, Option, RuleTable, TextOption
from model.text.grammar.schema import SchemaReader

MAX_RULES = 4000
MAX_MEMBERS = 4000  # steps in the rules of one object: properties times the counts that must be told apart
CHUNK = 16  # properties in one rule
MAX_REPETITIONS = 10_000

_SPACE = r"[ \n\r\t]{0,40}"
TERMINALS = rf"""
JSON_OPEN: /\{{{_SPACE}/
JSON_CLOSE: /{_SPACE}\}}/
JSON_BEGIN: /\[{_SPACE}/
JSON_END: /{_SPACE}\]/
JSON_COMMA: /{_SPACE},{_SPACE}/
JSON_COLON: /{_SPACE}:{_SPACE}/
JSON_KEY: /"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/
""".strip()


def schema_rules(name: str, schema: Mapping[str, Any], *, is_closed: bool) -> tuple[list[str], bool]:
    """Rules for a schema, of which the first one has the given name; and whether keys may be there that it does not
    name. They need `TERMINALS`.

    With `is_closed`, objects with `properties` have no others, unless the schema says `additionalProperties`. SDKs
    write schemas without it, and small models then add properties until the answer is full.
    """
    writer = RuleWriter(read_rules(schema, is_closed=is_closed), f"{name}_")
    lines = writer.lines()
    return [f"{name}: {name}_0", *lines], writer.has_other_keys


def read_rules(schema: Mapping[str, Any], *, is_closed: bool) -> RuleTable:
    """Read a schema. Raises `InvalidGrammar` if no text satisfies it, or if it cannot be enforced."""
    reader = SchemaReader(schema)
    table = RuleTable(reader)
    options = OptionReader(reader, table, is_closed=is_closed)
    table.index([schema], "$")
    for index, rule in enumerate(table.rules):  # which grows
        if index >= MAX_RULES:
            raise InvalidGrammar(f"is too complex: it has more than {MAX_RULES} parts")
        table.place = rule.place
        try:
            for way in reader.ways(rule.schemas):
                rule.options += options.options(way)
        except InvalidGrammar as error:
            if index == 0:
                raise
            raise InvalidGrammar(f"{error} (at {shortened(rule.place)})") from None
    table.find_ends()
    if not table.rules[0].can_end:
        raise InvalidGrammar(f"no text satisfies the schema: {table.reason or 'it can never end'}")
    return table


class RuleWriter:
    """Writes the rules of a schema in Lark. Their names begin with `prefix` and a number."""

    def __init__(self, table: RuleTable, prefix: str) -> None:
        self.has_other_keys = False  # whether an object may have keys that the schema does not name
        self._table = table
        self._prefix = prefix
        self._lines: list[str] = []
        self._num_names = 0

    def lines(self) -> list[str]:
        """The rules of Lark. The first one is that of the whole schema."""
        for index, rule in enumerate(self._table.rules):
            if rule.can_end:
                at = len(self._lines)
                options = map(self._expression, rule.options)
                self._lines.insert(at, f"{self._prefix}{index}: " + " | ".join(filter(None, options)))
        return self._lines

    def _new_name(self) -> str:
        self._num_names += 1
        return f"{self._prefix}m{self._num_names}"

    def _terminal(self, expression: str) -> str:
        name = self._new_name().upper()
        self._lines.append(f"{name}: {expression}")
        return name

    def _expression(self, option: Option) -> str | None:
        """An option in Lark; None if it allows no text."""
        if not self._table.can_end(option):
            return None
        if isinstance(option, TextOption):
            return self._terminal(option.expression) if option.is_terminal else option.expression
        if isinstance(option, ArrayOption):
            return f"JSON_BEGIN {self._elements(option)} JSON_END"
        if isinstance(option, Search):
            return f"JSON_BEGIN {self._found_elements(option)} JSON_END"
        is_set = any(rule < 0 for _, rule, _ in option.members)
        begin, end = ("JSON_BEGIN", "JSON_END") if is_set else ("JSON_OPEN", "JSON_CLOSE")
        return f"{begin} {self._members(option)} {end}"

    def _elements(self, array: ArrayOption) -> str:
        """The elements of an array, with the commas between them."""
        low, high, start = array.low, array.high, len(array.prefix)
        if not self._table.rules[array.rest].can_end:
            high = min(high, start)
        text = ""
        if high > start:
            text = _separated(f"{self._prefix}{array.rest}", max(low - start, 0), high - start, is_begun=start > 0)
        for index in reversed(range(start)):
            rule = array.prefix[index]
            if index >= high or (index >= low and not self._table.rules[rule].can_end):
                text = ""
                continue
            text = f"{'JSON_COMMA ' if index else ''}{self._prefix}{rule} {text}"
            text = text if index < low else f"({text})?"
        return text

    def _found_elements(self, search: Search) -> str:
        """The elements of an array with `contains`. The rule `{name}_{i}` stands for what follows in state i."""
        states = search.states(self._table.is_possible)
        name = self._new_name()
        names = {state: f"{name}_{index}" for index, state in enumerate(states)}
        for state, following in states.items():
            comma = "JSON_COMMA " if state[0] else ""
            options = [f"{comma}{self._prefix}{rule} {names[after]}" for rule, after in following]
            options += ['""'] if search.is_complete(state) else []
            self._lines.append(f"{names[state]}: {' | '.join(options)}")
        return names[search.start]

    def _member_texts(self, option: ObjectOption) -> tuple[list[tuple[str, bool]], str]:
        """Each member with a name, and whether it is required; and any other member, empty if there is none."""
        members = [
            (f"{key} JSON_COLON {self._prefix}{rule}" if rule >= 0 else key, is_required)
            for key, rule, is_required in option.members
            if self._table.is_possible(rule)
        ]
        if len(members) > CHUNK:  # they are in several rules, so each has its own
            for index, (text, is_required) in enumerate(members):
                rule_name = self._new_name()
                self._lines.append(f"{rule_name}: {text}")
                members[index] = rule_name, is_required
        extras = [
            f"{self._terminal(key)} JSON_COLON {self._prefix}{rule}"
            for key, rule in option.extras
            if self._table.is_possible(rule)
        ]
        self.has_other_keys |= bool(extras)
        return members, f"({' | '.join(extras)})" if extras else ""

    def _members(self, option: ObjectOption) -> str:
        """The members of an object: first those with a name, each at most once, then any number of others.

        The rule `{name}_{i}_{n}` stands for the members from number i on, after n others. Counts from the highest one
        that matters are the same.
        """
        members, extra = self._member_texts(option)
        low, high = option.low, option.high
        if high >= len(members) and not extra:
            high = math.inf
        num_required = sum(is_required for _, is_required in members)
        if low <= num_required:
            low = 0
        cap = int(max(1, low) if high == math.inf else high)
        if len(members) * cap > MAX_MEMBERS:
            raise InvalidGrammar("is too complex: minProperties and maxProperties of an object with many properties")
        needed = [sum(is_required for _, is_required in members[index:]) for index in range(len(members) + 1)]
        name = self._new_name()
        done: dict[tuple[int, int], str] = {}
        waiting: list[tuple[int, int]] = []

        def rule(index: int, count: int) -> str | None:
            """The rule for what follows; None if nothing can, and empty if nothing must."""
            if count + needed[index] > high or (not extra and count + len(members) - index < low):
                return None
            count = min(count, cap)
            if (index, count) not in done:
                done[index, count] = f"{name}_{index}_{count}"
                waiting.append((index, count))
            return done[index, count]

        def step(index: int, count: int) -> str:
            """The text of the rule for the members from number `index` on, after `count` members."""
            comma = "JSON_COMMA " if count else ""
            if index == len(members):
                if not extra or count >= high:
                    return '""'
                return _separated(extra, max(low - count, 0), high - count, is_begun=count > 0)
            if count == cap and high == math.inf:  # counts do not matter any more
                last = min(index + (1 if index % CHUNK else CHUNK), len(members))
                parts = [
                    f"{comma}{text}" if is_required else f"({comma}{text})?"
                    for text, is_required in members[index:last]
                ]
                return " ".join([*parts, rule(last, count) or ""])
            text, is_required = members[index]
            options = [f"{comma}{text} {following}"] if (following := rule(index + 1, count + 1)) is not None else []
            if not is_required and (following := rule(index + 1, count)) is not None:
                options.append(following)
            return " | ".join(options)

        first = rule(0, 0)
        while waiting:
            index, count = waiting.pop()
            self._lines.append(f"{done[index, count]}: {step(index, count)}")
        return first or ""


def _separated(text: str, least: int, most: float, *, is_begun: bool) -> str:
    """At least and at most so many parts with commas between them, and before them if others come first."""
    if is_begun:
        return _repeated(f"JSON_COMMA {text}", least, most)
    parts = f"{text} {_repeated(f'JSON_COMMA {text}', max(least - 1, 0), most - 1)}"
    return parts if least else f"({parts})?"


def _repeated(text: str, least: int, most: float) -> str:
    """At least and at most so many repetitions. Those above a limit that no text reaches are left out."""
    if most == 0:
        return '""'
    return f"({text}){{{least},{'' if most == math.inf else int(min(most, max(least, MAX_REPETITIONS)))}}}"
