"""Refuse parts of grammars that llguidance does not limit (their cost grows fast) or that it silently ignores."""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from model.errors import InvalidField

MAX_DIVISOR = 90_000  # of multipleOf, without its decimal point; takes up to 0.7 s, growing with its square
MAX_PATTERN_PROPERTIES = 100  # in a whole schema; takes about 0.1 s, growing with the cube of the number
# Texts in which attributes have no meaning, then an attribute. Special tokens such as <|"|> may contain quotes. A text
# without an end reaches to the end of the grammar, which is then invalid. So each character is read once.
ATTRIBUTE = re.compile(
    r"""<[^<>\s]+> | "(?:\\.|[^"\\])*+(?:"|\\?\Z) | //[^\n]* | \#[^\n]* | /(?:\\.|[^/\\])++(?:/|\\?\Z)
    | \b(temperature|max_tokens)\s*=""",
    re.VERBOSE | re.DOTALL,
)
IGNORED = "{name} has no effect on a rule of a grammar; set {name} in the request, for the whole text"


def check_attributes(field: str, text: str) -> None:
    """Raise `InvalidField` for the attributes `temperature=` and `max_tokens=` of rules of Lark."""
    for found in ATTRIBUTE.finditer(text):
        if found[1]:
            raise InvalidField(field, IGNORED.format(name=found[1]))


def check_schema(field: str, schema: Mapping[str, Any]) -> None:
    """Raise `InvalidField` for a schema that takes too long to compile for one of two known reasons."""
    num_patterns = 0
    nodes: list[Any] = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        elif isinstance(node, Mapping):
            nodes += node.values()
            patterns = node.get("patternProperties")
            num_patterns += len(patterns) if isinstance(patterns, Mapping) else 0
            divisor = node.get("multipleOf")
            if isinstance(divisor, int | float) and digits_of(divisor) > MAX_DIVISOR:
                reason = f"is too complex: multipleOf {divisor} has too many digits; use at most {MAX_DIVISOR}"
                raise InvalidField(field, reason)
    if num_patterns > MAX_PATTERN_PROPERTIES:
        reason = f"is too complex: it has {num_patterns} patternProperties; use at most {MAX_PATTERN_PROPERTIES}"
        raise InvalidField(field, reason)


def digits_of(number: float) -> int:
    """A positive number without its decimal point and without zeros at its end behind the point: 1.25 gives 125."""
    try:
        _, digits, exponent = Decimal(str(number)).as_tuple()
    except InvalidOperation:  # a boolean
        return 0
    if not isinstance(exponent, int):  # not finite
        return 0
    text = "".join(map(str, digits))
    if exponent >= 0:
        return int(text + "0" * exponent)
    num_zeros = min(len(text) - len(text.rstrip("0")), -exponent)
    return int(text[: len(text) - num_zeros] or 0)
