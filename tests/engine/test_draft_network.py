"""Tests of a draft network: it changes no bit of a result, whatever it drafts."""

from dataclasses import replace
from typing import Any

import pytest

from model.engine.engine import Engine
from model.engine.extra_time import ExtraTime
from model.engine.request import Request
from model.engine.step_budget import StepBudget
from model.network.transformer import Transformer
from model.tracing.edits import EditCondition
from tests.engine.driving import Drive, Result, ask, new_engine, prompt, run
from tests.engine.test_edits import EDITS, edited
from tests.engine.test_speculation import SAMPLED, greedy, mixed, network

LENGTH = 3  # of a draft


@pytest.fixture(autouse=True)
def drafts_have_a_length_that_does_not_depend_on_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        StepBudget, "network_draft", lambda self, decoding, drafting, acceptance, most: min(LENGTH, most)
    )
    monkeypatch.setattr(ExtraTime, "share_of_token", lambda self, sequence, num_decoding: 0.0)


def network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no draft come from earlier text."""
    monkeypatch.setattr(StepBudget, "min_acceptance", lambda self, num_decoding: 2.0)


def both(
    model: Transformer, draft_model: Transformer, requests: list[Request], **options: Any
) -> tuple[Engine, dict[tuple[str, int], Result], dict[tuple[str, int], Result]]:
    """An engine with a draft network, its results, and those of an engine without drafts."""
    engine = new_engine(model, draft_model=draft_model, **options)
    run(engine, ask("first", prompt(3)))  # nothing is drafted before a step was recorded
    return engine, run(engine, *requests), run(new_engine(model, speculates=False, **options), *requests)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"max_sequences": 2}, {"kv_cache_dtype": "int8"}], ids=str)
def test_results_are_bitwise_the_same_with_and_without_a_draft_network(
    dtype: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(dtype=dtype)
    drafter = network(dtype=dtype, change=0.05)
    engine, drafted, plain = both(model, drafter, mixed(), num_blocks=256, **options)
    assert drafted == plain
    assert 0 < engine.stats().num_accepted < engine.stats().num_drafted
    network_alone(monkeypatch)
    assert both(model, drafter, mixed(), num_blocks=256, **options)[1] == plain


def test_a_network_that_is_nearly_always_wrong_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network_alone(monkeypatch)
    model = network()
    engine, drafted, plain = both(
        model, network(change=5.0), [greedy(str(seed), prompt(5, seed=seed)) for seed in range(3)]
    )
    assert drafted == plain
    assert engine.stats().num_accepted < 0.3 * engine.stats().num_drafted


@pytest.mark.parametrize("params", SAMPLED, ids=str)
def test_a_copy_drafts_the_tokens_that_are_sampled(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It draws with the noise of the request, and penalties count its drafted tokens."""
    network_alone(monkeypatch)
    model = network()
    requests = [
        ask(f"{seed}", prompt(6, seed=seed), n=2, seed=seed, max_tokens=40, logprobs=2, **params) for seed in range(3)
    ]
    engine, drafted, plain = both(model, network(), requests, num_blocks=256)
    assert drafted == plain
    stats = engine.stats()
    assert stats.num_accepted == stats.num_drafted > 100


def test_a_draft_network_preempts_no_sequence_and_bits_stay_after_preemption() -> None:
    requests = [greedy(f"{seed}", prompt(4, seed=seed) * 2, max_tokens=24) for seed in range(3)]
    model = network()
    engine, drafted, plain = both(model, network(change=0.05), requests, num_blocks=3 * 8, block_size=4)
    assert drafted == plain
    assert engine.stats().num_preemptions == 0
    engine, drafted, plain = both(model, network(change=0.05), requests, num_blocks=20, block_size=4)
    assert drafted == plain
    assert engine.stats().num_preemptions > 0


def test_edited_requests_are_drafted_without_their_edits_and_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    network_alone(monkeypatch)
    model = network()
    edit = EDITS["add to the residual stream"]
    requests = [edited(model, greedy("edited", prompt(4)), *edit), greedy("plain", prompt(4))]
    engine, drafted, plain = both(model, network(), requests)
    assert drafted == plain
    assert engine.stats().num_accepted > 0


def test_a_condition_sees_the_drafted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit that begins with a drafted token applies to those after it."""
    network_alone(monkeypatch)
    model, request = network(), ask("1", prompt(5), seed=2, max_tokens=24, logprobs=2)
    ids = run(new_engine(model), request)["1", 0].ids
    for number, token_id in enumerate(ids[8:14]):
        edit = replace(*EDITS["add to the residual stream"], when=EditCondition(tokens=[token_id]))
        engine, drafted, plain = both(model, network(), [edited(model, request, edit)])
        assert drafted == plain, number
        assert engine.stats().num_accepted > 0


def test_drafted_tokens_are_shared_with_later_requests_as_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys and values that the draft network wrote to the cache are replaced."""
    network_alone(monkeypatch)
    model = network()
    drive = Drive(new_engine(model, draft_model=network(change=0.05)))
    drive.add(first := greedy("first", prompt(8), max_tokens=60))
    ids = [*first.prompt_ids, *drive.finish()["first", 0].ids]
    assert drive.engine.stats().num_accepted > 10
    drive.add(again := greedy("again", ids, max_tokens=20))
    found = drive.finish()["again", 0]
    assert found.num_cached >= 60
    expected = run(new_engine(model, speculates=False), again)["again", 0]
    assert (found.ids, found.logprob_values) == (expected.ids, expected.logprob_values)


@pytest.mark.parametrize(
    ("draft_seconds", "acceptance", "expected"),
    [(0.003, 0.9, 5), (0.003, 0.3, 0), (0.009, 0.9, 0), (0.0001, 1.0, 8)],
)
def test_drafts_have_the_length_with_most_tokens_in_a_second(
    draft_seconds: float, acceptance: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one token takes 10 ms here, and each further token 0.2 ms."""
    monkeypatch.undo()
    budget = StepBudget(max_stretch=2.0)
    for num_tokens in (1, 2, 4) * 20:
        budget.observe(num_tokens, 0.01 + 0.0002 * (num_tokens - 1), replayed=True)
        budget.observe_drafting(1, draft_seconds)
    assert budget.network_draft(1, 1, acceptance, most=8) == expected
