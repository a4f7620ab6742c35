"""Tests of a draft network with its own keys and values: it changes no bit of a result, and drafts from right keys.

An equal network would choose every token as the served one does. So if all its drafts are accepted, then its keys and
values are right.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from model.engine import draft_network, step_graphs
from model.engine.cache import PagedCache
from model.engine.draft_cache import DraftCache
from model.engine.draft_network import Draft, DraftNetwork
from model.engine.draft_planner import DraftPlanner
from model.engine.engine import Engine
from model.engine.extra_time import ExtraTime
from model.engine.request import Request
from model.engine.sequence import SequenceState
from model.engine.step_budget import StepBudget
from model.engine.step_graphs import StepGraphs
from model.engine.step_plan import ScheduledSequence, StepPlan
from model.network.transformer import Transformer
from model.text.grammar.grammars import Grammars
from model.text.tokenizer import Tokenizer
from tests.engine.driving import Drive, Result, ask, new_engine, prompt, run
from tests.engine.test_constraints import CONFIG, constrained, grammars, ids, repeating_model, tokenizer  # noqa: F401
from tests.engine.test_constraints import mixed as mixed_constraints
from tests.engine.test_edits import EDITS, edited
from tests.engine.test_speculation import SAMPLED, greedy, mixed, network, weights
from tests.ops.cpu.common import by_kernels

LENGTH = 3  # of a draft
CATCH_UP_TOKENS = DraftNetwork._catch_up_tokens
EQUAL: list[dict[str, Any]] = [{}, {"vocab_size": 80}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}]


@pytest.fixture(autouse=True)
def drafts_come_from_the_network_and_have_a_fixed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepBudget, "min_acceptance", lambda self, num_decoding: 2.0)
    monkeypatch.setattr(
        StepBudget, "network_draft", lambda self, decoding, drafting, acceptance, most: min(LENGTH, most)
    )
    monkeypatch.setattr(ExtraTime, "share_of_token", lambda self, sequence, num_decoding: 0.0)
    monkeypatch.setattr(DraftNetwork, "_catch_up_tokens", lambda self, seconds: draft_network.MAX_CATCH_UP)


@pytest.fixture(autouse=True)
def no_draft_network_has_failed(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A draft network that fails only drafts no more, which no result shows."""
    yield
    errors = [record for record in caplog.get_records("call") if record.levelname == "ERROR"]
    assert bool(errors) == request.node.name.startswith("test_a_draft_network_that_fails")


def equal(dtype: str = "float32", **changes: Any) -> Transformer:
    """The network of `network` with other limits: its vocabulary is cut, or has more tokens, with random weights."""
    original = weights(dtype=dtype)
    model = Transformer(replace(original.config, **changes))
    model.initialize(torch.Generator().manual_seed(2), std=0.3)
    state = model.to(original.embed.weight.dtype).state_dict()
    for name, old in original.state_dict().items():
        count = min(len(old), len(state[name]))
        state[name][:count] = old[:count]
    return by_kernels(model.requires_grad_(False))


def small(**changes: Any) -> Transformer:
    """A network with other weights and another shape."""
    base = network()
    model = Transformer(replace(base.config, num_layers=1, num_heads=2, num_kv_heads=1, d_head=32, **changes))
    model.initialize(torch.Generator().manual_seed(5), std=0.1)
    return by_kernels(model.requires_grad_(False))


def drafting(model: Transformer, drafter: Transformer, **options: Any) -> Engine:
    """An engine that has recorded a step: nothing is drafted before."""
    engine = new_engine(model, draft_model=drafter, drafts_from_own_keys=True, **options)
    run(engine, ask("first", [1, 2, 3]))
    return engine


Results = dict[tuple[str, int], Result]


def both(
    model: Transformer, drafter: Transformer, requests: Sequence[Request], **options: Any
) -> tuple[Engine, Results, Results]:
    """An engine with a draft network, its results, and those of an engine without drafts."""
    engine = drafting(model, drafter, **options)
    return engine, run(engine, *requests), run(new_engine(model, speculates=False, **options), *requests)


def assert_all_accepted(engine: Engine, least: int) -> None:
    stats = engine.stats()
    assert stats.num_accepted == stats.num_drafted > least


@pytest.mark.parametrize("drafter", ["changed", "small", "few tokens"])
@pytest.mark.parametrize(
    "options", [{}, {"max_sequences": 2}, {"kv_cache_dtype": "int8"}, {"max_step_tokens": 9}], ids=str
)
def test_results_are_bitwise_the_same_with_and_without_another_network(drafter: str, options: dict[str, Any]) -> None:
    networks = {
        "changed": lambda: network(change=0.05),
        "small": lambda: small(vocab_size=90),
        "few tokens": lambda: equal(vocab_size=20),
    }
    engine, drafted, plain = both(network(), networks[drafter](), mixed(), num_blocks=256, **options)
    assert drafted == plain
    assert engine.stats().num_drafted > 10


@pytest.mark.parametrize("params", SAMPLED, ids=str)
@pytest.mark.parametrize("options", EQUAL, ids=str)
def test_an_equal_network_drafts_every_token_right(options: dict[str, Any], params: dict[str, Any]) -> None:
    """Also with unused rows in its table of tokens, and for choices, which share the blocks of their prompt."""
    for_engine = {name: value for name, value in options.items() if name == "kv_cache_dtype"}
    for_network = {name: value for name, value in options.items() if name != "kv_cache_dtype"}
    requests = [
        ask(f"{seed}", prompt(6 + seed, seed=seed), n=2, seed=seed, max_tokens=40, logprobs=2, **params)
        for seed in range(3)
    ]
    model = network(dtype=options.get("dtype", "float32"))
    engine, drafted, plain = both(model, equal(**for_network), requests, num_blocks=256, **for_engine)
    assert drafted == plain
    assert_all_accepted(engine, 100)


def test_an_equal_network_drafts_every_token_right_after_preemption() -> None:
    requests = [ask(f"{seed}", prompt(9, seed=seed), seed=seed, max_tokens=40) for seed in range(6)]
    engine, drafted, plain = both(network(), network(), requests, num_blocks=24, block_size=4)
    assert drafted == plain
    assert engine.stats().num_preemptions > 4
    assert_all_accepted(engine, 100)


def test_an_equal_network_drafts_every_token_right_between_drafts_from_earlier_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Accepted tokens of earlier text have no keys of the draft network yet."""
    turns = itertools.count()
    monkeypatch.setattr(StepBudget, "min_acceptance", lambda *_: 0.05 if next(turns) % 2 else 2.0)
    found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    observe = DraftPlanner.observe

    def observed(self: DraftPlanner, plan: StepPlan, scheduled: ScheduledSequence, num_right: int) -> None:
        found[plan.num_network_drafts > 0].append((len(scheduled.draft), num_right))
        observe(self, plan, scheduled, num_right)

    monkeypatch.setattr(DraftPlanner, "observe", observed)
    requests = [greedy(f"{seed}", prompt(5, seed=seed) * 2, max_tokens=120) for seed in range(2)]
    _, drafted, plain = both(network(), network(), requests, num_blocks=256)
    assert drafted == plain
    assert sum(num_right for _, num_right in found[False]) > 20
    assert len(found[True]) > 10
    assert all(length == num_right for length, num_right in found[True])


def test_nothing_is_drafted_beyond_the_context_of_the_draft_network() -> None:
    requests = [greedy("short", prompt(8), max_tokens=140), greedy("long", prompt(70), max_tokens=60)]
    engine, drafted, plain = both(network(), equal(max_positions=48), requests, num_blocks=256)
    assert drafted == plain
    assert_all_accepted(engine, 20)
    assert engine.stats().num_drafted <= 48


def test_drafts_reach_to_the_end_of_the_context() -> None:
    requests = [greedy(f"{left}", prompt(150), max_tokens=left) for left in (10, 9, 4, 3, 2, 1)]
    engine, drafted, plain = both(network(), network(), requests, num_blocks=256)
    assert drafted == plain
    assert all(len(drafted[request.id, 0].ids) == request.params.max_tokens for request in requests)
    assert_all_accepted(engine, 9)


def computed_prompts(monkeypatch: pytest.MonkeyPatch, token_seconds: float | None = None) -> list[int]:
    """The list to which the draft network adds how many tokens it computes at a time before drafts.

    With `token_seconds`, a token seems to take so long.
    """
    counts: list[int] = []
    compute = DraftNetwork._compute

    def counted(self: DraftNetwork, draft: Draft, num_new: int) -> None:
        counts.append(num_new)
        compute(self, draft, num_new)
        self._token_seconds = token_seconds or self._token_seconds

    monkeypatch.setattr(DraftNetwork, "_compute", counted)
    return counts


def test_a_long_prompt_is_computed_in_parts_while_other_sequences_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_network, "MAX_CATCH_UP", 32)
    counts = computed_prompts(monkeypatch)
    requests = [greedy("long", prompt(120), max_tokens=30), greedy("short", prompt(5, seed=3), max_tokens=30)]
    engine, drafted, plain = both(network(), network(), requests, num_blocks=256)
    assert drafted == plain
    assert max(counts) == 32
    assert len(counts) == 4
    assert_all_accepted(engine, 20)


def test_tokens_before_drafts_are_computed_only_as_long_as_the_step_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token takes a millisecond here, so 25 fit into the time of the step."""
    monkeypatch.setattr(DraftNetwork, "_catch_up_tokens", CATCH_UP_TOKENS)
    counts = computed_prompts(monkeypatch, token_seconds=0.001)
    monkeypatch.setattr(StepBudget, "catch_up_seconds", lambda self, num_tokens: 0.0251)
    engine = drafting(network(), network(), num_blocks=256)
    run(engine, greedy("a", prompt(110), max_tokens=40))
    assert counts[:2] == [draft_network.FIRST_CATCH_UP, 25]
    counts.clear()
    monkeypatch.setattr(StepBudget, "catch_up_seconds", lambda self, num_tokens: 0.0)
    run(engine, greedy("b", prompt(40, seed=9), max_tokens=40))
    assert counts == [draft_network.MIN_CATCH_UP] * 2


def test_a_prompt_that_is_much_longer_than_the_answer_is_not_computed_for_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = computed_prompts(monkeypatch)
    engine = drafting(network(), network(), num_blocks=128)
    run(engine, greedy("short answer", prompt(120), max_tokens=4))
    assert counts == []
    run(engine, greedy("longer answer", prompt(120), max_tokens=5))
    assert counts == [120]


def test_the_measured_passes_of_drafts_have_the_mean_number_of_their_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two drafts ends at the end of the draft network's context. The first time, passes are recorded."""
    numbers: list[float] = []
    monkeypatch.setattr(StepBudget, "observe_drafting", lambda self, number, seconds: numbers.append(number))
    engine = drafting(network(), equal(max_positions=48), num_blocks=256)
    for _ in range(2):
        run(engine, greedy("a", prompt(38), max_tokens=40), greedy("b", prompt(20, seed=3), max_tokens=20))
    assert any(1 < number < 2 for number in numbers)


def test_a_draft_network_that_fails_before_its_first_pass_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = drafting(network(), network())
    num_drafted = engine.stats().num_drafted
    monkeypatch.setattr(draft_network, "Draft", None)
    request = greedy("a", prompt(9))
    assert run(engine, request) == run(new_engine(network(), speculates=False), request)
    assert engine.stats().num_drafted == num_drafted


def test_a_prompt_that_begins_like_an_earlier_one_is_computed_only_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = computed_prompts(monkeypatch)
    engine = drafting(network(), network(), num_blocks=128)
    first = run(engine, greedy("first", prompt(80), max_tokens=12))["first", 0]
    assert counts == [80]
    run(engine, greedy("again", [*prompt(80), *first.ids[:8], *prompt(30, seed=9)], max_tokens=12))
    assert sum(counts) <= 80 + 30 + 8 + 8
    assert_all_accepted(engine, 10)


def test_blocks_that_other_sequences_have_overwritten_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small cache, whose blocks are used again and again, for prompts that begin alike and otherwise differ."""
    engine = drafting(network(), network(), num_blocks=26)
    plain = new_engine(network(), speculates=False, num_blocks=26)
    for round in range(12):
        request = greedy(f"{round}", [*prompt(20 + round % 3 * 8), *prompt(30, seed=round % 4)], max_tokens=20)
        assert run(engine, request)[request.id, 0].ids == run(plain, request)[request.id, 0].ids
    assert_all_accepted(engine, 100)


def test_only_blocks_with_the_same_tokens_count_as_computed() -> None:
    known = DraftCache(PagedCache(network(), 8, 4))

    def sequence(ids: Sequence[int], blocks: list[int]) -> SequenceState:
        found = SequenceState(1, ids)
        found.blocks, found.num_computed = blocks, len(ids) - 1
        known.find_computed(found)
        return found

    first = sequence(range(9), [0, 1, 2])
    assert first.num_draft_computed == 0
    known.note_computed(first, 8)
    known.find_computed(first)  # as before its next draft
    assert sequence(range(13), [0, 1, 3, 4]).num_draft_computed == 8
    assert sequence([*range(4), 9, 9, 9, 9, 9], [0, 1, 2]).num_draft_computed == 4
    assert sequence(range(9), [5, 6, 7]).num_draft_computed == 0
    other = sequence(range(20, 29), [1, 5, 6])
    known.note_computed(other, 2)  # overwrites a part of block 1
    assert sequence(range(13), [0, 1, 3, 4]).num_draft_computed == 4


def test_cancelled_requests_leave_nothing_behind() -> None:
    drive = Drive(drafting(network(), network(), num_blocks=64))
    drive.add(*(request := [greedy(f"{seed}", prompt(9, seed=seed), max_tokens=60) for seed in range(4)]))
    drive.step(6)
    drive.abort("1")
    drive.step(3)
    drive.abort("2")
    found, plain = drive.finish(), run(new_engine(network(), speculates=False), *request)
    assert found["0", 0] == plain["0", 0]
    assert found["3", 0] == plain["3", 0]
    assert found["1", 0].ids == plain["1", 0].ids[: len(found["1", 0].ids)]
    assert_all_accepted(drive.engine, 30)


def test_of_very_many_shapes_with_drafts_the_graphs_that_were_used_last_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serve() -> tuple[Results, list[StepGraphs]]:
        requests = [greedy(f"{seed}", prompt(4, seed=seed), max_tokens=10 + 4 * seed) for seed in range(5)]
        engine = drafting(network(), network(), num_blocks=256)
        assert engine._draft_network is not None
        return run(engine, *requests), [engine._runner._step_graphs, engine._draft_network._graphs]

    plain, all_graphs = serve()
    assert all(len(graphs._graphs) > 5 for graphs in all_graphs)
    monkeypatch.setattr(step_graphs, "MAX_PLAIN_GRAPHS", 3)
    found, kept = serve()
    assert found == plain
    for graphs, limited in zip(all_graphs, kept, strict=True):
        assert list(limited._graphs) == list(graphs._graphs)[-3:]


def test_edited_requests_keep_their_bits() -> None:
    """The draft network knows nothing of edits, so some of its drafts are wrong."""
    model = network()
    edit = EDITS["add to the residual stream"]
    requests = [edited(model, ask("edited", prompt(40), max_tokens=40), *edit), greedy("plain", prompt(40))]
    engine, drafted, plain = both(model, network(), requests)
    assert drafted == plain
    assert 0 < engine.stats().num_accepted < engine.stats().num_drafted


def test_a_draft_network_that_fails_drafts_no_more_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = drafting(network(), network())
    num_drafted = engine.stats().num_drafted

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(DraftNetwork, "_choose", fail)
    request = greedy("a", prompt(9))
    assert run(engine, request) == run(new_engine(network(), speculates=False), request)
    assert engine.stats().num_drafted == num_drafted


class TestConstraints:
    def test_every_draft_of_an_equal_network_fits_the_grammar(
        self,
        grammars: Grammars,  # noqa: F811
        tokenizer: Tokenizer,  # noqa: F811
        repeating_model: Transformer,  # noqa: F811
    ) -> None:
        requests = [*mixed_constraints(grammars), *texts(grammars)]
        engine, drafted, plain = both(
            repeating_model, repeating_model, requests, tokenizer=tokenizer, num_blocks=600, max_sequences=16
        )
        assert drafted == plain
        stats = engine.stats()
        # A text may end in the middle of a draft, at a stop string for example.
        assert stats.num_drafted > 300
        assert stats.num_accepted > 0.9 * stats.num_drafted

    def test_grammars_of_preempted_requests_keep_their_bits_with_a_network_that_is_often_wrong(
        self,
        grammars: Grammars,  # noqa: F811
        tokenizer: Tokenizer,  # noqa: F811
        repeating_model: Transformer,  # noqa: F811
    ) -> None:
        drafter = Transformer(replace(CONFIG, num_layers=1))
        drafter.initialize(torch.Generator().manual_seed(3), std=0.1)
        engine, drafted, plain = both(
            repeating_model,
            by_kernels(drafter.requires_grad_(False)),
            [*mixed_constraints(grammars), *texts(grammars)],
            tokenizer=tokenizer,
            num_blocks=55,
        )
        assert drafted == plain
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert 0 < stats.num_accepted < stats.num_drafted


def texts(grammars: Grammars) -> list[Request]:  # noqa: F811
    """Constrained requests that end at stop tokens, or where nothing can follow."""
    word = grammars.grammar("grammar", 'start: ("the dog " | "a dog ")~6')
    row = grammars.regex("regex", "(the cat sat on the (mat|log); )+")
    return [
        constrained("word", word, ids(12, seed=3), temperature=0.0),
        constrained("row", row, ids(9, seed=2), temperature=0.0, max_tokens=90),
        constrained("sampled row", row, ids(9, seed=4), max_tokens=60, logprobs=3),
        constrained("no stop", word, ids(8, seed=5), n=2, stop_token_ids=frozenset()),
    ]
