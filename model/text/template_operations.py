"""The operations of a template that can take much time or memory, with limits: operators, string methods and filters.

A check compares the size of a result with the budget before the result is made. Operations whose results are about as
large as their inputs need no check: the result is counted afterwards.
"""

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import filters, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError

from model.text.stand_ins import without
from model.text.template_budget import (
    CONTAINERS,
    ITEM_BYTES,
    MAX_INTEGER_BITS,
    MAX_ITEMS,
    MAX_WIDTH,
    TooExpensive,
    current,
)

MAX_SLOW_CHARACTERS = 1 << 20  # for filters that take long for each character
MAX_JSON_OPTIONS = 200
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_NUMBER = re.compile(r"\d+")
_STAR_WIDTH = re.compile(r"%(?:\([^()%]{0,200}\))?[#0\- +\d.]*\*")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")
_LONG_DATE = re.compile(r"%[^a-zA-Z%]*\d")


def check_width(*arguments: Any) -> None:
    """Refuse large numbers as arguments: most are widths that a value is padded to."""
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_WIDTH:
            raise TooExpensive(f"passes a number above {MAX_WIDTH:,} to a function that pads or splits")


def check_number_of_items(number: int) -> None:
    if number > MAX_ITEMS:
        raise TooExpensive(f"splits a text into more than {MAX_ITEMS:,} parts")


def check_format(pattern: str, values: Any, mark: str) -> None:
    """Check the size of `pattern % values` or `pattern.format(values)`, where `mark` begins each field."""
    budget = current()
    fields = pattern if mark == "%" else pattern.replace("{{", "").replace("}}", "")
    if (_STAR_WIDTH if mark == "%" else _NESTED_FIELD).search(fields):
        raise SecurityError("a width that is computed from a value is not available in chat templates")
    widths = _NUMBER.findall(fields)
    if any(len(width) > len(str(MAX_WIDTH)) for width in widths):
        raise TooExpensive(f"formats a value with a width above {MAX_WIDTH:,}")
    budget.check(len(pattern) + sum(map(int, widths)) + fields.count(mark) * budget.size(values))


# Operators


def _multiply(left: Any, right: Any) -> Any:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
            current().check((1 if isinstance(sequence, str) else ITEM_BYTES) * len(sequence) * times)
    return left * right


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_INTEGER_BITS:
        raise TooExpensive(f"computes an integer of more than {MAX_INTEGER_BITS:,} bits")
    return left**right


def _remainder(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        check_format(left, right, "%")
    return left % right


OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": _multiply,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": _power,
    "%": _remainder,
}


def apply_operator(name: str, left: Any, right: Any) -> Any:
    """The result of a binary operator, within the budget."""
    budget = current()
    budget.tick()
    for operand in (left, right):
        if isinstance(operand, int) and operand.bit_length() > MAX_INTEGER_BITS:
            raise TooExpensive(f"computes with an integer of more than {MAX_INTEGER_BITS:,} bits")
    return budget.keep(OPERATORS[name](left, right))


def concatenate(values: list[Any]) -> str:
    """The operator `~`: the texts of all values, joined."""
    budget = current()
    budget.tick()
    budget.size(values)
    return str(budget.keep("".join(map(as_text, values))))


# Stand-in characters in the texts of clients


def plain(value: Any) -> Any:
    """The value without stand-in characters in its texts, to be compared or searched."""
    stand_ins = current().stand_ins
    if isinstance(value, str):
        return without(value, stand_ins)
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value)) if any(isinstance(each, str) for each in value) else value
    if isinstance(value, dict) and not all(isinstance(key, str) and key.isascii() for key in value):
        return {plain(key): each for key, each in value.items()}
    return value


def as_text(value: Any) -> str:
    """The text of a value. Python would escape the stand-ins in the texts of a container."""
    text = str(value)
    return _unescaped(text, lambda character: repr(character)[1:-1]) if isinstance(value, CONTAINERS) else text


def _unescaped(text: str, escape: Callable[[str], str]) -> str:
    if "\\" in text:
        for stand_in in current().stand_ins:
            text = text.replace(escape(stand_in), stand_in)
    return text


@pass_context
def without_stand_ins(_: Any, value: Any) -> Any:
    """An operand of a comparison."""
    shown = plain(value)
    return value if shown is value else current().keep(shown)


def _cut(text: str, pieces: Sequence[str], gap: int) -> list[str]:
    """The parts of a text that are as long as the pieces, with gaps between them."""
    parts, begin = [], 0
    for piece in pieces:
        parts.append(text[begin : begin + len(piece)])
        begin += len(piece) + gap
    return parts


def call_with_stand_ins(name: str, text: str, *args: Any) -> Any:
    """Call a method that searches in a text, as if the text had no stand-ins. They stay in the result."""
    shown, shown_args = plain(text), tuple(map(plain, args))
    if name == "replace":
        old, new, *count = args
        parts = call_with_stand_ins("split", text, old, *count) if old else [text]
        return new.join(parts) if old else text.replace(old, new, *count)
    found = getattr(shown, name)(*shown_args)
    if not isinstance(found, (str, list, tuple)) or found == text:
        return found
    if name in ("split", "rsplit"):
        return _cut(text, found, len(shown_args[0]))
    if name in ("partition", "rpartition"):
        return tuple(_cut(text, found, 0))
    begin = len(shown) - len(shown.lstrip(*shown_args)) if name == "strip" else 0
    begin = len(text) - len(found) if name in ("lstrip", "removeprefix") else begin
    return text[begin : begin + len(found)]


# Methods of strings


def _check_replace(text: str, old: Any, new: Any, *_: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        current().check(len(text) + text.count(old) * len(new))


def _check_expandtabs(text: str, tabsize: int = 8) -> None:
    current().check(len(text) + text.count("\t") * tabsize)


def _check_split(text: str, sep: str | None = None, maxsplit: int = -1) -> None:
    if maxsplit < 0 or maxsplit > MAX_ITEMS:
        check_number_of_items(text.count(sep) if sep else len(text.split(None, MAX_ITEMS + 1)))


def _check_splitlines(text: str, *_: Any, **__: Any) -> None:
    check_number_of_items(sum(map(text.count, LINE_ENDS)))


def _check_nothing(*_: Any, **__: Any) -> None:
    pass


CHECKED_METHODS: Mapping[str, Callable[..., None]] = {
    "replace": _check_replace,
    "expandtabs": _check_expandtabs,
    "split": _check_split,
    "rsplit": _check_split,
    "splitlines": _check_splitlines,
}
# The results of these are about as long as the string, or as long as a width.
# fmt: off
CHEAP_METHODS = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
    "isupper", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex",
    "rjust", "rpartition", "rstrip", "startswith", "strip", "swapcase", "title", "upper", "zfill",
))
SEARCHING_METHODS = frozenset((
    "count", "endswith", "find", "index", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
    "rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "strip",
))
# fmt: on


def call_string_method(text: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of a string, within the budget."""
    name = method.__name__
    check_width(*args, *kwargs.values())
    if name == "join":
        (values,) = args
        values = list(current().keep(iter(values)))
        current().check(current().size(values) + len(values) * len(text))
        return method(values)
    if name in CHECKED_METHODS:
        CHECKED_METHODS[name](text, *args, **kwargs)
    elif name not in CHEAP_METHODS:
        raise SecurityError(f"the string method {name!r} is not available in chat templates")
    if name in SEARCHING_METHODS and args and args[0] is not None and not kwargs:
        return call_with_stand_ins(name, text, *args)
    return method(*args, **kwargs)


# Filters


def _check_collect(value: Any, *_: Any, **__: Any) -> None:
    """For filters that make a list of a value, or that compare its elements."""
    if isinstance(value, str):
        check_number_of_items(len(value))
    current().size(value)


def _check_slow(value: Any, *_: Any, **__: Any) -> None:
    if current().size(value) > MAX_SLOW_CHARACTERS:
        raise TooExpensive(f"uses a slow filter for a text of more than {MAX_SLOW_CHARACTERS:,} characters")


def _check_indent(value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    check_width(width)
    current().size((value, width))
    text = str(value)
    _check_splitlines(text)
    current().check(len(text) + (1 + text.count("\n")) * (width if isinstance(width, int) else len(str(width))))


def _check_padding(value: Any, *arguments: Any, **named: Any) -> None:
    check_width(*arguments, *named.values())
    _check_collect("" if isinstance(value, str) else value)


def _check_parts(value: Any, *arguments: Any, **named: Any) -> None:
    check_width(*arguments, *named.values())
    _check_collect(value)


def _check_sum(value: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, (int, float)):
        raise SecurityError("the filter 'sum' adds only numbers in chat templates")
    _check_collect(value)


def _check_format_filter(value: Any, *args: Any, **kwargs: Any) -> None:
    current().size(value)
    check_format(str(value), (args, kwargs), "%")


FILTER_CHECKS: Mapping[str, Callable[..., None]] = {
    "indent": _check_indent,
    "center": _check_padding,
    "truncate": _check_padding,
    "round": _check_padding,
    "batch": _check_parts,
    "slice": _check_parts,
    "sum": _check_sum,
    "format": _check_format_filter,
    **dict.fromkeys(("title", "wordcount", "urlencode", "escape", "e", "forceescape"), _check_slow),
}
# These pass a value on, look at a part of it, copy its text, or check the size themselves (replace). Every other filter
# collects or compares all elements.
# fmt: off
CHEAP_FILTERS = frozenset((
    "abs", "attr", "capitalize", "count", "d", "default", "first", "float", "int", "items", "last", "length",
    "lower", "map", "random", "reject", "rejectattr", "replace", "safe", "select", "selectattr", "string", "tojson",
    "trim", "upper",
))
TEXT_FILTERS = frozenset((  # of a container they take its text
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "lower", "replace", "string", "title",
    "trim", "truncate", "upper", "wordcount",
))
# fmt: on
REMOVED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")  # slow, and not useful in a prompt


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks the size of its result before it is made, and counts it."""
    start = 1 if getattr(function, "jinja_pass_arg", None) else 0  # the first argument may be Jinja's own
    default: Callable[..., None] = _check_nothing if name in CHEAP_FILTERS else _check_collect
    check = FILTER_CHECKS.get(name, default)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.tick()
        if name in TEXT_FILTERS and isinstance(args[start], CONTAINERS):
            args = (*args[:start], as_text(args[start]), *args[start + 1 :])
        check(*args[start:], **kwargs)
        return budget.keep(function(*args, **kwargs))

    return run


def bounded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test (`is defined`) that takes time from the budget."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        current().tick()
        return function(*map(plain, args), **kwargs)

    return run


def replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    """Jinja's filter `replace`. It checks the size of the result itself."""
    current().size((value, old, new))
    text, old, new = str(value), str(old), str(new)
    _check_replace(text, old, new)
    return str(call_with_stand_ins("replace", text, old, new, -1 if count is None else count))


def trim(value: Any, chars: str | None = None) -> str:
    """Jinja's filter `trim`."""
    text = str(value)
    return str(call_with_stand_ins("strip", text, chars)) if chars else text.strip()


@pass_eval_context
def join(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's filter `join`. It reads a lazy value once, so the size is checked here."""
    budget = current()
    values = list(value) if isinstance(value, Iterator) else value
    _check_collect(values)
    budget.check(budget.size(values) + budget.size(d) * len(values))
    return filters.sync_do_join(context, values, d, attribute)


@pass_context  # so that Jinja does not call it when it compiles the template
def spend(_: Any, num_bytes: int) -> bool:
    """Count one step of a loop, or an output of fixed text. Returns True, so that a condition can begin with it."""
    budget = current()
    budget.tick()
    budget.spend(num_bytes)
    return True


@pass_context
def keep(_: Any, value: Any) -> Any:
    """Count a value that a template has made: a list, a slice, a comparison."""
    budget = current()
    budget.tick()
    return budget.keep(value)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson` of transformers: like Jinja's, but without HTML escapes, and with the options of `json`."""
    budget = current()
    if budget.size((indent, separators)) > MAX_JSON_OPTIONS or (isinstance(indent, int) and indent > MAX_JSON_OPTIONS):
        raise TooExpensive(f"writes JSON with separators or an indent of more than {MAX_JSON_OPTIONS} characters")
    budget.size(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        text = encoder.encode(value)
    else:
        pieces = []
        for piece in encoder.iterencode(value):  # deep values are mostly indents
            budget.tick()
            budget.spend(len(piece))
            pieces.append(piece)
        text = "".join(pieces)
    return _unescaped(text, lambda character: json.dumps(character)[1:-1]) if ensure_ascii else text


# Functions


def raise_exception(message: Any) -> None:
    """The function with which a template refuses messages that it cannot render."""
    current().size(message)
    raise TemplateError(str(message))


def strftime_now(pattern: str) -> str:
    """The local time in a format of `strftime`."""
    if len(pattern) > 1000 or _LONG_DATE.search(pattern):
        raise TooExpensive("formats a date with a width, or with more than 1,000 characters")
    return datetime.now().strftime(pattern)
