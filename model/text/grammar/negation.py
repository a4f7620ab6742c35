"""Write the negation of a JSON schema as a JSON schema without `not`, for `not`, `if` and `oneOf`.

A value satisfies the negation only if it does not satisfy the schema. The converse does not hold for all schemas: a
negation that is not exact allows fewer values.
"""

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from model.text.grammar.formats import FORMATS
from model.text.grammar.limits import InvalidGrammar
from model.text.grammar.patterns import alternatives

TYPES = ("null", "boolean", "number", "string", "array", "object")
# Keywords whose negation asks for a smaller or a larger number: the type of the value, the keyword, and the step.
OPPOSITES = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}
# Keywords that have no negation here, with the values that ask for nothing.
NOT_NEGATED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"), (True, {})),
    "additionalItems": (True, {}),
    "patternProperties": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "multipleOf": (),
    "uniqueItems": (False,),
}


def type_of(value: Any) -> str:
    """The type of a value of JSON, as in `TYPES`."""
    kinds = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def negated(schema: Mapping[str, Any], resolve: Callable[[Any], Any]) -> tuple[dict[str, Any], bool]:
    """The negation of a schema that is an object, and whether it is exact. `resolve` finds what a `$ref` names.

    Keywords that have no negation are left out if others can be violated in their place. Otherwise, raise
    `InvalidGrammar`.
    """
    options: list[Any] = []
    left_out = []
    for keyword, value in schema.items():
        has_no_negation = keyword in NOT_NEGATED and value not in NOT_NEGATED[keyword]
        if has_no_negation or (keyword == "format" and value in FORMATS):
            left_out.append(keyword)
        else:
            options += _violations(keyword, value, schema, resolve)
    if left_out and not options:
        raise InvalidGrammar(f"the keyword {left_out[0]} cannot be enforced inside of not, if or oneOf")
    is_exact = not left_out and "integer" not in schema.get("type", ()) and "prefixItems" not in schema
    return {"anyOf": options or [False]}, is_exact


def _violations(keyword: str, value: Any, schema: Mapping[str, Any], resolve: Callable[[Any], Any]) -> list[Any]:
    """Schemas for the values that violate one keyword."""
    if keyword == "type":
        allowed = {"number" if name == "integer" else name for name in ([value] if isinstance(value, str) else value)}
        return [{"type": [name for name in TYPES if name not in allowed]}]
    if keyword in ("const", "enum"):
        return _excluding([value] if keyword == "const" else value)
    if keyword in OPPOSITES:
        kind, opposite, step = OPPOSITES[keyword]
        if isinstance(value, bool):  # of draft 4, where it belongs to minimum or maximum
            return []
        if keyword in ("minimum", "maximum") and schema.get(f"exclusiveM{keyword[1:]}") is True:
            opposite, step = opposite.replace("exclusiveM", "m"), 0
        return [{"type": kind, opposite: value + step}] if value + step >= 0 or kind == "number" else []
    if keyword == "pattern":
        return [{"type": "string", "pattern": _not_found(value)}]
    if keyword == "properties":
        return [
            {"type": "object", "required": [name], "properties": {name: {"not": each}}} for name, each in value.items()
        ]
    if keyword == "required":
        return [{"type": "object", "properties": {name: False}} for name in value]
    if keyword == "prefixItems":
        return [
            {"type": "array", "minItems": index + 1, "prefixItems": [*[True] * index, {"not": each}]}
            for index, each in enumerate(value)
        ]
    if keyword == "items":
        if isinstance(value, list):
            return _violations("prefixItems", value, schema, resolve)
        num_before = len(schema.get("prefixItems", ()))
        if num_before:  # only the first of the others is told apart
            return _violations("prefixItems", [*[True] * num_before, value], {}, resolve)
        return [{"type": "array", "contains": {"not": value}}]
    if keyword == "contains":
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        options = [{"type": "array", "contains": value, "minContains": 0, "maxContains": least - 1}] if least else []
        return options + ([] if most is None else [{"type": "array", "contains": value, "minContains": most + 1}])
    if keyword == "dependentRequired":
        return [
            {"type": "object", "required": [name], "properties": {each: False}}
            for name, needed in value.items()
            for each in needed
        ]
    if keyword == "$ref":
        return [{"not": resolve(value)}]
    if keyword == "allOf":
        return [{"not": each} for each in value]
    if keyword == "anyOf":
        return [{"allOf": [{"not": each} for each in value]}]
    if keyword == "oneOf":
        pairs = [{"allOf": [one, other]} for index, one in enumerate(value) for other in value[:index]]
        return [{"allOf": [{"not": each} for each in value]}, *pairs]
    if keyword == "not":
        return [value]
    if keyword == "if":
        then, otherwise = schema.get("then", True), schema.get("else", True)
        return [{"allOf": [value, {"not": then}]}, {"allOf": [{"not": value}, {"not": otherwise}]}]
    return []


def _excluding(values: list[Any]) -> list[Any]:
    """Schemas for the values that are not in a list."""
    listed: dict[str, list[Any]] = {}
    for value in values:
        listed.setdefault(type_of(value), []).append(value)
    options: list[Any] = [{"type": [name for name in TYPES if name not in listed]}]
    if len(set(listed.get("boolean", (True, False)))) == 1:
        options.append({"const": not listed["boolean"][0]})
    if "number" in listed:
        numbers = sorted(set(listed["number"]))
        options.append({"type": "number", "exclusiveMaximum": numbers[0]})
        options += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in pairwise(numbers)
        ]
        options.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    if "string" in listed:
        texts = "|".join(map(_escaped, listed["string"]))
        options.append({"type": "string", "pattern": f"^(?!({texts})$)"})
    for kind in ("array", "object"):
        if kind in listed:
            options.append({"type": kind, "allOf": list(map(_different, listed[kind]))})
    return options


def _different(value: Any) -> dict[str, Any]:
    """A schema for the arrays or objects that are not equal to a value."""
    if isinstance(value, list):
        parts = _violations("prefixItems", [{"const": each} for each in value], {}, lambda reference: reference)
        return {"anyOf": [*parts, {"minItems": len(value) + 1}, *([{"maxItems": len(value) - 1}] if value else [])]}
    properties = {name: {"not": {"const": each}} for name, each in value.items()}
    parts = [{"required": [name], "properties": {name: each}} for name, each in properties.items()]
    return {"anyOf": [*parts, *({"properties": {name: False}} for name in value), {"minProperties": len(value) + 1}]}


def _escaped(text: str) -> str:
    """A text as a regular expression that all dialects read alike."""
    return re.sub(r"[^A-Za-z0-9]", lambda found: f"\\U{ord(found[0]):08x}", text)


def _not_found(pattern: str) -> str:
    """A regular expression for the texts in which a pattern is not found."""
    found = [each if each.startswith("^") else rf"[\s\S]*{each}" for each in alternatives(pattern)]
    return f"^(?!{'|'.join(found)})"
