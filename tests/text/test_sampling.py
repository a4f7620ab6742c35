"""Sampling: the distributions of `transformers`, the formulas of penalties, and noise independent of other requests."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.errors import shortened
from model.ops import torch_sampling
from model.ops.interface import Draw
from model.ops.torch_ops import TORCH, SamplingOps
from model.ops.torch_sampling import keep_top, uniforms_of
from model.text import sampling
from model.text.constraint import TokenMasks
from model.text.sampling import Sampler, SamplingParams, key_of, token_logprobs
from tests.ops.cpu.common import cpu_backend

V = 12
NUM_DRAWS = 4000
PROMPT_IDS = (3, 5)


sampling_ops: list[SamplingOps] = [TORCH.sampling]  # set by the fixture `backend`


@pytest.fixture(autouse=True, scope="module", params=["pytorch", "kernels"])
def backend(request: pytest.FixtureRequest) -> None:
    """Run every test with PyTorch, then with our kernels."""
    sampling_ops[0] = TORCH.sampling if request.param == "pytorch" else cpu_backend(torch.float32).sampling


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> list[int | Exception]:
    return sampling.sample(logits, samplers, sampling_ops[0])


def random_logits(seed: int) -> Tensor:
    return 2 * torch.randn(V, generator=torch.Generator().manual_seed(seed))


def sampler(prompt_ids: Sequence[int] = (), **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), prompt_ids)


def choose(chooser: Sampler, logits: Tensor) -> int:
    """Choose the next token of one sequence, in a batch of one."""
    [token_id] = sample(logits[None], [chooser])
    assert isinstance(token_id, int), token_id
    return token_id


def sampler_unless_refused(prompt_ids: Sequence[int] = (), **params: Any) -> Sampler | None:
    """A sampler, or None if an error names one of the parameters. Other errors are raised."""
    try:
        return sampler(prompt_ids, **params)
    except ValueError as error:
        if str(error).partition(": ")[0] not in params:
            raise
        return None


def processed_by_transformers(logits: Tensor, seen: Sequence[int], **params: Any) -> Tensor:
    """The logits after the processors of `transformers`, before the softmax."""
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
    expected = processed_by_transformers(logits, [], **params).softmax(0).tolist()
    choosers = [sampler(seed=seed, **params) for seed in range(100)]
    counts = Counter(
        itertools.chain.from_iterable(sample(logits.expand(100, V), choosers) for _ in range(NUM_DRAWS // 100))
    )
    assert counts.total() == NUM_DRAWS
    for token_id, probability in enumerate(expected):
        # Five standard deviations of a count, plus three for rare tokens. Chance alone practically never exceeds this.
        allowed = 5 * math.sqrt(NUM_DRAWS * probability * (1 - probability)) + 3
        assert abs(counts[token_id] - NUM_DRAWS * probability) <= allowed, token_id


@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(0, V + 3),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.floats(0.3, 3.0),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_token_is_drawn_that_transformers_excludes(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = random_logits(seed)
    params: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    if top_k:
        params["top_k"] = top_k
    scores = processed_by_transformers(logits, [], **params)
    kept = {i for i in range(V) if scores[i] != -torch.inf}
    choosers = [sampler(seed=seed + draw, **params) for draw in range(30)]
    assert set(sample(logits.expand(30, V), choosers)) <= kept


def test_a_repetition_penalty_applies_to_prompt_and_output_as_in_transformers() -> None:
    for seed in range(20):
        chooser = sampler(PROMPT_IDS, temperature=0.0, repetition_penalty=1.7)
        seen = list(PROMPT_IDS)
        for step in range(8):
            # In every other step all logits are negative, so the penalty multiplies instead of dividing.
            logits = random_logits(100 * seed + step) - 8 * (step % 2)
            expected = int(processed_by_transformers(logits, seen, repetition_penalty=1.7).argmax())
            assert choose(chooser, logits) == expected
            seen.append(expected)


def test_presence_and_frequency_penalties_apply_only_to_the_output() -> None:
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
            assert choose(chooser, logits) == expected
            counts[expected] += 1


def test_penalties_count_any_number_of_different_tokens() -> None:
    chooser = sampler([150, 7], temperature=0.0, presence_penalty=1.0, repetition_penalty=2.0)
    logits = torch.linspace(1.0, 0.9, 200)
    others = [token_id for token_id in range(200) if token_id not in (7, 150)]
    assert [choose(chooser, logits) for _ in range(201)] == [*others, 7, 150, 0]


def test_penalties_come_before_temperature() -> None:
    """At temperature T a penalty of 1 counts as 1/T, which is enough to change the most likely of two tokens."""
    logits = torch.full((V,), -100.0)
    logits[0], logits[1] = 5.0, 4.5
    chooser = sampler(seed=1, temperature=0.01, presence_penalty=1.0)
    assert [choose(chooser, logits) for _ in range(4)] == [0, 1, 0, 0]


def test_a_seed_repeats_a_sequence_even_if_others_draw_in_between() -> None:
    logits = torch.zeros(V)
    alone = sampler(seed=5)
    expected = [choose(alone, logits) for _ in range(20)]
    first, other = sampler(seed=5), sampler(seed=6)
    torch.manual_seed(0)
    pairs = [(choose(first, logits), choose(other, logits), torch.rand(1)) for _ in range(20)]
    assert [pair[0] for pair in pairs] == expected
    assert [pair[1] for pair in pairs] != expected
    unseeded = [[choose(chooser, logits) for _ in range(20)] for chooser in (sampler(), sampler())]
    assert unseeded[0] != unseeded[1]


def test_temperature_zero_chooses_the_first_of_the_most_likely_tokens() -> None:
    logits = random_logits(3)
    assert choose(sampler(temperature=0.0, top_k=3, top_p=0.5, seed=1), logits) == int(logits.argmax())
    assert choose(sampler(temperature=0.0), torch.tensor([0.0] * 4 + [1.0] * 8)) == 4


EXTREMES: dict[str, list[float]] = {
    "temperature": [0.0, 5e-324, 1e-300, 1e-46, 1e-40, 1e-6, 1e308],
    "top_p": [5e-324, 1e-10, 1.0],
    "presence_penalty": [-1e308, -1e38, 0.0, 1e38, 1e308],
    "frequency_penalty": [-1e308, 0.0, 1e308],
    "repetition_penalty": [5e-324, 1e-40, 1.0, 1e40, 1e308],
}


@pytest.mark.parametrize("pair", list(itertools.combinations(EXTREMES, 2)), ids=" and ".join)
def test_finite_parameters_always_choose_a_token_or_are_refused_and_named(pair: tuple[str, str]) -> None:
    for values in itertools.product(*(EXTREMES[name] for name in pair)):
        given_params = dict(zip(pair, values, strict=True))
        chooser = sampler_unless_refused(PROMPT_IDS, seed=1, **given_params)
        if chooser is None:
            continue
        for step in range(4):
            assert 0 <= choose(chooser, random_logits(step)) < V, given_params


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bias",
    [{1: 1e308}, {1: 1e308, 2: 1e308}, {1: -1e308}, dict.fromkeys(range(V), -1e308), {1: 3.4e38}],
    ids=["one", "two", "negative", "all negative", "near the largest"],
)
def test_a_finite_bias_always_chooses_a_token_or_is_refused_and_named(
    temperature: float, bias: dict[int, float]
) -> None:
    chooser = sampler_unless_refused(seed=1, temperature=temperature, logit_bias=bias)
    assert chooser is None or 0 <= choose(chooser, random_logits(1)) < V


def test_a_tiny_temperature_is_greedy() -> None:
    for temperature in (1e-6, 1e-30, 1e-40, 1e-300, 5e-324):
        for seed in range(5):
            logits = random_logits(seed)
            assert choose(sampler(seed=seed, temperature=temperature), logits) == int(logits.argmax())


ZEROS = [0.0] * (V - 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "invalid",
    [[math.nan] * V, [*ZEROS, math.nan], [*ZEROS, math.inf], [-math.inf] * V],
    ids=["nan", "one nan", "one inf", "no token left"],
)
def test_invalid_logits_are_an_error_of_their_own_row_only(invalid: list[float], temperature: float) -> None:
    logits = torch.tensor([[*ZEROS, 1.0], invalid, [*ZEROS, 9.0]])
    choosers = [sampler(seed=seed, temperature=temperature) for seed in range(3)]
    first, error, last = sample(logits, choosers)
    assert isinstance(error, ValueError)
    assert "the largest logit is not a finite number" in str(error)
    assert [first, last] == [
        choose(sampler(seed=seed, temperature=temperature), logits[row]) for row, seed in ((0, 0), (2, 2))
    ]


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 3.0, 1e308])
def test_a_token_that_a_processor_excludes_is_never_chosen(temperature: float) -> None:
    def only_3_and_5(tokens: Sequence[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, -torch.inf).index_copy(0, torch.tensor([3, 5]), logits[[3, 5]])

    choosers = [sampler(seed=seed, processors=[only_3_and_5], temperature=temperature) for seed in range(50)]
    chosen = sample(torch.zeros(50, V), choosers)
    assert set(chosen) == ({3} if temperature == 0 else {3, 5})


def test_processors_get_the_tokens_so_far_and_run_in_order_before_the_bias() -> None:
    seen: list[tuple[list[int], list[float]]] = []

    def record(tokens: Sequence[int], logits: Tensor) -> Tensor:
        seen.append((list(tokens), logits.tolist()))
        return logits + 1

    chooser = sampler(PROMPT_IDS, temperature=0.0, processors=[record, record], logit_bias={7: 2.0})
    logits = torch.zeros(V)
    assert [choose(chooser, logits), choose(chooser, logits)] == [7, 7]
    assert [tokens for tokens, _ in seen] == [[3, 5], [3, 5], [3, 5, 7], [3, 5, 7]]
    assert [values for _, values in seen] == [[0.0] * V, [1.0] * V] * 2
    assert logits.tolist() == [0.0] * V


def test_a_processor_that_changes_its_logits_in_place_changes_no_other_row() -> None:
    def overwrite(tokens: Sequence[int], logits: Tensor) -> Tensor:
        return logits.fill_(0.0).index_fill_(0, torch.tensor([4]), 1.0)

    logits = random_logits(1).repeat(2, 1)
    before = logits.clone()
    choosers = [sampler(temperature=0.0, processors=[overwrite]), sampler(temperature=0.0)]
    assert sample(logits, choosers) == [4, int(before[1].argmax())]
    assert torch.equal(logits, before)


PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.2, 1.0, 2.5]), "seed": st.integers(0, 5)},
    optional={
        "top_k": st.integers(1, 15),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.9),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), st.floats(-5, 5), max_size=3),
        "processors": st.sampled_from([(), (lambda tokens, logits: logits.roll(1),), (lambda tokens, logits: None,)]),
    },
)


@given(params=st.lists(PARAMS, min_size=1, max_size=6), prompt_ids=st.lists(st.integers(0, V - 1), max_size=4))
@settings(max_examples=60, deadline=None)
def test_the_tokens_of_a_request_do_not_depend_on_other_requests(
    params: list[dict[str, Any]], prompt_ids: list[int]
) -> None:
    logits = [torch.stack([random_logits(7 * step + row) for row in range(len(params))]) for step in range(4)]
    together = [sampler(prompt_ids, **each) for each in params]
    drawn = [sample(rows, together) for rows in logits]
    for row, each in enumerate(params):
        alone = sampler(prompt_ids, **each)
        expected = [sample(rows[row : row + 1], [alone])[0] for rows in logits]
        assert list(map(str, expected)) == [str(tokens[row]) for tokens in drawn]


@given(
    seed=st.integers(0, 1000),
    num_values=st.integers(2, 40),
    params=st.lists(
        st.fixed_dictionaries(
            {},
            optional={"top_k": st.integers(1, 45), "top_p": st.floats(0.01, 0.999), "min_p": st.floats(0.001, 1.0)},
        ).filter(bool),
        min_size=1,
        max_size=4,
    ),
    num_candidates=st.integers(1, 39),
)
@example(seed=1, num_values=38, params=[{"top_k": 15, "min_p": 0.5, "top_p": 0.5}], num_candidates=12)
@settings(max_examples=200, deadline=None)
def test_keeping_top_tokens_gives_the_same_result_for_any_number_of_candidates(
    seed: int, num_values: int, params: list[dict[str, Any]], num_candidates: int
) -> None:
    """The logits have only `num_values` different values, so that many tokens are equally likely."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(num_values, (len(params), 40), generator=generator) / num_values * 6
    probabilities = logits.softmax(-1)
    draws = [sampler(**each).draw(row) for row, each in enumerate(params)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_sampling, "TOP_CANDIDATES", num_candidates)
        kept = keep_top(probabilities, draws)
        patch.setattr(torch_sampling, "TOP_CANDIDATES", 40)  # all tokens
        assert torch.equal(kept, keep_top(probabilities, draws))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {1, 2, 4, 7}),
        ({"top_k": 4}, {1, 2, 4, 7}),
        ({"top_k": 5}, set(range(V))),
        ({"top_p": 0.5}, {2}),
        ({"top_p": 0.7}, {1, 2, 4, 7}),
        ({"top_p": 0.95}, {1, 2, 4, 7}),
        ({"top_p": 0.99}, set(range(V))),
        ({"min_p": 0.14}, {2}),
        ({"min_p": 0.13}, {1, 2, 4, 7}),
        ({"top_k": 2, "top_p": 0.9}, {1, 2, 4, 7}),
        ({"top_k": 2, "top_p": 0.8}, {2}),
        ({"top_k": 3, "top_p": 0.8}, {1, 2, 4, 7}),
    ],
    ids=str,
)
def test_equally_likely_tokens_are_kept_or_excluded_together(params: dict[str, Any], kept: set[int]) -> None:
    """Probabilities: one of 0.69, three of 0.093, eight of 0.0046. Top-p adds up the tokens that top-k keeps."""
    logits = torch.zeros(V)
    logits[[1, 4, 7]] = 3.0
    logits[2] = 5.0
    probabilities = keep_top(logits.softmax(0)[None], [sampler(**params).draw(0)])
    assert set(probabilities[0].nonzero()[:, 0].tolist()) == kept
    choosers = [sampler(seed=seed, **params | {"temperature": 1.0}) for seed in range(2000)]
    assert set(sample(logits.expand(2000, V), choosers)) == kept


def test_a_draw_is_the_smallest_of_exponential_variables_over_the_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With this method, a small rounding error of the probabilities rarely changes the token. No noise is invalid."""

    def drawn(logits: Tensor, noise: list[float], **params: Any) -> int | Exception:
        monkeypatch.setattr(torch_sampling, "uniforms_of", lambda keys, size, device: torch.tensor([noise]))
        return sampling.sample(logits[None], [sampler(**params)])[0]

    logits = torch.tensor([0.1, 0.2, 0.0, 0.7]).log()
    # Exponential variables -ln u, divided by the probabilities. The last token has 0.69 / 0.7 = 0.99 in all three rows.
    # The first token has 0.69 / 0.1 = 6.9, then 0.105 / 0.1 = 1.05, then 0.05 / 0.1 = 0.5, which is the smallest.
    rows = [[0.5] * 4, [0.9, 0.5, 0.5, 0.5], [0.95, 0.5, 0.5, 0.5]]
    low, high = 2**-24, 1 - 2**-24
    extremes = [[low, low, high, 0.5], [low, high, low, low]]
    assert [drawn(logits, row) for row in (*rows, *extremes)] == [3, 3, 0, 3, 1]
    assert drawn(logits, rows[2], top_k=1) == 3
    for noise in (low, high):
        for params in ({}, {"top_k": 1}, {"top_p": 0.1}, {"temperature": 1e-30}):
            chosen = drawn(torch.tensor([-torch.inf, 1.0, 3.0]), [noise] * 3, **params)
            assert chosen in ({2} if params else {1, 2}), "an excluded token is never drawn"


def test_a_seed_draws_the_same_tokens_with_pytorch_and_with_kernels() -> None:
    logits = 3 * torch.randn(20, 1000, generator=torch.Generator().manual_seed(0))
    cases: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"top_k": 40, "top_p": 0.9}]
    for params in cases:
        choosers = [[sampler(seed=seed, **params) for seed in range(20)] for _ in range(2)]
        for _ in range(5):
            assert sample(logits, choosers[0]) == sampling.sample(logits, choosers[1])


def test_keys_are_unique_and_noise_is_uniform() -> None:
    seeds = (*range(100), *range(2**63 - 100, 2**63))
    keys = {key_of(seed, num_drawn) for seed in seeds for num_drawn in range(100)}
    assert len(keys) == 20_000
    assert max(keys) < 2**64
    noise = uniforms_of([key_of(seed, 1) for seed in range(200)], 5000).double()
    assert noise.min() > 0
    assert noise.max() < 1
    for dim in (0, 1):  # one token in many draws, then all tokens in one draw
        count = noise.shape[dim]
        assert (noise.mean(dim) - 0.5).abs().max() < 6 * (12 * count) ** -0.5
        neighbours = (noise.narrow(dim, 1, count - 1) - 0.5) * (noise.narrow(dim, 0, count - 1) - 0.5)
        assert neighbours.mean(dim).abs().max() < 6 / 12 * count**-0.5
    counts = torch.histc(noise, bins=256, min=0, max=1)
    mean = noise.numel() / 256
    assert ((counts - mean) ** 2 / mean).sum() < 255 + 6 * (2 * 255) ** 0.5


@pytest.mark.parametrize(
    "params",
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
def test_a_parameter_out_of_range_is_named(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(params))}: "):
        SamplingParams(**params)


UNUSUAL_VALUES: list[Any] = [
    *(sign * size for sign in (1, -1) for size in (10**309, 10**5000, 2**64, 2**63, 2**63 - 1, 2**31, 2**31 - 1, 2, 1)),
    *(sign * size for sign in (1.0, -1.0) for size in (math.inf, 1e308, 2.5, 1e-320, 0.0)),
    *(0, math.nan, True, "1", [1]),
]
ALLOWED_RANGES = {
    "temperature": "a number of at least 0",
    "top_k": "an integer between 0 and 2147483647",
    "top_p": "a number above 0 and at most 1",
    "min_p": "a number between 0 and 1",
    "repetition_penalty": "a number between 0.01 and 100",
    "presence_penalty": "a number between -2 and 2",
    "frequency_penalty": "a number between -2 and 2",
    "seed": "an integer between 0 and 9223372036854775807",
    "logit_bias": "a number between -100 and 100",
}


def error_message(params: dict[str, Any]) -> str | None:
    """The message of the error for these parameters, or None if they are valid."""
    try:
        SamplingParams(**params)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("value", UNUSUAL_VALUES, ids=shortened)
@pytest.mark.parametrize("name", ALLOWED_RANGES)
def test_any_value_works_or_is_refused_with_the_range_that_is_allowed(name: str, value: Any) -> None:
    """Also in a batch with another request, where the values of both are in the same tensors."""
    given_params: dict[str, Any] = {"seed": 1, name: {3: value} if name == "logit_bias" else value}
    if (message := error_message(given_params)) is not None:
        assert message.startswith(f"{name}: ")
        assert message.endswith(f" must be {ALLOWED_RANGES[name]}")
        assert len(message) < 200
        return
    alone, *together = (sampler(PROMPT_IDS, **given_params) for _ in range(2))
    together.append(sampler(PROMPT_IDS, seed=2, top_k=3, min_p=0.1, presence_penalty=0.5, logit_bias={1: 0.5}))
    for step in range(3):
        logits = torch.stack([random_logits(step), random_logits(10 + step)])
        chosen = sample(logits, together)
        assert all(isinstance(token_id, int) and 0 <= token_id < V for token_id in chosen), chosen
        assert chosen[0] == choose(alone, logits[0])


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**64, 10**309, 1.0, "1"], ids=shortened)
def test_the_keys_of_a_bias_must_be_token_ids(token_id: Any) -> None:
    with pytest.raises(ValueError, match=r"^logit_bias: .{1,40} must be an integer between 0 and 2147483647$"):
        SamplingParams(logit_bias={token_id: 1.0})


class Broken(Exception):
    """The error of a sampler that fails."""


def with_failing_draw(chooser: Sampler) -> Sampler:
    def draw(row: int) -> None:
        raise Broken

    chooser.draw = draw  # type: ignore[assignment, method-assign]
    return chooser


def with_unpackable_top_k(chooser: Sampler) -> Sampler:
    """No tensor can store this number, which `SamplingParams` would refuse."""
    object.__setattr__(chooser.params, "top_k", 10**309)
    return chooser


def with_bias_beyond_the_vocabulary(chooser: Sampler) -> Sampler:
    chooser.bias = (torch.tensor([V + 5]), torch.tensor([1.0]))
    chooser.changes_logits = True
    return chooser


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        (with_failing_draw, Broken),
        (with_unpackable_top_k, OverflowError),
        (with_bias_beyond_the_vocabulary, IndexError),
    ],
)
@pytest.mark.parametrize("failing_rows", [(1,), (0, 3), (0, 1, 2, 3)], ids=str)
def test_only_the_rows_that_cannot_be_drawn_fail(
    fail: Callable[[Sampler], Sampler], expected: type[Exception], failing_rows: tuple[int, ...]
) -> None:
    params: list[dict[str, Any]] = [
        {"top_k": 5, "presence_penalty": 0.5},
        {"temperature": 0.7, "logit_bias": {2: 1.0}},
        {"temperature": 0.0},
        {"top_p": 0.8, "min_p": 0.01},
    ]
    seeded: list[dict[str, Any]] = [options | {"seed": row} for row, options in enumerate(params)]
    good_rows = [row for row in range(4) if row not in failing_rows]
    without = [sampler(**seeded[row]) for row in good_rows]
    together = [sampler(**options) for options in seeded]
    for row in failing_rows:
        together[row] = fail(sampler(seed=row, temperature=1.5))
    for step in range(5):
        logits = torch.stack([random_logits(10 * step + row) for row in range(4)])
        chosen = sample(logits, together)
        assert [type(chosen[row]) for row in failing_rows] == [expected] * len(failing_rows)
        if good_rows:
            assert [chosen[row] for row in good_rows] == sample(logits[good_rows], without)


def test_only_the_row_whose_computation_fails_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key_of(1, num_drawn) for num_drawn in range(1, 6)}

    def failing(compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(logits: Tensor, draws: Sequence[Draw], masks: Tensor | None) -> Any:
            if any(draw.key in keys for draw in draws):
                raise Broken
            return compute(logits, draws, masks)

        return run

    without, together = [sampler(seed=seed) for seed in (0, 2)], [sampler(seed=seed) for seed in (0, 1, 2)]
    for step in range(5):
        logits = torch.stack([random_logits(10 * step + row) for row in range(3)])
        expected = sample(logits[[0, 2]], without)
        with monkeypatch.context() as patch:
            patch.setattr(sampling_ops[0], "draw", failing(sampling_ops[0].draw))
            first, error, last = sample(logits, together)
        assert isinstance(error, Broken)
        assert [first, last] == expected


def test_masked_rows_choose_among_allowed_tokens_after_bias_and_penalties() -> None:
    """A mask removes tokens that a bias prefers, and keeps the effect of bias and penalties among the others."""
    logits = torch.stack([random_logits(row) for row in range(4)])
    is_allowed = torch.zeros(4, 32 * (logits.shape[-1] // 32 + 1), dtype=torch.bool)
    is_allowed[:2, [3, 5, 8]] = True
    is_allowed[2:] = True
    words = (is_allowed.view(4, -1, 32).long() << torch.arange(32)).sum(-1).to(torch.int32)
    masks = TokenMasks(words, {3: Broken()})
    params: list[dict[str, Any]] = [
        {"logit_bias": {4: 100.0, 8: 50.0}, "temperature": 0.0},
        {"temperature": 1e30, "seed": 1, "presence_penalty": 0.5},
        {"seed": 2},
        {"seed": 3},
    ]
    samplers = [sampler(**each) for each in params]
    first, second, third, failed = sampling.sample(logits, samplers, sampling_ops[0], masks=masks)
    assert first == 8
    assert second in (3, 5, 8)
    assert [third] == sample(logits[2:3], [sampler(**params[2])])
    assert isinstance(failed, Broken)


def test_rows_that_fail_only_as_a_batch_are_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch can fail for lack of memory, for example."""
    compute = sampling_ops[0].draw

    def draw(logits: Tensor, draws: Sequence[Draw], masks: Tensor | None) -> list[int]:
        if len(draws) > 1:
            raise Broken
        return compute(logits, draws, masks)

    logits = torch.stack([random_logits(row) for row in range(3)])
    expected = sample(logits, [sampler(seed=seed) for seed in range(3)])
    monkeypatch.setattr(sampling_ops[0], "draw", draw)
    assert sample(logits, [sampler(seed=seed) for seed in range(3)]) == expected


def test_logprobs_are_the_log_softmax_of_the_unchanged_logits() -> None:
    logits = random_logits(4)
    [found] = token_logprobs(logits[None], [6], 3)
    expected = logits.log_softmax(0)
    assert found.chosen == pytest.approx(expected[6].item())
    top = expected.topk(3)
    assert [token_id for token_id, _ in found.top] == top.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(top.values.tolist())
    assert len(token_logprobs(logits[None], [0], 50)[0].top) == V
    assert token_logprobs(logits[None], [0], 0)[0].top == []
    tied = torch.zeros(1, 5000)
    tied[0, 7] = 1
    assert [token_id for token_id, _ in token_logprobs(tied, [7], 4)[0].top] == [7, 0, 1, 2]


def test_logprobs_of_a_batch_are_those_of_each_row_alone() -> None:
    logits = torch.stack([random_logits(seed) for seed in range(4)])
    together = token_logprobs(logits, [1, 5, 0, 9], 2)
    assert together == [
        token_logprobs(row[None], [token_id], 2)[0] for row, token_id in zip(logits, [1, 5, 0, 9], strict=True)
    ]


def test_each_continuation_has_the_next_seed() -> None:
    params = SamplingParams(seed=2**63 - 2, top_k=3)
    assert [params.for_continuation(index).seed for index in range(3)] == [2**63 - 2, 2**63 - 1, 0]
    assert params.for_continuation(2).top_k == 3
    assert SamplingParams().for_continuation(2).seed is None
