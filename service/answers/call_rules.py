"""Rules of grammars for calls of functions: those that a request demands, and strict ones in any text."""

import json
from collections.abc import Sequence
from typing import Literal

from model.text.grammar.grammars import EmbeddedSchema
from model.text.tokenizer import Tokenizer
from service.answers.argument_rules import Style, argument_rules
from service.answers.call_forms import BEGIN, END, FORMS, Form
from service.answers.offered_tools import OfferedFunction

Layout = Literal["tagged", "list", "bare"]
MARKED_LISTS = ("list", "piped", "functools")  # forms with a mark before a list of calls in JSON
# The text before the calls, between two of them, and after them.
AROUND_CALLS: dict[Form, tuple[str, str, str]] = {
    "xml": (f"{BEGIN}\n", f"\n{END}\n{BEGIN}\n", f"\n{END}"),
    "pythonic": ("[", ", ", "]"),
    "block": ("```tool_code\n", "\n", "\n```"),
}


def layout_of(form: Form) -> Layout:
    """The layout of calls that are JSON: `ToolCallParser` reads it in this form."""
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


def enforced_rules(
    form: Form, functions: Sequence[OfferedFunction], tokenizer: Tokenizer | None, *, several: bool
) -> tuple[list[str], dict[str, EmbeddedSchema]]:
    """Rules for `calls` as the model writes them, with the schemas that they use; JSON if a function needs that."""
    style: Style | None = "xml" if form == "xml" else "python" if form in ("pythonic", "block") else None
    if style is not None:
        found = [argument_rules(f"call_{index}", function, style) for index, function in enumerate(functions)]
        own = [each for each in found if each is not None]
        if len(own) == len(found):
            before, between, after = AROUND_CALLS[form]
            more = f" ({json.dumps(between)} call)*" if several else ""
            calls = f"calls: {json.dumps(before)} call{more} {json.dumps(after)}"
            names = " | ".join(f"call_{index}" for index in range(len(functions)))
            rules = [calls, f"call: {names}", *(rule for each in own for rule in each.rules)]
            return rules, {name: schema for each in own for name, schema in each.schemas.items()}
    rules = call_rules(form, functions, several=several)
    if form in MARKED_LISTS:
        rules[-1] = rules[-1].replace("calls:", f"calls: {mark_rule(FORMS[form].begin[0], tokenizer)}")
        rules[-1] += f" {mark_rule(FORMS[form].end, tokenizer)}" if FORMS[form].end else ""
    return rules, argument_schemas(functions)


def mark_rule(mark: str, tokenizer: Tokenizer | None) -> str:
    """The expression of a mark, which is a special token in some vocabularies."""
    token_id = None if tokenizer is None else tokenizer.id_of(mark)
    is_special = tokenizer is not None and token_id is not None and tokenizer.special_name(token_id)
    return f"<[{token_id}]>" if is_special else json.dumps(mark)


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
