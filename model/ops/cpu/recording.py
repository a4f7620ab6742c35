"""Call kernels: one at a time, or record all calls of a forward pass and replay them together.

A recording is to a CPU what a CUDA graph is to a GPU. The forward pass runs as usual while its kernel calls are
recorded, with the addresses that they read and write. A replay makes the same calls on new inputs at these addresses,
without any Python between the kernels.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.ops.cpu.buffer_pool import buffer_pool
from model.ops.cpu.shared_layout import Kernel, Layout, load_checked

logger = logging.getLogger(__name__)

# A call has at most this many tasks, so at most this many threads compute it. With more tasks than threads, a
# suspended thread delays the others less.
MAX_TASKS = 32
ALIGNMENT = 64  # bytes
CHUNK = 1 << 24  # bytes that a recording's memory grows by, at least

_recording: ContextVar["Recording | None"] = ContextVar("recording", default=None)


@dataclass(frozen=True)
class ThreadPool:
    """The functions of thread_pool.cpp. They release Python's global lock while they run.

    They return how many threads computed at most: fewer than `num_threads` if the system refused to start one.
    """

    run_call: Callable[[int, int, bytes, int], int]  # kernel, num_tasks, arguments, num_threads
    run_calls: Callable[[int, int, int], int]  # calls, num_calls, num_threads
    call_layout: Layout  # of each of these calls


@cache
def thread_pool() -> ThreadPool | None:
    """The functions that run kernels; None if the library could not be built."""
    library = load_checked("thread_pool")
    if library is None:
        return None
    run_call, run_calls = library.run_call, library.run_calls
    run_call.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_char_p, ctypes.c_long]
    run_calls.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
    run_call.restype = run_calls.restype = ctypes.c_long
    return ThreadPool(run_call, run_calls, Layout.read(library, "kernel_call"))


def call(kernel: Kernel, num_tasks: int, /, **arguments: int | float) -> None:
    """Run a kernel now, divided into at most `num_tasks` tasks. If a recording is being made, record the call.

    The C++ declaration of the kernel says what its arguments mean. Raises TypeError if one is missing or unknown.
    """
    packed = kernel.arguments.pack(arguments)
    num_tasks = max(1, min(num_tasks, MAX_TASKS))
    recording = _recording.get()
    if recording is not None:
        recording.add_call(kernel.address, num_tasks, packed)
    pool = thread_pool()
    assert pool is not None, "a kernel was found, so the thread pool must be there too"
    num_threads = torch.get_num_threads()
    num_available = pool.run_call(kernel.address, num_tasks, packed, num_threads)
    if num_available < num_threads:
        warn_of_missing_threads(num_available, num_threads)


@cache
def warn_of_missing_threads(num_available: int, num_threads: int) -> None:
    """Log, once, that the system refused to start threads."""
    logger.warning(
        "the system refused to start a thread, so kernels run on %d of %d threads; allow the process more threads "
        "(for example by the limit of PIDs of its container) or ask for fewer with --threads",
        num_available,
        num_threads,
    )


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


class RecordingMemory:
    """Memory for intermediate results, shared by recordings of which only one runs at a time."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []


class Recording:
    """The kernel calls of one forward pass.

    `is_complete` becomes False if PyTorch computes anything during the recording, because a replay would miss that.
    """

    def __init__(self, memory: RecordingMemory) -> None:
        self.is_complete = True
        self._memory = memory
        self._position = (0, 0)  # the current chunk, and how many of its bytes are taken
        self._calls: list[tuple[int, int, bytes]] = []  # kernel, num_tasks, arguments
        self._call_list = _CallList([])

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record all kernel calls inside of the `with` block, and look for computations by PyTorch."""
        token = _recording.set(self)
        try:
            with _ComputationWatcher(self):
                yield
        finally:
            _recording.reset(token)
        self._call_list = _CallList(self._calls)

    def add_call(self, kernel: int, num_tasks: int, arguments: bytes) -> None:
        """Record a call: the kernel's address, and the struct of its arguments."""
        self._calls.append((kernel, num_tasks, arguments))

    def replay(self) -> None:
        """Make all recorded calls again, on the current contents of their inputs."""
        pool = thread_pool()
        assert pool is not None
        num_threads = torch.get_num_threads()
        num_available = pool.run_calls(self._call_list.address, self._call_list.num_calls, num_threads)
        if num_available < num_threads:
            warn_of_missing_threads(num_available, num_threads)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in the memory of this recording."""
        size = torch.Size(shape).numel() * dtype.itemsize
        chunk, taken = self._position
        while chunk < len(self._memory.chunks) and taken + size > len(self._memory.chunks[chunk]):
            chunk, taken = chunk + 1, 0
        # The watcher need not see these operations. This saves three quarters of the time that it costs.
        with torch._C._DisableTorchDispatch():
            if chunk == len(self._memory.chunks):
                self._memory.chunks.append(torch.empty(max(size, CHUNK), dtype=torch.uint8))
            self._position = (chunk, taken + -(-size // ALIGNMENT) * ALIGNMENT)
            return self._memory.chunks[chunk][taken : taken + size].view(dtype).view(shape)


class _CallList:
    """Calls as thread_pool.cpp reads them: an array of `KernelCall`, and the arguments of all calls."""

    def __init__(self, calls: Sequence[tuple[int, int, bytes]]) -> None:
        self._arguments = ctypes.create_string_buffer(b"".join(arguments for _, _, arguments in calls))
        position, pool = ctypes.addressof(self._arguments), thread_pool()
        packed = bytearray()
        for kernel, num_tasks, arguments in calls:
            assert pool is not None
            packed += pool.call_layout.pack({"kernel": kernel, "num_tasks": num_tasks, "arguments": position})
            position += len(arguments)
        self._calls = ctypes.create_string_buffer(bytes(packed))
        self.address, self.num_calls = ctypes.addressof(self._calls), len(calls)


_aten: Any = torch.ops.aten
# Operations that always return views: for these, the watcher need not compare addresses.
VIEWS = frozenset(
    (
        _aten.view.default,
        _aten.view.dtype,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.as_strided.default,
        _aten.unsqueeze.default,
        _aten.transpose.int,
        _aten.split_with_sizes.default,
        _aten.detach.default,
    )
)


class _ComputationWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Marks a recording as incomplete if PyTorch does anything but make views of tensors."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # if True, torch imports its compiler, which delays the first request by most of a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in VIEWS:
            return result
        storages = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        outputs = result if isinstance(result, (list, tuple)) else (result,)
        is_view = all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in storages for x in outputs)
        if func._schema.is_mutable or not is_view:
            self._recording.is_complete = False
        return result
