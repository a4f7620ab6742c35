"""Read calls as Qwen3-Coder writes them: `<function=NAME><parameter=KEY>VALUE</parameter></function>`."""

import json
from collections.abc import Mapping
from typing import Any

from model.text.thinking import num_partial
from service.answers.call_text import CallText, NoCall, Read
from service.answers.json_calls import refuse_constant

OTHER_NAMES = {"True": "true", "False": "false", "None": "null"}


def read_xml_call(source: CallText) -> Read[None]:
    """Read a call after `<function=`."""
    name = (yield from source.read_until(">")).strip()
    source.begin_call(name)
    properties = source.properties(name)
    separator = "{"
    while True:
        if not (yield from source.skip()) or (yield from source.accept("</function>")):
            break
        if (yield from source.accept(source.end_mark)):  # the model has forgotten the end of the function
            source.place -= len(source.end_mark)
            break
        yield from source.expect("<parameter=")
        key = (yield from source.read_until(">")).strip()
        source.add_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from read_xml_value(source, properties.get(key, {}))
    source.add_arguments("{}" if separator == "{" else "}")


def read_xml_value(source: CallText, schema: Any) -> Read[None]:
    """Read a value and the end of its parameter. A text becomes pieces while it arrives."""
    is_text = types_of(schema) == {"string"}
    parts: list[str] = []
    yield from source.accept("\n")
    if is_text:
        source.add_arguments('"')
    while True:
        end = source.text.find("</parameter>", source.place)
        is_found = end >= 0
        if is_found and source.text.startswith("\n", end - 1) and end > source.place:
            end -= 1
        elif not is_found:
            ends = ("\n</parameter>", "</parameter>")
            num_kept = 0 if source.is_whole else max(num_partial(source.text[source.place :], end) for end in ends)
            end = len(source.text) - num_kept
        part = source.text[source.place : end]
        source.place = end
        if is_text:
            source.add_arguments(json.dumps(part, ensure_ascii=False)[1:-1])
        else:
            parts.append(part)
        if is_found:
            break
        if source.is_whole:
            raise NoCall
        yield
    yield from source.accept("\n")
    yield from source.expect("</parameter>")
    source.add_arguments('"' if is_text else json_of("".join(parts), schema))


def types_of(schema: Any) -> set[str]:
    """The types that a JSON schema names, or its alternatives do; empty if there are none."""
    if not isinstance(schema, Mapping):
        return set()
    found: set[str] = set()
    for each in (schema, *list_of(schema.get("anyOf")), *list_of(schema.get("oneOf"))):
        kinds = each.get("type") if isinstance(each, Mapping) else None
        found.update(kind for kind in ([kinds] if isinstance(kinds, str) else list_of(kinds)) if isinstance(kind, str))
    return found


def list_of(value: Any) -> list[Any]:
    """A list in a schema of a client, which may be anything else."""
    return value if isinstance(value, list) else []


def json_of(text: str, schema: Any) -> str:
    """The JSON of a value that is written as text: a text if the schema says so, or if it is no JSON."""
    value = OTHER_NAMES.get(text.strip(), text.strip())
    if not ("string" in types_of(schema) and value != "null"):
        try:
            json.loads(value, parse_constant=refuse_constant)
            return value
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)
