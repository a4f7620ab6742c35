"""Read what a client asks of a text, and write it as one grammar for llguidance.

This runs only in the limited process of `program.py`: the sources may be hostile.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from model.errors import shortened
from model.text.grammar.lark import TERMINALS, schema_rules
from model.text.grammar.limits import InvalidGrammar

# Texts in which attributes have no meaning, then an attribute. Special tokens such as <|"|> may contain quotes. A text
# without an end reaches to the end of the grammar, which is then invalid. So each character is read once.
ATTRIBUTE = re.compile(
    r"""<[^<>\s]+> | "(?:\\.|[^"\\])*+(?:"|\\?\Z) | //[^\n]* | \#[^\n]* | /(?:\\.|[^/\\])++(?:/|\\?\Z)
    | \b(temperature|max_tokens)\s*=""",
    re.VERBOSE | re.DOTALL,
)
# The brackets of JSON, and its texts, in which they have no meaning.
NESTING = re.compile(r'"(?:\\.|[^"\\])*+"?|[][{}]', re.DOTALL)
MAX_DEPTH = 500  # deeper JSON could overflow the small stack of the limited process
IGNORED = "{name} has no effect on a rule of a grammar; set {name} in the request, for the whole text"
TOO_LARGE = "all schemas together are too large"
NOT_ENFORCEABLE = "the schema cannot be enforced"


@dataclass
class Grammar:
    """A grammar in the Lark dialect of llguidance."""

    rules: str
    has_other_keys: bool = False
    """Whether JSON in the text may have objects with keys that its schema does not name."""
    not_enforced: dict[str, str] = field(default_factory=dict)
    """The fields of the functions whose arguments may be any JSON object, and why: one of two fixed texts."""


def read_source(source: Mapping[str, Any], compile_error: Callable[[str], str]) -> Grammar:
    """The grammar of a source: `{"json": schema, "is_closed": bool}`, `{"regex": text}`, `{"choice": [text, ...]}`,
    `{"grammar": text}`, or our own `{"rules": text, "schemas": {rule: EmbeddedSchema}}`.

    `compile_error` compiles rules, and returns the error or an empty text. Raises `InvalidGrammar`.
    """
    if (schema := source.get("json")) is not None:
        schema = parsed(schema) if isinstance(schema, str) else schema
        lines, has_other_keys = schema_rules("start", schema, is_closed=source["is_closed"])
        return Grammar("\n".join([TERMINALS, *lines]), has_other_keys)
    if (pattern := source.get("regex")) is not None:
        return Grammar(f"start: /{regex_to_lark(pattern, use_ascii='dws')}/")
    if (choices := source.get("choice")) is not None:
        return Grammar(choice_rules(choices))
    if "rules" in source:
        return with_schemas(source["rules"], source["schemas"], compile_error)
    text = source["grammar"]
    if "::=" in text:
        try:
            return Grammar(any_to_lark(text))
        except Exception as error:  # the parser of llguidance has no common class of errors
            raise InvalidGrammar(f"not valid EBNF: {error}") from error
    check_attributes(text)
    return Grammar(text)


def with_schemas(rules: str, schemas: Mapping[str, Any], compile_error: Callable[[str], str]) -> Grammar:
    """Our own rules, with those of each schema. A schema that is not strict may be replaced with any object."""
    parts: dict[str, tuple[list[str], bool]] = {}
    reasons: dict[str, str] = {}
    for rule, each in schemas.items():
        if each["schema"] is None:
            reasons[rule] = TOO_LARGE
            continue
        try:
            lines, _ = parts[rule] = schema_rules(rule, each["schema"], is_closed=each["is_closed"])
            reasons[rule] = compile_error("\n".join([f"start: {rule}", TERMINALS, *lines]))
        except (InvalidGrammar, RecursionError) as error:
            reasons[rule] = str(error) if isinstance(error, InvalidGrammar) else "is nested too deeply"
        if reasons[rule] and each["is_strict"]:
            raise InvalidGrammar(refusal(each["name"], reasons[rule]), each["field"])
    enforced = [rule for rule, each in schemas.items() if not reasons[rule] and not each["is_strict"]]
    enforced.sort(key=lambda rule: sum(map(len, parts[rule][0])), reverse=True)
    num_left_out = 0
    while True:
        reasons |= dict.fromkeys(enforced[:num_left_out], TOO_LARGE)
        parts |= {rule: schema_rules(rule, {"type": "object"}, is_closed=False) for rule in schemas if reasons[rule]}
        text = "\n".join([TERMINALS, rules, *(line for lines, _ in parts.values() for line in lines)])
        if num_left_out == len(enforced) or not compile_error(text):
            break
        num_left_out = min(len(enforced), 2 * num_left_out + 1)
    not_enforced = {
        schemas[rule]["field"]: TOO_LARGE if reason == TOO_LARGE else NOT_ENFORCEABLE
        for rule, reason in reasons.items()
        if reason
    }
    return Grammar(text, any(has_other_keys for _, has_other_keys in parts.values()), not_enforced)


def refusal(name: str, reason: str) -> str:
    if not name:
        return reason
    return f"the schema of {name!r} cannot be enforced: {reason}; change the schema, or leave out strict"


def parsed(text: str) -> Mapping[str, Any]:
    """A JSON schema that a client has sent as text, as vLLM's clients do."""
    depth = 0
    for part in NESTING.findall(text):
        depth += (part in "[{") - (part in "]}")
        if depth > MAX_DEPTH:
            raise InvalidGrammar("is a text that is nested too deeply")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidGrammar("is a text that is not JSON; send a JSON schema") from None
    if not isinstance(schema, Mapping):
        raise InvalidGrammar("is a text, but not that of a JSON object; send a JSON schema")
    return schema


def choice_rules(choices: Sequence[str]) -> str:
    if not choices or not all(choices):
        raise InvalidGrammar("there must be choices, and none of them may be empty")
    for text in choices:
        if "\0" in text:
            raise InvalidGrammar(f"{shortened(text)} contains a NUL character")
    return "start: ANY\nANY: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)


def check_attributes(text: str) -> None:
    """Raise `InvalidGrammar` for the attributes `temperature=` and `max_tokens=` of rules of Lark."""
    for found in ATTRIBUTE.finditer(text):
        if found[1]:
            raise InvalidGrammar(IGNORED.format(name=found[1]))
