"""Read untrusted checkpoint files safely: regular files only, and only up to a given size.

This module does not know the meaning of any key or tensor.
"""

import json
import math
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model.errors import CheckpointError, printable_name

# A config.json has some kilobytes.
MAX_JSON_BYTES = 2 << 20
MAX_JSON_DEPTH = 64
# The first bytes of a text that stands for a large file in a clone without Git LFS.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
FILE_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def file_statuses(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """The resolved path, size and time of change in nanoseconds of each file: equal ones mean equal contents."""
    found = [(path, path.stat()) for path in (each.resolve() for each in paths)]
    return [(str(path), status.st_size, status.st_mtime_ns) for path, status in found]


def is_present(path: Path) -> bool:
    """Whether there is a file, or a link. A link to a missing file counts, so that reading it is an error."""
    return path.exists() or path.is_symlink()


def require_regular_file(path: Path) -> None:
    """Raise `CheckpointError` unless `path` is a regular file or a symbolic link to one; `OSError` if it is missing.

    Other files are not opened, because opening a named pipe waits for a writer, and reading a device may never end. A
    link to a missing file, and a pointer of Git LFS, are a `CheckpointError` that says how to get the file.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"{path}: is a link to a file that does not exist; download it again") from None
        raise
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: is {FILE_KINDS.get(stat.S_IFMT(mode), 'a special file')}, not a regular file")
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(
                f"{path}: is only a pointer of Git LFS to the file; run `git lfs pull` in its directory"
            )


def read_regular_file(path: Path, *, max_bytes: int) -> bytes:
    """Read a regular file. Raises `CheckpointError` if it is missing, unreadable or larger than `max_bytes`."""
    try:
        require_regular_file(path)
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise CheckpointError(f"{path}: has more than {max_bytes} bytes, the limit for this file")
    return content


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object. Raises `CheckpointError` for anything else, and for numbers that are not finite."""
    text = read_regular_file(path, max_bytes=max_bytes)
    non_finite: list[str] = []

    def parse_float(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            non_finite.append(literal)
        return value

    try:
        content = json.loads(text.decode("utf-8"), parse_float=parse_float, parse_constant=parse_float)
    except RecursionError:
        raise CheckpointError(f"{path}: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    if _depth_exceeds(content, MAX_JSON_DEPTH):
        raise CheckpointError(f"{path}: nested deeper than {MAX_JSON_DEPTH} levels, which is the limit")
    if non_finite:
        key_path = ".".join(_find_non_finite(content) or ["a number"])
        name, literal = printable_name(key_path), printable_name(non_finite[0])
        raise CheckpointError(f"{path}: {name} is {literal}; numbers must be finite")
    return content


def _values(container: Any) -> Iterable[Any]:
    return container.values() if type(container) is dict else container


def _depth_exceeds(content: dict[str, Any], limit: int) -> bool:
    """Whether containers are nested more than `limit` deep: comparing them could exceed Python's recursion limit."""
    level: list[Any] = [content]
    for _ in range(limit):
        level = [value for container in level for value in _values(container) if type(value) in (dict, list)]
        if not level:
            return False
    return True


def _find_non_finite(content: Any) -> list[str] | None:
    """The keys and indices that lead to the first number that is not finite.

    None if there is no such number: a later duplicate of its key has replaced it.
    """
    if type(content) is float:
        return None if math.isfinite(content) else []
    for key, value in content.items() if type(content) is dict else enumerate(content):
        if type(value) in (float, dict, list) and (key_path := _find_non_finite(value)) is not None:
            return [str(key), *key_path]
    return None
