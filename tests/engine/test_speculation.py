"""Guessed tokens: with them a request gets the same, to the last bit, in fewer steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from model.engine.choice import Made
from model.engine.engine import Engine
from model.engine.pace import Pace
from model.engine.request import Request
from model.engine.tracing import TraceParams
from model.stages import stages_of
from model.trace import Selection
from model.transformer import Transformer
from tests.engine.driving import Drive, Result, ask, new_engine, prompt, run
from tests.kernels.common import by_kernels
from tests.tiny import CONFIGS, build

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def tokens_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(Pace, "worth", lambda self, num_streams: 0.05)


def network(name: str = "llama", dtype: str = "float32") -> Transformer:
    """A tiny one by our own kernels, whose heads are whole vectors; it repeats itself."""
    model = Transformer(replace(CONFIGS[name], d_head=16, max_positions=160))
    model.initialize(torch.Generator().manual_seed(0), std=0.1)
    return by_kernels(model.to(DTYPES[dtype]).requires_grad_(False))


def greedy(id: str, prompt_ids: Sequence[int], **params: Any) -> Request:
    return ask(id, prompt_ids, temperature=0.0, **{"max_tokens": 60, "logprobs": 2} | params)


def mixed() -> list[Request]:
    """Streams that repeat themselves and those that do not, with sampled ones between them."""
    requests = [greedy(f"greedy {seed}", prompt(3 + 5 * seed, seed=seed)) for seed in range(3)]
    repeating = [greedy(f"repeating {seed}", prompt(6, seed=seed) * 4, logprobs=None) for seed in range(2)]
    sampled = ask("sampled", prompt(9), max_tokens=40)
    ended = greedy("ended", prompt(5) * 3, stop_token_ids=frozenset(range(20)))
    return [*requests, *repeating, sampled, ended]


def both(model: Transformer, requests: Sequence[Request], **options: Any) -> tuple[Engine, Any, Any]:
    """An engine that guesses, all that it gave, and all that one that does not gave."""
    guessing, plain = (new_engine(model, speculates=speculates, **options) for speculates in (True, False))
    found = [run(engine, *requests) for engine in (guessing, plain)]
    assert plain.stats().num_drafted == 0
    return guessing, *found


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "qwen3"])
def test_all_that_a_request_gets_is_the_same_to_the_bit(name: str, dtype: str) -> None:
    model = network(name, dtype)
    for options in ({}, {"block_size": 16}, {"max_sequences": 2}):
        engine, guessed, plain = both(model, mixed(), num_blocks=256, **options)
        assert guessed == plain
        stats = engine.stats()
        assert 0 < stats.num_drafted_right < stats.num_drafted


def test_it_takes_fewer_steps() -> None:
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


def test_it_goes_on_beside_one_that_is_traced() -> None:
    model = network()
    others = [greedy(f"{seed}", [5 + seed] * 8) for seed in range(2)]
    stats, results = [], []
    for speculates in (True, False):
        drive = Drive(new_engine(model, speculates=speculates))
        drive.add(*others)
        drive.step(3)  # one is recorded, else nothing is guessed
        drive.add(ask("traced", prompt(9), max_tokens=60, **shown(model)))
        found = drive.finish()
        assert len(found["traced", 0].traces) == 60
        results.append([found[request.id, 0] for request in others] + [found["traced", 0].ids])
        stats.append(drive.engine.stats())
    assert results[0] == results[1]
    assert stats[0].num_drafted_right > 0
    assert stats[1].num_drafted == 0


def test_blocks_for_guesses_push_nobody_out() -> None:
    """Where a guess needs a block and none is free, it is not made."""
    requests = [greedy(f"{seed}", prompt(4, seed=seed) * 2, max_tokens=24) for seed in range(3)]
    engine, guessed, plain = both(network(), requests, num_blocks=3 * 8, block_size=4)
    assert guessed == plain
    assert engine.stats().num_preemptions == 0
    crowded, guessed, plain = both(network(), requests, num_blocks=20, block_size=4)
    assert guessed == plain
    assert crowded.stats().num_preemptions > 0


def test_what_was_guessed_right_is_found_by_who_comes_later() -> None:
    model = network()
    engine = new_engine(model)
    drive = Drive(engine)
    first = greedy("first", [5] * 8, max_tokens=60)
    drive.add(first)
    ids = [*first.prompt_ids, *drive.finish()["first", 0].ids]
    assert engine.stats().num_drafted_right > 20
    drive.add(again := greedy("again", ids, max_tokens=20))
    found = drive.finish()["again", 0]
    assert found.num_cached >= 60
    expected = run(new_engine(model, speculates=False), again)["again", 0]
    assert (found.ids, found.numbers) == (expected.ids, expected.numbers)


def shown(model: Transformer) -> dict[str, Any]:
    return {"trace": TraceParams(selection=Selection(stages=stages_of(model.config)[:1]))}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {3: 1.0}},
        {"processors": [lambda tokens, logits: logits]},
        {"tap": lambda name, tensor: tensor},
        shown,
    ],
)
def test_only_who_takes_the_largest_logit_is_guessed(params: Any) -> None:
    model = network()
    engine = new_engine(model)
    params = params(model) if callable(params) else params
    for _ in range(2):
        result = run(engine, ask("a", [5] * 8, **{"temperature": 0.0, "max_tokens": 20} | params))["a", 0]
        assert result.error is None
    assert engine.stats().num_drafted == 0


def test_pytorchs_kernels_round_by_what_is_beside_a_token_so_nothing_is_guessed() -> None:
    engine = new_engine(build(CONFIGS["llama"]))
    result: Result = run(engine, greedy("a", [5] * 8, max_tokens=30))["a", 0]
    assert len(result.ids) == 30
    assert engine.stats().num_drafted == 0


class TestMade:
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
    def test_the_tokens_after_a_draft_count_as_far_as_it_is_right(
        self, chosen: list[int | Exception], draft: list[int], expected: list[int]
    ) -> None:
        made = Made()
        made.follow(chosen, draft)
        assert (made.token_ids, made.error) == (expected, None)

    def test_what_fails_after_the_newest_token_fails(self) -> None:
        made = Made()
        made.follow([self.ERROR, 5], [4])
        assert (made.token_ids, made.error) == ([], self.ERROR)
