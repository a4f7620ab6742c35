"""Files of blocks of keys and values: one for each block, named by its hash, and checked when it is read.

Processes can share a directory, because a file appears whole and never changes: it is written under another name and
then renamed. No locks are needed. If the files take more than the limit, those that were used longest ago are deleted.
"""

import hashlib
import logging
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from model.errors import InvalidField

logger = logging.getLogger(__name__)
NETWORK = re.compile(r"[0-9a-f]{32}")  # the folder of the blocks of one network
BLOCK = re.compile(r"([0-9a-f]{64})(\.[0-9a-f]+)?")  # a block; the ending is that of an unfinished file
DIGEST_BYTES = 32
FREE_PART = 16  # when the limit is reached, one of so many parts of it is freed: looking at all files takes time


class BlockFiles:
    """The blocks of `block_bytes` each of the network `identity`, below a `directory` that may hold other networks too.

    All files together take at most `max_bytes`; of several processes, each may exceed it by a sixteenth.
    """

    def __init__(self, directory: Path, identity: bytes, block_bytes: int, max_bytes: int) -> None:
        """Raises `InvalidField` if nothing can be written there, or if no block fits."""
        self._file_bytes = DIGEST_BYTES + block_bytes
        if max_bytes < self._file_bytes:
            reason = f"{max_bytes} bytes are too few: one block of keys and values takes {self._file_bytes}"
            raise InvalidField("prefix_cache_bytes", reason)
        self._directory, self._max_bytes = directory.expanduser(), max_bytes
        self._folder = self._directory / identity.hex()[:32]
        self._room = 0  # bytes that can be written before the files are counted again
        self._has_failed = False  # whether the last block could not be written
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(0, "no permission")
        except OSError as error:
            reason = f"{directory} cannot be used ({error.strerror}); name a directory that the service may write"
            raise InvalidField("prefix_cache_directory", reason) from error

    @property
    def changed(self) -> int:
        """When a block was added or removed, in nanoseconds."""
        return self._folder.stat().st_mtime_ns

    def names(self) -> set[bytes]:
        """The hashes of all blocks of this network."""
        found = [BLOCK.fullmatch(name) for name in os.listdir(self._folder)]
        return {bytes.fromhex(each[1]) for each in found if each is not None and each[2] is None}

    def touch(self, digest: bytes) -> bool:
        """Note that a block is used now, and return whether there is one."""
        try:
            os.utime(self._folder / digest.hex())
        except OSError:
            return False
        return True

    def read(self, digest: bytes) -> memoryview | None:
        """The content of a block; None if there is none, or if it is damaged: then it is deleted, with a warning."""
        path = self._folder / digest.hex()
        try:
            with path.open("rb") as file:
                content = file.read(self._file_bytes + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read, so its tokens are computed: %s", path, error)
            return None
        block = memoryview(content)[DIGEST_BYTES:]
        if len(content) != self._file_bytes or content[:DIGEST_BYTES] != _checksum(digest, block):
            logger.warning("%s is damaged, so its tokens are computed, and it is deleted", path)
            with suppress(OSError):
                path.unlink()
            return None
        self.touch(digest)
        return block

    def write(self, digest: bytes, block: bytes) -> bool:
        """Write a block, and return whether that was possible. Only one thread may call this."""
        path = self._folder / digest.hex()
        unfinished = path.with_suffix(f".{secrets.token_hex(4)}")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)  # somebody may have emptied the directory
            if self._room < self._file_bytes:
                self._room = self._make_room()
            with open(unfinished, "xb", opener=_open_private) as file:
                file.write(_checksum(digest, block))
                file.write(block)
            unfinished.replace(path)
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s cannot be written, so prefixes are not stored at present: %s", path, error)
            self._has_failed = True
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            return False
        self._room -= self._file_bytes
        self._has_failed = False
        return True

    def _make_room(self) -> int:
        """Delete the files that were used longest ago, until a part of the limit is free. Returns the bytes of this
        part."""
        files = []
        for folder in self._directory.iterdir():
            if NETWORK.fullmatch(folder.name):
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if BLOCK.fullmatch(entry.name):
                            with suppress(FileNotFoundError):  # another process has deleted it
                                status = entry.stat()
                                files.append((status.st_mtime_ns, status.st_size, entry.path))
        wanted = max(self._max_bytes // FREE_PART, self._file_bytes)
        excess = sum(size for _, size, _ in files) + wanted - self._max_bytes
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            Path(path).unlink(missing_ok=True)
            excess -= size
        return wanted


def _checksum(digest: bytes, block: bytes | memoryview) -> bytes:
    """Also of the name, so that a file with the name of another one is damaged."""
    checksum = hashlib.sha256(digest)
    checksum.update(block)
    return checksum.digest()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
