"""Read one way to satisfy a JSON schema as the options of a rule."""

import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from model.text.grammar.contains import Search
from model.text.grammar.formats import FORMATS, HTTP_URL
from model.text.grammar.limits import InvalidGrammar
from model.text.grammar.number_keywords import common_multiple, narrowest
from model.text.grammar.number_regex import number_regex
from model.text.grammar.patterns import check_pattern, content_terminal, is_empty, needs_terminal, schema_error
from model.text.grammar.rules import (
    ArrayOption,
    ObjectOption,
    Option,
    RuleTable,
    TextOption,
    quoted,
    spelled,
)
from model.text.grammar.schema import (
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

MAX_PATTERN_PROPERTIES = 100  # of one object; takes about 0.1 s, growing with the cube of the number
MAX_CONTAINS = 4  # in the schemas of one array
MAX_UNIQUE = 200  # values of the elements of an array with uniqueItems
MAX_HTTP_URL = 2083  # pydantic writes this maxLength for addresses of the web, and the format of any URI
MAX_LENGTH = 1_000_000
OPTIONS = {"whitespace_flexible": False}  # so that llguidance reads all schemas of a grammar as parts of one


class OptionReader:
    """Reads ways of schemas as options, and adds the rules for their parts to the table.

    With `is_closed`, objects with `properties` have no others, unless the schema says `additionalProperties`.
    """

    def __init__(self, reader: SchemaReader, table: RuleTable, *, is_closed: bool) -> None:
        self._reader = reader
        self._table = table
        self._is_closed = is_closed

    def options(self, way: Way) -> list[Option]:
        """The options for the values of one way to satisfy the schemas of a rule."""
        if (values := literals(way)) is not None:
            texts = [spelled(value) for value in values if self._reader.accepts_all(value, way)]
            if not texts:
                self._table.note_empty("no value of const or enum satisfies the other keywords")
            return [TextOption(" | ".join(map(quoted, dict.fromkeys(texts))), is_terminal=True)] if texts else []
        options: list[Option] = []
        if not types_of(way):
            self._table.note_empty("no type is left for a value")
        for name in types_of(way):
            if name in ("null", "boolean"):
                options.append(TextOption('"null"' if name == "null" else '"true" | "false"', is_terminal=True))
            else:
                read = {"number": self._number, "string": self._string, "array": self._array, "object": self._object}
                option = read[name](way)
                options += [] if option is None else [option]
        return options

    def _number(self, way: Way) -> Option | None:
        low, high, integer = narrowest(way, "minimum"), narrowest(way, "maximum"), is_integer(way)
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
                self._table.note_empty("no number lies between minimum and maximum")
            return TextOption(expression, is_terminal=True) if expression else None
        schema: dict[str, Any] = {"type": "integer" if integer else "number", "multipleOf": float(divisor)}
        least, most = (-(10**15), 10**15) if integer else (-(10**9), 10**9)
        for name, bound, default in (("inimum", low, least), ("aximum", high, most)):
            key = f"exclusiveM{name}" if bound is not None and bound.is_strict else f"m{name}"
            schema[key] = default if bound is None else float(bound.value)
        edges = [Fraction(default if bound is None else bound.value) for bound, default in ((low, least), (high, most))]
        first = math.ceil(edges[0] / divisor) + (low is not None and low.is_strict and edges[0] % divisor == 0)
        if first * divisor > edges[1] or (high is not None and high.is_strict and first * divisor == edges[1]):
            self._table.note_empty("no multiple of multipleOf lies between minimum and maximum")
            return None
        return TextOption(_embedded(schema))

    def _string(self, way: Way) -> Option | None:
        low, high = _count(way, "minLength", max, 0), _count(way, "maxLength", min, math.inf)
        if low > high:
            self._table.note_empty("minLength is above maxLength")
            return None
        if low > MAX_LENGTH:
            raise InvalidGrammar(f"minLength is too large; use at most {MAX_LENGTH}")
        patterns = [plain["pattern"] for plain in way if "pattern" in plain]
        formats = [format_regex(plain, high) for plain in way if plain.get("format") in FORMATS]
        if any(map(needs_terminal, patterns)):
            terminal = _string_terminal(patterns, formats, low, high)
            if is_empty(terminal):
                self._table.note_empty("no string satisfies its patterns, formats and lengths together")
                return None
            return TextOption(terminal, is_terminal=True)
        for pattern in patterns:
            check_pattern(pattern)
        parts = [*patterns, *(f"^({each})$" for each in formats)]
        schema: dict[str, Any] = {"type": "string", "minLength": int(low)}
        if high <= MAX_LENGTH:  # no text is longer
            schema["maxLength"] = int(high)
        if parts:
            schema["allOf"] = [{"type": "string", "pattern": each} for each in dict.fromkeys(parts)]
            if schema_error(schema).startswith("Unsatisfiable"):
                self._table.note_empty("no string satisfies its patterns, formats and lengths together")
                return None
        return TextOption(_embedded(schema))

    def _array(self, way: Way) -> Option | None:
        low, high = int(_count(way, "minItems", max, 0)), _count(way, "maxItems", min, math.inf)
        longest = max((len(prefix_items(plain)) for plain in way), default=0)
        rules = [
            self._table.index([item_schema(plain, index) for plain in way], f"[{index if index < longest else '*'}]")
            for index in range(longest + 1)
        ]
        if any(plain.get("uniqueItems") for plain in way) and high > 1:
            if any("contains" in plain for plain in way):
                raise InvalidGrammar("the keywords uniqueItems and contains cannot be enforced together")
            return self._set(way, rules, low, high)
        if low > high:
            self._table.note_empty("minItems is above maxItems")
            return None
        sought = tuple(plain for plain in way if "contains" in plain and contains_limits(plain) != (0, math.inf))
        if sought:
            return self._search(way, sought, longest, low, high)
        return ArrayOption(tuple(rules[:-1]), rules[-1], low, high)

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
                options.append((self._table.index([*items, *wanted], part), found))
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

    def _set(self, way: Way, rules: Sequence[int], low: int, high: float) -> Option:
        """An array of different values. They must be listed in the schema, and come in the order of the schema."""
        found: list[Any] = []
        for each in self._reader.ways(self._table.rules[rules[0]].schemas):
            values = [True, False] if types_of(each) == ["boolean"] else literals(each)
            if values is None or len(rules) > 1 or len(values) > MAX_UNIQUE:
                limit = f"elements with an enum of up to {MAX_UNIQUE} values"
                raise InvalidGrammar(f"the keyword uniqueItems can be enforced only for {limit}")
            found += [spelled(value) for value in values if self._reader.accepts_all(value, each)]
        if not found:
            return ArrayOption((), rules[0], low, 0)
        return ObjectOption(tuple((quoted(text), -1, False) for text in dict.fromkeys(found)), (), low, high)

    def _object(self, way: Way) -> Option | None:
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
            (
                quoted(spelled(name)),
                self._table.index(self._reader.schemas_for(way, name), f".{name}"),
                name in required,
            )
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
        return ObjectOption(members, extras, low, high)

    def _extras(
        self, way: Way, names: Sequence[str], keys: Sequence[str | None], key_ways: Sequence[Way]
    ) -> list[tuple[str, int]]:
        """The keys that the schema does not name, as terminals, with the rules of their values.

        They match one of `keys`, which are patterns; None: they match no pattern.
        """
        others = f" & ~({' | '.join(quoted(spelled(name)) for name in names)})" if names else ""
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
            rule = self._table.index(schemas, ".*")
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
