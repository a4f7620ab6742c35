"""How results are shown, on a console and in a notebook: a heading, and a line for each part, on one screen.

A line has the name of a field or of a stage, the shape of its array, and the first values. A result whose fields are
few and short is shown on one line, as dataclasses are.
"""

import dataclasses
import html
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

MAX_COLUMNS = 110
MAX_ROWS = 20
MIN_STAGES = 8
NUM_LAST = 3  # of the rows, if there are too many
MAX_VALUES = 4  # of an array
MAX_NAME = 36
Row = tuple[str, str, str]
"""The name of a part, its shape, and its first values."""


class Displayed:
    """The base of results, which are dataclasses."""

    def __repr__(self) -> str:
        if is_list(self):  # usually one of several in a tuple
            return brief_record(self)
        return one_line(self) or as_text(self)

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        rows = "".join(row_html(row) for group in groups_of(self) for row in group)
        return f"<table><caption>{html.escape(heading(self))}</caption>{rows}</table>"


def as_text(result: Any) -> str:
    """The lines of a result."""
    lines = [heading(result)]
    for rows in groups_of(result):
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        cells = (f"  {name:{widths[0]}}  {shape:{widths[1]}}  {values}" for name, shape, values in rows)
        lines += [shorten(line.rstrip(), MAX_COLUMNS) for line in cells]
    return "\n".join(lines)


def groups_of(result: Any) -> list[list[Row]]:
    """The rows of the fields of a result, and those of its stages."""
    fields = limited([row_of(name, value) for name, value in fields_of(result)], MAX_ROWS)
    stages = [
        (name, f"{shape_of(value)} {' '.join(dims)}", first_values(value)) for name, value, dims in stages_of(result)
    ]
    return [fields, limited(stages, max(MAX_ROWS - len(fields), MIN_STAGES))]


def row_html(row: Row) -> str:
    return "<tr>" + "".join(f'<td style="text-align: left">{html.escape(cell)}</td>' for cell in row) + "</tr>"


def heading(result: Any) -> str:
    """The kind of a result, with the text of its tokens."""
    texts = [text for token in getattr(result, "tokens", ()) if isinstance(text := getattr(token, "text", None), str)]
    about = f": {shorten(repr(''.join(texts)), 60)}" if texts else ""
    return f"{type(result).__name__}{about}"


def one_line(result: Any) -> str | None:
    """A result as dataclasses are shown, if its fields are short and none of them has parts; None otherwise."""
    parts = []
    for name, value in fields_of(result):
        if is_array(value) or isinstance(value, Displayed | Mapping) or has_parts(value):
            return None
        parts.append(f"{name}={value!r}")
    line = f"{type(result).__name__}({', '.join(parts)})"
    return line if len(line) <= MAX_COLUMNS and not stages_of(result) else None


def has_parts(value: Any) -> bool:
    return is_list(value) and any(isinstance(each, Displayed | Mapping | tuple | list) for each in value)


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def row_of(name: str, value: Any) -> Row:
    """The row of a field."""
    if is_array(value):
        return name, shape_of(value), first_values(value)
    if isinstance(value, str | int):
        return name, "", shorten(repr(value), MAX_COLUMNS)
    if isinstance(value, Mapping):
        items = ", ".join(f"{key}: {brief(each)}" for key, each in islice(value.items(), MAX_ROWS))
        return name, f"{len(value)} entries", shorten(items, MAX_COLUMNS)
    if is_list(value):
        return name, f"{len(value)} items", shorten(", ".join(map(brief, islice(value, MAX_ROWS))), MAX_COLUMNS)
    return name, "", brief(value)


def brief(value: Any) -> str:
    """A value in less than a line: of a token its text, of another record its fields."""
    if is_array(value):
        return f"array {shape_of(value)}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping) and not isinstance(value, Displayed):
        return f"{{{len(value)} entries}}"
    if is_list(value):
        inner = ", ".join(map(brief, islice(value, MAX_VALUES)))
        return f"({inner}{', ...' if len(value) > MAX_VALUES else ''})"
    if isinstance(value, Displayed):
        return brief_record(value)
    return shorten(repr(value), 60)


def brief_record(record: Any) -> str:
    fields = dict(fields_of(record))
    text = fields.get("text")
    if isinstance(text, str):
        probability = fields.get("probability")
        return repr(text) if probability is None else f"{text!r} {probability:.3f}"
    inner = ", ".join(f"{name}={brief(value)}" for name, value in islice(fields.items(), MAX_VALUES))
    return shorten(f"{type(record).__name__}({inner}{', ...' if len(fields) > MAX_VALUES else ''})", 80)


def fields_of(result: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a result that hold something, and arrays that are computed from others; without its stages."""
    names = {each.name: each.repr for each in dataclasses.fields(result)}
    has_stages = is_stage_arrays(result)
    for name, is_shown in names.items():
        value = getattr(result, name)
        if is_shown and not name.startswith("_") and not is_empty(value) and not (has_stages and name == "stages"):
            yield name, value
    for name in () if has_stages else computed_names(type(result)):
        value = getattr(result, name)
        if is_array(value):
            yield name, value


def computed_names(kind: type) -> list[str]:
    """The names of the properties of a class."""
    found = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    return [name for name, member in found.items() if isinstance(member, property | cached_property)]


def stages_of(result: Any) -> list[tuple[str, Any, tuple[str, ...]]]:
    """The stages of a trace: name, array, and names of the axes."""
    return [(name, result[name], result.dims(name)) for name in result] if is_stage_arrays(result) else []


def is_stage_arrays(result: Any) -> bool:
    return isinstance(result, Mapping) and hasattr(result, "dims")


def is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def is_empty(value: Any) -> bool:
    return value is None or ((is_list(value) or isinstance(value, Mapping)) and not value)


def shape_of(array: Any) -> str:
    return f"{tuple(array.shape)}"


def first_values(array: Any) -> str:
    """The first numbers of an array or a tensor."""
    if 0 in array.shape:
        return ""
    row = array[(0,) * (array.ndim - 1)] if array.ndim else array[None]
    numbers = (f"{number:.4g}" for number in row[:MAX_VALUES].tolist())
    return ", ".join(numbers) + (", ..." if array.shape and array.shape[-1] > MAX_VALUES else "")


def short_list(items: Sequence[Any] | Mapping[str, Any]) -> str:
    """The first items of a list of results, or of results by name, and the number of the others."""
    pairs = items.items() if isinstance(items, Mapping) else ((None, item) for item in items)
    texts = [(name, one_line(item) or brief(item)) for name, item in islice(pairs, MAX_ROWS)]
    shown = [text if name is None else f"{name}: {text}" for name, text in texts]
    rest = [f"... {len(items) - MAX_ROWS} more"] if len(items) > MAX_ROWS else []
    left, right = "{}" if isinstance(items, Mapping) else "()"
    return left + ",\n ".join([*shown, *rest]) + right


def limited(rows: list[Row], count: int) -> list[Row]:
    """The first and the last rows, `count` in all, with one in between that counts the others."""
    rows = [(shorten(name, MAX_NAME), shape, values) for name, shape, values in rows]
    if len(rows) <= count:
        return rows
    num_first = count - 1 - NUM_LAST
    return [*rows[:num_first], (f"... {len(rows) - num_first - NUM_LAST} more", "", ""), *rows[-NUM_LAST:]]


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
