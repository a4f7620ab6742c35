"""Read the arguments of calls, for the clients and for `load`. An error names the argument, and says what it takes."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from forwardscope.errors import InvalidArgument

MAX_SHOWN = 60
Index = int | slice | str | Sequence[int]
"""The chosen indices of a dim of a weight."""
Corpus = str | PathLike[str] | Sequence[str | PathLike[str] | Sequence[int]]
"""A text, a path, or a list of texts, paths and lists of token ids."""


def to_prompt(prompt: Any, name: str = "prompt") -> str | list[int]:
    """A text, or token ids: a list, a numpy array or a tensor."""
    if isinstance(prompt, str):
        return prompt
    items = to_list(prompt, name, "a text, or a list of token ids")
    if items and (isinstance(items[0], str | bytes | list | tuple) or len(getattr(items[0], "shape", [])) > 0):
        raise InvalidArgument(name, f"{shown(prompt)} is a list of prompts, but here is place for one")
    return [to_integer(item, name, "token ids are integers") for item in items]


def to_continuations(continuations: Any) -> list[str] | list[list[int]]:
    """Texts, or lists of token ids."""
    items = to_list(continuations, "continuations", "a list of texts, or of lists of token ids")
    read: list[Any] = [to_prompt(item, f"continuations.{index}") for index, item in enumerate(items)]
    if len(set(map(type, read))) != 1:
        raise InvalidArgument("continuations", "has texts and token ids; give one kind" if read else "is empty")
    return read


def to_token(token: Any, name: str) -> str | int | None:
    """A token as its text or its id."""
    if token is None or isinstance(token, str):
        return token
    return to_integer(token, name, "give a token id, or the text of one token")


def to_indices(indices: Any, name: str) -> list[int] | None:
    """Integers: a list, a range, a numpy array or a tensor. None stays None."""
    if indices is None:
        return None
    takes = f"a list of integers, such as {'[0, -1]' if name.endswith('positions') else '[0, 1]'}"
    return [to_integer(item, name, f"give {takes}") for item in to_list(indices, name, takes)]


def to_index_text(indices: Any, name: str) -> str:
    """The indices of a dim of a weight as a query has them: an index, a list, a range, a slice or such a text."""
    if isinstance(indices, str):
        return indices
    if isinstance(indices, slice):
        ends = (indices.start, indices.stop, indices.step)
        numbers = ["" if end is None else str(to_integer(end, name, "a slice has integers")) for end in ends]
        return ":".join(numbers if numbers[2] else numbers[:2])
    if isinstance(indices, range) and len(indices) > 1 and indices.step > 0 and indices[0] >= 0:
        return f"{indices.start}:{indices.stop}:{indices.step}"
    if isinstance(indices, Iterable) and len(getattr(indices, "shape", (1,))) > 0:
        return ",".join(map(str, to_indices(indices, name) or []))
    hint = "give an index, a list, a range or a slice of indices, or a text such as '0:10'"
    return str(to_integer(indices, name, hint))


def to_targets(targets: Any, name: str = "targets") -> list[int | None] | None:
    """Token ids, or None where a position has no target."""
    if targets is None:
        return None
    takes = "a list of token ids, with None where there is no target"
    items = to_list(targets, name, takes)
    return [None if item is None else to_integer(item, name, f"give {takes}") for item in items]


def to_text(text: Any, name: str) -> str:
    if not isinstance(text, str):
        raise InvalidArgument(name, f"{shown(text)} is not a text")
    return text


def to_name(text: Any, name: str = "name") -> str:
    """A text that is not empty, as in a path."""
    if not to_text(text, name):
        raise InvalidArgument(name, "is empty")
    return str(text)


def to_texts(texts: Any, name: str) -> list[str]:
    """One text, or several."""
    items = [texts] if isinstance(texts, str) else to_list(texts, name, "a text, or a list of texts")
    return [to_text(item, name) for item in items]


def to_mappings(mappings: Any, name: str, item: str) -> list[dict[str, Any]]:
    """A list of mappings; `item` is the name of one, for errors."""
    if isinstance(mappings, Mapping):
        raise InvalidArgument(name, f"is one {item}; put it into a list")
    items = to_list(mappings, name, f"a list of {item}s")
    for index, each in enumerate(items):
        if not isinstance(each, Mapping):
            raise InvalidArgument(f"{name}.{index}", f"{shown(each)} is not a mapping from the fields of the {item}")
    return [dict(each) for each in items]


def to_mapping(mapping: Any, name: str, takes: str) -> dict[str, Any]:
    """A mapping, which `takes` describes for errors."""
    if not isinstance(mapping, Mapping):
        raise InvalidArgument(name, f"{shown(mapping)} is not {takes}")
    return dict(mapping)


def to_messages(messages: Any) -> list[dict[str, Any]]:
    """A conversation; one question may be a text."""
    own = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return to_mappings(own, "messages", "message")


def to_list(values: Any, name: str, takes: str) -> list[Any]:
    """The items of a list, a tuple, a range, an array or a tensor; not of a text or a mapping."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable | Sequence):
        raise InvalidArgument(name, f"{shown(values)} is not {takes}")
    try:
        return list(values)
    except TypeError:  # an array of no dims
        raise InvalidArgument(name, f"{shown(values)} is not {takes}") from None


def to_integer(value: Any, name: str, hint: str) -> int:
    """An integer of Python, numpy or PyTorch, but no bool and no float."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise InvalidArgument(name, f"{shown(value)} is not an integer; {hint}")


def shown(value: Any) -> str:
    """A value in an error message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
