"""Tests of the engine: under any load, each request gets the tokens that the plain network gives it alone.

The networks are in float64, so that no token depends on rounding. `alone` computes one request at a time, without a
cache. Most requests sample with a seed: with greedy choice, a tiny network soon repeats itself, and a wrong key might
change no token.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.checkpoints.load import load_checkpoint
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.text.sampling import SamplingParams
from model.text.tokenizer import Tokenizer
from model.text.transcript import End, GenerationParams
from tests.conftest import shared
from tests.engine.driving import (
    Drive,
    Result,
    alone,
    ask,
    assert_each_equals_alone,
    assert_equal,
    new_engine,
    prompt,
    run,
)
from tests.service.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.tiny import CONFIGS, build, every_engine_config, exact

ROOT = Path(__file__).resolve().parents[2]


def mixed() -> list[Request]:
    """Requests of different lengths, each with other sampling parameters."""
    return [
        ask("greedy", prompt(5), max_tokens=9, temperature=0.0, logprobs=None),
        ask("long", prompt(30, seed=2), max_tokens=12, temperature=1.3, logprobs=5),
        ask("one", [7], max_tokens=14, top_k=20, logprobs=3),
        ask("penalized", prompt(12, seed=3), max_tokens=10, repetition_penalty=1.4, frequency_penalty=0.5),
        ask("biased", prompt(17, seed=4), max_tokens=7, logit_bias={3: 5.0, 9: -5.0}, logprobs=0, min_p=0.05),
        ask("narrow", prompt(9, seed=5), max_tokens=11, top_p=0.8, logprobs=3, seed=8),
    ]


@every_engine_config
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_step_tokens": 7, "max_sequences": 3},
        {"max_step_tokens": 3, "max_sequences": 3, "block_size": 1, "num_blocks": 200},
        {"num_blocks": 12},
        {"num_blocks": 3, "block_size": 16, "max_step_tokens": 9},
    ],
    ids=["together", "in chunks", "in tiny chunks", "in a small cache", "in few blocks"],
)
def test_requests_in_a_batch_get_the_same_tokens_as_alone(name: str, limits: dict[str, Any]) -> None:
    model = exact(name)
    assert_each_equals_alone(model, run(new_engine(model, **limits), *mixed()), *mixed())


@every_engine_config
def test_preempted_requests_get_the_same_tokens_as_alone(name: str) -> None:
    model = exact(name)
    engine = new_engine(model, num_blocks=11, max_step_tokens=16)
    requests = [ask(f"{i}", prompt(6, seed=i), max_tokens=20, seed=i, logprobs=1, temperature=1.2) for i in range(5)]
    results = run(engine, *requests)
    assert engine.stats().num_preemptions >= 3
    assert_each_equals_alone(model, results, *requests)


@every_engine_config
@pytest.mark.parametrize("is_running", [False, True], ids=["with an ended request", "with a running request"])
def test_requests_that_share_a_prefix_get_the_same_tokens_as_alone(name: str, is_running: bool) -> None:
    model, common = exact(name), prompt(19)
    drive = Drive(new_engine(model, num_blocks=30))
    first = ask("first", common, max_tokens=9, temperature=1.3)
    drive.add(first)
    drive.step(4)
    if not is_running:
        drive.finish()
    requests = [
        ask("same", common, max_tokens=9, seed=2),
        ask("longer", [*common, *prompt(9, seed=3)], max_tokens=9, seed=3),
        ask("forked", [*common[:13], 0, 1, 2], max_tokens=9, seed=4),
        ask("other", [*common[:3], 0, *common[4:]], max_tokens=9, seed=5),
    ]
    drive.add(*requests)
    results = drive.finish()
    assert [results[request.id, 0].num_cached for request in requests] == [16, 16, 12, 0]
    stats = drive.engine.stats()
    num_tokens = sum(len(request.prompt_ids) for request in (first, *requests))
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (num_tokens, 44)
    assert_each_equals_alone(model, results, first, *requests)


@every_engine_config
def test_generated_tokens_are_shared_as_a_prefix_too(name: str) -> None:
    model = exact(name)
    engine = new_engine(model)
    first = ask("first", prompt(6), max_tokens=15, temperature=1.2)
    drive = Drive(engine)
    drive.add(first)
    again = [*first.prompt_ids, *drive.finish()["first", 0].ids]
    second = ask("second", again, max_tokens=8, seed=3)
    drive.add(second)
    results = drive.finish()
    assert results["second", 0].num_cached == 20
    assert_each_equals_alone(model, results, first, second)


class TestCacheSalt:
    """The time to the first token reveals whether a prompt was computed before; a salt hides that from other users."""

    @pytest.mark.parametrize("is_running", [False, True], ids=["with an ended request", "with a running request"])
    @pytest.mark.parametrize(
        ("first", "second", "num_cached"),
        [
            ("alice", "alice", 16),
            ("alice", "bob", 0),
            ("alice", None, 0),
            (None, "alice", 0),
            (None, None, 16),
            ("", None, 0),
            ("", "", 16),
            ("\ud800", "\ud800", 16),
        ],
    )
    def test_a_prefix_is_shared_only_with_requests_of_the_same_salt(
        self, first: str | None, second: str | None, num_cached: int, is_running: bool
    ) -> None:
        model = exact("llama")
        requests = [
            replace(ask(f"{index}", prompt(19), max_tokens=9), cache_salt=salt)
            for index, salt in enumerate((first, second))
        ]
        drive = Drive(new_engine(model))
        drive.add(requests[0])
        drive.step(4)
        if not is_running:
            drive.finish()
        drive.add(requests[1])
        results = drive.finish()
        assert results["1", 0].num_cached == num_cached
        assert drive.engine.stats().num_prefix_hits == num_cached
        assert_each_equals_alone(model, results, *requests)

    def test_the_choices_of_one_request_share_its_prompt(self) -> None:
        model = exact("llama")
        request = replace(ask("many", prompt(19), n=3), cache_salt="alice")
        results = run(new_engine(model), request)
        assert [results["many", choice].num_cached for choice in range(3)] == [0, 16, 16]
        assert_each_equals_alone(model, results, request)

    def test_generated_tokens_are_shared_only_with_requests_of_the_same_salt(self) -> None:
        drive = Drive(new_engine(exact("llama")))
        first = replace(ask("first", prompt(6), max_tokens=15), cache_salt="alice")
        drive.add(first)
        again = [*first.prompt_ids, *drive.finish()["first", 0].ids]
        for salt, num_cached in (("bob", 0), ("alice", 20), (None, 0)):
            drive.add(replace(ask(f"{salt}", again), cache_salt=salt))
            assert drive.finish()[f"{salt}", 0].num_cached == num_cached


@every_engine_config
@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 6, "max_sequences": 3}], ids=["whole", "in chunks"])
def test_choices_share_their_prompt_and_choice_i_equals_a_request_with_the_seed_plus_i(
    name: str, limits: dict[str, Any]
) -> None:
    model, ids = exact(name), prompt(14)
    request = ask("many", ids, n=4, seed=5, max_tokens=7, temperature=1.2, logprobs=2)
    neighbour = ask("neighbour", prompt(9, seed=2), max_tokens=9)
    results = run(new_engine(model, **limits), request, neighbour)
    assert [results["many", choice].num_cached for choice in range(4)] == [0, 12, 12, 12]
    for choice in range(4):
        as_single = ask("single", ids, seed=5 + choice, max_tokens=7, temperature=1.2, logprobs=2)
        assert_equal(results["many", choice], alone(model, as_single))
    assert len({tuple(results["many", choice].ids) for choice in range(4)}) == 4
    assert_each_equals_alone(model, results, neighbour)


def test_choices_without_a_seed_differ() -> None:
    results = run(new_engine(exact("llama")), ask("many", prompt(5), n=4, seed=None, max_tokens=12, temperature=2.0))
    assert len({tuple(result.ids) for result in results.values()}) == 4


@every_engine_config
@pytest.mark.parametrize(
    "limits",
    [{}, {"max_step_tokens": 4, "max_sequences": 4}, {"num_blocks": 8, "max_step_tokens": 6}],
    ids=["whole", "in chunks", "in a small cache"],
)
def test_an_echoed_prompt_has_the_logprobs_of_one_pass_over_all_of_it(name: str, limits: dict[str, Any]) -> None:
    model = exact(name)
    requests = [
        ask("prompt", prompt(21), max_tokens=6, echo=True, logprobs=3),
        ask("same", prompt(21), max_tokens=6, seed=2),
        ask("twice", prompt(10, seed=2), max_tokens=18, echo=True, logprobs=0, n=2),
        ask("one", [3], max_tokens=24, echo=True, logprobs=2),
        ask("bare", prompt(8, seed=3), max_tokens=4, echo=True, logprobs=None),
        ask("scored", prompt(21), max_tokens=0, echo=True, logprobs=3),
        ask("without text", prompt(17, seed=4), max_tokens=2, logprobs=None, prompt_logprobs=1),
        ask("not returned", prompt(5, seed=4), max_tokens=0),
    ]
    engine = new_engine(model, **limits)
    results = run(engine, *requests)
    has_outgrown = name == "phi3"  # a sequence that is longer than its short context is computed again
    assert (engine.stats().num_preemptions > 0) == ("num_blocks" in limits or has_outgrown)
    assert results["scored", 0].num_cached == 0  # all of its tokens have log-probabilities
    assert_each_equals_alone(model, results, *requests)


def test_an_echoed_prompt_that_is_preempted_half_computed_is_reported_once() -> None:
    """A decoding sequence needs the last block while the echoed prompt is computed in chunks."""
    model = exact("llama")
    engine = new_engine(model, num_blocks=11, max_step_tokens=8, max_sequences=3)
    decoding = ask("decoding", [1], max_tokens=40)
    echo = ask("echo", prompt(30), max_tokens=3, echo=True, logprobs=2)
    drive = Drive(engine)
    drive.add(decoding)
    drive.step(9)
    drive.add(echo)
    results = drive.finish()
    assert_each_equals_alone(model, results, decoding, echo)


class TestStopping:
    @every_engine_config
    def test_a_stop_token_ends_only_its_own_request_and_is_the_last_token(self, name: str) -> None:
        model = exact(name)
        free = [ask(f"{i}", prompt(7, seed=i), max_tokens=16, seed=i, temperature=1.3) for i in range(4)]
        expected = [alone(model, request).ids for request in free]
        stops = [ids[at] for ids, at in zip(expected, (0, 4, 15), strict=False)] + [66]
        requests = [
            ask(
                request.id, request.prompt_ids, max_tokens=16, seed=i, temperature=1.3, stop_token_ids=frozenset({stop})
            )
            for i, (request, stop) in enumerate(zip(free, stops, strict=True))
        ]
        results = run(new_engine(model), *requests)
        for i, stop in enumerate(stops):
            result, until = results[f"{i}", 0], expected[i].index(stop) if stop in expected[i] else 15
            assert result.ids == expected[i][: until + 1]
            assert result.end == (End("stop", stop) if stop in expected[i] else End("length"))

    def test_the_text_ends_before_a_stop_string(self, tokenizer: Tokenizer) -> None:
        model = build(replace(CONFIGS["llama"], vocab_size=VOCAB_SIZE), dtype=torch.float64)
        words = tokenizer.encode("the cat sat on the mat")
        bias = dict.fromkeys(tokenizer.encode(" cat sat that the"), 30.0)
        free = ask("free", words, max_tokens=20, logit_bias=bias, temperature=2.0)
        text = alone(model, free, tokenizer=tokenizer).text
        stop = text[9:12]
        request = ask("stopped", words, max_tokens=20, logit_bias=bias, temperature=2.0, stop=[stop, "never"])
        results = run(new_engine(model, tokenizer=tokenizer), request, free)
        assert results["stopped", 0].text == text[: text.index(stop)]
        assert results["stopped", 0].end == End("stop", stop)
        assert_each_equals_alone(model, results, request, free, tokenizer=tokenizer)

    @pytest.fixture
    def tokenizer(self, tmp_path: Any) -> Tokenizer:
        write_tokenizer(tmp_path / "tokenizer.json")
        return Tokenizer.from_directory(tmp_path)


class TestAborting:
    @pytest.mark.parametrize("num_steps", range(7))
    def test_aborting_a_request_at_any_step_does_not_change_the_others(self, num_steps: int) -> None:
        model = exact("qwen3")
        aborted = ask("aborted", prompt(15), n=3, max_tokens=20, temperature=1.2)
        neighbours = [
            ask("same prompt", prompt(15), max_tokens=9, seed=3),
            ask("other", prompt(11, seed=2), max_tokens=9),
        ]
        drive = Drive(new_engine(model, num_blocks=20, max_step_tokens=8, max_sequences=4))
        drive.add(aborted, *neighbours)
        drive.step(num_steps)
        drive.abort("aborted", "because")
        for choice in range(3):
            result = drive.results["aborted", choice]
            assert result.end == End("cancelled", "because")
            assert result.ids == alone(model, aborted, choice).ids[: len(result.ids)]
        assert_each_equals_alone(model, drive.finish(), *neighbours)

    def test_an_aborted_request_frees_its_blocks_at_once_and_its_prefix_stays_shareable(self) -> None:
        model = exact("llama")
        drive = Drive(new_engine(model))
        drive.add(ask("first", prompt(20), max_tokens=20))
        drive.step(3)
        assert drive.engine.stats().cache_usage > 0
        drive.abort("first")
        assert drive.engine.stats().cache_usage == 0
        second = ask("second", prompt(20), max_tokens=5)
        drive.add(second)
        assert drive.finish()["second", 0].num_cached == 16
        assert_each_equals_alone(model, drive.results, second)

    def test_aborting_a_request_cancels_only_the_choices_that_have_not_ended(self) -> None:
        model = exact("llama")
        free = ask("many", prompt(5), n=3, max_tokens=20, temperature=1.3)
        expected = [alone(model, free, choice).ids for choice in range(3)]
        stop = next(token for token in expected[1][:6] if token not in expected[0][:8] + expected[2][:8])
        request = ask("many", prompt(5), n=3, max_tokens=20, temperature=1.3, stop_token_ids=frozenset({stop}))
        drive = Drive(new_engine(model))
        drive.add(request)
        drive.step(8)
        drive.abort("many")
        ends = [drive.results["many", choice].end for choice in range(3)]
        assert ends == [End("cancelled"), End("stop", stop), End("cancelled")]
        drive.finish()

    def test_aborting_an_ended_or_unknown_request_has_no_output(self) -> None:
        engine = new_engine(exact("llama"))
        run(engine, ask("ended", [1]))
        assert engine.abort("ended") == []
        assert engine.abort("unknown") == []


class TestPausing:
    @pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
    def test_a_paused_request_gets_no_tokens_and_the_same_ones_as_alone_when_resumed(self, num_steps: int) -> None:
        model = exact("mistral")
        paused = ask("paused", prompt(13), n=2, max_tokens=9, temperature=1.2)
        other = ask("other", prompt(6, seed=2), max_tokens=12)
        drive = Drive(new_engine(model, max_step_tokens=8))
        drive.add(paused, other)
        drive.step(num_steps)
        drive.engine.pause("paused", True)
        before = [len(drive.results["paused", choice].ids) for choice in range(2)]
        drive.until(lambda: drive.results["other", 0].end is not None)
        assert not drive.engine.can_step
        assert drive.step().num_sequences == 0
        assert drive.engine.stats().cache_usage == 0
        assert [len(drive.results["paused", choice].ids) for choice in range(2)] == before
        assert drive.engine.has_work
        drive.engine.pause("paused", False)
        assert drive.engine.can_step
        assert_each_equals_alone(model, drive.finish(), paused, other)

    def test_a_paused_request_can_be_aborted(self) -> None:
        drive = Drive(new_engine(exact("llama")))
        drive.add(ask("paused", prompt(13)))
        drive.step()
        drive.engine.pause("paused", True)
        drive.abort("paused")
        assert not drive.engine.has_work
        assert drive.engine.stats().cache_usage == 0


class TestSteps:
    def test_a_step_reports_what_it_computed(self) -> None:
        drive = Drive(new_engine(exact("llama"), max_step_tokens=10, max_sequences=3))
        drive.add(ask("first", prompt(6), max_tokens=9), ask("twice", prompt(9, seed=2), n=2, max_tokens=9))
        steps = [drive.step() for _ in range(3)]
        assert [step.started for step in steps] == [["first", "twice"], [], []]
        assert [(step.num_sequences, step.num_tokens) for step in steps] == [(2, 10), (2, 6), (3, 3)]
        assert all(step.seconds > 0 and step.trace_seconds == 0 for step in steps)
        stats = drive.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (3, 0)
        assert stats.cache_usage == pytest.approx((2 + 3 + 1) / 64)
        last = [output for output in steps[-1].outputs if output.request_id == "twice"]
        assert [(output.choice, output.num_prompt, output.num_generated, output.num_cached) for output in last] == [
            (0, 9, 2, 0),
            (1, 9, 1, 8),
        ]

    def test_a_step_of_an_idle_engine_is_empty(self) -> None:
        engine = new_engine(exact("llama"))
        assert not engine.has_work
        step = engine.step()
        assert (step.outputs, step.started, step.num_tokens) == ([], [], 0)

    def test_waiting_requests_are_counted(self) -> None:
        drive = Drive(new_engine(exact("llama"), max_sequences=2))
        drive.add(*(ask(f"{i}", [i]) for i in range(5)))
        step = drive.step()
        stats = drive.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (2, 3)
        assert step.started == ["0", "1"]

    def test_an_id_can_be_used_again_when_its_request_has_ended(self) -> None:
        model = exact("llama")
        engine = new_engine(model)
        request = ask("again", prompt(6))
        engine.add(request)
        with pytest.raises(ValueError, match="id: 'again' is running already"):
            engine.add(request)
        while engine.has_work:
            engine.step()
        assert_each_equals_alone(model, run(engine, request), request)


class TestRefusals:
    @pytest.mark.parametrize(
        ("wrong", "complaint"),
        [
            ({"prompt_ids": []}, "prompt: is empty"),
            (
                {"prompt_ids": [1] * 48, "max_tokens": 1},
                "prompt: this model's maximum context length is 48 tokens. However, your prompt resulted in 48 tokens.",
            ),
            (
                {"prompt_ids": [1] * 40, "max_tokens": 9},
                "max_tokens: this model's maximum context length is 48 tokens. However, you requested 49 tokens",
            ),
            (
                {"prompt_ids": [1] * 20, "max_tokens": 21},
                "length is 40 tokens. However, you requested 41 tokens",
            ),
            ({"prompt_ids": [1, 67]}, "67"),
            ({"prompt_ids": [-1]}, "-1"),
            ({"logit_bias": {67: 1.0}}, "logit_bias: 67"),
            ({"logit_bias": {-1: 1.0}}, "logit_bias: -1"),
            ({"stop": ["a"]}, "stop: the checkpoint has no tokenizer"),
        ],
        ids=str,
    )
    def test_a_request_that_does_not_fit_is_refused_and_leaves_the_engine_unchanged(
        self, wrong: dict[str, Any], complaint: str
    ) -> None:
        engine = new_engine(exact("llama"), num_blocks=10)
        with pytest.raises(ValueError, match=complaint):
            engine.add(ask("wrong", **{"prompt_ids": [1]} | wrong))
        assert not engine.has_work
        engine.check_integrity()

    def test_a_request_that_just_fits_into_the_context_and_the_cache_is_served(self) -> None:
        model = exact("llama")
        full_cache, full_context = ask("cache", [1] * 20, max_tokens=20), ask("context", [1] * 40, max_tokens=8)
        assert_each_equals_alone(model, run(new_engine(model, num_blocks=10), full_cache), full_cache)
        assert_each_equals_alone(model, run(new_engine(model, num_blocks=12), full_context), full_context)

    @pytest.mark.slow
    def test_the_memory_of_the_cache_is_provided_by_populate_cache(self) -> None:
        """Steps need not do it, and creating the engine does not wait for it.

        The measurement needs a process of its own, because this one has memory that other tests have freed.
        """
        if not Path("/proc/self/statm").exists():
            pytest.skip("this system does not report the memory of a process in /proc/self/statm")
        code = (
            "import resource; from model.engine.engine import Engine, EngineConfig; from tests.tiny import exact;"
            "pages = lambda: int(open('/proc/self/statm').read().split()[1]); model = exact('llama'); before = pages();"
            "engine = Engine(model, None, EngineConfig(cache_bytes=1 << 28)); created = pages();"
            "list(engine.populate_cache());"
            "print(*((number - before) * resource.getpagesize() for number in (created, pages())))"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        created, populated = map(int, found.stdout.split())
        assert created < 0.2 * (1 << 28)
        if populated < 0.2 * (1 << 28):
            pytest.skip("this Linux has no MADV_POPULATE_WRITE, so each page is provided at the first write")
        assert populated > 0.9 * (1 << 28)

    def test_a_cache_smaller_than_one_block_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cache_bytes: 1000 bytes are too few: one block of 16 tokens"):
            Engine(exact("llama"), None, EngineConfig(cache_bytes=1000))

    @pytest.mark.parametrize(
        "wrong", [{"max_tokens": -1}, {"max_tokens": 1, "n": 0}, {"max_tokens": 1, "logprobs": -1}], ids=str
    )
    def test_the_error_about_a_meaningless_parameter_begins_with_its_name(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"^{list(wrong)[-1]}: "):
            GenerationParams(**wrong)


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5},
    {"temperature": 1.2, "top_k": 9, "presence_penalty": 0.5},
    {"temperature": 2.0, "top_p": 0.9, "repetition_penalty": 1.2},
]
STEMS = [prompt(16, seed=1), prompt(16, seed=2)]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    stem = draw(st.sampled_from(STEMS))
    tail = draw(st.lists(st.integers(0, 66), max_size=5))
    ids = [*stem[: draw(st.integers(0, 16))], *tail] or [5]
    echo, logprobs = draw(st.sampled_from([(False, 0), (False, None), (False, 2), (True, 1), (True, None)]))
    sampling: dict[str, Any] = draw(st.sampled_from(SAMPLINGS))
    return sampling | {
        "prompt_ids": ids,
        "max_tokens": draw(st.integers(0, 12)),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "seed": draw(st.integers(0, 3)),
        "stop_token_ids": draw(st.sampled_from([frozenset(), frozenset(range(0, 67, 9))])),
        "echo": echo,
        "logprobs": logprobs,
    }


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests()),
        st.tuples(st.just("add"), requests()),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.sampled_from(["abort", "pause", "resume"]), st.integers(0, 9)),
    ),
    min_size=4,
    max_size=14,
)


@every_engine_config
@settings(max_examples=6, deadline=None)
@given(
    events=EVENTS,
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    num_more_blocks=st.integers(0, 6),
    max_sequences=st.integers(1, 6),
    num_more_tokens=st.integers(0, 30),
)
def test_whatever_is_added_aborted_and_paused_each_request_gets_the_same_tokens_as_alone(
    name: str,
    events: Sequence[tuple[str, Any]],
    block_size: int,
    num_more_blocks: int,
    max_sequences: int,
    num_more_tokens: int,
) -> None:
    model = exact(name)
    engine = new_engine(
        model,
        block_size=block_size,
        num_blocks=-(-33 // block_size) + num_more_blocks,
        max_sequences=max_sequences,
        max_step_tokens=max_sequences + num_more_tokens,
    )
    drive, asked, aborted = Drive(engine), list[Request](), set[str]()
    for kind, value in events:
        if kind == "add":
            asked.append(ask(f"{len(asked)}", **value))
            drive.add(asked[-1])
        elif kind == "step":
            drive.step(value)
        elif asked:
            request = asked[value % len(asked)]
            if kind == "abort":
                drive.abort(request.id)
                aborted.add(request.id)
            else:
                engine.pause(request.id, kind == "pause")
    for request in asked:
        engine.pause(request.id, False)
    results = drive.finish()
    for request in asked:
        for choice in range(request.params.n):
            found, expected = results[request.id, choice], alone(model, request, choice)
            if found.end == End("cancelled"):
                assert request.id in aborted
                expected = cancelled_after(expected, len(found.ids))
            assert_equal(found, expected)


def cancelled_after(result: Result, num_tokens: int) -> Result:
    """The result of a request that was cancelled after `num_tokens` tokens."""
    return Result(result.ids[:num_tokens], result.logprobs[:num_tokens], end=End("cancelled"))


def test_stories260k_writes_its_reference_text_among_other_requests_in_a_small_cache() -> None:
    directory = shared("checkpoints/stories260K")
    reference = json.loads((directory / "greedy_ids.json").read_text())["greedy_ids"]
    model = load_checkpoint(str(directory)).model
    engine = new_engine(model, num_blocks=40, block_size=16, max_step_tokens=32)
    stories = [
        Request(
            id=f"story {i}",
            prompt_ids=reference[:length],
            params=GenerationParams(max_tokens=201 - length, sampling=SamplingParams(temperature=0)),
        )
        for i, length in enumerate((1, 1, 60, 100))
    ]
    others = [ask(f"other {i}", prompt(50, seed=i, config=model.config), max_tokens=100, seed=i) for i in range(5)]
    results = run(engine, *[request for pair in zip(stories, others, strict=False) for request in pair], others[-1])
    for story in stories:
        assert [*story.prompt_ids, *results[story.id, 0].ids] == reference[:201]
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_prefix_hits > 0
