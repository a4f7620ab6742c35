"""Read JSON schemas (draft 2020-12, and what older drafts wrote differently): which combinations of plain schemas
satisfy a schema, and whether a value satisfies it.

A plain schema is an object of keywords that concern one value and its parts (`type`, `minimum`, `properties`, ...). A
way to satisfy a schema is a tuple of plain schemas that are all satisfied: references are followed, each `anyOf` and
`oneOf` has one way for each of its options, and `if` has one for `then` and one for `else`. Keywords that are unknown,
or whose value asks for nothing, have no effect. Keywords that cannot be enforced raise `InvalidGrammar`.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any
from urllib.parse import unquote

from model.errors import shortened
from model.text.grammar.formats import FORMATS
from model.text.grammar.limits import InvalidGrammar
from model.text.grammar.negation import TYPES, negated, type_of
from model.text.grammar.number_keywords import within

Schema = Mapping[str, Any] | bool
Way = tuple[Mapping[str, Any], ...]

MAX_WAYS = 1024  # to satisfy one schema
MAX_PAIRS = 16 * MAX_WAYS  # of ways that may contradict each other
MAX_DEPTH = 3  # of properties that may distinguish two options of oneOf
MAX_ABSENT = 3  # properties of an `if` whose absence is a way of its own
PLAIN_KEYWORDS: dict[str, tuple[type, ...]] = {
    "type": (str, list),
    "const": (object,),
    "enum": (list,),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (int, float)),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (int, float, bool)),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), (int, float)),
    **dict.fromkeys(("minContains", "maxContains"), (int, float)),
    **dict.fromkeys(("pattern", "format"), (str,)),
    **dict.fromkeys(("properties", "patternProperties"), (Mapping,)),
    **dict.fromkeys(("additionalProperties", "additionalItems", "propertyNames", "contains"), (Mapping, bool)),
    "items": (Mapping, bool, list),
    "prefixItems": (list,),
    "required": (list,),
    "uniqueItems": (bool,),
}
UNSUPPORTED = ("$dynamicRef", "$recursiveRef", "x-guidance")
SIMPLE_KEYWORDS = ("type", "const", "enum")


@dataclass(frozen=True)
class _Values:
    """The values of some types, of a list (None: all), and without those of another list, as their `_key`."""

    types: frozenset[str] = frozenset(TYPES)
    allowed: frozenset[Any] | None = None
    excluded: frozenset[Any] = frozenset()


class SchemaReader:
    """The ways to satisfy the parts of one schema. All parts are read when they are first needed."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._interned: dict[str, Schema] = {}
        self._ways: dict[int, list[Way]] = {}  # by the identity of an interned schema
        self._active: set[int] = set()
        self._inexact: set[int] = set()  # schemas whose ways leave out some values that satisfy them
        self._is_exact = True  # what is being read
        self._simple_values: dict[int, tuple[Schema, _Values]] = {}

    def intern(self, schema: Any) -> Schema:
        """The first schema that is equal to this one. Raises `InvalidGrammar` for a value that is no schema."""
        if not isinstance(schema, Mapping | bool):
            raise InvalidGrammar(f"{shortened(schema)} is not a JSON schema, which is an object or a boolean")
        return self._interned.setdefault(json.dumps(schema), schema)

    def ways(self, schemas: Iterable[Schema]) -> list[Way]:
        """The ways to satisfy several schemas together; none if nothing can satisfy them."""
        result: list[Way] = [()]
        for schema in schemas:
            result = self._combined(result, self._ways_of(schema))
        return result

    def _ways_of(self, schema: Schema) -> list[Way]:
        schema = self.intern(schema)
        if isinstance(schema, bool):
            return [()] if schema else []
        if id(schema) in self._active:
            raise InvalidGrammar("can never be satisfied: a $ref leads back to itself")
        if (found := self._ways.get(id(schema))) is None:
            self._active.add(id(schema))
            is_outer_exact, self._is_exact = self._is_exact, True
            found = self._ways[id(schema)] = self._read(schema)
            if not self._is_exact:
                self._inexact.add(id(schema))
            self._is_exact = is_outer_exact
            self._active.discard(id(schema))
        if id(schema) in self._inexact:
            self._is_exact = False
        return found

    def _read(self, schema: Mapping[str, Any]) -> list[Way]:
        for keyword in UNSUPPORTED:
            if keyword in schema:
                raise InvalidGrammar(f"the keyword {keyword} cannot be enforced")
        ways: list[Way] = [()]
        plain = {key: schema[key] for key in schema if key in PLAIN_KEYWORDS}
        for keyword, value in schema.items():
            if keyword in plain:
                if keyword == next(iter(plain)):
                    check_plain(plain)
                    self._is_exact &= plain.get("format") not in FORMATS
                    ways = self._combined(ways, [(plain,)])
            elif keyword == "$ref":
                ways = self._combined(ways, self._ways_of(self._resolve(value)))
            elif keyword in ("allOf", "anyOf", "oneOf"):
                if not isinstance(value, list) or not value:
                    raise InvalidGrammar(f"the keyword {keyword} must be a list of schemas")
                options = [self._ways_of(each) for each in value]
                if keyword == "allOf":
                    for option in options:
                        ways = self._combined(ways, option)
                elif keyword == "anyOf":
                    ways = self._combined(ways, [way for option in options for way in option])
                else:
                    ways = self._combined(ways, self._exclusive(value, options))
            elif keyword == "not":
                ways = self._combined(ways, self._violations(value))
            elif keyword == "if" and not all(schema.get(name, True) in (True, {}) for name in ("then", "else")):
                ways = self._combined(
                    ways, self._conditional(value, schema.get("then", True), schema.get("else", True))
                )
            elif keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
                if not isinstance(value, Mapping):
                    raise InvalidGrammar(f"the keyword {keyword} must be an object")
                for name, needed in value.items():
                    then = {"required": [name, *needed]} if isinstance(needed, list) else needed
                    present = self._combined([({"required": [name]},)], self._ways_of(then))
                    ways = self._combined(ways, [({"properties": {name: False}},), *present])
        if "unevaluatedProperties" in schema:
            ways = [(*way, *_seal_properties(way, schema["unevaluatedProperties"])) for way in ways]
        if "unevaluatedItems" in schema:
            ways = [(*way, *_seal_items(way, schema["unevaluatedItems"])) for way in ways]
        return ways

    def _combined(self, first: Sequence[Way], second: Sequence[Way]) -> list[Way]:
        """The ways to satisfy one of the first and one of the second ones, without many that nothing satisfies."""
        ways: list[Way] = []
        num_pairs = len(first) * len(second)
        for one, other in product(first, second) if num_pairs <= MAX_PAIRS else ():
            way = (*one, *other)
            if num_pairs == 1 or not self._is_contradiction(one, other):
                ways.append(way)
        if num_pairs > MAX_PAIRS or len(ways) > MAX_WAYS:
            raise InvalidGrammar(f"is too complex: anyOf, oneOf, allOf and if have more than {MAX_WAYS} combinations")
        return ways

    def _is_contradiction(self, first: Way, second: Way) -> bool:
        """Whether the types and constants of two ways, or those of a required property, contradict each other."""
        way = (*first, *second)
        if not _have_value(map(self._values, way)):
            return True
        required = {name for plain in way for name in plain.get("required", ())}
        for name in required & {name for plain in second or first for name in property_names((plain,))}:
            schemas = [plain["properties"][name] for plain in way if name in plain.get("properties", {})]
            if any(each is False for each in schemas):
                return True
            if len(schemas) > 1 and not _have_value(map(self._values, schemas)):
                return True
        return False

    def _values(self, schema: Schema) -> "_Values":
        """The values that a schema allows by its types and constants alone."""
        if id(schema) not in self._simple_values:
            self._simple_values[id(schema)] = schema, self._read_values(schema)
        return self._simple_values[id(schema)][1]

    def _read_values(self, schema: Schema) -> "_Values":
        if isinstance(schema, Mapping) and set(schema) == {"$ref"}:
            schema = self._resolve(schema["$ref"])
        if not isinstance(schema, Mapping):
            return _Values()
        excluded = schema.get("not")
        if not isinstance(excluded, Mapping) or not set(excluded) <= {"const", "enum"}:
            excluded = {}
        return _Values(frozenset(types_of((schema,))), _listed_keys(schema), _listed_keys(excluded) or frozenset())

    # not and if

    def _violations(self, schema: Schema) -> list[Way]:
        """The ways not to satisfy a schema."""
        schema = self.intern(schema)
        if isinstance(schema, bool):
            return [] if schema else [()]
        is_exact = self._is_exact
        self._ways_of(schema)  # raises if the schema is invalid
        negation, self._is_exact = negated(schema, self._resolve)
        self._is_exact &= is_exact
        return self._ways_of(negation)

    def _conditional(self, condition: Schema, then: Schema, otherwise: Schema) -> list[Way]:
        """The ways of `if`. The absence of a property that the condition names is a way of its own, so that many
        conditions on the same property have few combinations.
        """
        met = self._ways_of(condition)
        if isinstance(condition, Mapping):
            optional = set(condition.get("properties", ())) - set(condition.get("required", ()))
            for name in sorted(optional)[:MAX_ABSENT]:
                met = self._combined(met, [({"properties": {name: False}},), ({"required": [name]},)])
        met = self._combined(met, self._ways_of(then))
        return [*met, *self._combined(self._violations(condition), self._ways_of(otherwise))]

    def _resolve(self, reference: Any) -> Any:
        """The schema that a `$ref` inside of this schema names."""
        text = str(reference).removeprefix(str(self._root.get("$id", "#")).removesuffix("#"))
        if text in ("", "#"):
            return self._root
        if text.startswith("#/"):
            node: Any = self._root
            for part in text[2:].split("/"):
                name = unquote(part).replace("~1", "/").replace("~0", "~")
                try:
                    is_index = isinstance(node, list) and re.fullmatch("0|[1-9][0-9]{0,8}", name)
                    node = node[int(name) if is_index else name]
                except (LookupError, TypeError):
                    raise InvalidGrammar(f"the $ref {shortened(reference)} names nothing in the schema") from None
            return node
        if text.startswith("#"):
            for node in _all_objects(self._root):
                if node.get("$anchor") == text[1:] or node.get("$id") == text:
                    return node
        raise InvalidGrammar(f"the $ref {shortened(reference)} does not refer to a part of the schema; add it to $defs")

    # oneOf

    def _exclusive(self, schemas: Sequence[Schema], options: Sequence[Sequence[Way]]) -> list[Way]:
        """The ways of `oneOf`: those of all options, if each way excludes those of all other options.

        Properties that distinguish two ways are required in both. Options that nothing else distinguishes are combined
        with the negation of each other.
        """
        ways = [(index, way) for index, option in enumerate(options) for way in option]
        needed: list[set[str]] = [set() for _ in ways]
        is_inexact = [id(self.intern(each)) in self._inexact for each in schemas]
        similar = [
            {other for other in range(len(options)) if other != index and (is_inexact[index] or is_inexact[other])}
            for index in range(len(options))
        ]
        for first, second in combinations(range(len(ways)), 2):
            one, other = ways[first][0], ways[second][0]
            if one != other and other not in similar[one]:
                names = self._separate(ways[first][1], ways[second][1], MAX_DEPTH)
                if names is None:
                    similar[one].add(other)
                    similar[other].add(one)
                else:
                    needed[first] |= names
                    needed[second] |= names
        result: list[Way] = []
        for (index, way), names in zip(ways, needed, strict=True):
            exclusive: list[Way] = [(*way, {"required": sorted(names)}) if names else way]
            for other in sorted(similar[index]):
                exclusive = self._combined(exclusive, self._violations(schemas[other]))
            result += exclusive
        self._is_exact &= not any(needed)
        result = [way for way in result if not self._is_contradiction(way, ())]
        if not result and ways:
            raise InvalidGrammar("the options of oneOf cannot be told apart; use anyOf")
        return result

    def _separate(self, first: Way, second: Way, depth: int) -> set[str] | None:
        """The names of properties that must be present so that no value satisfies both ways; None if some may."""
        if not set(types_of(first)) & set(types_of(second)):
            return set()
        for one, other in ((first, second), (second, first)):
            values = literals(one)
            if values is not None:
                accepted = [value for value in values if self.accepts_all(value, one)]
                return None if any(self.accepts_all(value, other) for value in accepted) else set()
        if set(types_of(first)) & set(types_of(second)) != {"object"} or not depth:
            return None
        names = [name for name in property_names(first) if name in property_names(second)]
        for name in names:
            schemas = [self.schemas_for(way, name) for way in (first, second)]
            pairs = list(product(*map(self.ways, schemas)))
            if any(id(self.intern(each)) in self._inexact for each in (*schemas[0], *schemas[1])):
                continue
            if all(self._separate(one, other, depth - 1) == set() for one, other in pairs):
                return {name}
        for one, other in ((first, second), (second, first)):
            required = [name for plain in one for name in plain.get("required", ())]
            if any(False in self.schemas_for(other, name) for name in required):
                return set()
        return None

    # Parts of objects

    def schemas_for(self, way: Way, name: str) -> list[Schema]:
        """The schemas that the value of a property must satisfy."""
        schemas: list[Schema] = []
        for plain in way:
            found = [value for key, value in plain.get("properties", {}).items() if key == name]
            found += [value for key, value in plain.get("patternProperties", {}).items() if compiled(key).search(name)]
            schemas += found if found else [plain["additionalProperties"]] if "additionalProperties" in plain else []
            if "propertyNames" in plain and not self.accepts(name, plain["propertyNames"]):
                schemas.append(False)
        return schemas

    # Values

    def accepts(self, value: Any, schema: Schema) -> bool:
        """Whether a value satisfies a schema."""
        return any(self.accepts_all(value, way) for way in self._ways_of(schema))

    def accepts_all(self, value: Any, way: Way) -> bool:
        return all(self._accepts_plain(value, plain) for plain in way)

    def _accepts_plain(self, value: Any, plain: Mapping[str, Any]) -> bool:
        kind, types = type_of(value), asked_types(plain)
        if kind not in types and not (kind == "number" and "integer" in types and value % 1 == 0):
            return False
        if "const" in plain and not _equal(value, plain["const"]):
            return False
        if "enum" in plain and not any(_equal(value, each) for each in plain["enum"]):
            return False
        if kind == "number":
            return within(plain, value)
        if kind == "string":
            return (
                plain.get("minLength", 0) <= len(value) <= plain.get("maxLength", math.inf)
                and ("pattern" not in plain or compiled(plain["pattern"]).search(value) is not None)
                and (plain.get("format") not in FORMATS or re.fullmatch(FORMATS[plain["format"]], value) is not None)
            )
        if kind == "array":
            return (
                plain.get("minItems", 0) <= len(value) <= plain.get("maxItems", math.inf)
                and (not plain.get("uniqueItems") or len(set(map(_key, value))) == len(value))
                and all(self.accepts(each, item_schema(plain, index)) for index, each in enumerate(value))
                and ("contains" not in plain or self._contains(plain, value))
            )
        if kind == "object":
            return (
                plain.get("minProperties", 0) <= len(value) <= plain.get("maxProperties", math.inf)
                and set(plain.get("required", ())) <= value.keys()
                and all(
                    self.accepts(each, schema)
                    for name, each in value.items()
                    for schema in self.schemas_for((plain,), name)
                )
            )
        return True

    def _contains(self, plain: Mapping[str, Any], value: Sequence[Any]) -> bool:
        """Whether an array has the right number of elements that satisfy `contains`."""
        least, most = contains_limits(plain)
        if sum(self.accepts(each, plain["contains"]) for each in value) < least:
            return False
        others = sum(self.accepts(each, {"not": plain["contains"]}) for each in value) if most < math.inf else 0
        return len(value) - others <= most


def check_plain(plain: Mapping[str, Any]) -> None:
    """Raise `InvalidGrammar` for keywords with values of a wrong kind."""
    for keyword, value in plain.items():
        kinds = PLAIN_KEYWORDS[keyword]
        is_wrong = not isinstance(value, kinds) or (
            isinstance(value, bool) and bool not in kinds and object not in kinds
        )
        if is_wrong or (keyword.startswith(("min", "max")) and keyword[3] in "LIPC" and not _is_count(value)):
            raise InvalidGrammar(f"the keyword {keyword} cannot have the value {shortened(value)}")
        try:
            if keyword in ("const", "enum") or isinstance(value, float):
                json.dumps(value, allow_nan=False)
        except ValueError:
            raise InvalidGrammar(f"the keyword {keyword} has a number that is not finite") from None
    for name in asked_types(plain):
        if name not in (*TYPES, "integer"):
            raise InvalidGrammar(f"{shortened(name)} is not a type; there are {', '.join(TYPES)} and integer")
    if not all(isinstance(name, str) for name in plain.get("required", ())):
        raise InvalidGrammar("the keyword required must list the names of properties")


def asked_types(plain: Mapping[str, Any]) -> Sequence[str]:
    """The types that a schema allows, as it writes them."""
    types: str | Sequence[str] = plain.get("type", TYPES)
    return [types] if isinstance(types, str) else types


def types_of(way: Way) -> list[str]:
    """The types that a value may have, as in `TYPES`: an integer is a number."""
    types = list(TYPES)
    for plain in way:
        asked = {"number" if name == "integer" else name for name in asked_types(plain)}
        types = [name for name in types if name in asked]
    return types


def literals(way: Way) -> list[Any] | None:
    """The values of the first `const` or `enum`; None if the way has neither."""
    for plain in way:
        if "const" in plain:
            return [plain["const"]]
        if "enum" in plain:
            return list(plain["enum"])
    return None


def property_names(way: Way) -> list[str]:
    """The names that a way mentions, in the order in which they appear."""
    names = [name for plain in way for name in plain.get("properties", ())]
    names += [name for plain in way for name in plain.get("required", ())]
    return list(dict.fromkeys(names))


def prefix_items(plain: Mapping[str, Any]) -> list[Schema]:
    items = plain.get("items")
    return items if isinstance(items, list) else plain.get("prefixItems", [])  # a list in older drafts


def item_schema(plain: Mapping[str, Any], index: int) -> Schema:
    """The schema of one element of an array."""
    prefix = prefix_items(plain)
    if index < len(prefix):
        return prefix[index]
    items = plain.get("items", True)
    rest: Schema = plain.get("additionalItems", True) if isinstance(items, list) else items
    return rest


def contains_limits(plain: Mapping[str, Any]) -> tuple[int, float]:
    """The least and the largest number of elements that satisfy `contains`."""
    return int(plain.get("minContains", 1)), plain.get("maxContains", math.inf)


def is_integer(way: Way) -> bool:
    """Whether a number must be an integer."""
    return any("number" not in asked_types(plain) for plain in way)


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.ASCII)
    except (re.error, OverflowError) as error:
        raise InvalidGrammar(f"the pattern {shortened(pattern)} is not valid: {error}") from None


def _equal(first: Any, second: Any) -> bool:
    return bool(first == second) and _key(first) == _key(second)


def _key(value: Any) -> tuple[str, Any]:
    """The type of a value, and the same for equal values of JSON: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    if isinstance(value, Mapping):
        return "object", frozenset((name, _key(each)) for name, each in value.items())
    return type_of(value), value


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and value >= 0 and value % 1 == 0


def _listed_keys(schema: Mapping[str, Any]) -> frozenset[Any] | None:
    """The keys of the values that `const` and `enum` allow."""
    check_plain({name: schema[name] for name in SIMPLE_KEYWORDS if name in schema})
    keys = [frozenset({_key(schema["const"])})] if "const" in schema else []
    keys += [frozenset(map(_key, schema["enum"]))] if "enum" in schema else []
    return frozenset.intersection(*keys) if keys else None


def _have_value(all_values: Iterable["_Values"]) -> bool:
    """Whether any value is among all of these values."""
    types = frozenset(TYPES)
    allowed: frozenset[Any] | None = None
    excluded: frozenset[Any] = frozenset()
    for values in all_values:
        types &= values.types
        excluded |= values.excluded
        if values.allowed is not None:
            allowed = values.allowed if allowed is None else allowed & values.allowed
    return bool(types) if allowed is None else any(kind in types for kind, _ in allowed - excluded)


def _seal_properties(way: Way, rest: Schema) -> Way:
    """A plain schema for the properties that a way does not mention."""
    if any("additionalProperties" in plain for plain in way):
        return ()
    # A property that only a negation mentions is not evaluated.
    properties = {
        name: True
        for plain in way
        for name, each in plain.get("properties", {}).items()
        if not (isinstance(each, Mapping) and set(each) == {"not"})
    }
    patterns = dict.fromkeys((name for plain in way for name in plain.get("patternProperties", ())), True)
    return ({"properties": properties, "patternProperties": patterns, "additionalProperties": rest},)


def _seal_items(way: Way, rest: Schema) -> Way:
    """A plain schema for the elements that a way does not mention."""
    if any(not isinstance(plain.get("items", []), list) for plain in way):
        return ()
    longest = max((len(prefix_items(plain)) for plain in way), default=0)
    return ({"prefixItems": [True] * longest, "items": rest},)


def _all_objects(root: Any) -> Iterable[Mapping[str, Any]]:
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Mapping):
            yield node
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
