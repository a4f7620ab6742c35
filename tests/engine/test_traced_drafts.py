"""Tests of drafts for traced requests: the answer and each trace have the same bits as without drafts."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.engine import extra_costs
from model.engine.engine import Engine
from model.engine.extra_time import ExtraTime
from model.engine.request import Request
from model.engine.sequence import ExtraCost
from model.engine.step_budget import StepBudget
from model.engine.step_tracer import StepTrace
from model.engine.trace_params import TraceParams
from model.network.transformer import Transformer
from model.text.grammar.grammars import Grammars
from model.text.tokenizer import Tokenizer
from model.tracing.edits import EditCondition
from model.tracing.selection import Selection
from model.tracing.stages import stages_of
from tests.engine.driving import Result, ask, new_engine, prompt, run
from tests.engine.test_constraints import constrained, grammars, repeating_model, tokenizer  # noqa: F401
from tests.engine.test_edits import EDITS, edited
from tests.engine.test_speculation import greedy, network

MODEL = network()
STAGES = stages_of(MODEL.config)
RESIDUALS = [stage for stage in STAGES if stage.name.endswith("resid_post")]
PATTERNS = [stage for stage in STAGES if stage.name.endswith("pattern")]
KINDS: dict[str, dict[str, Any]] = {
    "values of all stages": {"selection": Selection(stages=STAGES, detail="values")},
    "summaries of all stages": {"selection": Selection(stages=STAGES)},
    "patterns of a head": {"selection": Selection(stages=PATTERNS, detail="values", heads=[1])},
    "residuals at some positions": {"selection": Selection(stages=RESIDUALS, positions=[3, 40, 41, 43, 60])},
    "predictions": {"selection": Selection(stages=()), "top_k": 3},
    "lens": {"selection": Selection(stages=RESIDUALS, detail="none"), "logit_lens": 2},
    "nothing": {"selection": Selection(stages=(), positions=[0])},
}


EXTRA_SHARE = ExtraTime.share_of_token


@pytest.fixture(autouse=True)
def drafts_always_pay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepBudget, "min_acceptance", lambda self, num_decoding: 0.05)
    monkeypatch.setattr(StepBudget, "network_draft", lambda self, decoding, drafting, acceptance, most: min(3, most))
    monkeypatch.setattr(ExtraTime, "share_of_token", lambda self, sequence, num_decoding: 0.0)


def traced(**trace: Any) -> dict[str, Any]:
    return {"trace": TraceParams(**trace)}


def contents(step: StepTrace) -> tuple[Any, ...]:
    """Everything in the trace of a step that can be compared."""
    stages = [
        (each.stage.name, each.shape, each.dtype, None if each.values is None else each.values.tolist(), each.summary)
        for each in step.stages
    ]
    return step.positions, repr(stages), step.predictions, repr(step.logit_lens), step.constraint


def comparable(result: Result) -> tuple[Any, ...]:
    traces = [contents(each) for each in result.traces]
    return result.ids, result.logprobs, result.text, result.end, repr(result.error), traces


def both(model: Transformer, requests: list[Request], **options: Any) -> tuple[Engine, Any, Any]:
    """An engine that drafts, and what its results and those of an engine without drafts contain."""
    engines = new_engine(model, **options), new_engine(model, **options | {"speculates": False, "draft_model": None})
    found = []
    for engine in engines:
        run(engine, ask("first", [1, 2, 3]))
        found.append({key: comparable(result) for key, result in run(engine, *requests).items()})
    return engines[0], found[0], found[1]


def repeating(**params: Any) -> list[Request]:
    """Requests whose text repeats, and of which some sampled tokens do not."""
    return [
        greedy("greedy", [5] * 8, **{"max_tokens": 60} | params),
        ask("sampled", [9] * 8, **{"n": 2, "temperature": 0.3, "max_tokens": 40, "repetition_penalty": 1.05} | params),
    ]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("drafter", ["text", "network"])
def test_traced_requests_get_the_same_bits_with_and_without_drafts(kind: str, drafter: str) -> None:
    options = {"draft_model": network(change=0.05)} if drafter == "network" else {}
    requests = repeating(**traced(**KINDS[kind]))
    engine, drafted, plain = both(MODEL, [*requests, greedy("plain", [7] * 8)], num_blocks=256, **options)
    assert drafted == plain
    stats = engine.stats()
    assert 20 < stats.num_accepted < stats.num_drafted
    assert len(plain["greedy", 0][-1]) > 0 or kind == "nothing"


def test_steps_with_drafts_of_traced_requests_are_fewer() -> None:
    engine = new_engine(MODEL)
    run(engine, ask("first", [1, 2, 3]))
    engine.add(greedy("a", [5] * 8, max_tokens=100, **traced(**KINDS["summaries of all stages"])))
    num_steps = 0
    while engine.has_work:
        num_steps += engine.step().num_sequences
    assert num_steps < 60


@pytest.mark.parametrize("name", ["add to the residual stream", "add while generating", "zero heads"])
def test_traced_requests_with_edits_get_the_same_bits(name: str) -> None:
    trace = traced(**KINDS["values of all stages"])
    requests = [edited(MODEL, each, *EDITS[name]) for each in repeating(**trace, max_tokens=30)]
    engine, drafted, plain = both(MODEL, requests, num_blocks=256)
    assert drafted == plain
    assert engine.stats().num_accepted > 0


def test_nothing_is_drafted_for_traced_requests_whose_edits_have_conditions() -> None:
    """The conditions read a whole pass, and not a token of it."""
    edits = [replace(edit, when=EditCondition(tokens=[5])) for edit in EDITS["add to the residual stream"]]
    request = edited(MODEL, greedy("a", [5] * 8, **traced(**KINDS["lens"])), *edits)
    engine, drafted, plain = both(MODEL, [request])
    assert drafted == plain
    assert engine.stats().num_drafted == 0


def test_traces_of_preempted_requests_are_the_same() -> None:
    requests = [
        greedy(f"{seed}", prompt(4, seed=seed) * 2, max_tokens=30, **traced(**KINDS["values of all stages"]))
        for seed in range(3)
    ]
    engine, drafted, plain = both(MODEL, requests, num_blocks=20, block_size=4)
    assert drafted == plain
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_accepted > 0


def test_traced_requests_with_grammars_get_the_same_bits(
    grammars: Grammars,  # noqa: F811
    tokenizer: Tokenizer,  # noqa: F811
    repeating_model: Transformer,  # noqa: F811
) -> None:
    """Also what the grammar changed for each token, at a stop token, and where nothing can follow."""
    trace = traced(selection=Selection(stages=stages_of(repeating_model.config)[:3]), top_k=2, logit_lens=1)
    row = grammars.regex("regex", "(the cat sat on the (mat|log); )+")
    word = grammars.grammar("grammar", 'start: ("the dog " | "a dog ")~6')
    requests = [
        constrained("row", row, temperature=0.0, max_tokens=90, **trace),
        constrained("sampled", row, n=2, max_tokens=60, **trace),
        constrained("word", word, temperature=0.0, stop_token_ids=frozenset(), **trace),
        constrained("stopped", row, temperature=0.0, stop=["log"], max_tokens=90, **trace),
    ]
    for draft_model in (None, repeating_model):
        engine, drafted, plain = both(
            repeating_model, requests, num_blocks=600, tokenizer=tokenizer, draft_model=draft_model
        )
        assert drafted == plain
        assert engine.stats().num_accepted > 20


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.2, 0.8]),
    st.integers(1, 30),
)
def test_mixtures_of_traced_and_other_requests_get_the_same_bits(
    kinds: list[str], seed: int, temperature: float, max_tokens: int
) -> None:
    requests = [
        ask(
            f"{index}",
            prompt(5, seed=seed + index) * 2,
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            **traced(**KINDS[kind]),
        )
        for index, kind in enumerate(kinds)
    ]
    _, drafted, plain = both(MODEL, [*requests, greedy("plain", [seed % 60] * 6, max_tokens=20)], num_blocks=256)
    assert drafted == plain


def test_traces_that_take_longer_than_a_step_have_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rejected token is traced in vain."""
    monkeypatch.setattr(ExtraTime, "share_of_token", EXTRA_SHARE)
    for seconds, is_worth_it in ((1e-5, True), (10.0, False)):
        cost = ExtraCost(seconds, seconds)
        monkeypatch.setattr(extra_costs, "_cost", lambda *_, cost=cost: cost)
        monkeypatch.setattr(StepBudget, "replayed_seconds", lambda self, num_tokens, default: 0.01)
        for draft_model in (None, network(change=0.05)):
            engine = new_engine(MODEL, draft_model=draft_model)
            run(engine, ask("first", [1, 2, 3]))
            num_before = engine.stats().num_drafted
            run(engine, greedy("a", [5] * 8, max_tokens=30, **traced(**KINDS["lens"])))
            assert (engine.stats().num_drafted > num_before) == is_worth_it
