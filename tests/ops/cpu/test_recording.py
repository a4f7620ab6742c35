"""Recordings: a replay computes with the current inputs, and computations of PyTorch are noticed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from model.ops.cpu import recording as recording_module
from model.ops.cpu.recording import Recording, RecordingMemory
from tests.ops.cpu.common import cpu_backend

ROOT = Path(__file__).resolve().parents[3]


class TestRecording:
    def test_a_replay_computes_with_the_current_inputs(self) -> None:
        operations = cpu_backend(torch.float32).ops
        a, b = torch.ones(5), torch.ones(5)
        recording = Recording(RecordingMemory())
        total = recording.run(lambda: operations.add(operations.add(a, b), b))
        assert recording.is_complete
        assert total.tolist() == [3.0] * 5
        a[:] = torch.arange(5.0)
        recording.replay()
        assert total.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
        assert torch.equal(operations.add(a, b), a + 1)  # a later call is not part of the recording
        recording.replay()
        assert total.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]

    @pytest.mark.parametrize("compute", [lambda x: x * 2, lambda x: x.add_(1), lambda x: x[::2].contiguous()])
    def test_a_computation_by_pytorch_makes_a_recording_incomplete_and_a_view_does_not(
        self, compute: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        operations, a = cpu_backend(torch.float32).ops, torch.ones(6)
        for function, is_complete in ((lambda x: x.view(2, 3).flatten()[2:4], True), (compute, False)):
            recording = Recording(RecordingMemory())
            with torch.inference_mode():
                recording.run(partial(lambda function: function(operations.add(a, a)), function))
            assert recording.is_complete is is_complete

    def test_recordings_share_memory_which_grows_as_needed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recording_module, "CHUNK", 256)
        operations, memory = cpu_backend(torch.float32).ops, RecordingMemory()
        for _ in range(2):
            recording, ones = Recording(memory), [torch.ones(size) for size in (10, 50, 200, 10)]
            tensors: list[torch.Tensor] = recording.run(partial(list, map(operations.add, ones, ones)))
            assert recording.is_complete
            assert [bool((tensor == 2).all()) for tensor in tensors] == [True] * 4
        assert [len(chunk) for chunk in memory.chunks] == [256, 256, 832]

    def test_a_recording_that_frees_uses_memory_again_when_no_view_is_left(self) -> None:
        recording = Recording(RecordingMemory(), frees=True)
        first = recording.empty((8, 4), torch.float32)
        view, address = first[2:], first.data_ptr()
        del first
        assert recording.empty((8, 4), torch.float32).data_ptr() != address
        del view
        assert recording.empty((16, 2), torch.float32).data_ptr() == address
        assert recording.empty((16, 2), torch.bfloat16).data_ptr() not in range(address, address + 128)


@pytest.mark.usefixtures("instructions")
def test_idle_kernel_threads_use_little_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with emulated instructions: an emulation that replaces system calls could keep waiting threads awake.

    A thread of an earlier test may still work for some seconds, so one quiet time after a call is enough.
    """
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ones = torch.ones(1 << 16)

    def idle_seconds() -> float:
        cpu_backend(torch.float32).ops.add(ones, ones)
        before = time.process_time()
        time.sleep(0.5)
        return time.process_time() - before

    assert any(idle_seconds() < 0.25 for _ in range(20))


REFUSED_THREADS = """
import logging, resource, sys
from pathlib import Path
import torch
from model.ops.cpu.cpu_ops import find_backend

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
operations = find_backend(torch.float32, 16).ops
ones = torch.ones(1 << 16)
operations.add(ones, ones)  # allocates what a call needs
torch.get_num_threads = lambda: 4
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (in_use + (1 << 22), hard))  # less than the stack of a thread
for _ in range(3):
    total = operations.add(ones, ones)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert (total == 2).all()
"""


def test_if_the_system_refuses_to_start_a_thread_kernels_run_on_fewer_and_one_warning_says_so() -> None:
    cpu_backend(torch.float32)
    command = [sys.executable, "-c", REFUSED_THREADS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    (warning,) = ended.stdout.splitlines()
    assert "kernels run on 1 of 4 threads" in warning
