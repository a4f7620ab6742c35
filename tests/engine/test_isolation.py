"""Tests of isolation: a sequence that fails ends with an error, and all others get the same tokens as alone."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from model.checkpoints.load import BUNDLED, load_checkpoint
from model.engine.attention import step_context
from model.engine.request import Request
from model.engine.step_batch import StepSequence
from model.engine.step_graph import ForwardResult
from model.engine.trace_params import TraceParams
from model.errors import shortened
from model.network.transformer import Transformer
from model.ops.interface import Draw
from model.text.sampling import Sampler
from model.text.transcript import End
from model.tracing.hooks import Hooks
from model.tracing.selection import Selection
from model.tracing.stages import stages_of
from model.tracing.tap import Tap
from tests.editor import Editor
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
from tests.ops.cpu.common import by_kernels
from tests.tiny import CONFIGS, build, every_engine_config, exact


def neighbours() -> list[Request]:
    """A short prompt that soon decodes, a long prompt, and one that begins like the prompt of the faulty request."""
    return [
        ask("short", [1, 2], max_tokens=14, temperature=1.3),
        ask("long", prompt(26, seed=2), max_tokens=5, seed=2),
        ask("alike", [*prompt(8), 3], max_tokens=6, seed=3, logprobs=1),
    ]


def fail_among_neighbours(model: Transformer, faulty: Request, *, max_step_tokens: int = 12) -> Result:
    """The result of a request that fails. Asserts that its neighbours and a later request are not affected."""
    drive = Drive(new_engine(model, num_blocks=24, max_step_tokens=max_step_tokens))
    short, *others = neighbours()
    drive.add(short)
    drive.step(2)
    drive.add(faulty, *others)
    drive.finish()
    later = ask("later", faulty.prompt_ids, max_tokens=6, seed=4)
    drive.add(later)
    assert_each_equals_alone(model, drive.finish(), short, *others, later)
    return drive.results[faulty.id, 0]


def assert_ended_with(result: Result, error: type[Exception], match: str) -> None:
    assert result.end == End("error")
    assert isinstance(result.error, error)
    assert match in str(result.error)


def bundled_by_kernels() -> Transformer:
    return by_kernels(load_checkpoint(str(BUNDLED), dtype="float32").model)


class Broken(Exception):
    """The error that the taps and processors of these tests raise."""


class RaisingTap:
    """Raises at one stage, in `wants` or in the call."""

    def __init__(self, stage: str, *, in_wants: bool) -> None:
        self._stage = stage
        self._in_wants = in_wants

    def wants(self, name: str) -> bool:
        if name == self._stage and self._in_wants:
            raise Broken(name)
        return name == self._stage

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        if name == self._stage:
            raise Broken(name)
        return tensor


def stages_of_pass(name: str) -> list[str]:
    return [stage.name for stage in stages_of(CONFIGS[name]) if stage.name not in ("probabilities", "loss")]


class TestTaps:
    @pytest.mark.parametrize("in_wants", [True, False], ids=["in wants", "in the call"])
    @pytest.mark.parametrize(
        "name",
        ["gpt2", pytest.param("qwen3", marks=pytest.mark.slow), pytest.param("2017 block", marks=pytest.mark.slow)],
    )
    def test_a_tap_that_raises_at_any_stage_ends_only_its_own_request(self, name: str, in_wants: bool) -> None:
        model = exact(name)
        for stage in stages_of_pass(name)[:: 3 if in_wants else 1]:
            drive = Drive(new_engine(model))
            faulty = ask("faulty", prompt(9), tap=RaisingTap(stage, in_wants=in_wants))
            neighbour = ask("neighbour", prompt(7, seed=2), max_tokens=3)
            drive.add(faulty, neighbour)
            results = drive.finish()
            assert_ended_with(results["faulty", 0], Broken, stage)
            assert results["faulty", 0].ids == []
            assert_each_equals_alone(model, results, neighbour)

    @every_engine_config
    def test_a_tap_that_raises_in_a_later_step_ends_its_request_in_that_step(self, name: str) -> None:
        calls = 0

        def tap(stage: str, tensor: Tensor) -> Tensor:
            nonlocal calls
            calls += stage == "embed"
            if calls == 4:
                raise Broken("the fourth step")
            return tensor

        model = exact(name)
        faulty = ask("faulty", prompt(9), tap=tap)
        result = fail_among_neighbours(model, faulty, max_step_tokens=64)
        assert_ended_with(result, Broken, "the fourth step")
        assert result.ids == alone(model, faulty).ids[:3]

    @pytest.mark.parametrize("stage", ["embed", "blocks.1.attn.pattern", "blocks.0.attn.k", "ln_final.out", "logits"])
    @pytest.mark.parametrize(
        "change",
        [
            lambda tensor: None,
            lambda tensor: tensor[..., :-1],
            lambda tensor: tensor.sum(),
            lambda tensor: tensor.float(),
            lambda tensor: tensor.tolist(),
        ],
        ids=["None", "another shape", "a scalar", "another dtype", "a list"],
    )
    def test_a_tap_that_returns_another_shape_or_type_ends_only_its_own_request(
        self, stage: str, change: Callable[[Tensor], Any]
    ) -> None:
        def tap(name: str, tensor: Tensor) -> Any:
            return change(tensor) if name == stage else tensor

        result = fail_among_neighbours(exact("llama"), ask("faulty", prompt(9), tap=tap))
        assert_ended_with(result, ValueError, stage)

    @pytest.mark.parametrize(
        ("trace", "error"),
        [
            (TraceParams(selection=Selection(stages=[]), top_k=68), ValueError),
            (TraceParams(selection=Selection(stages=[]), logit_lens=68), ValueError),
            (TraceParams(selection=Selection(stages=stages_of(CONFIGS["llama"]), heads=[6])), IndexError),
        ],
        ids=["top_k", "lens", "heads"],
    )
    def test_a_trace_with_parameters_out_of_range_ends_only_its_own_request(
        self, trace: TraceParams, error: type[Exception]
    ) -> None:
        result = fail_among_neighbours(exact("llama"), ask("faulty", prompt(9), trace=trace))
        assert_ended_with(result, error, "")


def test_an_error_while_attention_is_traced_ends_only_the_traced_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little memory for the scores, for example: no other request needs them."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise Broken("too many keys")

    monkeypatch.setattr(step_context, "trace_attention", fail)
    selection = Selection(stages=stages_of(CONFIGS["llama"]))
    model, faulty = exact("llama"), ask("faulty", prompt(9), trace=TraceParams(selection=selection))
    assert_ended_with(fail_among_neighbours(model, faulty), Broken, "too many keys")


def short_requests() -> list[Request]:
    """Requests whose blocks are read together, up to slots behind their last tokens."""
    return [ask("short", [1, 2], max_tokens=9, seed=2), ask("shorter", [3], max_tokens=9, seed=3)]


def fill_with(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


class TestNonFiniteValues:
    """Keys and values must be finite even where they are masked, because 0 * NaN is NaN.

    So no sequence may read values that are not finite and that another sequence left in a block.
    """

    STAGES = ("blocks.0.attn.k", "blocks.0.attn.v", "blocks.1.resid_pre", "blocks.2.attn.v")

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("name", ["gpt2", pytest.param("mistral", marks=pytest.mark.slow), "qwen3"])
    def test_values_that_a_tap_wrote_are_not_read_after_its_request_failed(
        self, name: str, stage: str, value: float
    ) -> None:
        faulty = ask("faulty", prompt(13), tap=Editor({stage: fill_with(value)}))
        assert_ended_with(fail_among_neighbours(exact(name), faulty), ValueError, "not a finite number")

    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("num_tokens", [12, 2])
    @pytest.mark.parametrize("name", ["gpt2", pytest.param("mistral", marks=pytest.mark.slow), "qwen3"])
    def test_they_are_not_read_after_the_request_was_aborted(self, name: str, num_tokens: int, stage: str) -> None:
        model = exact(name)
        drive = Drive(new_engine(model, num_blocks=10, max_step_tokens=num_tokens, max_sequences=2))
        drive.add(ask("faulty", prompt(30), tap=Editor({stage: fill_with(torch.nan)})))
        drive.step(29 // num_tokens)
        drive.abort("faulty")
        later = [*short_requests(), ask("long", prompt(13), max_tokens=3)]
        drive.add(*later)
        assert_each_equals_alone(model, drive.finish(), *later)

    @every_engine_config
    def test_they_are_not_read_after_the_request_was_preempted(self, name: str) -> None:
        """A decoding sequence takes over its blocks while the prompt of the request is computed in chunks."""
        model = exact(name)
        drive = Drive(new_engine(model, num_blocks=12, max_step_tokens=4, max_sequences=3))
        decoding = ask("decoding", [1], max_tokens=40)
        drive.add(decoding)
        drive.step(9)
        drive.add(ask("faulty", prompt(30), tap=Editor({"blocks.0.attn.v": fill_with(torch.nan)})))
        drive.until(lambda: drive.engine.stats().num_preemptions > 0)
        drive.abort("faulty")
        drive.add(*short_requests())
        assert_each_equals_alone(model, drive.finish(), decoding, *short_requests())

    @pytest.mark.parametrize("name", ["mistral", "qwen2"])
    def test_they_are_not_read_after_a_window_hid_them_and_the_request_ended_well(self, name: str) -> None:
        model = exact(name)
        num_calls = 0

        def fill_first_chunk_with_nan(tensor: Tensor) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            return torch.full_like(tensor, torch.nan) if num_calls == 1 else tensor

        last = 2
        assert CONFIGS[name].window_of(last) is not None
        drive = Drive(new_engine(model, num_blocks=11, max_step_tokens=8, max_sequences=4))
        drive.add(ask("faulty", prompt(32), tap=Editor({f"blocks.{last}.attn.v": fill_first_chunk_with_nan})))
        assert drive.finish()["faulty", 0].end == End("length")
        drive.add(*short_requests())
        assert_each_equals_alone(model, drive.finish(), *short_requests())


PROCESSORS: dict[str, Callable[[Sequence[int], Tensor], Any]] = {
    "too short": lambda tokens, logits: logits[:-1],
    "another dim": lambda tokens, logits: logits[None],
    "nan": lambda tokens, logits: torch.full_like(logits, torch.nan),
    "one nan": lambda tokens, logits: logits.index_fill(0, torch.tensor([5]), torch.nan),
    "inf": lambda tokens, logits: logits.index_fill(0, torch.tensor([5]), torch.inf),
    "all masked": lambda tokens, logits: torch.full_like(logits, -torch.inf),
    "None": lambda tokens, logits: None,
    "a list": lambda tokens, logits: logits.tolist(),
}


class TestProcessors:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("wrong", PROCESSORS)
    def test_a_processor_that_returns_invalid_logits_ends_only_its_own_request(
        self, wrong: str, temperature: float
    ) -> None:
        processors = [PROCESSORS[wrong]]
        faulty = ask("faulty", prompt(9), processors=processors, temperature=temperature, logprobs=1)
        result = fail_among_neighbours(exact("llama"), faulty)
        assert result.end == End("error")
        assert isinstance(result.error, (ValueError, AttributeError))
        assert result.ids == []

    def test_a_processor_that_raises_after_some_tokens_ends_its_request_with_those_tokens(self) -> None:
        def process(tokens: Sequence[int], logits: Tensor) -> Tensor:
            if len(tokens) == 12:
                raise Broken("the fourth token")
            return logits

        model = exact("llama")
        faulty = ask("faulty", prompt(9), processors=[process])
        result = fail_among_neighbours(model, faulty)
        assert_ended_with(result, Broken, "the fourth token")
        assert result.ids == alone(model, ask("plain", prompt(9))).ids[:3]

    def test_one_choice_fails_and_the_others_continue(self) -> None:
        calls = 0

        def process(tokens: Sequence[int], logits: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 6:
                raise Broken
            return logits

        model = exact("llama")
        results = run(new_engine(model), ask("many", prompt(5), n=3, processors=[process]))
        plain = ask("many", prompt(5), n=3)
        ends = [results["many", choice].end for choice in range(3)]
        assert sorted(end.finish_reason for end in ends if end is not None) == ["error", "length", "length"]
        for choice, end in enumerate(ends):
            if end == End("length"):
                assert_equal(results["many", choice], alone(model, plain, choice))


class TestDraws:
    """The random draws of a step are computed together, but one that fails ends only its own request."""

    SEED = 4  # of the request whose third draw fails

    @pytest.fixture(params=[lambda: exact("llama"), bundled_by_kernels], ids=["pytorch", "kernels"])
    def model(self, request: pytest.FixtureRequest) -> Transformer:
        model: Transformer = request.param()
        return model

    def fail_third_draw(self, monkeypatch: pytest.MonkeyPatch) -> None:
        draw, num_drawn = Sampler.draw, 0

        def failing(sampler: Sampler, row: int) -> Draw:
            nonlocal num_drawn
            num_drawn += sampler.params.seed == self.SEED
            if sampler.params.seed == self.SEED and num_drawn == 3:
                raise Broken("the third draw")
            return draw(sampler, row)

        monkeypatch.setattr(Sampler, "draw", failing)

    def test_a_draw_that_fails_ends_only_its_own_request_and_changes_no_bit_of_its_neighbours(
        self, model: Transformer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        faulty = ask("faulty", prompt(9), seed=self.SEED, top_k=9)
        expected = run(new_engine(model), *neighbours())
        self.fail_third_draw(monkeypatch)
        results = run(new_engine(model), faulty, *neighbours())
        failed = results.pop(("faulty", 0))
        assert_ended_with(failed, Broken, "the third draw")
        assert len(failed.ids) == 2
        assert {key: result.ids for key, result in results.items()} == {
            key: result.ids for key, result in expected.items()
        }
        for key, result in results.items():
            assert_equal(result, expected[key])
            if model.batch_invariant:
                assert result.logprob_values == expected[key].logprob_values

    def test_a_parameter_that_no_tensor_can_hold_ends_only_its_own_request(self, model: Transformer) -> None:
        """`SamplingParams` refuses such a number, so the test sets it afterwards."""
        faulty = ask("faulty", prompt(9), seed=None)
        object.__setattr__(faulty.params.sampling, "top_k", 10**309)
        expected = run(new_engine(model), *neighbours())
        results = run(new_engine(model), faulty, *neighbours())
        assert_ended_with(results.pop(("faulty", 0)), OverflowError, "")
        for key, result in results.items():
            assert_equal(result, expected[key])

    def test_a_failed_draw_does_not_affect_neighbours_that_start_at_other_steps(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor a later request with the same prompt."""
        self.fail_third_draw(monkeypatch)
        faulty = ask("faulty", prompt(9), seed=self.SEED, temperature=0.9)
        assert_ended_with(fail_among_neighbours(exact("llama"), faulty), Broken, "the third draw")


class TestNumbers:
    """The number parameters of a request: each value works, or is refused with the allowed range."""

    RANGES: ClassVar[dict[str, str]] = {
        "max_tokens": "an integer between 0 and 2147483647",
        "n": "an integer between 1 and 16384",
        "logprobs": "an integer between 0 and 2147483647",
    }
    LARGE = (10**309, -(10**309), 10**5000, 2**64, 2**63, 2**31, 2**31 - 1)
    OTHERS = (1, 2, 0, -1, 1.0, 2.5, 1e-320, math.nan, math.inf, -math.inf, True, "1", None)

    @pytest.mark.parametrize("value", [*LARGE, *OTHERS], ids=shortened)
    @pytest.mark.parametrize("name", RANGES)
    def test_any_value_works_or_is_refused_with_the_allowed_range(self, name: str, value: Any) -> None:
        drive = Drive(new_engine(exact("llama")))
        complaint = complaint_about(drive, {name: value})
        if complaint is None:
            drive.add(*neighbours()[:2])
            results = drive.finish()
            assert all(result.error is None for result in results.values())
            assert_each_equals_alone(exact("llama"), results, *neighbours()[:2])
        else:
            assert complaint.startswith(f"{name}: ")
            assert self.RANGES[name] in complaint or "context length is 48" in complaint
            assert len(complaint) < 240
            assert not drive.engine.has_work


def complaint_about(drive: Drive, wrong: dict[str, Any]) -> str | None:
    """Add a request with these parameters. Returns the error message if it is refused."""
    try:
        drive.add(ask("asked", prompt(9), **{"max_tokens": 4} | wrong))
    except ValueError as error:
        return str(error)
    return None


class TestEditing:
    """An edit changes only the sequence to which it belongs."""

    @every_engine_config
    def test_an_edited_request_gets_what_the_edited_network_gives_it_alone(self, name: str) -> None:
        model = exact(name)
        mlp_stage = "mlp.router_logits" if model.config.has_experts(2) else "mlp.post"
        for stage in ("blocks.1.attn.k", "blocks.0.attn.pattern", f"blocks.2.{mlp_stage}", "embed"):
            edit = Editor({stage: lambda tensor: -tensor})
            edited = ask("edited", prompt(15), max_tokens=7, tap=edit, temperature=1.2)
            results = run(new_engine(model, max_step_tokens=10), edited, *neighbours())
            assert_equal(results["edited", 0], self.alone_edited(model, edited))
            assert results["edited", 0].logprob_values != pytest.approx(alone(model, edited).logprob_values, abs=1e-2)
            assert_each_equals_alone(model, results, *neighbours())

    @staticmethod
    def alone_edited(model: Transformer, request: Request) -> Result:
        assert not isinstance(request.tap, Hooks)
        return alone(model, request, tap=request.tap)

    @pytest.mark.parametrize("name", ["gpt2", pytest.param("qwen3", marks=pytest.mark.slow)])
    def test_an_edit_at_any_stage_changes_no_bit_of_its_neighbours(self, name: str) -> None:
        model = build(CONFIGS[name])
        for stage in stages_of_pass(name):
            copied, edited = (
                self.logits_of_neighbours(model, Editor({stage: edit})) for edit in (torch.clone, lambda x: 0.5 * x)
            )
            assert all(torch.equal(one, other) for one, other in zip(copied, edited, strict=True)), stage

    @staticmethod
    def logits_of_neighbours(model: Transformer, tap: Tap) -> list[Tensor]:
        """The logits of the sequences without a tap, from two steps."""
        engine = new_engine(model)
        found: list[Tensor] = []
        compute = engine._runner.run

        def spy(sequences: Sequence[StepSequence]) -> ForwardResult:
            result = compute(sequences)
            found.extend(result.logits[each.rows] for each in sequences if each.request.tap is None)
            return result

        engine._runner.run = spy  # type: ignore[method-assign]
        drive = Drive(engine)
        drive.add(ask("tapped", prompt(9), tap=tap), *neighbours())
        drive.step(2)
        assert len(found) == 6
        return found

    def test_an_edited_request_neither_uses_nor_offers_a_prefix(self) -> None:
        model = exact("llama")
        drive = Drive(new_engine(model))
        before, after = ask("before", prompt(16), max_tokens=3), ask("after", prompt(16), max_tokens=3, seed=2)
        edited = ask("edited", prompt(16), max_tokens=9, tap=Editor({"blocks.0.attn.v": torch.neg}), n=2)
        drive.add(edited)
        drive.step(4)
        drive.add(before)
        drive.step(3)
        again = ask("again", prompt(16), max_tokens=9, tap=Editor({"blocks.0.attn.v": torch.neg}))
        drive.add(again, after)
        results = drive.finish()
        num_cached = {key: result.num_cached for key, result in results.items()}
        assert num_cached == {
            ("edited", 0): 0,
            ("edited", 1): 0,
            ("before", 0): 0,
            ("again", 0): 0,
            ("after", 0): 12,
        }
        assert results["again", 0].ids == results["edited", 0].ids
        assert_each_equals_alone(model, results, before, after)


class TestFailedSteps:
    def test_a_failed_step_ends_its_own_sequences_and_the_engine_continues(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = exact("llama")
        engine = new_engine(model, max_sequences=4)
        drive = Drive(engine)
        failing = [ask("first", prompt(12)), ask("second", prompt(12), seed=1), *neighbours()[:2]]
        waiting = ask("waiting", prompt(12), seed=3)
        drive.add(*failing)
        drive.step(2)
        drive.add(waiting)

        def fail(sequences: Sequence[StepSequence]) -> ForwardResult:
            blocks = torch.tensor([block for each in sequences for block in each.scheduled.sequence.blocks])
            for pool in engine._cache._pools:
                pool.view(len(pool), -1, 4, *pool.shape[2:])[:, blocks] = torch.nan
            raise Broken("the whole step")

        with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL, "model.engine.engine"):
            patch.setattr(engine._runner, "run", fail)
            step = drive.step()
        assert {(output.request_id, output.choice) for output in step.outputs} == {
            ("first", 0),
            ("second", 0),
            ("short", 0),
            ("long", 0),
        }
        for request in failing:
            for choice in range(request.params.n):
                assert_ended_with(drive.results[request.id, choice], Broken, "the whole step")
        assert_each_equals_alone(model, drive.finish(), waiting)
        assert drive.results["waiting", 0].num_cached == 0
        drive.add(*(ask(f"again {request.id}", request.prompt_ids) for request in failing))
        results = drive.finish()
        for request in failing:
            assert_equal(results[f"again {request.id}", 0], alone(model, ask("plain", request.prompt_ids)))
