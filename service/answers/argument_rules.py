"""Rules of grammars for calls whose arguments are not one JSON object: Python's, and those of Qwen3-Coder."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from model.text.grammar.grammars import EmbeddedSchema
from service.answers.offered_tools import OfferedFunction
from service.answers.xml_calls import types_of
from service.http.openai_schemas import JsonObject

Style = Literal["python", "xml"]
MAX_ARGUMENTS = 32
NOTES = frozenset({"title", "description", "default", "examples"})  # keywords that allow the same values
OBJECT_KEYWORDS = NOTES | {"type", "properties", "required", "additionalProperties"}
XML_TEXT = r"/(.|\n)*/ & ~/(.|\n)*<\/parameter>(.|\n)*/"


class ArgumentRules(NamedTuple):
    """The rules of one function's call, and the JSON schemas of rules that they use, by the names of these rules."""

    rules: list[str]
    schemas: dict[str, EmbeddedSchema]


def argument_rules(rule: str, function: OfferedFunction, style: Style) -> ArgumentRules | None:
    """The rules for a call of a function, named `rule`; None if its schema needs JSON.

    A schema is plain if it only names properties, and their types do not depend on each other.
    """
    schema = function.parameters
    properties = schema.get("properties", {})
    is_plain = (
        schema.keys() <= OBJECT_KEYWORDS
        and isinstance(properties, dict)
        and len(properties) <= MAX_ARGUMENTS
        and all(name.isidentifier() and name.isascii() for name in properties)
        and "$ref" not in json.dumps(properties)
    )
    required = schema.get("required", [])
    if not is_plain or not isinstance(required, list) or not set(map(str, required)) <= properties.keys():
        return None
    found = ArgumentRules([], {})
    names: dict[str, str] = {}  # of rules: those of required arguments first
    for index, name in enumerate(sorted(properties, key=lambda name: name not in required)):
        names[name] = f"{rule}_{index}"
        value = value_rule(f"{names[name]}_value", function, properties[name], style, found)
        if value is None:
            return None
        begin = f"{name}=" if style == "python" else f"<parameter={name}>\n"
        found.rules.append(f"{names[name]}: {json.dumps(begin)} {value}")
    needed = [names[name] for name in names if name in required]
    others = [names[name] for name in names if name not in required]
    if style == "python":
        begin, end = f"{function.name}(", ")"
        arguments = python_arguments(needed, others)
    else:
        begin, end = f"<function={function.name}>\n", "</function>"
        arguments = " ".join([*needed, *(f"{each}?" for each in others)])
    found.rules.append(f"{rule}: {json.dumps(begin)} {arguments} {json.dumps(end)}")
    return found


def value_rule(rule: str, function: OfferedFunction, schema: Any, style: Style, found: ArgumentRules) -> str | None:
    """The expression of a value, and in the form of Qwen3-Coder of the text after it; None if there is none."""
    types, keywords = types_of(schema), set(schema) - NOTES if isinstance(schema, dict) else set()
    if style == "python" and types == {"boolean"} and keywords == {"type"}:
        return '("True" | "False")'
    end = "" if style == "python" else ' "\\n</parameter>\\n"'
    if style == "python" or (types and "string" not in types):
        found.schemas[rule] = EmbeddedSchema(schema, function.place, function.name, is_strict=function.is_strict)
        return f"{rule}{end}"
    choices: JsonObject = schema if isinstance(schema, dict) else {}
    if keywords <= {"type", "enum"} and types == {"string"} and isinstance(choices.get("enum", []), list):
        texts = choices.get("enum")
        if texts is None:
            found.rules.append(f"{rule.upper()}: ({XML_TEXT}){end}")
            return rule.upper()
        if texts and all(isinstance(text, str) for text in texts):
            return f"({' | '.join(map(json.dumps, texts))}){end}"
    return None


def python_arguments(needed: Sequence[str], others: Sequence[str]) -> str:
    """Arguments with commas between them: all `needed` ones, then any of the `others`, in this order."""

    def after(names: Sequence[str]) -> str:
        return " ".join(f'(", " {name})?' for name in names)

    if needed:
        return " ".join([' ", " '.join(needed), after(others)])
    alternatives = [f"{name} {after(others[index + 1 :])}" for index, name in enumerate(others)]
    return f"({' | '.join(alternatives)})?" if alternatives else ""
