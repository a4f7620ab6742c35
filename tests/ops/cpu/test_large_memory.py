"""Large memory holds zeros before the system provides its pages, and keeps its values when it does."""

import mmap
from pathlib import Path

import pytest
import torch

from model.ops.cpu import large_memory

SIZE = 1 << 26  # bytes
STATM = Path("/proc/self/statm")  # the second number: resident pages


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not STATM.exists(), reason="this system does not tell the resident memory of a process")
def test_the_pages_of_zeros_are_provided_by_populate_and_their_values_stay() -> None:
    before = resident_bytes()
    tensor = large_memory.zeros((SIZE // 4,), torch.float32)
    assert resident_bytes() < before + SIZE // 2
    tensor[7] = 3.0
    large_memory.populate(tensor)
    if resident_bytes() < before + SIZE // 2:
        pytest.skip("this Linux has no MADV_POPULATE_WRITE, so pages are provided at the first write")
    assert tensor[7] == 3.0
    assert tensor.count_nonzero() == 1


def test_a_part_of_a_tensor_can_be_populated() -> None:
    tensor = large_memory.zeros((SIZE,), torch.uint8)
    large_memory.populate(tensor[123:-45])
    large_memory.populate(torch.ones(10))
    assert not tensor.any()
