"""Read the files of a checkpoint, which anybody may have written: regular files only, and only up to a given size.

It knows nothing of what the keys and tensors mean.
"""

import json
import math
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model.config import short_repr

# Far above the files of any published checkpoint of the families that are served: the index of the largest network
# that `ModelConfig` allows has less than 1.5 MB, a config.json some kilobytes.
MAX_JSON_BYTES = 2 << 20
MAX_JSON_DEPTH = 64
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class CheckpointError(ValueError):
    """The checkpoint cannot be served; the message names the file and what to do."""


def require_regular(path: Path) -> None:
    """Raise `CheckpointError` unless `path` is a regular file or a symbolic link to one; `OSError` where nothing is.

    Opening a named pipe would wait for a writer, and a device may have no end.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: is {KINDS.get(stat.S_IFMT(mode), 'a special file')}, not a regular file")


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """The content of a regular file. `CheckpointError` where it is none, or has more than `max_bytes`."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise CheckpointError(f"{path}: has more than {max_bytes} bytes, the most that is read")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. `CheckpointError` where the file holds none, or a number that is not finite."""
    text = read_regular(path, max_bytes=MAX_JSON_BYTES)
    not_finite: list[str] = []

    def read_float(spelling: str) -> float:
        value = float(spelling)
        if not math.isfinite(value):
            not_finite.append(spelling)
        return value

    try:
        content = json.loads(text.decode("utf-8"), parse_float=read_float, parse_constant=read_float)
    except RecursionError:
        raise CheckpointError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    if _depth_exceeds(content, MAX_JSON_DEPTH):
        raise CheckpointError(f"{path}: not valid JSON: nested deeper than {MAX_JSON_DEPTH} levels")
    if not_finite:
        place = ".".join(_place_of_not_finite(content) or ["a number"])
        raise CheckpointError(f"{path}: {one_line(place)} is {one_line(not_finite[0])}; numbers must be finite")
    return content


def _values(container: Any) -> Iterable[Any]:
    return container.values() if type(container) is dict else container


def _depth_exceeds(content: dict[str, Any], limit: int) -> bool:
    """Whether containers stand in each other more than `limit` deep: to compare or print them could fail later."""
    level: list[Any] = [content]
    for _ in range(limit):
        level = [value for container in level for value in _values(container) if type(value) in (dict, list)]
        if not level:
            return False
    return True


def _place_of_not_finite(content: Any) -> list[str] | None:
    """The keys and indices that lead to the first number that is not finite; None where no such number is left."""
    if type(content) is float:
        return None if math.isfinite(content) else []
    for key, value in content.items() if type(content) is dict else enumerate(content):
        if type(value) in (float, dict, list) and (place := _place_of_not_finite(value)) is not None:
            return [str(key), *place]
    return None


def one_line(name: str) -> str:
    """A name from a file, as an error message can hold it: printable, and not too long."""
    return name if name.isprintable() and len(name) <= 200 else short_repr(name)


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first of these names, and how many more there are."""
    names = list(names)
    return ", ".join(map(one_line, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")
