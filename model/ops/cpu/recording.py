"""Record all kernel calls of a forward pass, and replay them together.

A recording is to a CPU what a CUDA graph is to a GPU. `StepGraph` (`model/engine/step_graph.py`) lets `Recording.run`
compute the forward pass. Meanwhile, `call` (`launch.py`) also appends each kernel call to the recording, with the
addresses that it reads and writes. Later, `StepGraph.replay` writes new inputs to these addresses, and
`Recording.replay` makes the same calls, without any Python between the kernels.
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.ops.cpu.launch import CURRENT, thread_pool, warn_of_missing_threads

Result = TypeVar("Result")
ALIGNMENT = 64  # bytes
CHUNK = 1 << 24  # bytes that a recording's memory grows by, at least


class RecordingMemory:
    """Memory for intermediate results, shared by recordings of which only one runs at a time."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


class Recording:
    """The kernel calls of one forward pass.

    `is_complete` becomes False if PyTorch computes anything during the recording, because a replay would miss that.

    If it `frees`, later tensors get the memory of those that no Python object refers to any more. So kernels may read
    addresses only from their own arguments, not from tables (as those of traces and edits do).
    """

    def __init__(self, memory: RecordingMemory, *, frees: bool = False) -> None:
        self.is_complete = True
        self._memory = memory
        self.frees = frees
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # parts of the memory, by size
        self._taken: list[int] = []  # bytes of each chunk
        self._calls: list[tuple[int, int, bytes]] = []  # kernel, num_tasks, arguments
        self._call_list = _CallList([])

    def run(self, compute: Callable[[], Result]) -> Result:
        """Compute, record all kernel calls, and look for computations by PyTorch."""
        token = CURRENT.set(self)
        try:
            with _ComputationWatcher(self):
                result = compute()
        finally:
            CURRENT.reset(token)
        self._call_list = _CallList(self._calls)
        self._calls.clear()
        return result

    def keep(self, logits: Tensor) -> Tensor:
        """The logits (N, V) where they are: in the memory of all recordings."""
        return logits

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
        size = -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        # The watcher need not see these operations. This saves three quarters of the time that it costs.
        with torch._C._DisableTorchDispatch():
            part = self._free[size].pop() if self._free[size] else self._take(size)
            if self.frees:
                lent = part.numpy()  # lives as long as the memory of the tensor is shared
                finalize(lent, self._free[size].append, part).atexit = False
                part = torch.from_numpy(lent)
            return part[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def _take(self, size: int) -> Tensor:
        """The next `size` bytes of the first chunk that has so many left, or of a new one."""
        chunks = self._memory.chunks
        self._taken += [0] * (len(chunks) - len(self._taken))
        fitting = (i for i, chunk in enumerate(chunks) if self._taken[i] + size <= len(chunk))
        index = next(fitting, len(chunks))
        if index == len(chunks):
            chunks.append(torch.empty(max(size, CHUNK), dtype=torch.uint8))
            self._taken.append(0)
        self._taken[index] += size
        return chunks[index][self._taken[index] - size : self._taken[index]]


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
