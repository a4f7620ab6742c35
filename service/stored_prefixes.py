"""Store the computed blocks of the prefix cache in files, so that they survive a restart and other processes find them.

One thread reads files and one writes them, so that neither the event loop nor a step waits for a disk. A sequence waits
for its own blocks only, and no longer than computing them would about take.
"""

import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import takewhile
from queue import Empty, Full, Queue, SimpleQueue

from model.engine.block_files import BlockFiles
from model.engine.block_pool import BlockPool
from model.engine.cache import PagedCache
from model.engine.prefix_store import StoreCounts

MAX_WAITING = 8192  # blocks that wait to be written; no memory is kept for them
SECONDS_OF_LOAD, SECONDS_OF_BLOCK = 0.2, 0.02  # that a sequence waits at most: in all, and for each block
REFRESH_SECONDS = 5.0  # after which the blocks of other processes are found
TICK_NANOSECONDS = 100_000_000  # more than the clock of a file system needs to show a change
WRITER_NICENESS = 10  # of POSIX systems: steps come first
CLOSE_SECONDS = 3.0  # for which the end of the service waits until everything is written


class FileLoad:
    """The files of `digests`, which are copied to the first of the `blocks` of the cache, one after the other."""

    def __init__(self, digests: Sequence[bytes], blocks: Sequence[int]) -> None:
        self.digests, self.blocks = digests, blocks
        self.num_loaded = 0
        self.has_ended = False  # whether its thread has left it
        self._wants_more = True
        self._deadline = time.perf_counter() + SECONDS_OF_LOAD + SECONDS_OF_BLOCK * len(digests)
        self._lock = threading.Lock()  # held while a block is written to memory, not while a file is read

    @property
    def is_over(self) -> bool:
        return self.has_ended or time.perf_counter() >= self._deadline

    def end(self) -> int:
        with self._lock:
            self._wants_more = False
            return self.num_loaded

    def put(self, content: memoryview, cache: PagedCache) -> bool:
        """Write the next block to the cache, and return whether another one is wanted after it."""
        with self._lock:
            if self._wants_more:
                cache.write_block(self.blocks[self.num_loaded], content)
                self.num_loaded += 1
            return self._wants_more and self.num_loaded < len(self.digests)


class StoredPrefixes:
    """A `PrefixStore` of files. `load`, `note_use` and `wait` are called on the network's thread."""

    def __init__(self, files: BlockFiles, cache: PagedCache, pool: BlockPool) -> None:
        self._files, self._cache, self._pool = files, cache, pool
        self._changed = 0  # when the folder had changed before its blocks were listed
        self._known = set[bytes]()
        self._find_others()
        self._num_read = self._num_written = self._num_skipped = 0
        self._last_load: FileLoad | None = None
        self._loads: SimpleQueue[FileLoad | None] = SimpleQueue()
        self._used: Queue[tuple[bytes, int] | None] = Queue(MAX_WAITING)
        self._load_ended = threading.Event()
        self._reader = threading.Thread(target=self._read, name="read-prefixes", daemon=True)
        self._writer = threading.Thread(target=self._write, name="write-prefixes", daemon=True)
        self._reader.start()
        self._writer.start()

    def load(self, digests: Iterable[bytes], blocks: Sequence[int]) -> FileLoad | None:
        known = list(takewhile(self._known.__contains__, digests))
        # After its time, a load has not ended while its thread waits for the disk.
        is_stuck = self._last_load is not None and self._last_load.is_over and not self._last_load.has_ended
        if not known or is_stuck:
            return None
        self._last_load = load = FileLoad(known, blocks)
        self._loads.put(load)
        return load

    def note_use(self, block: int) -> None:
        digest = self._pool.hash_of(block)
        if digest is None:  # another block has the same content
            return
        try:
            self._used.put_nowait((digest, block))
        except Full:
            self._num_skipped += 1

    def wait(self, seconds: float) -> None:
        self._load_ended.wait(seconds)
        self._load_ended.clear()

    def counts(self) -> StoreCounts:
        return StoreCounts(self._num_read, self._num_written, self._num_skipped)

    def close(self) -> None:
        self._loads.put(None)
        try:
            self._used.put(None, timeout=CLOSE_SECONDS)
        except Full:
            return
        self._writer.join(CLOSE_SECONDS)

    def _read(self) -> None:
        """Read one block of each load in turn."""
        while (load := self._loads.get()) is not None:
            digest = load.digests[load.num_loaded]
            content = self._files.read(digest)
            if content is None:
                self._known.discard(digest)
            if content is not None and load.put(content, self._cache):
                self._loads.put(load)
            else:
                self._num_read += load.num_loaded
                load.has_ended = True
                self._load_ended.set()

    def _write(self) -> None:
        if sys.platform == "linux":
            niceness = max(WRITER_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        refreshed = time.perf_counter()
        while True:
            with suppress(Empty):
                used = self._used.get(timeout=REFRESH_SECONDS)
                if used is None:
                    return
                self._store(*used)
            if time.perf_counter() >= refreshed + REFRESH_SECONDS:
                self._find_others()
                refreshed = time.perf_counter()

    def _store(self, digest: bytes, block: int) -> None:
        """Write a block, unless it is stored already. While it is copied, the cache may give it to another sequence."""
        if self._files.touch(digest):
            return
        if self._pool.hash_of(block) is digest:
            content = self._cache.read_block(block)
            if self._pool.hash_of(block) is digest and self._files.write(digest, content):
                self._known.add(digest)
                self._num_written += 1
                return
        self._num_skipped += 1

    def _find_others(self) -> None:
        """Find the blocks that this and other processes have stored."""
        with suppress(OSError):
            changed = self._files.changed
            if changed != self._changed:
                self._known = self._files.names()
                # Another file in the same tick of the clock leaves no trace, so a recent change is looked at again.
                self._changed = changed if time.time_ns() > changed + TICK_NANOSECONDS else 0
