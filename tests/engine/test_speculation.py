"""Tests of speculation: with drafts, a request gets bitwise the same results, in fewer steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from model.engine.engine import Engine
from model.engine.prompt_lookup import accept_draft
from model.engine.request import Request
from model.engine.step_budget import StepBudget
from model.engine.trace_params import TraceParams
from model.network.transformer import Transformer
from model.tracing.selection import Selection
from model.tracing.stages import stages_of
from tests.engine.driving import Drive, Result, ask, new_engine, prompt, run
from tests.ops.cpu.common import by_kernels
from tests.tiny import CONFIGS, build

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def drafts_always_pay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft whatever the measured step times are, since they depend on the load of the machine."""
    monkeypatch.setattr(StepBudget, "min_acceptance", lambda self, num_decoding: 0.05)


def network(name: str = "llama", dtype: str = "float32", *, change: float = 0.0) -> Transformer:
    """A tiny network on our kernels. With a `change`, each weight differs by about this part from other networks."""
    return by_kernels(weights(name, dtype, change=change))


def weights(name: str = "llama", dtype: str = "float32", *, change: float = 0.0) -> Transformer:
    """The network before our kernels pack its weights. They need a head size of whole vectors. Its text repeats."""
    model = Transformer(replace(CONFIGS[name], d_head=16, max_positions=160))
    model.initialize(torch.Generator().manual_seed(0), std=0.1)
    chance = torch.Generator().manual_seed(1)
    for parameter in model.parameters() if change else ():
        parameter.data *= 1 + change * torch.randn(parameter.shape, generator=chance)
    return model.to(DTYPES[dtype]).requires_grad_(False)


def greedy(id: str, prompt_ids: Sequence[int], **params: Any) -> Request:
    return ask(id, prompt_ids, temperature=0.0, **{"max_tokens": 60, "logprobs": 2} | params)


def mixed() -> list[Request]:
    """Greedy requests that repeat themselves and others that do not, and a sampled one."""
    requests = [greedy(f"greedy {seed}", prompt(3 + 5 * seed, seed=seed)) for seed in range(3)]
    repeating = [greedy(f"repeating {seed}", prompt(6, seed=seed) * 4, logprobs=None) for seed in range(2)]
    sampled = ask("sampled", prompt(9), max_tokens=40)
    ended = greedy("ended", prompt(5) * 3, stop_token_ids=frozenset(range(20)))
    return [*requests, *repeating, sampled, ended]


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.1},
    {"temperature": 0.1, "repetition_penalty": 1.1},
    {"temperature": 0.05, "frequency_penalty": 0.02, "presence_penalty": 0.1},
    {"temperature": 0.1, "logit_bias": {3: 1.0}},
    {"temperature": 0.7, "top_k": 2},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.0, "min_p": 0.5},
]


def both(model: Transformer, requests: Sequence[Request], **options: Any) -> tuple[Engine, Any, Any]:
    """An engine that speculates, its results, and the results of an engine that does not."""
    speculating, plain = (new_engine(model, speculates=speculates, **options) for speculates in (True, False))
    with_drafts, without_drafts = (run(engine, *requests) for engine in (speculating, plain))
    assert plain.stats().num_drafted == 0
    return speculating, with_drafts, without_drafts


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"block_size": 16}, {"max_sequences": 2}], ids=str)
def test_results_are_bitwise_the_same_with_and_without_drafts(name: str, dtype: str, options: dict[str, int]) -> None:
    engine, with_drafts, without_drafts = both(network(name, dtype), mixed(), num_blocks=256, **options)
    assert with_drafts == without_drafts
    stats = engine.stats()
    assert 0 < stats.num_accepted < stats.num_drafted


@pytest.mark.parametrize("params", SAMPLED, ids=str)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_sampled_requests_are_bitwise_the_same_with_and_without_drafts(dtype: str, params: dict[str, Any]) -> None:
    """Also their penalties, which count drafted tokens only where these are chosen."""
    requests = [
        ask(f"{seed}", prompt(6, seed=seed) * 4, n=2, seed=seed, max_tokens=60, logprobs=2, **params)
        for seed in range(4)
    ]
    engine, with_drafts, without_drafts = both(network(dtype=dtype), requests, num_blocks=256)
    assert with_drafts == without_drafts
    assert engine.stats().num_accepted > 0


def test_drafts_save_steps() -> None:
    model, counts = network(), []
    for speculates in (True, False):
        drive = Drive(new_engine(model, speculates=speculates))
        drive.add(greedy("a", [5] * 8, max_tokens=100))
        num_steps = 0
        while drive.engine.has_work:
            num_steps += drive.step().num_sequences
        counts.append(num_steps)
    assert counts[1] == 100
    assert counts[0] < 60


def test_other_sequences_use_drafts_while_one_is_traced() -> None:
    model = network()
    others = [greedy(f"{seed}", [5 + seed] * 8) for seed in range(2)]
    stats, results = [], []
    for speculates in (True, False):
        drive = Drive(new_engine(model, speculates=speculates))
        drive.add(*others)
        drive.step(3)  # nothing is drafted before the first step has been recorded
        drive.add(ask("traced", prompt(9), max_tokens=60, **traced(model)))
        found = drive.finish()
        assert len(found["traced", 0].traces) == 60
        results.append([found[request.id, 0] for request in others] + [found["traced", 0].ids])
        stats.append(drive.engine.stats())
    assert results[0] == results[1]
    assert stats[0].num_accepted > 0
    assert stats[1].num_drafted == 0


def test_drafts_preempt_no_sequence() -> None:
    """A draft that needs a block is dropped if none is free."""
    requests = [greedy(f"{seed}", prompt(4, seed=seed) * 2, max_tokens=24) for seed in range(3)]
    engine, with_drafts, without_drafts = both(network(), requests, num_blocks=3 * 8, block_size=4)
    assert with_drafts == without_drafts
    assert engine.stats().num_preemptions == 0
    crowded, with_drafts, without_drafts = both(network(), requests, num_blocks=20, block_size=4)
    assert with_drafts == without_drafts
    assert crowded.stats().num_preemptions > 0


def test_accepted_drafts_are_shared_with_later_requests_as_a_prefix() -> None:
    model = network()
    engine = new_engine(model)
    drive = Drive(engine)
    first = greedy("first", [5] * 8, max_tokens=60)
    drive.add(first)
    ids = [*first.prompt_ids, *drive.finish()["first", 0].ids]
    assert engine.stats().num_accepted > 20
    drive.add(again := greedy("again", ids, max_tokens=20))
    found = drive.finish()["again", 0]
    assert found.num_cached >= 60
    expected = run(new_engine(model, speculates=False), again)["again", 0]
    assert (found.ids, found.logprob_values) == (expected.ids, expected.logprob_values)


def traced(model: Transformer) -> dict[str, Any]:
    return {"trace": TraceParams(selection=Selection(stages=stages_of(model.config)[:1]))}


@pytest.mark.parametrize(
    "params",
    [
        {"processors": [lambda tokens, logits: logits]},
        {"tap": lambda name, tensor: tensor},
    ],
)
def test_nothing_is_drafted_for_functions_of_the_caller(params: dict[str, Any]) -> None:
    engine = new_engine(network())
    for _ in range(2):
        result = run(engine, ask("a", [5] * 8, **{"temperature": 0.0, "max_tokens": 20} | params))["a", 0]
        assert result.error is None
    assert engine.stats().num_drafted == 0


def test_nothing_is_drafted_with_pytorchs_kernels_because_they_are_not_batch_invariant() -> None:
    engine = new_engine(build(CONFIGS["llama"]))
    result: Result = run(engine, greedy("a", [5] * 8, max_tokens=30))["a", 0]
    assert len(result.ids) == 30
    assert engine.stats().num_drafted == 0


class TestAcceptingADraft:
    ERROR = ValueError("no numbers")

    @pytest.mark.parametrize(
        ("chosen", "draft", "expected"),
        [
            ([4], [], [4]),
            ([4, 5, 6], [4, 5], [4, 5, 6]),
            ([4, 5, 6], [4, 7], [4, 5]),
            ([4, 5, 6], [7, 5], [4]),
            ([4, ERROR, 6], [4, 5], [4]),
            ([4, ERROR], [5], [4]),
        ],
    )
    def test_chosen_tokens_are_accepted_up_to_the_first_one_that_differs_from_the_draft(
        self, chosen: list[int | Exception], draft: list[int], expected: list[int]
    ) -> None:
        assert accept_draft(chosen, draft) == (expected, None)

    def test_an_error_after_the_newest_token_is_the_error_of_the_step(self) -> None:
        assert accept_draft([self.ERROR, 5], [4]) == ([], self.ERROR)
