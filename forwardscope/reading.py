"""Build results from the JSON of answers by the types of their fields.

Unknown fields are ignored, because a newer server may send more. A missing field that may be None is None, because an
older server may send fewer.
"""

import math
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from forwardscope.results.records import Named, OrNull, Record

Result = TypeVar("Result", bound=Record)
Reader = Callable[[Any], Any]


def read(kind: type[Result], answer: Any) -> Result:
    """The result of a JSON object. Raises `KeyError`, `TypeError` or `ValueError` if a field is missing or wrong."""
    return cast(Result, reader_of(cast(Hashable, kind))(answer))


@cache
def reader_of(hint: Hashable) -> Reader:
    """A function that converts JSON to a value of a type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner = reader_of(args[0])
        if any(isinstance(mark, OrNull) for mark in args[1:]):
            return number if args[0] is float else or_none(inner)
        return inner
    kind = origin or hint
    if is_dataclass(kind):
        return record_reader(kind)
    if kind in (Union, types.UnionType):
        options = [option for option in args if option is not types.NoneType]
        if len(options) == 1:
            return or_none(reader_of(options[0]))
        lists = [reader_of(option) for option in options if get_origin(option) is tuple]
        return lambda value: lists[0](value) if lists and isinstance(value, list) else value
    if kind in (tuple, Sequence, Named):
        item, build = reader_of(args[0]), Named if kind is Named else tuple
        return lambda values: build([item(each) for each in values])
    if kind is Mapping:
        entry = reader_of(args[1])
        return lambda values: {name: entry(each) for name, each in values.items()}
    return lambda value: value


def or_none(inner: Reader) -> Reader:
    return lambda value: None if value is None else inner(value)


def number(value: float | None) -> float:
    return math.nan if value is None else value


def record_reader(kind: Any) -> Reader:
    """A function that builds a record from a JSON object."""
    hints, readers = get_type_hints(kind, include_extras=True), dict[str, Reader]()
    required: list[str] = []

    def read_record(answer: Mapping[str, Any]) -> Any:
        if not readers:  # at the first call, because a record may contain records of its own kind
            readers.update({each.name: reader_of(hints[each.name]) for each in fields(kind)})
            required.extend(each.name for each in fields(kind) if each.default is MISSING)
        values = {name: read(answer[name]) for name, read in readers.items() if name in answer}
        for name in required:
            if name not in values:
                values[name] = readers[name](missing(answer, name, hints[name]))
        return kind.from_json(values)

    return read_record


def missing(answer: Mapping[str, Any], name: str, hint: Any) -> Any:
    """None for a field that may be null. Raises `KeyError` for another one."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return None if types.NoneType in get_args(hint) else answer[name]
