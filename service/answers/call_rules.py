"""Rules of grammars for calls of functions, which an answer must follow if the request demands calls."""

import json
from collections.abc import Sequence
from typing import Literal

from model.text.grammar.grammars import EmbeddedSchema
from service.answers.call_forms import BEGIN, END, Form
from service.answers.offered_tools import OfferedFunction

Layout = Literal["tagged", "list", "bare"]


def layout_of(form: Form) -> Layout:
    """The layout of enforced calls, which are always JSON: `ToolCallParser` reads it in this form."""
    return "tagged" if form in ("tagged", "xml") else "bare" if form == "bare" else "list"


def call_rules(form: Form, functions: Sequence[OfferedFunction], *, several: bool) -> list[str]:
    """Rules, in llguidance's dialect of Lark, for `calls`: one or `several` calls of these functions.

    They use the rules of `argument_schemas`. In the tagged form, `marked` is the part of `calls` after the first mark.
    """
    rules = []
    layout = layout_of(form)
    key = "parameters" if layout == "bare" else "arguments"
    for index, function in enumerate(functions):
        head = json.dumps(f'{{"name": {json.dumps(function.name)}, "{key}": ')
        rules.append(f'call_{index}: {head} arguments_{index} "}}"')
    names = " | ".join(f"call_{index}" for index in range(len(functions)))
    rules.append(f"call: {names}")
    if layout == "tagged":
        calls = f'"{BEGIN}" marked'
        more = f' ("\\n{BEGIN}\\n" call "\\n{END}")*' if several else ""
        rules.append(f'marked: "\\n" call "\\n{END}"{more}')
    elif layout == "list":
        calls = '"[" call' + (' (", " call)*' if several else "") + ' "]"'
    else:
        calls = "call"
    return [*rules, f"calls: {calls}"]


def argument_schemas(functions: Sequence[OfferedFunction]) -> dict[str, EmbeddedSchema]:
    """The JSON schemas of the arguments, by the names of their rules in `call_rules`.

    If the schema of a function that is not strict cannot be enforced, its arguments are any JSON object: the prompt
    describes the function anyway, and the other functions are not concerned.
    """
    return {
        f"arguments_{index}": EmbeddedSchema(
            function.parameters, function.place, function.name, is_strict=function.is_strict
        )
        for index, function in enumerate(functions)
    }
