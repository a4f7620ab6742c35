"""Run kernels on the thread pool, and allocate their outputs. During `Recording.run`, each call is also recorded."""

import ctypes
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.ops.cpu.buffer_pool import LARGE, buffer_pool
from model.ops.cpu.shared_layout import Argument, Kernel, Layout, load_checked

if TYPE_CHECKING:
    from model.ops.cpu.recording import Recording

logger = logging.getLogger(__name__)

MANY_TASKS = 32  # with more tasks than threads, a suspended thread delays the others less
CURRENT: ContextVar["Recording | None"] = ContextVar("recording", default=None)  # the one that runs (`recording.py`)


@dataclass(frozen=True)
class ThreadPool:
    """The functions of thread_pool.cpp. They release Python's global lock while they run, except for `run_brief_call`.

    They return how many threads computed at most: fewer than `num_threads` if the system refused to start one.
    """

    run_call: Callable[[int, int, bytes, int], int]  # kernel, num_tasks, arguments, num_threads
    run_brief_call: Callable[[int, int, bytes, int], int]  # the same
    run_calls: Callable[[int, int, int], int]  # calls, num_calls, num_threads
    call_layout: Layout  # of each of these calls


@cache
def thread_pool() -> ThreadPool | None:
    """The functions that run kernels; None if the library could not be built."""
    library = load_checked("thread_pool")
    if library is None:
        return None
    run_call, run_calls = library.run_call, library.run_calls
    run_brief_call = ctypes.PyDLL(library._name, handle=library._handle).run_call
    run_call.argtypes = run_brief_call.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_char_p, ctypes.c_long]
    run_calls.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
    run_call.restype = run_brief_call.restype = run_calls.restype = ctypes.c_long
    return ThreadPool(run_call, run_brief_call, run_calls, Layout.read(library, "kernel_call"))


def most_tasks() -> int:
    """The number of tasks into which a call may be divided: at least one for each thread."""
    return max(MANY_TASKS, torch.get_num_threads())


def call(kernel: Kernel, num_tasks: int, table: bytes = b"", /, **arguments: Argument) -> None:
    """Run a kernel now, divided into at most `num_tasks` tasks. If a recording is being made, record the call.

    The C++ declaration of the kernel says what its arguments mean, and whether a table follows them. A tensor is passed
    as its address, and None as null. Raises TypeError if an argument is missing or unknown.
    """
    num_tasks = max(1, min(num_tasks, most_tasks()))
    packed = _record(kernel, num_tasks, table, arguments)
    num_threads = torch.get_num_threads()
    num_available = _pool().run_call(kernel.address, num_tasks, packed, num_threads)
    if num_available < num_threads:
        warn_of_missing_threads(num_available, num_threads)


def call_brief(kernel: Kernel, table: bytes = b"", /, **arguments: Argument) -> None:
    """Like `call` with one task, for microseconds of work: other threads of Python wait.

    If they could run meanwhile, they would keep Python's lock for much longer than the work takes, after each call.
    """
    _pool().run_brief_call(kernel.address, 1, _record(kernel, 1, table, arguments), 1)


def _record(kernel: Kernel, num_tasks: int, table: bytes, arguments: Mapping[str, Argument]) -> bytes:
    """Pack the arguments of a call and the table, and record the call if a recording is being made."""
    packed = kernel.arguments.pack(arguments) + table
    recording = CURRENT.get()
    if recording is not None:
        recording.add_call(kernel.address, num_tasks, packed)
    return packed


def _pool() -> ThreadPool:
    pool = thread_pool()
    assert pool is not None, "a kernel was found, so the thread pool must be there too"
    return pool


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
    return CURRENT.get() is not None


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor for the output of a kernel. During a recording, it lies in the recording's memory."""
    recording = CURRENT.get()
    if recording is not None:
        return recording.empty(shape, dtype)
    is_large = math.prod(shape) * dtype.itemsize >= LARGE
    return buffer_pool.empty(shape, dtype) if is_large else torch.empty(shape, dtype=dtype)
