"""Write JSON schemas as rules in the Lark dialect of llguidance.

The texts that the rules allow are a part of those that the schema allows, such that every reader reads them alike:
keys come in the order of the schema, none is there twice or spelled in two ways, numbers have a bounded number of
digits, and there are at most 40 characters of white space at one place, because small models may repeat it without end.
Strings, and multiples of a number, are left to llguidance's own reader of schemas.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

from model.errors import shortened
from model.text.grammar_contains import Search
from model.text.grammar_formats import FORMATS, HTTP_URL
from model.text.grammar_limits import InvalidGrammar
from model.text.grammar_numbers import Bound, number_regex
from model.text.grammar_patterns import check_pattern, content_terminal, is_empty, needs_terminal, schema_error
from model.text.grammar_schema import (
    Schema,
    SchemaReader,
    Way,
    contains_limits,
    is_integer,
    item_schema,
    literals,
    prefix_items,
    property_names,
    types_of,
)

MAX_RULES = 4000
MAX_MEMBERS = 4000  # steps in the rules of one object: properties times the counts that must be told apart
MAX_DIVISOR = 90_000  # of multipleOf, without its decimal point; takes up to 0.7 s, growing with its square
MAX_PATTERN_PROPERTIES = 100  # of one object; takes about 0.1 s, growing with the cube of the number
MAX_CONTAINS = 4  # in the schemas of one array
MAX_UNIQUE = 200  # values of the elements of an array with uniqueItems
HUGE = Decimal(10) ** 30  # texts have fewer digits
MAX_HTTP_URL = 2083  # pydantic writes this maxLength for addresses of the web, and the format of any URI
CHUNK = 16  # properties in one rule
MAX_REPETITIONS = 10_000
MAX_LENGTH = 1_000_000

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
OPTIONS = {"whitespace_flexible": False}  # so that llguidance reads all schemas of a grammar as parts of one


@dataclass(frozen=True)
class _Text:
    """A value that has no parts, as an expression of Lark."""

    expression: str
    is_terminal: bool = False


@dataclass(frozen=True)
class _Array:
    prefix: tuple[int, ...]  # rules
    rest: int
    low: int
    high: float


@dataclass(frozen=True)
class _Search:
    """An array with `contains`. See `Search`."""

    search: Search


@dataclass(frozen=True)
class _Object:
    """Members with a name in their order, then others, whose keys are terminals."""

    members: tuple[tuple[str, int, bool], ...]  # the key as an expression, the rule, and whether it is required
    extras: tuple[tuple[str, int], ...]
    low: int
    high: float


_Option = _Text | _Array | _Search | _Object


@dataclass
class _Rule:
    schemas: tuple[Schema, ...]
    place: str  # of its first schema: $.items[*].name
    options: list[_Option] = field(default_factory=list)
    can_end: bool = False


class SchemaRules:
    """The rules for one schema, whose names begin with `prefix` and a number.

    With `is_closed`, objects with `properties` have no others, unless the schema says `additionalProperties`. SDKs
    write schemas without it, and small models then add properties until the answer is full.
    """

    def __init__(self, schema: Mapping[str, Any], prefix: str, *, is_closed: bool) -> None:
        self.has_other_keys = False  # whether an object may have keys that the schema does not name
        self._reader = SchemaReader(schema)
        self._prefix = prefix
        self._is_closed = is_closed
        self._rules: list[_Rule] = []
        self._indices: dict[tuple[int, ...], int] = {}
        self._reason = ""
        self._place = ""
        self._index([schema], "$")
        for index, rule in enumerate(self._rules):  # which grows
            if index >= MAX_RULES:
                raise InvalidGrammar(f"is too complex: it has more than {MAX_RULES} parts")
            self._place = rule.place
            try:
                for way in self._reader.ways(rule.schemas):
                    rule.options += self._options(way)
            except InvalidGrammar as error:
                if index == 0:
                    raise
                raise InvalidGrammar(f"{error} (at {shortened(rule.place)})") from None
        self._find_ends()
        if not self._rules[0].can_end:
            raise InvalidGrammar(f"no text satisfies the schema: {self._reason or 'it can never end'}")

    def lines(self) -> list[str]:
        """The rules of Lark. The first one is that of the whole schema."""
        self._lines: list[str] = []
        self._num_names = 0
        for index, rule in enumerate(self._rules):
            if rule.can_end:
                at = len(self._lines)
                options = map(self._expression, rule.options)
                self._lines.insert(at, f"{self._prefix}{index}: " + " | ".join(filter(None, options)))
        return self._lines

    # From ways to options

    def _index(self, schemas: Sequence[Schema], part: str) -> int:
        """The index of the rule for values that satisfy all these schemas, of a part of the place that is read."""
        interned = dict.fromkeys(id(self._reader.intern(schema)) for schema in schemas if schema not in (True, {}))
        key = tuple(interned)
        if key not in self._indices:
            self._indices[key] = len(self._rules)
            self._rules.append(_Rule(tuple(self._reader.intern(schema) for schema in schemas), self._place + part))
        return self._indices[key]

    def _options(self, way: Way) -> list[_Option]:
        if (values := literals(way)) is not None:
            texts = [spelled(value) for value in values if self._reader.accepts_all(value, way)]
            if not texts:
                self._reason = self._reason or "no value of const or enum satisfies the other keywords"
            return [_Text(" | ".join(map(_quoted, dict.fromkeys(texts))), is_terminal=True)] if texts else []
        options: list[_Option] = []
        if not types_of(way):
            self._reason = self._reason or "no type is left for a value"
        for name in types_of(way):
            if name in ("null", "boolean"):
                options.append(_Text('"null"' if name == "null" else '"true" | "false"', is_terminal=True))
            else:
                read = {"number": self._number, "string": self._string, "array": self._array, "object": self._object}
                option = read[name](way)
                options += [] if option is None else [option]
        return options

    def _number(self, way: Way) -> _Option | None:
        low, high, integer = lower_bound(way), upper_bound(way), is_integer(way)
        divisor = common_multiple(way)
        places = None
        if divisor is not None and (integer or divisor.denominator == 1):
            integer, divisor = True, Fraction(divisor.numerator)
            divisor = None if divisor == 1 else divisor
        elif divisor is not None and divisor.numerator == 1 and set(str(divisor.denominator)) == {"1", "0"}:
            places, divisor = len(str(divisor.denominator)) - 1, None
        if divisor is None:
            expression = number_regex(low, high, is_integer=integer, max_places=places)
            if not expression:
                self._reason = self._reason or "no number lies between minimum and maximum"
            return _Text(expression, is_terminal=True) if expression else None
        schema: dict[str, Any] = {"type": "integer" if integer else "number", "multipleOf": float(divisor)}
        least, most = (-(10**15), 10**15) if integer else (-(10**9), 10**9)
        for name, bound, default in (("inimum", low, least), ("aximum", high, most)):
            key = f"exclusiveM{name}" if bound is not None and bound.is_strict else f"m{name}"
            schema[key] = default if bound is None else float(bound.value)
        edges = [Fraction(default if bound is None else bound.value) for bound, default in ((low, least), (high, most))]
        first = math.ceil(edges[0] / divisor) + (low is not None and low.is_strict and edges[0] % divisor == 0)
        if first * divisor > edges[1] or (high is not None and high.is_strict and first * divisor == edges[1]):
            self._reason = self._reason or "no multiple of multipleOf lies between minimum and maximum"
            return None
        return _Text(_embedded(schema))

    def _string(self, way: Way) -> _Option | None:
        low, high = _count(way, "minLength", max, 0), _count(way, "maxLength", min, math.inf)
        if low > high:
            self._reason = self._reason or "minLength is above maxLength"
            return None
        if low > MAX_LENGTH:
            raise InvalidGrammar(f"minLength is too large; use at most {MAX_LENGTH}")
        patterns = [plain["pattern"] for plain in way if "pattern" in plain]
        formats = [format_regex(plain, high) for plain in way if plain.get("format") in FORMATS]
        if any(map(needs_terminal, patterns)):
            terminal = _string_terminal(patterns, formats, low, high)
            if is_empty(terminal):
                self._reason = self._reason or "no string satisfies its patterns, formats and lengths together"
                return None
            return _Text(terminal, is_terminal=True)
        for pattern in patterns:
            check_pattern(pattern)
        parts = [*patterns, *(f"^({each})$" for each in formats)]
        schema: dict[str, Any] = {"type": "string", "minLength": int(low)}
        if high <= MAX_LENGTH:  # no text is longer
            schema["maxLength"] = int(high)
        if parts:
            schema["allOf"] = [{"type": "string", "pattern": each} for each in dict.fromkeys(parts)]
            if schema_error(schema).startswith("Unsatisfiable"):
                self._reason = self._reason or "no string satisfies its patterns, formats and lengths together"
                return None
        return _Text(_embedded(schema))

    def _array(self, way: Way) -> _Option | None:
        low, high = int(_count(way, "minItems", max, 0)), _count(way, "maxItems", min, math.inf)
        longest = max((len(prefix_items(plain)) for plain in way), default=0)
        rules = [
            self._index([item_schema(plain, index) for plain in way], f"[{index if index < longest else '*'}]")
            for index in range(longest + 1)
        ]
        if any(plain.get("uniqueItems") for plain in way) and high > 1:
            if any("contains" in plain for plain in way):
                raise InvalidGrammar("the keywords uniqueItems and contains cannot be enforced together")
            return self._set(way, rules, low, high)
        if low > high:
            self._reason = self._reason or "minItems is above maxItems"
            return None
        sought = tuple(plain for plain in way if "contains" in plain and contains_limits(plain) != (0, math.inf))
        if sought:
            return _Search(self._search(way, sought, longest, low, high))
        return _Array(tuple(rules[:-1]), rules[-1], low, high)

    def _search(self, way: Way, sought: Way, longest: int, low: int, high: float) -> Search:
        """An array in which the right number of elements satisfies the `contains` of each of the `sought` schemas."""
        if len(sought) > MAX_CONTAINS:
            raise InvalidGrammar(f"is too complex: it has more than {MAX_CONTAINS} contains for one array")
        limits = [contains_limits(plain) for plain in sought]
        others: list[Schema] = [self._other_elements(plain) for plain in sought]
        choices = []
        for index in range(longest + 1):
            items = [item_schema(plain, index) for plain in way]
            part = f"[{index if index < longest else '*'}]"
            options = []
            for found in product((True, False), repeat=len(sought)):
                wanted = [
                    plain["contains"] if is_found else other
                    for plain, other, is_found in zip(sought, others, found, strict=True)
                ]
                options.append((self._index([*items, *wanted], part), found))
            choices.append(tuple(options))
        return Search(tuple(choices), low, high, tuple(limits))

    def _other_elements(self, plain: Mapping[str, Any]) -> Schema:
        """The schema of elements that do not satisfy `contains`, or of any elements if that does not matter."""
        other = {"not": plain["contains"]}
        try:
            self._reader.ways([other])
        except InvalidGrammar:
            if contains_limits(plain)[1] < math.inf:
                raise
            return True
        return other

    def _set(self, way: Way, rules: Sequence[int], low: int, high: float) -> _Option:
        """An array of different values. They must be listed in the schema, and come in the order of the schema."""
        found: list[Any] = []
        for each in self._reader.ways(self._rules[rules[0]].schemas):
            values = [True, False] if types_of(each) == ["boolean"] else literals(each)
            if values is None or len(rules) > 1 or len(values) > MAX_UNIQUE:
                limit = f"elements with an enum of up to {MAX_UNIQUE} values"
                raise InvalidGrammar(f"the keyword uniqueItems can be enforced only for {limit}")
            found += [spelled(value) for value in values if self._reader.accepts_all(value, each)]
        if not found:
            return _Array((), rules[0], low, 0)
        return _Object(tuple((_quoted(text), -1, False) for text in dict.fromkeys(found)), (), low, high)

    def _object(self, way: Way) -> _Option | None:
        low, high = int(_count(way, "minProperties", max, 0)), _count(way, "maxProperties", min, math.inf)
        names = property_names(way)
        key_schemas = [plain["propertyNames"] for plain in way if "propertyNames" in plain]
        key_ways = self._reader.ways(key_schemas) if key_schemas else []
        listed = [literals(each) for each in key_ways]
        if key_ways and all(values is not None for values in listed):
            names += [name for values in listed for name in values or () if isinstance(name, str) and name not in names]
            key_ways = []
        required = {name for plain in way for name in plain.get("required", ())}
        members = tuple(
            (_quoted(spelled(name)), self._index(self._reader.schemas_for(way, name), f".{name}"), name in required)
            for name in names
        )
        patterns = list(dict.fromkeys(key for plain in way for key in plain.get("patternProperties", ())))
        if len(patterns) > MAX_PATTERN_PROPERTIES:
            limit = f"it has {len(patterns)} patternProperties; use at most {MAX_PATTERN_PROPERTIES}"
            raise InvalidGrammar(f"is too complex: {limit}")
        is_named = any(key in plain for plain in way for key in ("properties", "patternProperties"))
        is_open = any("additionalProperties" in plain for plain in way) or not (self._is_closed and is_named)
        keys = [None, *patterns] if is_open else patterns
        if key_schemas and not key_ways:
            keys = []
        extras = tuple(self._extras(way, names, keys, key_ways))
        return _Object(members, extras, low, high)

    def _extras(
        self, way: Way, names: Sequence[str], keys: Sequence[str | None], key_ways: Sequence[Way]
    ) -> list[tuple[str, int]]:
        """The keys that the schema does not name, as terminals, with the rules of their values.

        They match one of `keys`, which are patterns; None: they match no pattern.
        """
        others = f" & ~({' | '.join(_quoted(spelled(name)) for name in names)})" if names else ""
        if key_ways:
            allowed = " | ".join(self._key_terminal(each) for each in key_ways)
            others += f" & ({allowed})"
        terminals = {pattern: _string_terminal([pattern], [], 0, math.inf) for pattern in keys if pattern is not None}
        found = []
        for chosen in keys:
            schemas: list[Schema] = []
            for plain in way:
                if chosen is not None and chosen in plain.get("patternProperties", {}):
                    schemas.append(plain["patternProperties"][chosen])
                elif "additionalProperties" in plain:
                    schemas.append(plain["additionalProperties"])
            rule = self._index(schemas, ".*")
            key = "JSON_KEY" if chosen is None else f"JSON_KEY & {terminals[chosen]}"
            excluded = "".join(f" & ~({terminals[each]})" for each in terminals if each != chosen)
            found.append((f"{key}{others}{excluded}", rule))
        return found

    def _key_terminal(self, way: Way) -> str:
        if "string" not in types_of(way):
            raise InvalidGrammar("the keyword propertyNames allows no string")
        low, high = _count(way, "minLength", max, 0), _count(way, "maxLength", min, math.inf)
        patterns = [plain["pattern"] for plain in way if "pattern" in plain]
        formats = [FORMATS[plain["format"]] for plain in way if plain.get("format") in FORMATS]
        return f"({_string_terminal(patterns, formats, low, high)})"

    # Texts that end

    def _find_ends(self) -> None:
        """Find the rules that allow a text. A rule allows one if the rules of all its necessary parts do."""
        has_changed = True
        while has_changed:
            has_changed = False
            for rule in reversed(self._rules):
                if not rule.can_end and any(map(self._can_end, rule.options)):
                    rule.can_end = has_changed = True

    def _can_end(self, option: _Option) -> bool:
        if isinstance(option, _Array):
            if option.low > option.high:
                return False
            necessary = option.prefix[: option.low] + (option.rest,) * (option.low > len(option.prefix))
            return all(self._rules[rule].can_end for rule in necessary)
        if isinstance(option, _Search):
            return bool(option.search.states(self._is_possible))
        if isinstance(option, _Object):
            num_required = sum(is_required for _, _, is_required in option.members)
            possible = sum(self._is_possible(rule) for _, rule, _ in option.members)
            num_possible = math.inf if any(self._is_possible(rule) for _, rule in option.extras) else possible
            return max(num_required, option.low) <= min(option.high, num_possible) and all(
                self._is_possible(rule) for _, rule, is_required in option.members if is_required
            )
        return True

    def _is_possible(self, rule: int) -> bool:
        return rule < 0 or self._rules[rule].can_end

    # From options to rules

    def _new_name(self) -> str:
        self._num_names += 1
        return f"{self._prefix}m{self._num_names}"

    def _terminal(self, expression: str) -> str:
        name = self._new_name().upper()
        self._lines.append(f"{name}: {expression}")
        return name

    def _expression(self, option: _Option) -> str | None:
        """An option in Lark; None if it allows no text."""
        if not self._can_end(option):
            return None
        if isinstance(option, _Text):
            return self._terminal(option.expression) if option.is_terminal else option.expression
        if isinstance(option, _Array):
            return f"JSON_BEGIN {self._elements(option)} JSON_END"
        if isinstance(option, _Search):
            return f"JSON_BEGIN {self._found_elements(option.search)} JSON_END"
        is_set = any(rule < 0 for _, rule, _ in option.members)
        begin, end = ("JSON_BEGIN", "JSON_END") if is_set else ("JSON_OPEN", "JSON_CLOSE")
        return f"{begin} {self._members(option)} {end}"

    def _elements(self, array: _Array) -> str:
        """The elements of an array, with the commas between them."""
        low, high, start = array.low, array.high, len(array.prefix)
        if not self._rules[array.rest].can_end:
            high = min(high, start)
        text = ""
        if high > start:
            rest = f"{self._prefix}{array.rest}"
            least, most = max(low - start, 0), high - start
            if start:
                text = _repeated(f"JSON_COMMA {rest}", least, most)
            else:
                text = f"{rest} {_repeated(f'JSON_COMMA {rest}', max(least - 1, 0), most - 1)}"
                text = text if least else f"({text})?"
        for index in reversed(range(start)):
            rule = array.prefix[index]
            if index >= high or (index >= low and not self._rules[rule].can_end):
                text = ""
                continue
            text = f"{'JSON_COMMA ' if index else ''}{self._prefix}{rule} {text}"
            text = text if index < low else f"({text})?"
        return text

    def _found_elements(self, search: Search) -> str:
        """The elements of an array with `contains`. The rule `{name}_{i}` stands for what follows in state i."""
        states = search.states(self._is_possible)
        name = self._new_name()
        names = {state: f"{name}_{index}" for index, state in enumerate(states)}
        for state, following in states.items():
            comma = "JSON_COMMA " if state[0] else ""
            options = [f"{comma}{self._prefix}{rule} {names[after]}" for rule, after in following]
            options += ['""'] if search.is_complete(state) else []
            self._lines.append(f"{names[state]}: {' | '.join(options)}")
        return names[search.start]

    def _members(self, option: _Object) -> str:
        """The members of an object: first those with a name, each at most once, then any number of others.

        The rule `{name}_{i}_{n}` stands for the members from number i on, after n others. Counts from the highest one
        that matters are the same.
        """
        members = [
            (f"{key} JSON_COLON {self._prefix}{rule}" if rule >= 0 else key, is_required)
            for key, rule, is_required in option.members
            if self._is_possible(rule)
        ]
        if len(members) > CHUNK:  # they are in several rules, so each has its own
            for index, (text, is_required) in enumerate(members):
                rule_name = self._new_name()
                self._lines.append(f"{rule_name}: {text}")
                members[index] = rule_name, is_required
        extras = [
            f"{self._terminal(key)} JSON_COLON {self._prefix}{rule}"
            for key, rule in option.extras
            if self._is_possible(rule)
        ]
        self.has_other_keys |= bool(extras)
        low, high = option.low, option.high
        if high >= len(members) and not extras:
            high = math.inf
        num_required = sum(is_required for _, is_required in members)
        if low <= num_required:
            low = 0
        cap = int(max(1, low) if high == math.inf else high)
        if len(members) * cap > MAX_MEMBERS:
            raise InvalidGrammar("is too complex: minProperties and maxProperties of an object with many properties")
        needed = [sum(is_required for _, is_required in members[index:]) for index in range(len(members) + 1)]
        extra = f"({' | '.join(extras)})" if extras else ""
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

        first = rule(0, 0)
        while waiting:
            index, count = waiting.pop()
            self._lines.append(
                f"{done[index, count]}: {self._step(members, extra, index, count, (low, high, cap), rule)}"
            )
        return first or ""

    def _step(
        self,
        members: Sequence[tuple[str, bool]],
        extra: str,
        index: int,
        count: int,
        limits: tuple[int, float, int],
        rule: Callable[[int, int], str | None],
    ) -> str:
        """The text of the rule for the members from number `index` on, after `count` members."""
        low, high, cap = limits
        comma = "JSON_COMMA " if count else ""
        if index == len(members):
            if not extra or count >= high:
                return '""'
            least, most = max(low - count, 0), high - count
            if count:
                return _repeated(f"JSON_COMMA {extra}", least, most)
            text = f"{extra} {_repeated(f'JSON_COMMA {extra}', max(least - 1, 0), most - 1)}"
            return text if least else f"({text})?"
        if count == cap and high == math.inf:  # counts do not matter any more
            last = min(index + (1 if index % CHUNK else CHUNK), len(members))
            parts = [
                f"{comma}{text}" if is_required else f"({comma}{text})?" for text, is_required in members[index:last]
            ]
            return " ".join([*parts, rule(last, count) or ""])
        text, is_required = members[index]
        options = [f"{comma}{text} {following}"] if (following := rule(index + 1, count + 1)) is not None else []
        if not is_required and (following := rule(index + 1, count)) is not None:
            options.append(following)
        return " | ".join(options)


def spelled(value: Any) -> str:
    """The one text for a value that the schema lists."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise InvalidGrammar("contains half of a surrogate pair, which no text can contain") from None
    return text


def lower_bound(way: Way) -> Bound | None:
    """The lowest number, as `minimum` and `exclusiveMinimum` say."""
    bounds = _bounds(way, "minimum", "exclusiveMinimum")
    bounds = [_rounded(bound, "ROUND_CEILING") for bound in bounds if bound.value > -HUGE]
    if any(bound.value > HUGE for bound in bounds):
        raise InvalidGrammar("is too complex: a minimum has more than 30 digits")
    return max(bounds, key=lambda bound: (bound.value, bound.is_strict), default=None)


def upper_bound(way: Way) -> Bound | None:
    """The highest number, as `maximum` and `exclusiveMaximum` say."""
    bounds = _bounds(way, "maximum", "exclusiveMaximum")
    bounds = [_rounded(bound, "ROUND_FLOOR") for bound in bounds if bound.value < HUGE]
    if any(bound.value < -HUGE for bound in bounds):
        raise InvalidGrammar("is too complex: a maximum has more than 30 digits")
    return min(bounds, key=lambda bound: (bound.value, not bound.is_strict), default=None)


def _bounds(way: Way, name: str, strict_name: str) -> list[Bound]:
    bounds = []
    for plain in way:
        strict = plain.get(strict_name, False)
        if name in plain:
            bounds.append(Bound(Decimal(str(plain[name])), strict is True))
        if not isinstance(strict, bool):
            bounds.append(Bound(Decimal(str(strict)), True))
    return bounds


def _rounded(bound: Bound, direction: str) -> Bound:
    """A bound with at most 15 places, not outside of the given one."""
    rounded = bound.value.quantize(Decimal("1e-15"), direction) if abs(bound.value) < 10**12 else bound.value
    return Bound(rounded, bound.is_strict and rounded == bound.value)


def common_multiple(way: Way) -> Fraction | None:
    """The smallest number that all multiples of all `multipleOf` are multiples of."""
    result: Fraction | None = None
    for plain in way:
        if (divisor := plain.get("multipleOf")) is None:
            continue
        if divisor <= 0:
            raise InvalidGrammar("the keyword multipleOf must be positive")
        value = Decimal(str(divisor)).normalize()
        _, digits, exponent = value.as_tuple()
        if not isinstance(exponent, int) or len(digits) + max(exponent, 0) > 6 or exponent < -15:
            raise _too_many_digits(divisor)
        fraction = Fraction(value)
        if result is not None:
            fraction = Fraction(
                math.lcm(result.numerator, fraction.numerator), math.gcd(result.denominator, fraction.denominator)
            )
        result = fraction
        scaled = result.numerator * 10 ** max(len(str(result.denominator)) - 1, 0) // result.denominator
        if max(scaled, result.numerator) > MAX_DIVISOR:
            raise _too_many_digits(divisor)
    return result


def _too_many_digits(divisor: float) -> InvalidGrammar:
    reason = f"is too complex: multipleOf {shortened(divisor)} has too many digits; use at most {MAX_DIVISOR}"
    return InvalidGrammar(reason)


def format_regex(plain: Mapping[str, Any], max_length: float) -> str:
    is_http = plain["format"] == "uri" and max_length == MAX_HTTP_URL
    return HTTP_URL if is_http else FORMATS[plain["format"]]


def _string_terminal(patterns: Sequence[str], formats: Sequence[str], low: float, high: float) -> str:
    """A string without escapes, as an expression for a terminal."""
    parts = [r"""/[^"\\\x00-\x1f\x7f]*/""", *map(content_terminal, patterns)]
    parts += [f"/{each.replace('/', chr(92) + '/')}/" for each in formats]
    if low or high < math.inf:
        parts.append(f"/(?s:.){{{int(low)},{'' if high == math.inf else int(high)}}}/")
    return f"""("\\"" ({" & ".join(parts)}) "\\"")"""


def _count(way: Way, keyword: str, choose: Any, default: float) -> float:
    count: float = choose((plain[keyword] for plain in way if keyword in plain), default=default)
    return count


def _embedded(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': OPTIONS})}"


def _quoted(text: str) -> str:
    """A text as a string literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _repeated(text: str, least: int, most: float) -> str:
    """At least and at most so many repetitions. Those above a limit that no text reaches are left out."""
    if most == 0:
        return '""'
    return f"({text}){{{least},{'' if most == math.inf else int(min(most, max(least, MAX_REPETITIONS)))}}}"


def schema_rules(name: str, schema: Mapping[str, Any], *, is_closed: bool) -> tuple[list[str], bool]:
    """Rules for a schema, of which the first one has the given name; and whether keys may be there that it does not
    name. They need `TERMINALS`.
    """
    rules = SchemaRules(schema, f"{name}_", is_closed=is_closed)
    lines = rules.lines()
    return [f"{name}: {name}_0", *lines], rules.has_other_keys
