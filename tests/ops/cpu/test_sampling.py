"""Sampling with our kernels: draws with Gumbel noise, and the tokens that top-k, top-p and min-p keep."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from model.ops.interface import Draw
from model.ops.torch_ops import TORCH
from model.ops.torch_sampling import keep_top, uniforms_of
from model.text.sampling import key_of
from tests.ops.cpu.common import DTYPES, cpu_backend
from tests.tiny import quick

pytestmark = pytest.mark.usefixtures("instructions")


def gumbel(key: int, size: int) -> list[float]:
    """The noise of `sampling.cpp`, from the uniform numbers that sampling with PyTorch uses."""
    return [-math.log(-math.log(uniform)) for uniform in uniforms_of([key], size)[0].tolist()]


def draw_of(row: int = 0, *, seed: int, num_drawn: int = 1, **params: Any) -> Draw:
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    return Draw(row, **settings, key=key_of(seed, num_drawn))


@pytest.mark.parametrize("dtype", DTYPES)
class TestDraw:
    @pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
    def test_a_draw_is_the_largest_sum_of_scaled_logit_and_noise(self, dtype: torch.dtype, temperature: float) -> None:
        logits = (3 * torch.randn(3, 203, generator=torch.Generator().manual_seed(0))).to(dtype)
        seeds = [0, 5, 2**32 - 1, 2**32, 2**63 - 1]
        draws = [
            draw_of(row, seed=seed, num_drawn=num_drawn, temperature=temperature)
            for row in (2, 0, 1)
            for seed in seeds
            for num_drawn in (1, 2, 2**32 + 1)
        ]
        found = cpu_backend(dtype).sampling.draw(logits, draws)
        assert found == cpu_backend(dtype).sampling.draw(logits.float(), draws), (
            "logits are float32 if a row in the batch has penalties"
        )
        for draw, token_id in zip(draws, found, strict=True):
            noise = gumbel(draw.key, 203)
            scores = [x / temperature + noise[i] for i, x in enumerate(logits[draw.row].tolist())]
            assert token_id == max(range(203), key=scores.__getitem__)

    @pytest.mark.parametrize(
        "params",
        [
            {"top_k": 1},
            {"top_k": 50},
            {"top_k": 5000},
            {"top_p": 0.05},
            {"top_p": 0.9},
            {"min_p": 0.5},
            {"min_p": 1e-5},
            {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.7},
            {"top_k": 70_000, "top_p": 0.999},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("spread", quick(2, [0.0, 8.0, 1.0]))
    def test_draws_are_among_the_tokens_that_pytorch_keeps_and_reach_all_likely_ones(
        self, dtype: torch.dtype, spread: float, params: dict[str, Any]
    ) -> None:
        logits = (spread * torch.randn(1, 50257, generator=torch.Generator().manual_seed(1))).to(dtype)
        draws = [draw_of(seed=seed, **params) for seed in range(300)]
        scaled = (logits.float() - logits.float().amax()) / draws[0].temperature
        kept = keep_top(scaled.softmax(-1), draws[:1])[0] > 0
        found = cpu_backend(dtype).sampling.draw(logits, draws)
        assert len(found) == 300
        assert kept[found].all()
        probabilities = scaled[0].masked_fill(~kept, -torch.inf).softmax(-1)
        assert set((300 * probabilities > 15).nonzero()[:, 0].tolist()) <= set(found)
        if spread == 0:  # all tokens are equally likely, and equal tokens are kept together
            assert len(set(found)) > 270

    def test_equally_likely_tokens_are_drawn_equally_often(self, dtype: torch.dtype) -> None:
        V, rows, steps = 300, 100, 300
        logits = torch.zeros(1, V, dtype=dtype)
        operations = cpu_backend(dtype).sampling
        counts: Counter[int] = Counter()
        for step in range(steps):
            counts.update(operations.draw(logits, [draw_of(seed=seed, num_drawn=step) for seed in range(rows)]))
        mean = rows * steps / V
        assert sum((counts[i] - mean) ** 2 / mean for i in range(V)) < V + 5 * math.sqrt(2 * V)  # chi squared
        assert max(abs(counts[i] - mean) for i in range(V)) < 6 * math.sqrt(mean)


def random_masks(num_rows: int, size: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Bitmasks (R, W) with this share of allowed tokens, and the same as (R, V) bool. The last row allows all."""
    generator = torch.Generator().manual_seed(3)
    is_allowed = torch.rand(num_rows, size // 32 * 32 + 32, generator=generator) < share
    is_allowed[:, 40] = True
    is_allowed[-1] = True
    words = (is_allowed.view(num_rows, -1, 32).long() << torch.arange(32)).sum(-1)
    return words.to(torch.int32), is_allowed[:, :size]


@pytest.mark.parametrize("size", quick(3, [41, 64, 203, 50257]))
@pytest.mark.parametrize("dtype", DTYPES)
class TestMasks:
    """Masked sampling is sampling from logits in which all excluded tokens have -inf."""

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
    def test_the_argmax_and_draws_are_those_of_logits_with_excluded_tokens_at_minus_infinity(
        self, dtype: torch.dtype, size: int, share: float
    ) -> None:
        logits = (3 * torch.randn(5, size, generator=torch.Generator().manual_seed(0))).to(dtype)
        masks, is_allowed = random_masks(5, size, share)
        excluded = logits.masked_fill(~is_allowed, -torch.inf)
        ops = cpu_backend(dtype).sampling
        for found in (ops.argmax(logits, masks), TORCH.sampling.argmax(logits, masks)):
            expected = excluded.max(dim=-1)
            assert found.indices.tolist() == expected.indices.tolist()
            assert found.values.tolist() == expected.values.tolist()
        draws = [
            draw_of(row, seed=seed, **params)
            for seed in range(5)
            for row in range(5)
            for params in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2, "temperature": 0.5})
        ]
        token_ids = ops.draw(logits, draws, masks)
        assert token_ids == ops.draw(excluded, draws)
        assert all(is_allowed[draw.row, token_id] for draw, token_id in zip(draws, token_ids, strict=True))
        assert TORCH.sampling.draw(logits, draws, masks) == TORCH.sampling.draw(excluded, draws)

    def test_our_kernels_draw_the_same_allowed_tokens_as_pytorch(self, dtype: torch.dtype, size: int) -> None:
        logits = (3 * torch.randn(5, size, generator=torch.Generator().manual_seed(0))).to(dtype)
        masks, _ = random_masks(5, size, 0.3)
        draws = [draw_of(row, seed=seed) for seed in range(20) for row in range(5)]
        assert cpu_backend(dtype).sampling.draw(logits, draws, masks) == TORCH.sampling.draw(logits, draws, masks)

    def test_a_row_that_allows_all_tokens_gets_the_same_as_without_masks(self, dtype: torch.dtype, size: int) -> None:
        logits = (3 * torch.randn(5, size, generator=torch.Generator().manual_seed(0))).to(dtype)
        masks, _ = random_masks(5, size, 0.1)
        ops = cpu_backend(dtype).sampling
        draws = [draw_of(4, seed=seed, top_k=seed) for seed in range(20)]
        assert ops.draw(logits, draws, masks) == ops.draw(logits, draws)
        assert [part[4] for part in ops.argmax(logits, masks)] == [part[4] for part in ops.argmax(logits)]

    def test_excluded_nan_does_not_count_and_allowed_nan_does(self, dtype: torch.dtype, size: int) -> None:
        logits = torch.zeros(2, size, dtype=dtype)
        logits[:, 7] = torch.nan
        masks = torch.full((2, size // 32 + 1), -1, dtype=torch.int32)
        masks[0, 0] = ~(1 << 7)
        for ops in (cpu_backend(dtype).sampling, TORCH.sampling):
            assert ops.argmax(logits, masks).values.isnan().tolist() == [False, True]
