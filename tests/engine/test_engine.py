"""Whatever shares its steps, its cache and its budget with it, a request gets what the plain network gives it alone.

In float64, so that a token never hangs on rounding; `alone` caches nothing and runs nothing beside. Most requests are
drawn with a seed: a tiny network left to its likeliest token soon repeats itself, and a wrong key would not show.
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

from model.checkpoint import load_checkpoint
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.generation import End, GenerationParams
from model.sampling import SamplingParams
from model.tokenizer import Tokenizer
from tests.conftest import shared
from tests.engine.driving import (
    Drive,
    Result,
    alone,
    ask,
    assert_each_is_as_alone,
    assert_equal,
    new_engine,
    prompt,
    run,
)
from tests.service.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.tiny import CONFIGS, build, every_config, exact

ROOT = Path(__file__).resolve().parents[2]


def mixed() -> list[Request]:
    """Requests of many lengths, each with its own way to choose."""
    return [
        ask("greedy", prompt(5), max_tokens=9, temperature=0.0, logprobs=None),
        ask("long", prompt(30, seed=2), max_tokens=12, temperature=1.3, logprobs=5),
        ask("one", [7], max_tokens=14, top_k=20, logprobs=3),
        ask("penalized", prompt(12, seed=3), max_tokens=10, repetition_penalty=1.4, frequency_penalty=0.5),
        ask("biased", prompt(17, seed=4), max_tokens=7, logit_bias={3: 5.0, 9: -5.0}, logprobs=0, min_p=0.05),
        ask("narrow", prompt(9, seed=5), max_tokens=11, top_p=0.8, logprobs=3, seed=8),
    ]


@every_config
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_step_tokens": 7, "max_sequences": 3},
        {"max_step_tokens": 3, "max_sequences": 3, "block_size": 1, "num_blocks": 200},
        {"num_blocks": 12},
        {"num_blocks": 3, "block_size": 16, "max_step_tokens": 9},
    ],
    ids=["together", "in chunks", "in crumbs", "in little room", "in few blocks"],
)
def test_a_batch_gives_each_request_what_it_gets_alone(name: str, limits: dict[str, Any]) -> None:
    model = exact(name)
    assert_each_is_as_alone(model, run(new_engine(model, **limits), *mixed()), *mixed())


@every_config
def test_what_gave_way_to_others_goes_on_as_if_it_had_not(name: str) -> None:
    model = exact(name)
    engine = new_engine(model, num_blocks=11, max_step_tokens=16)
    requests = [ask(f"{i}", prompt(6, seed=i), max_tokens=20, seed=i, logprobs=1, temperature=1.2) for i in range(5)]
    results = run(engine, *requests)
    assert engine.stats().num_preemptions >= 3
    assert_each_is_as_alone(model, results, *requests)


@every_config
@pytest.mark.parametrize("is_running", [False, True], ids=["that has ended", "that runs"])
def test_a_prefix_of_another_request_is_taken_over_and_changes_nothing(name: str, is_running: bool) -> None:
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
    assert_each_is_as_alone(model, results, first, *requests)


@every_config
def test_what_was_generated_is_a_prefix_too(name: str) -> None:
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
    assert_each_is_as_alone(model, results, first, second)


class TestCacheSalt:
    """The time to the first token shows whether a prompt was computed before; a salt hides that from other users."""

    @pytest.mark.parametrize("is_running", [False, True], ids=["that has ended", "that runs"])
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
        assert_each_is_as_alone(model, results, *requests)

    def test_the_choices_of_one_request_share_its_prompt(self) -> None:
        model = exact("llama")
        request = replace(ask("many", prompt(19), n=3), cache_salt="alice")
        results = run(new_engine(model), request)
        assert [results["many", choice].num_cached for choice in range(3)] == [0, 16, 16]
        assert_each_is_as_alone(model, results, request)

    def test_what_was_generated_is_shared_with_the_same_salt_alone(self) -> None:
        drive = Drive(new_engine(exact("llama")))
        first = replace(ask("first", prompt(6), max_tokens=15), cache_salt="alice")
        drive.add(first)
        again = [*first.prompt_ids, *drive.finish()["first", 0].ids]
        for salt, num_cached in (("bob", 0), ("alice", 20), (None, 0)):
            drive.add(replace(ask(f"{salt}", again), cache_salt=salt))
            assert drive.finish()[f"{salt}", 0].num_cached == num_cached


@every_config
@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 6, "max_sequences": 3}], ids=["whole", "in chunks"])
def test_choices_share_their_prompt_and_each_is_a_request_with_the_next_seed(name: str, limits: dict[str, Any]) -> None:
    model, ids = exact(name), prompt(14)
    request = ask("many", ids, n=4, seed=5, max_tokens=7, temperature=1.2, logprobs=2)
    neighbour = ask("neighbour", prompt(9, seed=2), max_tokens=9)
    results = run(new_engine(model, **limits), request, neighbour)
    assert [results["many", choice].num_cached for choice in range(4)] == [0, 12, 12, 12]
    for choice in range(4):
        as_single = ask("single", ids, seed=5 + choice, max_tokens=7, temperature=1.2, logprobs=2)
        assert_equal(results["many", choice], alone(model, as_single))
    assert len({tuple(results["many", choice].ids) for choice in range(4)}) == 4
    assert_each_is_as_alone(model, results, neighbour)


def test_choices_without_a_seed_differ() -> None:
    results = run(new_engine(exact("llama")), ask("many", prompt(5), n=4, seed=None, max_tokens=12, temperature=2.0))
    assert len({tuple(result.ids) for result in results.values()}) == 4


@every_config
@pytest.mark.parametrize(
    "limits",
    [{}, {"max_step_tokens": 4, "max_sequences": 4}, {"num_blocks": 11, "max_step_tokens": 6}],
    ids=["whole", "in chunks", "in little room"],
)
def test_an_echoed_prompt_has_the_logprobs_of_one_whole_pass(name: str, limits: dict[str, Any]) -> None:
    model = exact(name)
    requests = [
        ask("prompt", prompt(21), max_tokens=6, echo=True, logprobs=3),
        ask("same", prompt(21), max_tokens=6, seed=2),
        ask("twice", prompt(10, seed=2), max_tokens=18, echo=True, logprobs=0, n=2),
        ask("one", [3], max_tokens=12, echo=True, logprobs=2),
        ask("bare", prompt(8, seed=3), max_tokens=4, echo=True, logprobs=None),
    ]
    engine = new_engine(model, **limits)
    results = run(engine, *requests)
    assert (engine.stats().num_preemptions > 0) == ("num_blocks" in limits)
    assert results["same", 0].num_cached == 0
    assert_each_is_as_alone(model, results, *requests)


def test_an_echoed_prompt_that_gives_way_half_computed_is_shown_once() -> None:
    """A stream takes its last block from it while its prompt is in chunks."""
    model = exact("llama")
    engine = new_engine(model, num_blocks=11, max_step_tokens=8, max_sequences=3)
    stream = ask("stream", [1], max_tokens=40)
    echo = ask("echo", prompt(30), max_tokens=3, echo=True, logprobs=2)
    drive = Drive(engine)
    drive.add(stream)
    drive.step(9)
    drive.add(echo)
    results = drive.finish()
    assert_each_is_as_alone(model, results, stream, echo)


class TestStopping:
    @every_config
    def test_a_stop_token_ends_its_own_request_with_that_token(self, name: str) -> None:
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

    def test_a_stop_string_ends_the_text_before_itself(self, tokenizer: Tokenizer) -> None:
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
        assert_each_is_as_alone(model, results, request, free, tokenizer=tokenizer)

    @pytest.fixture
    def tokenizer(self, tmp_path: Any) -> Tokenizer:
        write_tokenizer(tmp_path / "tokenizer.json")
        return Tokenizer.from_directory(tmp_path)


class TestAborting:
    @pytest.mark.parametrize("num_steps", range(7))
    def test_whenever_a_request_is_given_up_its_neighbours_go_on(self, num_steps: int) -> None:
        model = exact("qwen3")
        given_up = ask("given up", prompt(15), n=3, max_tokens=20, temperature=1.2)
        neighbours = [
            ask("same prompt", prompt(15), max_tokens=9, seed=3),
            ask("other", prompt(11, seed=2), max_tokens=9),
        ]
        drive = Drive(new_engine(model, num_blocks=20, max_step_tokens=8, max_sequences=4))
        drive.add(given_up, *neighbours)
        drive.step(num_steps)
        drive.abort("given up", "because")
        for choice in range(3):
            result = drive.results["given up", choice]
            assert result.end == End("cancelled", "because")
            assert result.ids == alone(model, given_up, choice).ids[: len(result.ids)]
        assert_each_is_as_alone(model, drive.finish(), *neighbours)

    def test_what_is_given_up_leaves_its_blocks_at_once_and_its_prefix_to_others(self) -> None:
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
        assert_each_is_as_alone(model, drive.results, second)

    def test_some_choices_of_a_request_may_have_ended_before_it_is_given_up(self) -> None:
        model = exact("llama")
        lengths = ask("many", prompt(5), n=3, max_tokens=20, temperature=1.3)
        expected = [alone(model, lengths, choice).ids for choice in range(3)]
        stop = next(token for token in expected[1][:6] if token not in expected[0][:8] + expected[2][:8])
        request = ask("many", prompt(5), n=3, max_tokens=20, temperature=1.3, stop_token_ids=frozenset({stop}))
        drive = Drive(new_engine(model))
        drive.add(request)
        drive.step(8)
        drive.abort("many")
        ends = [drive.results["many", choice].end for choice in range(3)]
        assert ends == [End("cancelled"), End("stop", stop), End("cancelled")]
        drive.finish()

    def test_to_give_up_what_has_ended_or_never_was_gives_nothing(self) -> None:
        engine = new_engine(exact("llama"))
        run(engine, ask("ended", [1]))
        assert engine.abort("ended") == []
        assert engine.abort("never") == []


class TestHolding:
    @pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
    def test_a_held_request_waits_and_goes_on_as_if_it_had_not(self, num_steps: int) -> None:
        model = exact("mistral")
        held = ask("held", prompt(13), n=2, max_tokens=9, temperature=1.2)
        other = ask("other", prompt(6, seed=2), max_tokens=12)
        drive = Drive(new_engine(model, max_step_tokens=8))
        drive.add(held, other)
        drive.step(num_steps)
        drive.engine.hold("held", True)
        before = [len(drive.results["held", choice].ids) for choice in range(2)]
        drive.until(lambda: drive.results["other", 0].end is not None)
        assert not drive.engine.can_step
        assert drive.step().num_sequences == 0
        assert drive.engine.stats().cache_usage == 0
        assert [len(drive.results["held", choice].ids) for choice in range(2)] == before
        assert drive.engine.has_work
        drive.engine.hold("held", False)
        assert drive.engine.can_step
        assert_each_is_as_alone(model, drive.finish(), held, other)

    def test_a_held_request_can_be_given_up(self) -> None:
        drive = Drive(new_engine(exact("llama")))
        drive.add(ask("held", prompt(13)))
        drive.step()
        drive.engine.hold("held", True)
        drive.abort("held")
        assert not drive.engine.has_work
        assert drive.engine.stats().cache_usage == 0


class TestSteps:
    def test_a_step_says_what_it_was(self) -> None:
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

    def test_an_idle_engine_takes_an_empty_step(self) -> None:
        engine = new_engine(exact("llama"))
        assert not engine.has_work
        step = engine.step()
        assert (step.outputs, step.started, step.num_tokens) == ([], [], 0)

    def test_those_that_wait_are_counted(self) -> None:
        drive = Drive(new_engine(exact("llama"), max_sequences=2))
        drive.add(*(ask(f"{i}", [i]) for i in range(5)))
        step = drive.step()
        stats = drive.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (2, 3)
        assert step.started == ["0", "1"]

    def test_an_id_is_free_again_when_its_request_has_ended(self) -> None:
        model = exact("llama")
        engine = new_engine(model)
        request = ask("again", prompt(6))
        engine.add(request)
        with pytest.raises(ValueError, match="id: 'again' is running already"):
            engine.add(request)
        while engine.has_work:
            engine.step()
        assert_each_is_as_alone(model, run(engine, request), request)


class TestRefusals:
    @pytest.mark.parametrize(
        ("wrong", "complaint"),
        [
            ({"prompt_ids": []}, "prompt: is empty"),
            ({"prompt_ids": [1] * 48, "max_tokens": 1}, "prompt: has 48 tokens"),
            ({"prompt_ids": [1] * 40, "max_tokens": 9}, "max_tokens: 9 after a prompt of 40 pass the context"),
            ({"prompt_ids": [1] * 20, "max_tokens": 21}, "max_tokens: 21 after a prompt of 20 pass the cache of 40"),
            ({"prompt_ids": [1, 67]}, "67"),
            ({"prompt_ids": [-1]}, "-1"),
            ({"logit_bias": {67: 1.0}}, "logit_bias: 67"),
            ({"logit_bias": {-1: 1.0}}, "logit_bias: -1"),
            ({"stop": ["a"]}, "stop: the checkpoint has no tokenizer"),
        ],
        ids=str,
    )
    def test_what_does_not_fit_is_refused_and_the_engine_stays_as_it_was(
        self, wrong: dict[str, Any], complaint: str
    ) -> None:
        engine = new_engine(exact("llama"), num_blocks=10)
        with pytest.raises(ValueError, match=complaint):
            engine.add(ask("wrong", **{"prompt_ids": [1]} | wrong))
        assert not engine.has_work
        engine.check_integrity()

    def test_what_just_fits_into_context_and_cache_is_served(self) -> None:
        model = exact("llama")
        full_cache, full_context = ask("cache", [1] * 20, max_tokens=20), ask("context", [1] * 40, max_tokens=8)
        assert_each_is_as_alone(model, run(new_engine(model, num_blocks=10), full_cache), full_cache)
        assert_each_is_as_alone(model, run(new_engine(model, num_blocks=12), full_context), full_context)

    def test_the_memory_of_the_cache_is_taken_when_the_engine_is_made(self) -> None:
        """Not by the first step that uses it. In a process of its own: this one has memory that others gave back."""
        if not Path("/proc/self/statm").exists():
            pytest.skip("this system does not say what memory a process has")
        code = (
            "import resource; from model.engine.engine import Engine, EngineConfig; from tests.tiny import exact;"
            "pages = lambda: int(open('/proc/self/statm').read().split()[1]); model = exact('llama'); before = pages();"
            "engine = Engine(model, None, EngineConfig(cache_bytes=1 << 28));"
            "print((pages() - before) * resource.getpagesize())"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        assert int(found.stdout) > 0.9 * (1 << 28)

    def test_a_cache_without_a_block_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cache_bytes: 1000 hold no block of 16 tokens"):
            Engine(exact("llama"), None, EngineConfig(cache_bytes=1000))

    @pytest.mark.parametrize(
        "wrong", [{"max_tokens": 0}, {"max_tokens": 1, "n": 0}, {"max_tokens": 1, "logprobs": -1}], ids=str
    )
    def test_what_means_nothing_is_refused_by_name(self, wrong: dict[str, int]) -> None:
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
    return {
        "prompt_ids": ids,
        "max_tokens": draw(st.integers(1, 12)),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "seed": draw(st.integers(0, 3)),
        "stop_token_ids": draw(st.sampled_from([frozenset(), frozenset(range(0, 67, 9))])),
        "echo": echo,
        "logprobs": logprobs,
    } | draw(st.sampled_from(SAMPLINGS))


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests()),
        st.tuples(st.just("add"), requests()),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.sampled_from(["abort", "hold", "unhold"]), st.integers(0, 9)),
    ),
    min_size=4,
    max_size=14,
)


@every_config
@settings(max_examples=12, deadline=None)
@given(
    events=EVENTS,
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    num_more_blocks=st.integers(0, 6),
    max_sequences=st.integers(1, 6),
    num_more_tokens=st.integers(0, 30),
)
def test_whatever_comes_and_goes_each_survivor_is_as_alone(
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
    drive, asked, given_up = Drive(engine), list[Request](), set[str]()
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
                given_up.add(request.id)
            else:
                engine.hold(request.id, kind == "hold")
    for request in asked:
        engine.hold(request.id, False)
    results = drive.finish()
    for request in asked:
        for choice in range(request.params.n):
            found, expected = results[request.id, choice], alone(model, request, choice)
            if found.end == End("cancelled"):
                assert request.id in given_up
                expected = cut(expected, len(found.ids))
            assert_equal(found, expected)


def cut(result: Result, num_tokens: int) -> Result:
    """The part of a result that was out when it was cancelled."""
    return Result(result.ids[:num_tokens], result.logprobs[:num_tokens], end=End("cancelled"))


def test_stories260k_tells_its_story_among_others_in_little_room() -> None:
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
