"""Calls of kernels: each at once, or all of a pass recorded and then run again as one.

A recording is to a CPU what a CUDA graph is to a GPU: the pass runs as it always does, and the list of its kernels with
the addresses that they read and write is kept. To run it again with other inputs costs no Python between the kernels.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.kernels import native
from model.kernels.memory import kept

MAX_ARGUMENTS = 18  # as in run.cpp
ALIGNMENT = 64
CHUNK = 1 << 24  # bytes
MAX_PARTS = 32  # of a call: many more than threads, so that one which is held up holds up little

_Call = ctypes.c_int64 * (2 + MAX_ARGUMENTS)


@cache
def runner() -> Callable[[Any, int, int], None] | None:
    """`run` of run.cpp; None where it cannot be had."""
    library = native.load("run")
    if library is None:
        return None
    run = library.run
    run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long], None
    return run


def call(kernel: int, num_parts: int, *arguments: int) -> None:
    """Run a kernel now, divided into at most so many parts, and keep the call where a recording is made."""
    made = _Call(kernel, max(1, min(num_parts, MAX_PARTS)), *arguments)
    recording = _recording.get()
    if recording is not None:
        recording.calls.append(made)
    run = runner()
    assert run is not None, "who has a kernel can run it"
    run(made, 1, torch.get_num_threads())


def is_recording() -> bool:
    """Whether calls are kept to be made again, on other inputs, without the Python between them."""
    return _recording.get() is not None


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for what a kernel writes; in a recording, it stays the recording's."""
    recording = _recording.get()
    return kept.empty(shape, dtype) if recording is None else recording.take(shape, dtype)


def pointer(tensor: Tensor | None) -> int:
    """The address of a tensor as the argument of a kernel; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def bits(number: float) -> int:
    """A number as the argument of a kernel."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


class Memory:
    """What recordings write on the way. They share it, since one runs at a time."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []


class Recording:
    """The calls of one pass. `is_whole` unless it is seen that something was computed that is no call of a kernel."""

    def __init__(self, memory: Memory) -> None:
        self.calls: list[Any] = []
        self.is_whole = True
        self._memory = memory
        self._place = (0, 0)  # chunk, bytes of it that are taken
        self._list: Any = None

    @contextmanager
    def record(self, *, watched: bool = True) -> Iterator[None]:
        """What is called inside is kept. To be `watched` takes long: once is enough for passes that do the same."""
        token = _recording.set(self)
        try:
            with _Watch(self) if watched else nullcontext():
                yield
        finally:
            _recording.reset(token)
        self._list = (_Call * len(self.calls))(*self.calls)

    def replay(self) -> None:
        """All calls again, on what their inputs hold now."""
        run = runner()
        assert run is not None
        run(self._list, len(self.calls), torch.get_num_threads())

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        chunk, taken = self._place
        while chunk < len(self._memory.chunks) and taken + size > len(self._memory.chunks[chunk]):
            chunk, taken = chunk + 1, 0
        if chunk == len(self._memory.chunks):
            was_whole = self.is_whole  # to make memory is seen as a computation, too
            self._memory.chunks.append(torch.empty(max(size, CHUNK), dtype=torch.uint8))
            self.is_whole = was_whole
        self._place = (chunk, taken + -(-size // ALIGNMENT) * ALIGNMENT)
        return self._memory.chunks[chunk][taken : taken + size].view(dtype).view(shape)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Notes whether PyTorch computes anything during a recording: all that it may make are views."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler for it, which takes most of a second of the first request

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        storages = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        results = made if isinstance(made, (list, tuple)) else (made,)
        is_view = all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in storages for x in results)
        if func._schema.is_mutable or not is_view:
            self._recording.is_whole = False
        return made


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)
