"""Sampling: the distributions of `transformers`, the penalties of their formulas, and a generator of one's own."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.sampling import Sampler, SamplingParams, token_logprobs

V = 12
NUM_DRAWS = 4000
PROMPT_IDS = (3, 5)


def random_logits(seed: int) -> Tensor:
    return 2 * torch.randn(V, generator=torch.Generator().manual_seed(seed))


def sampler(prompt_ids: Sequence[int] = (), **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), V, prompt_ids)


def sampler_unless_refused(prompt_ids: Sequence[int] = (), **params: Any) -> Sampler | None:
    """None where an error names one of the parameters; any other error is the caller's failure."""
    try:
        return sampler(prompt_ids, **params)
    except ValueError as error:
        if str(error).partition(": ")[0] not in params:
            raise
        return None


def processed(logits: Tensor, seen: Sequence[int], **params: Any) -> Tensor:
    """The logits as `transformers` hands them to its softmax."""
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    processors = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor,
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    scores = logits[None]
    for name, processor in processors.items():
        if name in params:
            scores = processor(params[name])(torch.tensor([seen], dtype=torch.int64), scores)
    return scores[0]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 2.5, "min_p": 0.3},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_distribution_of_transformers(params: dict[str, Any]) -> None:
    logits = random_logits(1)
    expected = processed(logits, [], **params).softmax(0).tolist()
    chooser = sampler(seed=11, **params)
    counts = Counter(chooser.sample(logits) for _ in range(NUM_DRAWS))
    for token_id, chance in enumerate(expected):
        # Five standard deviations of a count, and three more for the rare ones: chance does not explain what is beyond.
        allowed = 5 * math.sqrt(NUM_DRAWS * chance * (1 - chance)) + 3
        assert abs(counts[token_id] - NUM_DRAWS * chance) <= allowed, token_id


@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, V + 3),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.floats(0.3, 3.0),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_token_is_drawn_that_transformers_cuts_off(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = random_logits(seed)
    params = {"temperature": temperature, "top_p": top_p, "min_p": min_p} | ({"top_k": top_k} if top_k else {})
    scores = processed(logits, [], **params)
    kept = {i for i in range(V) if scores[i] != -torch.inf}
    chooser = sampler(seed=seed, **params)
    assert {chooser.sample(logits) for _ in range(30)} <= kept


def test_a_repetition_penalty_weakens_what_prompt_and_output_hold_as_transformers_does() -> None:
    for seed in range(20):
        chooser = sampler(PROMPT_IDS, temperature=0.0, repetition_penalty=1.7)
        seen = list(PROMPT_IDS)
        for step in range(8):
            # All below zero every other time: there the penalty multiplies, and weakens all the same.
            logits = random_logits(100 * seed + step) - 8 * (step % 2)
            expected = int(processed(logits, seen, repetition_penalty=1.7).argmax())
            assert chooser.sample(logits) == expected
            seen.append(expected)


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    presence, frequency, bias = 0.4, 0.3, {2: 1.5, 7: -2.0}
    for seed in range(20):
        chooser = sampler(
            PROMPT_IDS, temperature=0.0, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
        )
        counts: Counter[int] = Counter()
        for step in range(10):
            logits = random_logits(100 * seed + step // 5)
            expected = max(
                range(V),
                key=lambda i: logits[i].item() + bias.get(i, 0) - presence * (counts[i] > 0) - frequency * counts[i],
            )
            assert chooser.sample(logits) == expected
            counts[expected] += 1


def test_penalties_come_before_temperature() -> None:
    """A cold draw sees a penalty of 1 as one of 1/T: enough to change the likeliest token of a near tie."""
    logits = torch.full((V,), -100.0)
    logits[0], logits[1] = 5.0, 4.5
    chooser = sampler(seed=1, temperature=0.01, presence_penalty=1.0)
    assert [chooser.sample(logits) for _ in range(4)] == [0, 1, 0, 0]


def test_a_seed_repeats_a_sequence_whatever_others_draw_in_between() -> None:
    logits = torch.zeros(V)
    alone = sampler(seed=5)
    expected = [alone.sample(logits) for _ in range(20)]
    first, other = sampler(seed=5), sampler(seed=6)
    torch.manual_seed(0)
    pairs = [(first.sample(logits), other.sample(logits), torch.rand(1)) for _ in range(20)]
    assert [pair[0] for pair in pairs] == expected
    assert [pair[1] for pair in pairs] != expected
    unseeded = [[chooser.sample(logits) for _ in range(20)] for chooser in (sampler(), sampler())]
    assert unseeded[0] != unseeded[1]


def test_temperature_zero_is_argmax_and_the_first_of_equals() -> None:
    logits = random_logits(3)
    assert sampler(temperature=0.0, top_k=3, top_p=0.5, seed=1).sample(logits) == int(logits.argmax())
    assert sampler(temperature=0.0).sample(torch.tensor([0.0] * 4 + [1.0] * 8)) == 4


EXTREMES: dict[str, list[float]] = {
    "temperature": [0.0, 5e-324, 1e-300, 1e-46, 1e-40, 1e-6, 1e308],
    "top_p": [5e-324, 1e-10, 1.0],
    "presence_penalty": [-1e308, -1e38, 0.0, 1e38, 1e308],
    "frequency_penalty": [-1e308, 0.0, 1e308],
    "repetition_penalty": [5e-324, 1e-40, 1.0, 1e40, 1e308],
}


@pytest.mark.parametrize("pair", list(itertools.combinations(EXTREMES, 2)), ids=" and ".join)
def test_finite_parameters_always_choose_a_token_or_are_refused_by_name(pair: tuple[str, str]) -> None:
    for values in itertools.product(*(EXTREMES[name] for name in pair)):
        given_params = dict(zip(pair, values, strict=True))
        chooser = sampler_unless_refused(PROMPT_IDS, seed=1, **given_params)
        for step in range(4 if chooser is not None else 0):
            assert 0 <= chooser.sample(random_logits(step)) < V, given_params


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bias",
    [{1: 1e308}, {1: 1e308, 2: 1e308}, {1: -1e308}, dict.fromkeys(range(V), -1e308), {1: 3.4e38}],
    ids=["one", "two", "negative", "all negative", "near the largest"],
)
def test_a_finite_bias_always_chooses_a_token_or_is_refused_by_name(temperature: float, bias: dict[int, float]) -> None:
    chooser = sampler_unless_refused(seed=1, temperature=temperature, logit_bias=bias)
    assert chooser is None or 0 <= chooser.sample(random_logits(1)) < V


def test_a_tiny_temperature_is_greedy() -> None:
    for temperature in (1e-6, 1e-30, 1e-40, 1e-300, 5e-324):
        for seed in range(5):
            logits = random_logits(seed)
            assert sampler(seed=seed, temperature=temperature).sample(logits) == int(logits.argmax())


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(ValueError, match="not numbers"):
        sampler().sample(torch.full((V,), torch.nan))
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="not numbers"):
            sampler(temperature=0.0).sample(torch.tensor([0.0] * (V - 1) + [wrong]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"seed": 2**63},
        {"temperature": math.nan},
        {"top_p": math.nan},
        {"repetition_penalty": math.nan},
    ],
    ids=str,
)
def test_a_parameter_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: "):
        SamplingParams(**wrong)


def test_logprobs_are_a_log_softmax_of_the_unchanged_logits() -> None:
    logits = random_logits(4)
    found = token_logprobs(logits, 6, 3)
    expected = logits.log_softmax(0)
    assert found.chosen == pytest.approx(expected[6].item())
    top = expected.topk(3)
    assert [token_id for token_id, _ in found.top] == top.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(top.values.tolist())
    assert len(token_logprobs(logits, 0, 50).top) == V
    assert token_logprobs(logits, 0, 0).top == []
