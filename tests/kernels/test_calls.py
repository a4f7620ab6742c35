"""Recorded calls run again on what their inputs hold; what is no call of a kernel is noticed."""

import time
from collections.abc import Callable

import pytest
import torch

from model.kernels import calls
from model.kernels.calls import Memory, Recording
from tests.kernels.common import native_operations


class TestRecording:
    def test_what_was_recorded_runs_again_on_what_its_inputs_hold(self) -> None:
        operations = native_operations(torch.float32)
        a, b = torch.ones(5), torch.ones(5)
        recording = Recording(Memory())
        with recording.record():
            total = operations.add(operations.add(a, b), b)
        assert recording.is_whole
        assert total.tolist() == [3.0] * 5
        a[:] = torch.arange(5.0)
        recording.replay()
        assert total.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
        assert torch.equal(operations.add(a, b), a + 1)  # what is called afterwards is no part of it
        recording.replay()
        assert total.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]

    @pytest.mark.parametrize("compute", [lambda x: x * 2, lambda x: x.add_(1), lambda x: x[::2].contiguous()])
    def test_what_pytorch_computes_is_noticed(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        operations, a = native_operations(torch.float32), torch.ones(6)
        for made, is_whole in ((lambda x: x.view(2, 3).flatten()[2:4], True), (compute, False)):
            recording = Recording(Memory())
            with torch.inference_mode(), recording.record():
                made(operations.add(a, a))
            assert recording.is_whole is is_whole

    def test_recordings_share_memory_and_grow_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls, "CHUNK", 256)
        operations, memory = native_operations(torch.float32), Memory()
        for _ in range(2):
            recording, ones = Recording(memory), [torch.ones(size) for size in (10, 50, 200, 10)]
            with recording.record():
                tensors = [operations.add(x, x) for x in ones]
            assert recording.is_whole
            assert [bool((tensor == 2).all()) for tensor in tensors] == [True] * 4
        assert [len(chunk) for chunk in memory.chunks] == [256, 256, 800, 256]


@pytest.mark.usefixtures("instructions")
def test_idle_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with emulated instructions: an emulation that replaced system calls would keep waiting threads awake."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    ones = torch.ones(1 << 16)
    native_operations(torch.float32).add(ones, ones)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.25
