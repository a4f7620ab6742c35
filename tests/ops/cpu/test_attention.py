"""Paged attention: it equals the formula, and no result depends on the other sequences of the call."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from model.ops.cpu.cpu_ops import find_backend
from model.ops.cpu.paged_attention import PagedAttention, PagedRead, empty_partials
from model.ops.torch_attention import ScoreRule
from tests.ops.cpu.common import DTYPES, cpu_backend

pytestmark = pytest.mark.usefixtures("instructions")

ATTENTION_SHAPES = [  # H, Hkv, D, tokens per block
    (4, 4, 16, 4),
    (8, 2, 32, 4),
    (6, 1, 64, 16),
    (2, 2, 128, 32),
    (3, 3, 80, 4),
    (4, 1, 256, 16),
]


def paged_kernels(dtype: torch.dtype) -> PagedAttention:
    kernels = cpu_backend(dtype).paged_attention
    assert kernels is not None
    return kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "Hkv", "D", "size"), ATTENTION_SHAPES)
class TestPagedAttention:
    LENGTHS = (1, 3, 4, 17, 150, 16)

    @pytest.fixture
    def attend(self, dtype: torch.dtype, H: int, Hkv: int, D: int, size: int) -> Callable[..., list[torch.Tensor]]:
        """A function that computes attention of the last `num_new` tokens of some sequences before position `end`.

        The blocks of the sequences lie in random order.
        """
        kernels = paged_kernels(dtype)
        self.size = size
        generator = torch.Generator().manual_seed(0)
        num_blocks = sum(-(-n // size) for n in self.LENGTHS)
        order = iter(torch.randperm(num_blocks, generator=generator).tolist())
        self.blocks = [[next(order) for _ in range(-(-n // size))] for n in self.LENGTHS]
        pool = (num_blocks * size, Hkv, D)
        self.keys, self.values = (torch.randn(pool, generator=generator).to(dtype) for _ in range(2))
        self.queries = [torch.randn(n, H, D, generator=generator).to(dtype) for n in self.LENGTHS]

        def run(
            sequences: Sequence[int],
            num_new: int = 1,
            window: int | None = None,
            end: int | None = None,
            softcap: float | None = None,
        ) -> list[torch.Tensor]:
            ends = [min(self.LENGTHS[s], end or self.LENGTHS[s]) for s in sequences]
            counts = [min(num_new, length) for length in ends]
            longest = max(len(self.blocks[s]) for s in sequences)
            read = PagedRead(
                blocks=torch.tensor([self.blocks[s] + [0] * (longest - len(self.blocks[s])) for s in sequences]),
                cu_seqlens=torch.tensor([0, *counts]).cumsum(0),
                start=torch.tensor([length - count for length, count in zip(ends, counts, strict=True)]),
                block_size=size,
            )
            queries = zip(sequences, ends, counts, strict=True)
            q = torch.cat([self.queries[s][length - count : length] for s, length, count in queries])
            z = kernels.attend_blocks(q, self.keys, self.values, read, window, ScoreRule(D**-0.5, softcap))
            return list(z.split(counts))

        return run

    def slots(self, sequence: int) -> list[int]:
        """The indices of the sequence's keys and values in the pool, in the order of its tokens."""
        slots = [block * self.size + offset for block in self.blocks[sequence] for offset in range(self.size)]
        return slots[: self.LENGTHS[sequence]]

    @pytest.mark.parametrize("num_new", [1, 2, 7, 33, 150])
    @pytest.mark.parametrize(
        ("window", "softcap"), [(None, None), (1, None), (5, None), (100, None), (None, 0.8), (5, 0.8)]
    )
    def test_paged_attention_equals_the_formula(
        self, attend: Any, dtype: torch.dtype, window: int | None, num_new: int, softcap: float | None
    ) -> None:
        found = attend(range(len(self.LENGTHS)), num_new, window, softcap=softcap)
        for sequence, z in enumerate(found):
            slots, num_queries = self.slots(sequence), len(z)
            q = self.queries[sequence][-num_queries:].double()
            k, v = self.keys[slots].double(), self.values[slots].double()
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # (S, H, D)
            scores = torch.einsum("thd,shd->hts", q, k) * q.shape[2] ** -0.5
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            own, keys = torch.arange(len(slots) - num_queries, len(slots))[:, None], torch.arange(len(slots))
            visible = (keys <= own) & (keys > own - (window or len(slots)))
            exact = torch.einsum("hts,shd->thd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)
            tolerance = (
                4e-6 if dtype == torch.float32 else 2**-7
            )  # sums are float32; bfloat16 also rounds weights and sums
            torch.testing.assert_close(z.double(), exact, atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 0.8)])
    def test_a_row_depends_neither_on_the_other_rows_nor_on_how_a_prompt_is_divided(
        self, attend: Any, window: int | None, softcap: float | None
    ) -> None:
        everything = attend(range(len(self.LENGTHS)), 150, window, softcap=softcap)
        for sequence, whole in enumerate(everything):
            assert torch.equal(attend([sequence], 150, window, softcap=softcap)[0], whole)
        assert all(map(torch.equal, attend([3, 1], 150, window, softcap=softcap), [everything[3], everything[1]]))
        for end, num_new in ((150, 1), (149, 1), (150, 3), (100, 40), (33, 2), (70, 70)):
            part = attend([4], num_new, window, end, softcap)[0]
            assert torch.equal(part, everything[4][end - num_new : end])

    def test_nan_changes_only_the_rows_that_see_it(self, attend: Any) -> None:
        expected = attend(range(len(self.LENGTHS)), 50)
        self.keys[self.slots(3)[2]] = torch.nan
        self.values[self.slots(4)[120]] = torch.nan
        beyond = [
            block * self.size + 3 for block in (self.blocks[0][0], self.blocks[1][0])
        ]  # slots behind the end of a sequence
        self.keys[beyond] = self.values[beyond] = torch.nan
        found = attend(range(len(self.LENGTHS)), 50)
        assert found[3][2:].isnan().all()
        assert torch.equal(found[3][:2], expected[3][:2])
        assert found[4][20:].isnan().all()  # queries from this token on
        assert torch.equal(found[4][:20], expected[4][:20])
        for other in (0, 1, 2, 5):
            assert torch.equal(found[other], expected[other])

    @pytest.mark.parametrize("key_position", [97, 98, 110, 111])
    @pytest.mark.parametrize("num_new", [1, 2, 50])
    @pytest.mark.parametrize("window", [16, 20])
    def test_a_key_changes_only_the_queries_whose_window_contains_it(
        self, attend: Any, window: int, num_new: int, key_position: int
    ) -> None:
        """Also if the kernel reads values in pairs."""
        ends = range(150 - 50 + num_new, 151)
        expected = [attend([4], num_new, window, end)[0] for end in ends]
        for pool in (self.keys, self.values):
            pool[self.slots(4)[key_position]] = torch.nan
        for end, before in zip(ends, expected, strict=True):
            found = attend([4], num_new, window, end)[0]
            for position, row, row_before in zip(range(end - num_new, end), found, before, strict=True):
                if key_position <= position < key_position + window:
                    assert row.isnan().all()
                else:
                    assert torch.equal(row, row_before)

    def test_a_score_far_above_all_others_selects_its_value_exactly(self, attend: Any) -> None:
        slots = self.slots(4)
        self.keys[slots] = 0
        self.keys[slots[7]] = 200.0
        self.queries[4][:] = 1.0
        for num_new in (1, 40):
            for found in attend([4], num_new)[0]:
                group = found.shape[0] // self.values.shape[1]
                assert torch.equal(found, self.values[slots[7]].repeat_interleave(group, dim=0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 100])
def test_a_long_prompt_has_the_same_results_as_its_tokens_one_by_one(dtype: torch.dtype, window: int | None) -> None:
    """Each thread computes many tiles, which share transposed keys and values in memory that grows with the prompt."""
    kernels, H, D, size, N = paged_kernels(dtype), 8, 16, 16, 1200
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(N, H, D, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(N, H, D, generator=generator).to(dtype)
    blocks = torch.randperm(N // size, generator=generator)[None]
    whole = PagedRead(blocks, torch.tensor([0, N]), torch.tensor([0]), size)
    alone = PagedRead(blocks.expand(N, -1).contiguous(), torch.arange(N + 1), torch.arange(N), size)
    expected = kernels.attend_blocks(q, keys, values, alone, window, ScoreRule(0.25))
    with ThreadPoolExecutor(1) as new_thread:
        found = new_thread.submit(kernels.attend_blocks, q, keys, values, whole, window, ScoreRule(0.25)).result()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("H", "Hkv", "D"), [(6, 2, 64), (3, 3, 80), (10, 1, 32)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (600, 0.8)])
def test_threads_that_share_the_keys_of_a_sequence_change_no_bit(
    dtype: torch.dtype, H: int, Hkv: int, D: int, window: int | None, softcap: float | None
) -> None:
    kernels, size, N, rule = paged_kernels(dtype), 16, 1072, ScoreRule(D**-0.5, softcap)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(N, Hkv, D, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(N, H, D, generator=generator).to(dtype)
    blocks = torch.randperm(N // size, generator=generator)[None]
    whole = PagedRead(blocks, torch.tensor([0, N]), torch.tensor([0]), size)
    expected = kernels.attend_blocks(q, keys, values, whole, window, rule)
    for ends, counts in (([1072], [1]), ([300, 1060, 40, 256, 257], [1] * 5), ([1072, 515, 6], [5, 7, 4])):
        rows = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        partials = empty_partials(len(rows), H, D, N)
        assert partials is not None
        partials.fill_(torch.nan)  # what is read must have been written
        read = PagedRead(
            blocks.expand(len(ends), -1).contiguous(),
            torch.tensor([0, *counts]).cumsum(0),
            torch.tensor(ends) - torch.tensor(counts),
            size,
            partials,
        )
        found = kernels.attend_blocks(q[rows].contiguous(), keys, values, read, window, rule)
        assert not partials.isnan().all()  # keys were indeed shared
        assert torch.equal(found, expected[rows])


def test_pytorch_computes_heads_whose_size_is_not_a_multiple_of_a_vector() -> None:
    backend = find_backend(torch.float32, 20)
    assert backend is None or backend.paged_attention is None
