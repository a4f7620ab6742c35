"""Call kernels: one at a time, or record all calls of a forward pass and replay them together.

A recording is to a CPU what a CUDA graph is to a GPU. The forward pass runs as usual while its kernel calls are
recorded, with the addresses that they read and write. A replay makes the same calls on new inputs at these addresses,
without any Python between the kernels.
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

from model.ops.cpu import build
from model.ops.cpu.buffer_pool import buffer_pool

MAX_ARGS = 20  # of a kernel: as in thread_pool.cpp
# A call has at most this many tasks, so at most this many threads compute it. With more tasks than threads, a
# suspended thread delays the others less.
MAX_TASKS = 32
ALIGNMENT = 64  # bytes
CHUNK = 1 << 24  # bytes that a recording's memory grows by, at least

_Call = ctypes.c_int64 * (2 + MAX_ARGS)  # the kernel, num_tasks and the arguments: `Call` in thread_pool.cpp
_recording: ContextVar["Recording | None"] = ContextVar("recording", default=None)


@cache
def runner() -> Callable[[Any, int, int], None] | None:
    """The function `run_calls` of thread_pool.cpp; None if the library could not be built."""
    library = build.load("thread_pool")
    if library is None:
        return None
    run_calls = library.run_calls
    run_calls.argtypes, run_calls.restype = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long], None
    return run_calls


def call(kernel: int, num_tasks: int, *args: int) -> None:
    """Run a kernel now, divided into at most `num_tasks` tasks. If a recording is being made, record the call."""
    new_call = _Call(kernel, max(1, min(num_tasks, MAX_TASKS)), *args)
    recording = _recording.get()
    if recording is not None:
        recording.calls.append(new_call)
    run_calls = runner()
    assert run_calls is not None, "a kernel was found, so the thread pool must be there too"
    run_calls(new_call, 1, torch.get_num_threads())


def is_recording() -> bool:
    """Whether the calls made now are recorded."""
    return _recording.get() is not None


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor for the output of a kernel. During a recording, it lies in the recording's memory."""
    recording = _recording.get()
    return buffer_pool.empty(shape, dtype) if recording is None else recording.empty(shape, dtype)


def pointer(tensor: Tensor | None) -> int:
    """The address of a tensor as a kernel argument; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def float_bits(number: float) -> int:
    """The bits of a float64 number as a kernel argument, which kernels read with `Args::real` (kernel.h)."""
    return int(struct.unpack("q", struct.pack("d", number))[0])


class RecordingMemory:
    """Memory for intermediate results, shared by recordings of which only one runs at a time."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []


class Recording:
    """The kernel calls of one forward pass.

    `is_whole` becomes False if PyTorch computes anything during the recording, because a replay would miss that.
    """

    def __init__(self, memory: RecordingMemory) -> None:
        self.calls: list[Any] = []
        self.is_whole = True
        self._memory = memory
        self._position = (0, 0)  # the current chunk, and how many of its bytes are taken
        self._call_list: Any = None

    @contextmanager
    def record(self, *, watched: bool = True) -> Iterator[None]:
        """Record all kernel calls inside of the `with` block.

        `watched`: also look for computations by PyTorch. This is slow; of several passes that compute in the same way,
        it is enough to watch one.
        """
        token = _recording.set(self)
        try:
            with _ComputationWatcher(self) if watched else nullcontext():
                yield
        finally:
            _recording.reset(token)
        self._call_list = (_Call * len(self.calls))(*self.calls)

    def replay(self) -> None:
        """Make all recorded calls again, on the current contents of their inputs."""
        run_calls = runner()
        assert run_calls is not None
        run_calls(self._call_list, len(self.calls), torch.get_num_threads())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in the memory of this recording."""
        size = torch.Size(shape).numel() * dtype.itemsize
        chunk, taken = self._position
        while chunk < len(self._memory.chunks) and taken + size > len(self._memory.chunks[chunk]):
            chunk, taken = chunk + 1, 0
        if chunk == len(self._memory.chunks):
            was_whole = self.is_whole  # the watcher takes the allocation for a computation
            self._memory.chunks.append(torch.empty(max(size, CHUNK), dtype=torch.uint8))
            self.is_whole = was_whole
        self._position = (chunk, taken + -(-size // ALIGNMENT) * ALIGNMENT)
        return self._memory.chunks[chunk][taken : taken + size].view(dtype).view(shape)


class _ComputationWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Marks a recording as not whole if PyTorch does anything but make views of tensors."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # if True, torch imports its compiler, which delays the first request by most of a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        outputs = result if isinstance(result, (list, tuple)) else (result,)
        is_view = all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in storages for x in outputs)
        if func._schema.is_mutable or not is_view:
            self._recording.is_whole = False
        return result
