"""Draws by our kernels: the largest of logits and Gumbel noise; what top-k, top-p and min-p leave of many tokens."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from model import sampling
from model.operations import Draw
from tests.kernels.common import DTYPES, native_operations

pytestmark = pytest.mark.usefixtures("instructions")


def gumbel(key: int, size: int) -> list[float]:
    """What `sampling.cpp` calls noise, from the numbers that PyTorch's draws use."""
    return [-math.log(-math.log(uniform)) for uniform in sampling.uniforms(key, size).tolist()]


def draw_of(row: int = 0, *, seed: int, num_drawn: int = 1, **params: Any) -> Draw:
    asked = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    return Draw(row, **asked, key=sampling.key_of(seed, num_drawn))


@pytest.mark.parametrize("dtype", DTYPES)
class TestDraw:
    @pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
    def test_it_is_the_largest_of_logits_and_their_noise(self, dtype: torch.dtype, temperature: float) -> None:
        logits = (3 * torch.randn(3, 203, generator=torch.Generator().manual_seed(0))).to(dtype)
        seeds = [0, 5, 2**32 - 1, 2**32, 2**63 - 1]
        draws = [
            draw_of(row, seed=seed, num_drawn=num_drawn, temperature=temperature)
            for row in (2, 0, 1)
            for seed in seeds
            for num_drawn in (1, 2, 2**32 + 1)
        ]
        found = native_operations(dtype).draw(logits, draws)
        assert found == native_operations(dtype).draw(logits.float(), draws), "beside a row that penalties changed"
        for draw, token_id in zip(draws, found or [], strict=True):
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
    @pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
    def test_it_keeps_of_many_tokens_what_pytorchs_keeps(
        self, dtype: torch.dtype, spread: float, params: dict[str, Any]
    ) -> None:
        logits = (spread * torch.randn(1, 50257, generator=torch.Generator().manual_seed(1))).to(dtype)
        draws = [draw_of(seed=seed, **params) for seed in range(300)]
        scaled = (logits.float() - logits.float().amax()) / draws[0].temperature
        kept = sampling._narrow(scaled.softmax(-1), draws[:1])[0] > 0
        found = native_operations(dtype).draw(logits, draws) or []
        assert len(found) == 300
        assert kept[found].all()
        chances = scaled[0].masked_fill(~kept, -torch.inf).softmax(-1)
        assert set((300 * chances > 15).nonzero()[:, 0].tolist()) <= set(found)
        if spread == 0:  # equal ones stay together
            assert len(set(found)) > 270

    def test_all_of_many_equal_tokens_are_drawn_alike_often(self, dtype: torch.dtype) -> None:
        V, rows, steps = 300, 100, 300
        logits = torch.zeros(1, V, dtype=dtype)
        operations = native_operations(dtype)
        counts: Counter[int] = Counter()
        for step in range(steps):
            counts.update(operations.draw(logits, [draw_of(seed=seed, num_drawn=step) for seed in range(rows)]) or [])
        mean = rows * steps / V
        assert sum((counts[i] - mean) ** 2 / mean for i in range(V)) < V + 5 * math.sqrt(2 * V)  # chi squared
        assert max(abs(counts[i] - mean) for i in range(V)) < 6 * math.sqrt(mean)
