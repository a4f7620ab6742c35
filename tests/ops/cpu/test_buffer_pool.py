"""The pool of large buffers: memory is used again when nothing shares it, and idle memory is bounded."""

import threading

import pytest
import torch

from model.ops.cpu import buffer_pool
from model.ops.cpu.buffer_pool import LARGE, BufferPool
from model.ops.cpu.launch import empty

NUMBERS = LARGE // 4


def test_the_memory_of_a_large_tensor_is_used_again_when_no_tensor_shares_it() -> None:
    pool = BufferPool()
    first = pool.empty((2, NUMBERS), torch.float32)
    address, part = first.data_ptr(), first[1, 5:].view(torch.int32)
    del first
    assert pool.num_idle_bytes == 0
    others = [pool.empty((2, NUMBERS), torch.float32).fill_(1.0) for _ in range(2)]
    part.fill_(7)
    assert all(bool((other == 1.0).all()) for other in others)
    del others, part
    assert pool.num_idle_bytes == 3 * 2 * LARGE
    again = [pool.empty((NUMBERS, 3), torch.bfloat16) for _ in range(3)]
    assert address in [tensor.data_ptr() for tensor in again]
    assert pool.num_idle_bytes == 0
    assert [(tensor.shape, tensor.dtype) for tensor in again] == [((NUMBERS, 3), torch.bfloat16)] * 3


def test_a_tensor_that_fits_no_idle_buffer_gets_new_memory() -> None:
    pool = BufferPool()
    pool.empty((4 * NUMBERS,), torch.float32)
    assert pool.num_idle_bytes == 4 * LARGE
    larger, smaller = pool.empty((4 * NUMBERS + 1,), torch.float32), pool.empty((2 * NUMBERS - 1,), torch.float32)
    assert pool.num_idle_bytes == 4 * LARGE
    assert (larger.numel(), smaller.numel()) == (4 * NUMBERS + 1, 2 * NUMBERS - 1)


def test_only_outputs_of_kernels_that_are_large_are_from_the_pool() -> None:
    before = buffer_pool.buffer_pool.num_idle_bytes
    empty((NUMBERS - 1,), torch.float32)
    assert buffer_pool.buffer_pool.num_idle_bytes == before
    empty((64 * NUMBERS,), torch.float32)  # as large as all idle buffers may be, so it displaces the others
    assert buffer_pool.buffer_pool.num_idle_bytes == buffer_pool.MAX_IDLE


def test_idle_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "MAX_IDLE", 3 * LARGE)
    pool = BufferPool()
    tensors = [pool.empty((NUMBERS,), torch.float32) for _ in range(5)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    freeing = threading.Thread(target=tensors.clear)
    freeing.start()
    freeing.join()
    assert pool.num_idle_bytes == 3 * LARGE
    pool.empty((4 * NUMBERS,), torch.float32)  # too large to be kept, and it displaces no other buffer
    assert pool.num_idle_bytes == 3 * LARGE
    assert {pool.empty((NUMBERS,), torch.float32).data_ptr()} < set(addresses)
