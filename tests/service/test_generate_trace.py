"""POST /generate with `trace`: steps show the rows of one pass over all tokens, and nothing else changes."""

import base64
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forwardscope.results.generations import FinishEvent, Generation, TokenEvent
from tests.service.running import PATIENCE_SECONDS, Running, Start, validate, wait_until
from tests.service.test_forward import as_tensor

PROMPT = [257, 69, 270, 273, 264]
LONG_PROMPT = [(7 * index) % 250 + 20 for index in range(37)]  # two full blocks of the cache, and part of a third
BLOCK = 16
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 4 * 4  # keys and values, layers, key-value heads, head size, bytes
# The engine computes step by step with the cache, and /forward all at once: the same sums in another order.
ROUNDING: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
BODY: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "max_tokens": 12, "ignore_eos": True}
EVERYTHING = {"stages": ["*"], "detail": "values", "encoding": "base64", "top_k": 3, "logit_lens": True}
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@dataclass(frozen=True)
class Choice:
    """One choice, assembled from a whole answer or from a stream."""

    tokens: list[int]
    text: str
    traces: list[dict[str, Any]]
    end: dict[str, Any]

    @property
    def positions(self) -> list[int]:
        return [position for trace in self.traces for position in trace["positions"]]

    @property
    def num_cached(self) -> int:
        return int(self.end["usage"]["cached_tokens"])


def generate(service: Running, stream: bool, **body: Any) -> list[Choice]:
    """Every choice of a request."""
    if stream:
        return from_events(service.stream(**body))
    answer = service.answer("/generate", **body)
    validate(Generation, answer)
    choices = answer["choices"] or [answer]
    return [Choice(choice["tokens"], choice["text"], choice["trace"] or [], end_of(choice)) for choice in choices]


def from_events(events: Sequence[dict[str, Any]]) -> list[Choice]:
    """Every choice of a stream. A trace is in the event of its token, or alone if it shows a part of the prompt."""
    choices = []
    for index in range(1 + max(event["choice"] for event in events)):
        *parts, end = [event for event in events if event["choice"] == index]
        validate(FinishEvent, end)
        for event in parts:
            validate(TokenEvent, event)
            assert event["token"] is not None or (event["trace"]["logit_lens"] is None and event["text"] == "")
        choices.append(
            Choice(
                tokens=[event["token"]["id"] for event in parts if event["token"] is not None],
                text="".join(event["text"] for event in parts),
                traces=[event["trace"] for event in parts if "trace" in event],
                end=end_of(end),
            )
        )
    return choices


def end_of(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in ("finish_reason", "stop_reason", "usage")}


def values_of(stage: dict[str, Any]) -> Tensor:
    """The numbers of a stage, with NaN for null and for the non-finite numbers of base64."""
    if isinstance(stage["values"], list):
        return as_tensor(stage["values"])
    assert stage["dtype"] == "float32"
    numbers = np.frombuffer(base64.b64decode(stage["values"]), dtype="<f4").reshape(stage["shape"]).astype(float)
    return torch.from_numpy(np.where(np.isfinite(numbers), numbers, np.nan))


@dataclass(frozen=True)
class ForwardStages:
    """All stages of one POST /forward."""

    stages: dict[str, tuple[list[str], Tensor]]

    @classmethod
    def of(cls, service: Running, ids: Sequence[int], **selection: Any) -> "ForwardStages":
        answer = service.answer("/forward", prompt=list(ids), detail="values", encoding="base64", **selection)
        return cls({stage["name"]: (stage["dims"], values_of(stage)) for stage in answer["stages"]})

    def check(self, trace: dict[str, Any]) -> None:
        """Check that the values of a step are rows of this pass, with the keys up to the last token of the step."""
        assert [stage["name"] for stage in trace["stages"]] == list(self.stages)
        for stage in trace["stages"]:
            dims, whole = self.stages[stage["name"]]
            (axis,) = (axis for axis, dim in enumerate(dims) if dim in ("position", "query"))
            rows = whole.index_select(axis, torch.tensor(trace["positions"]))
            rows = rows[..., : stage["shape"][-1]] if "key" in dims else rows
            assert (stage["dims"], stage["shape"]) == (dims, list(rows.shape)), stage["name"]
            torch.testing.assert_close(values_of(stage), rows, equal_nan=True, **ROUNDING)


def check_steps(service: Running, prompt: Sequence[int], choice: Choice, stages: Sequence[str] = ("*",)) -> None:
    """Check that each position that was not cached is shown once, in order, with the values of one pass."""
    ids = [*prompt, *choice.tokens]
    assert choice.positions == list(range(choice.num_cached, len(ids) - 1))
    whole = ForwardStages.of(service, ids, stages=list(stages))
    for trace in choice.traces:
        whole.check(trace)
        assert all(
            stage["shape"][-1] == trace["positions"][-1] + 1 for stage in trace["stages"] if "key" in stage["dims"]
        )


@both_ways
class TestValues:
    @pytest.mark.parametrize("encoding", ["json", "base64"])
    def test_each_step_shows_its_rows_of_all_stages_as_one_pass_over_all_tokens_has_them(
        self, tiny: Running, stream: bool, encoding: str
    ) -> None:
        trace = {"stages": ["*"], "detail": "values", "encoding": encoding}
        (choice,) = generate(tiny, stream, **BODY, trace=trace)
        assert [len(step["positions"]) for step in choice.traces] == [5] + [1] * 11
        catalogue = [stage["name"] for stage in tiny.get("/model").json()["stages"]]
        assert [stage["name"] for stage in choice.traces[-1]["stages"]] == catalogue
        kinds = {type(stage["values"]) for step in choice.traces for stage in step["stages"]}
        assert kinds == {list if encoding == "json" else str}
        check_steps(tiny, PROMPT, choice)

    @pytest.mark.parametrize(
        "more",
        [
            {},
            {"temperature": 0},
            {"echo": True, "logprobs": 2},
            {"stop": "e"},
            {"repetition_penalty": 1.5, "top_p": 0.9, "logprobs": 0},
            {"n": 3},
        ],
        ids=lambda more: next(iter(more), "plain"),
    )
    def test_a_trace_changes_nothing_else_in_the_answer(
        self, tiny: Running, stream: bool, more: dict[str, Any]
    ) -> None:
        body = BODY | {"prompt": "the cat sat on", "max_tokens": 20} | more

        def without_trace(**traced: Any) -> list[Any]:
            events = tiny.stream(**body, **traced) if stream else [tiny.answer("/generate", **body, **traced)]
            return [dropped(event) for event in events]

        def dropped(event: Any) -> Any:
            if isinstance(event, list):
                return [dropped(part) for part in event]
            if not isinstance(event, dict):
                return event
            # Decoding all rows of the prompt instead of the last one may change the last digit of a log-probability.
            left_out = ("id", "timings", "trace") if "choice" in event else ("logprob",)
            return {name: dropped(part) for name, part in event.items() if name not in left_out}

        assert without_trace(trace=EVERYTHING) == without_trace()

    def test_summaries_cover_the_traced_rows_and_are_sent_only_on_request(self, tiny: Running, stream: bool) -> None:
        (choice,) = generate(tiny, stream, **BODY, trace={"detail": "values"})
        (summary,) = generate(tiny, stream, **BODY, trace={})
        (nothing,) = generate(tiny, stream, **BODY, trace={"detail": "none"})
        for trace, short, bare in zip(choice.traces, summary.traces, nothing.traces, strict=True):
            assert short["stages"] == [without(stage, "values") for stage in trace["stages"]]
            assert bare["stages"] == [without(stage, "summary") for stage in short["stages"]]
            for stage in trace["stages"]:
                values = values_of(stage)
                numbers = values[values.isfinite()]
                expected = {
                    "min": numbers.min(),
                    "max": numbers.max(),
                    "mean": numbers.mean(),
                    "std": numbers.std(correction=0),
                    "l2": numbers.norm(),
                    "non_finite": values.numel() - numbers.numel(),
                }
                assert stage["summary"] == pytest.approx({name: float(x) for name, x in expected.items()}, **TOLERANCE)

    def test_heads_and_positions_select_as_in_forward_and_steps_without_them_show_nothing(
        self, tiny: Running, stream: bool
    ) -> None:
        stages, heads, positions = ["*.pattern", "*.k", "*.resid_mid", "logits"], [4, 1], [9, 3, 1, 15]
        trace = {"stages": stages, "detail": "values", "heads": heads, "positions": positions}
        (choice,) = generate(tiny, stream, **BODY, trace=trace)
        assert [step["positions"] for step in choice.traces] == [[1, 3], [9], [15]]
        whole = ForwardStages.of(tiny, PROMPT + choice.tokens, stages=stages, heads=heads)
        for step in choice.traces:
            whole.check(step)
        keys = [stage["shape"][-1] for step in choice.traces for stage in step["stages"] if "key" in stage["dims"]]
        assert keys == [5, 5, 10, 10, 16, 16]  # up to the last token of the step, whatever is selected

    @pytest.mark.parametrize("positions", [None, [2, 6]])
    def test_top_k_gives_the_predictions_of_forward_at_each_position(
        self, tiny: Running, stream: bool, positions: list[int] | None
    ) -> None:
        trace = {"stages": ["embed"], "detail": "none", "top_k": 4, "positions": positions}
        (choice,) = generate(tiny, stream, **BODY, trace=trace)
        answer = tiny.answer("/forward", prompt=PROMPT + choice.tokens, stages=["embed"], detail="none", top_k=4)
        found = [row for step in choice.traces for row in step["predictions"]]
        assert [row["position"] for row in found] == choice.positions == (positions or list(range(16)))
        for row in found:
            check_top(row["top"], answer["predictions"][row["position"]]["top"])
        (without_top_k,) = generate(tiny, stream, **BODY, trace=trace | {"top_k": 0})
        assert [step["predictions"] for step in without_top_k.traces] == [[]] * len(choice.traces)

    @pytest.mark.parametrize("top_k", [None, 0, 2])
    def test_the_logit_lens_decodes_the_residual_of_each_layer_at_the_position_that_chose_the_token(
        self, tiny: Running, stream: bool, top_k: int | None
    ) -> None:
        (choice,) = generate(tiny, stream, **BODY, trace={"logit_lens": True, "top_k": top_k})
        whole = ForwardStages.of(tiny, PROMPT + choice.tokens, stages=["blocks.*.resid_post"])
        with torch.inference_mode():
            residuals = torch.cat([values.float() for _, values in whole.stages.values()])
            logits = tiny.checkpoint.model.compute_logits(residuals)  # (L, T, V)
        assert len(choice.traces) == len(choice.tokens)
        for index, (step, chosen) in enumerate(zip(choice.traces, choice.tokens, strict=True)):
            assert step["stages"] == []  # none are requested
            assert [layer["layer"] for layer in step["logit_lens"]] == [0, 1]
            for layer, row in zip(step["logit_lens"], logits[:, len(PROMPT) - 1 + index], strict=True):
                chances = row.softmax(-1)
                assert layer["chosen_probability"] == pytest.approx(chances[chosen].item(), **TOLERANCE)
                top = row.topk(5 if top_k is None else top_k)
                expected = [
                    {"id": token_id, "text": text_of(tiny, token_id), "logit": logit, "probability": chances[token_id]}
                    for token_id, logit in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ]
                check_top(layer["top"], expected)

    def test_the_tokens_of_an_echoed_prompt_come_before_the_trace_of_their_step(
        self, tiny: Running, stream: bool
    ) -> None:
        body = BODY | {"echo": True, "trace": EVERYTHING}
        (choice,) = generate(tiny, stream, **body)
        assert choice.positions == list(range(16))
        if stream:
            *events, _ = tiny.stream(**body)
            assert ["trace" in event for event in events] == [False] * len(PROMPT) + [True] * 12

    def test_the_logit_lens_is_null_unless_requested(self, tiny: Running, stream: bool) -> None:
        (choice,) = generate(tiny, stream, **BODY, trace={"stages": ["embed"]})
        assert [step["logit_lens"] for step in choice.traces] == [None] * 12


TOLERANCE: dict[str, Any] = {"rel": 1e-5, "abs": 1e-5}


def check_top(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Check that the tokens are the same, and the numbers up to rounding."""
    assert [(entry["id"], entry["text"]) for entry in found] == [(entry["id"], entry["text"]) for entry in expected]
    for name in ("logit", "probability"):
        numbers = [float(entry[name]) for entry in expected]
        assert [entry[name] for entry in found] == pytest.approx(numbers, **TOLERANCE)


def text_of(service: Running, token_id: int) -> str | None:
    tokenizer = service.checkpoint.tokenizer
    assert tokenizer is not None
    return tokenizer.token_text(token_id) if token_id < tokenizer.vocab_size else None


def without(stage: dict[str, Any], name: str) -> dict[str, Any]:
    return {part: value for part, value in stage.items() if part != name}


@both_ways
class TestSteps:
    """However a sequence is divided into steps, each of its computed positions is shown once, in order."""

    def test_a_prompt_that_takes_several_steps_is_shown_step_by_step_before_the_first_token(
        self, tiny_directory: Path, start: Start, stream: bool
    ) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=4, max_step_tokens=8)
        body = BODY | {"prompt": LONG_PROMPT, "trace": EVERYTHING}
        (choice,) = generate(service, stream, **body)
        sizes = [len(step["positions"]) for step in choice.traces]
        assert sizes[:5] == [8, 8, 8, 8, 5]
        assert [step["logit_lens"] is None for step in choice.traces] == [True] * 4 + [False] * 12
        check_steps(service, LONG_PROMPT, choice)
        if stream:
            events = service.stream(**body | {"prompt": [*LONG_PROMPT[1:], 1]})
            assert [event["token"] is None for event in events[:-1]] == [True] * 4 + [False] * 12

    def test_a_cached_prefix_is_counted_and_not_shown(self, tiny_directory: Path, start: Start, stream: bool) -> None:
        service = start(model=str(tiny_directory))
        body = BODY | {"prompt": LONG_PROMPT, "trace": EVERYTHING}
        (first,), (again,) = generate(service, stream, **body), generate(service, stream, **body)
        assert (first.num_cached, again.num_cached) == (0, 2 * BLOCK)
        assert (first.tokens, first.text) == (again.tokens, again.text)
        longer = [*LONG_PROMPT, *first.tokens, 5]  # generated tokens are cached like those of a prompt
        (third,) = generate(service, stream, **body | {"prompt": longer})
        assert third.num_cached == 3 * BLOCK
        for prompt, choice in ((LONG_PROMPT, first), (LONG_PROMPT, again), (longer, third)):
            check_steps(service, prompt, choice)

    def test_selected_positions_are_computed_again_even_if_they_are_cached(
        self, tiny_directory: Path, start: Start, stream: bool
    ) -> None:
        service = start(model=str(tiny_directory))
        generate(service, stream, **BODY | {"prompt": LONG_PROMPT})
        for positions, num_cached in (([3, 36], 0), ([20, 40], BLOCK), ([36], 2 * BLOCK)):
            trace = EVERYTHING | {"positions": positions}
            (choice,) = generate(service, stream, **BODY | {"prompt": LONG_PROMPT, "trace": trace})
            assert (choice.positions, choice.num_cached) == (positions, num_cached)
            whole = ForwardStages.of(service, LONG_PROMPT + choice.tokens)
            for step in choice.traces:
                if step["positions"]:
                    whole.check(step)

    def test_each_choice_of_a_prompt_shows_its_own_tokens(
        self, tiny_directory: Path, start: Start, stream: bool
    ) -> None:
        service = start(model=str(tiny_directory))
        choices = generate(service, stream, **BODY | {"prompt": LONG_PROMPT, "n": 3}, trace=EVERYTHING)
        assert len({tuple(choice.tokens) for choice in choices}) == 3
        assert [choice.num_cached for choice in choices] == [0, 2 * BLOCK, 2 * BLOCK]
        for choice in choices:
            check_steps(service, LONG_PROMPT, choice)

    def test_a_traced_request_in_a_batch_shows_its_own_rows_and_the_others_show_nothing(
        self, tiny: Running, stream: bool
    ) -> None:
        bodies = [BODY | {"seed": seed, "prompt": PROMPT[: 2 + seed % 4]} for seed in range(8)]
        alone = [generate(tiny, stream, **body)[0] for body in bodies]
        traced = {2: EVERYTHING, 5: {"stages": ["*"], "detail": "values", "logit_lens": True}}
        with ThreadPoolExecutor(len(bodies)) as pool:
            with tiny.blocked():
                pending = [
                    pool.submit(generate, tiny, stream, **body, trace=traced.get(index))
                    for index, body in enumerate(bodies)
                ]
                wait_until(lambda: tiny.metric("num_requests_waiting") == len(bodies), "all wait for one step")
            together = [future.result(PATIENCE_SECONDS)[0] for future in pending]
        for index, (choice, expected) in enumerate(zip(together, alone, strict=True)):
            assert (choice.tokens, choice.text, choice.end) == (expected.tokens, expected.text, expected.end)
            if index in traced:
                check_steps(tiny, bodies[index]["prompt"], choice)
            else:
                assert choice.traces == []

    @pytest.mark.slow
    def test_positions_that_are_computed_again_after_a_preemption_are_not_shown_again(
        self, tiny_directory: Path, start: Start, stream: bool
    ) -> None:
        service = start(model=str(tiny_directory), cache_bytes=5 * BLOCK_BYTES)
        bodies = [BODY | {"seed": seed, "max_tokens": 40, "trace": EVERYTHING} for seed in range(2)]
        with ThreadPoolExecutor(2) as pool:
            with service.blocked():
                pending = [pool.submit(generate, service, stream, **body) for body in bodies]
                wait_until(lambda: service.metric("num_requests_waiting") == 2, "all wait for one step")
            together = [future.result(PATIENCE_SECONDS)[0] for future in pending]
        assert service.metric("num_preemptions_total") > 0
        assert [choice.tokens for choice in together] == [
            generate(service, stream, **body)[0].tokens for body in bodies
        ]
        for choice in together:
            check_steps(service, PROMPT, choice)


class TestMetrics:
    @both_ways
    def test_the_bytes_and_seconds_of_traces_are_counted_and_those_of_other_requests_are_not(
        self, tiny: Running, stream: bool
    ) -> None:
        names = ("trace_bytes_total", "trace_seconds_count", "trace_seconds_sum")

        def added(**trace: Any) -> tuple[bytes, list[float]]:
            before = [tiny.metric(name) for name in names]
            content = tiny.post("/generate", BODY | trace | {"stream": stream}).content
            wait_until(lambda: tiny.metric("num_requests_running") == 0, "it has ended")
            return content, [tiny.metric(name) - value for name, value in zip(names, before, strict=True)]

        assert added()[1] == [0, 0, 0]
        content, (num_bytes, num_steps, seconds) = added(trace=EVERYTHING)
        assert num_bytes == sum(map(len, raw_traces(content)))
        assert num_steps == 12  # one step for the prompt, and one for each token but the last
        assert 0 < seconds < PATIENCE_SECONDS


def raw_traces(content: bytes) -> list[bytes]:
    """The traces of an answer or a stream as they were sent. A trace is the last field of its event."""
    start = b'"trace":'
    if not content.startswith(b"data:"):
        traces, text = [], content.partition(start)[2].decode()[1:]
        while not text.startswith("]"):
            text = text.removeprefix(",")
            _, end = json.JSONDecoder().raw_decode(text)
            traces.append(text[:end].encode())
            text = text[end:]
        return traces
    frames = content.split(b"\n\n")
    return [frame.partition(start)[2].removesuffix(b"}") for frame in frames if start in frame]


class TestFailures:
    @pytest.mark.parametrize(
        "broken",
        [
            "model.tracing.selection.StageCollector.__call__",
            "model.tracing.selection.StageCollector.finish",
            "model.engine.step_tracer.predict",
            "service.answers.generation.trace_answer",
        ],
    )
    def test_an_error_in_a_trace_ends_only_its_own_request(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str], broken: str
    ) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("secret detail")

        (alone,) = generate(tiny, True, **BODY)
        monkeypatch.setattr(broken, fail)
        poisoned = BODY | {"trace": {"top_k": 1}}
        with ThreadPoolExecutor(5) as pool:
            with tiny.blocked():
                neighbours = [pool.submit(generate, tiny, stream, **BODY) for stream in (True, False, True)]
                pending = [pool.submit(tiny.post, "/generate", poisoned | {"stream": s}) for s in (True, False)]
                wait_until(lambda: tiny.metric("num_requests_waiting") == 5, "all wait for one step")
            assert [future.result(PATIENCE_SECONDS) for future in neighbours] == [[alone]] * 3
            streamed, whole = (future.result(PATIENCE_SECONDS) for future in pending)
        error, done, rest = streamed.content.split(b"\n\n")
        assert (error.partition(b"\n")[0], done, rest) == (b"event: error", b"data: [DONE]", b"")
        assert whole.status_code == 500
        assert b"secret" not in streamed.content + whole.content
        wait_until(lambda: "".join(errors_logged).count("secret detail") >= 2, "both failures are logged")
        errors_logged.clear()
        monkeypatch.undo()
        wait_until(lambda: tiny.metric("kv_cache_usage_perc") == 0, "all blocks are free")
        check_steps(tiny, PROMPT, generate(tiny, True, **BODY, trace=EVERYTHING)[0])


def test_a_lens_with_too_many_tokens_for_one_step_is_refused(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.answers.step_trace_answers.MAX_LENS_TOKENS", 8)
    for top_k, status in ((4, 200), (5, 400)):
        response = tiny.post("/generate", BODY | {"trace": {"logit_lens": True, "top_k": top_k}})
        assert response.status_code == status
    assert response.json()["error"]["param"] == "trace.top_k"
    assert "at most 4" in response.json()["error"]["message"]
