"""The API keys of the server: that of `--api-key`, and those of `--api-key-file`, which is read again if it changes."""

import hmac
import logging
from collections.abc import Iterable
from pathlib import Path

from service.settings import Settings, read_api_keys

logger = logging.getLogger(__name__)


class ApiKeys:
    """The keys of which requests must send one. If `is_needed` is false, they need none."""

    def __init__(self, settings: Settings) -> None:
        self.is_needed = settings.needs_api_key
        self._own = [] if settings.api_key is None else [settings.api_key.get_secret_value().encode()]
        self._path = settings.api_key_file
        self._version = None if self._path is None else _version_of(self._path)
        self._of_file = [] if self._path is None else _read(self._path)

    def accept(self, given: Iterable[bytes]) -> bool:
        """Whether one of the given keys is a key of the server."""
        keys = [*self._own, *self._keys_of_file()]
        return any(hmac.compare_digest(each, key) for each in given for key in keys)

    def _keys_of_file(self) -> list[bytes]:
        """The keys that the file has now; if it cannot be read any more, those of before, with an error in the log."""
        if self._path is not None and (version := _version_of(self._path)) != self._version:
            self._version = version
            try:
                self._of_file = _read(self._path)
                logger.info("the API keys were read again: %s has %d", self._path, len(self._of_file))
            except ValueError as error:
                logger.error("the API keys of before remain valid: %s", error)
        return self._of_file


def _read(path: Path) -> list[bytes]:
    return [key.encode() for key in read_api_keys(path)]


def _version_of(path: Path) -> tuple[int, ...] | None:
    """Numbers that differ after a change of the file; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
