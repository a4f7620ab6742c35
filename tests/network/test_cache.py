"""The key-value cache changes no result: one token at a time = chunks of any sizes = one full pass.

Each equality holds to the rounding of float32 and, nine digits finer, to that of float64, so the remaining differences
are rounding. The values of the networks are about one, and tests here check that positions matter to the networks, so a
wrong offset would be seen.
"""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.network.transformer import Transformer
from tests.tiny import BOTH_DTYPES, CONFIGS, ROUNDING, build, random_ids

LENGTH = 32  # beyond every window, and beyond the 12 positions that the scaled configs were trained on


def in_chunks(model: Transformer, ids: Tensor, borders: Iterable[int]) -> Tensor:
    """The logits of all positions, computed with one cache in chunks that end at `borders`."""
    cache = model.new_cache(ids.shape[1], batch=ids.shape[0])
    ends = [*sorted(borders), ids.shape[1]]
    starts = [0, *ends[:-1]]
    logits = [model(ids[:, start:end], cache) for start, end in zip(starts, ends, strict=True)]
    assert cache.length == ids.shape[1]
    return torch.cat(logits, dim=1)


def assert_equal_but_for_rounding(found: Tensor, expected: Tensor) -> None:
    tolerance = ROUNDING[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", BOTH_DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_one_token_at_a_time_equals_one_full_pass(name: str, dtype: torch.dtype) -> None:
    model = build(CONFIGS[name], dtype=dtype)
    ids = random_ids(67, LENGTH)
    assert_equal_but_for_rounding(in_chunks(model, ids, range(1, LENGTH)), model(ids))


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=12, deadline=None)
@given(borders=st.sets(st.integers(1, LENGTH - 1)), dtype=st.sampled_from(BOTH_DTYPES))
def test_chunks_of_any_sizes_equal_one_full_pass(name: str, borders: set[int], dtype: torch.dtype) -> None:
    model = build(CONFIGS[name], dtype=dtype)
    ids = random_ids(67, LENGTH, batch=2)
    assert_equal_but_for_rounding(in_chunks(model, ids, borders), model(ids))


@pytest.mark.parametrize("name", CONFIGS)
def test_unused_capacity_of_a_cache_changes_no_bit(name: str) -> None:
    """The part of the buffer behind the written tokens is uninitialized memory, and is never read."""
    model = build(CONFIGS[name])
    ids = random_ids(67, 13)  # longer than the training length of the longrope network, so both caches rotate alike
    roomy = model.new_cache(40)
    roomy._buffer.fill_(torch.nan)
    assert torch.equal(model(ids, roomy), model(ids, model.new_cache(13)))


@pytest.mark.parametrize("name", ["llama", "llama with dynamic scaling", "qwen3"])
def test_a_rotary_offset_that_is_wrong_by_one_changes_the_logits(name: str) -> None:
    model = build(CONFIGS[name])
    ids = random_ids(67, LENGTH)
    expected = model(ids)
    cache = model.new_cache(LENGTH)
    model(ids[:, :20], cache)
    rotary = model.rotary
    assert rotary is not None
    model.rotary = lambda positions, *others: rotary(positions - 1, *others)  # type: ignore[assignment]
    assert (model(ids[:, 20:], cache) - expected[:, 20:]).abs().max() > 1e-2


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_depend_on_the_order_of_the_earlier_tokens(name: str) -> None:
    """Otherwise a network that ignores positions would pass every test above.

    The swapped tokens are inside the window of the last token.
    """
    model = build(CONFIGS[name])
    ids = random_ids(67, LENGTH)
    swapped = ids.clone()
    swapped[:, -2], swapped[:, -3] = ids[:, -3], ids[:, -2]
    assert not torch.equal(ids, swapped)
    assert (model(ids)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_no_logit_depends_on_a_later_token(name: str) -> None:
    model = build(CONFIGS[name], dtype=torch.float64)
    ids = random_ids(67, LENGTH)
    changed = ids.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 67
    found, expected = model(changed)[:, :20], model(ids)[:, :20]
    if CONFIGS[name].num_experts:  # PyTorch multiplies the tokens of an expert together, whose number changes
        assert_equal_but_for_rounding(found, expected)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("name", "reach"), [("mistral", 3 * (5 - 1))])
def test_a_window_hides_tokens_that_are_further_back_than_all_layers_together_reach(name: str, reach: int) -> None:
    """Each of the three layers carries information over at most window - 1 positions."""
    model = build(CONFIGS[name])
    ids = random_ids(67, LENGTH)
    last = model(ids)[:, -1]
    hidden, seen = ids.clone(), ids.clone()
    hidden[:, LENGTH - 2 - reach] += 1
    seen[:, LENGTH - 1 - reach] += 1
    assert torch.equal(model(hidden % 67)[:, -1], last)
    assert not torch.equal(model(seen % 67)[:, -1], last)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_beyond_the_capacity_are_refused_and_the_cache_stays_usable(name: str) -> None:
    model = build(CONFIGS[name])
    ids = random_ids(67, 12)
    cache = model.new_cache(10)
    model(ids[:, :8], cache)
    with pytest.raises(ValueError, match="holds 10 tokens, 11 do not fit"):
        model(ids[:, 8:11], cache)
    assert cache.length == 8
    assert_equal_but_for_rounding(model(ids[:, 8:10], cache), model(ids[:, :10])[:, 8:])


@pytest.mark.parametrize("name", ["gpt2", "llama", "2017 block"])
def test_positions_beyond_the_context_are_refused_with_and_without_a_cache(name: str) -> None:
    model = build(CONFIGS[name])
    limit = model.config.max_positions
    ids = random_ids(67, limit + 1)
    assert model(ids[:, :limit]).shape == (1, limit, 67)
    with pytest.raises(ValueError, match=f"{limit + 1} positions, the context holds {limit}"):
        model(ids)
    cache = model.new_cache(limit + 1)
    model(ids[:, :limit], cache)
    with pytest.raises(ValueError, match=f"{limit + 1} positions, the context holds {limit}"):
        model(ids[:, limit:], cache)


def test_a_batch_of_another_size_than_that_of_the_cache_is_refused() -> None:
    """Without the check, one row written to a cache for two rows would be broadcast to both."""
    model = build(CONFIGS["llama"])
    cache = model.new_cache(8, batch=2)
    with pytest.raises(ValueError, match="batch"):
        model(random_ids(67, 4, batch=1), cache)
