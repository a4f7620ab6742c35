"""Read the keys of one architecture in the metadata of a GGUF file, and refuse keys that nothing has read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model.config import is_finite_number
from model.errors import CheckpointError, join_names, printable_name, short_repr


def shortest_decimal(value: float) -> float:
    """The number with the fewest digits that is equal to `value` in float32, such as 1e-05.

    Files store numbers in float32. A number that is not exact in float32 is returned as it is.
    """
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return float(str(rounded)) if float(rounded) == value else float(value)


class MetadataReader:
    """Reads the keys `ARCHITECTURE.*` and remembers which were read; `finish` refuses the other ones.

    Keys are given without the name of the architecture. A method that checks a key raises `CheckpointError` naming the
    key if it is wrong.
    """

    # Keys that do not change the forward pass in any architecture.
    HARMLESS = frozenset({"tensor_data_layout", "vocab_size"})

    def __init__(self, file: Path, metadata: Mapping[str, Any]) -> None:
        self.file = file
        self._metadata = metadata
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise CheckpointError(f"{file}: general.architecture is missing; the file holds no model")
        self.architecture = architecture
        self._prefix = f"{architecture}."
        self._unread = {
            key.removeprefix(self._prefix) for key in metadata if key.startswith(self._prefix)
        } - self.HARMLESS

    def error(self, key: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {printable_name(self._prefix + key)} {reason}")

    def has(self, key: str) -> bool:
        return self._prefix + key in self._metadata

    def take(self, key: str) -> Any:
        """The key's value, or None if the key is missing. A list of equal numbers, one for each layer, is a number."""
        self._unread.discard(key)
        value = self._metadata.get(self._prefix + key)
        if isinstance(value, np.ndarray):
            numbers = np.unique(value)
            if len(numbers) != 1:
                raise self.error(key, "differs between layers, which is not implemented")
            return numbers[0].item()
        return value

    def _take_or(self, key: str, default: float | None) -> Any:
        value = self.take(key)
        if value is None and default is None:
            raise self.error(key, "is missing")
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """The key's value, an integer of at least 0. Without a `default` the key must be present."""
        value = self._take_or(key, default)
        if type(value) is not int or value < 0:
            raise self.error(key, f"is {short_repr(value)}, not an integer of at least 0")
        return value

    def size(self, key: str, high: int, default: int | None = None) -> int:
        """The key's value, an integer from 1 to `high`."""
        value = self.integer(key, default)
        if not 1 <= value <= high:
            raise self.error(key, f"is {value}; it must be from 1 to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The key's value, a finite number of at least 0. Without a `default` the key must be present."""
        value = self._take_or(key, default)
        if not is_finite_number(value) or value < 0:
            raise self.error(key, f"is {short_repr(value)}, not a finite number of at least 0")
        return shortest_decimal(value)

    def text(self, key: str, default: str) -> str:
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"is {short_repr(value)}, not a text")
        return default if value is None else value

    def expect(self, key: str, *allowed: object) -> None:
        """Check that the key is missing or has one of these values. Other values are not implemented."""
        value = self.take(key)
        if value is not None and value not in allowed:
            only = " or ".join(map(repr, allowed))
            raise self.error(key, f"is {short_repr(value)}, which is not implemented (only {only})")

    def ignore(self, *keys: str) -> None:
        """Accept any value of these keys, because they do not change the forward pass of this architecture."""
        self._unread.difference_update(keys)

    def finish(self) -> None:
        """Raise `CheckpointError` for keys that nothing has read. Call it last."""
        if self._unread:
            unknown = join_names((self._prefix + key for key in sorted(self._unread)), limit=20)
            raise CheckpointError(
                f"{self.file}: {unknown}: unknown for this architecture; unknown keys are refused, because they may "
                "change the computation"
            )
