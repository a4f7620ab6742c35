import threading

import pytest
import torch

from model.kernels import memory
from model.kernels.memory import LARGE, Kept

NUMBERS = LARGE // 4


def test_memory_of_a_large_tensor_is_used_again_when_nothing_shares_it() -> None:
    kept = Kept()
    first = kept.empty((2, NUMBERS), torch.float32)
    address, part = first.data_ptr(), first[1, 5:].view(torch.int32)
    del first
    assert kept.num_idle_bytes == 0
    others = [kept.empty((2, NUMBERS), torch.float32).fill_(1.0) for _ in range(2)]
    part.fill_(7)
    assert all(bool((other == 1.0).all()) for other in others)
    del others, part
    assert kept.num_idle_bytes == 3 * 2 * LARGE
    again = [kept.empty((NUMBERS, 3), torch.bfloat16) for _ in range(3)]
    assert address in [tensor.data_ptr() for tensor in again]
    assert kept.num_idle_bytes == 0
    assert [(tensor.shape, tensor.dtype) for tensor in again] == [((NUMBERS, 3), torch.bfloat16)] * 3


def test_what_does_not_fit_is_made_anew() -> None:
    kept = Kept()
    kept.empty((4 * NUMBERS,), torch.float32)
    assert kept.num_idle_bytes == 4 * LARGE
    larger, smaller = kept.empty((4 * NUMBERS + 1,), torch.float32), kept.empty((2 * NUMBERS - 1,), torch.float32)
    assert kept.num_idle_bytes == 4 * LARGE
    assert (larger.numel(), smaller.numel()) == (4 * NUMBERS + 1, 2 * NUMBERS - 1)
    kept.empty((NUMBERS - 1,), torch.float32)  # not large
    assert kept.num_idle_bytes == 4 * LARGE


def test_what_lies_idle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_IDLE", 3 * LARGE)
    kept = Kept()
    tensors = [kept.empty((NUMBERS,), torch.float32) for _ in range(5)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    freeing = threading.Thread(target=tensors.clear)
    freeing.start()
    freeing.join()
    assert kept.num_idle_bytes == 3 * LARGE
    kept.empty((4 * NUMBERS,), torch.float32)  # more than is kept: it leaves the others alone
    assert kept.num_idle_bytes == 3 * LARGE
    assert {kept.empty((NUMBERS,), torch.float32).data_ptr()} < set(addresses)
