"""POST /generate with `trace`: what steps show are the rows of one pass over all the tokens, and nothing else moves."""

import base64
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from service.schemas import FinishEvent, GenerateAnswer, TokenEvent
from tests.service.checkpoints import VOCAB_SIZE
from tests.service.running import PATIENCE_SECONDS, Running, Start, wait_until
from tests.service.test_forward import as_tensor

PROMPT = [257, 69, 270, 273, 264]
LONG_PROMPT = [(7 * index) % 250 + 20 for index in range(37)]  # two full blocks of the cache, and a part of a third
BLOCK = 16
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 4 * 4  # keys and values, layers, key-value heads, numbers of four bytes
# The engine computes a step at a time with the cache, /forward all at once: the same sums in another order.
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}
BODY: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "max_tokens": 12, "ignore_eos": True}
EVERYTHING = {"stages": ["*"], "detail": "values", "encoding": "base64", "top_k": 3, "logit_lens": True}
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@dataclass(frozen=True)
class Shown:
    """One choice, put together from the whole answer or from the stream."""

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


def generate(service: Running, stream: bool, **body: Any) -> list[Shown]:
    """Every choice of a request."""
    if stream:
        return from_events(service.stream(**body))
    answer = service.answer("/generate", **body)
    GenerateAnswer.model_validate(answer)
    choices = answer["choices"] or [answer]
    return [Shown(choice["tokens"], choice["text"], choice["trace"] or [], end_of(choice)) for choice in choices]


def from_events(events: Sequence[dict[str, Any]]) -> list[Shown]:
    """Every choice of a stream; a trace comes with its token, or alone where it shows a part of the prompt."""
    choices = []
    for index in range(1 + max(event["choice"] for event in events)):
        *parts, end = [event for event in events if event["choice"] == index]
        FinishEvent.model_validate(end)
        for event in parts:
            TokenEvent.model_validate(event)
            assert event["token"] is not None or (event["trace"]["logit_lens"] is None and event["text"] == "")
        choices.append(
            Shown(
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
    """The numbers of a stage; null is NaN, and so is what stands for it in base64."""
    if isinstance(stage["values"], list):
        return as_tensor(stage["values"])
    assert stage["dtype"] == "float32"
    numbers = np.frombuffer(base64.b64decode(stage["values"]), dtype="<f4").reshape(stage["shape"]).astype(float)
    return torch.from_numpy(np.where(np.isfinite(numbers), numbers, np.nan))


@dataclass(frozen=True)
class Pass:
    """Every stage of one POST /forward."""

    stages: dict[str, tuple[list[str], Tensor]]

    @classmethod
    def over(cls, service: Running, ids: Sequence[int], **selection: Any) -> "Pass":
        answer = service.answer("/forward", prompt=list(ids), detail="values", encoding="base64", **selection)
        return cls({stage["name"]: (stage["dims"], values_of(stage)) for stage in answer["stages"]})

    def check(self, trace: dict[str, Any]) -> None:
        """The values of a step are the rows of this pass; of the keys, those up to the last token of the step."""
        assert [stage["name"] for stage in trace["stages"]] == list(self.stages)
        for stage in trace["stages"]:
            dims, whole = self.stages[stage["name"]]
            (axis,) = (axis for axis, dim in enumerate(dims) if dim in ("position", "query"))
            rows = whole.index_select(axis, torch.tensor(trace["positions"]))
            rows = rows[..., : stage["shape"][-1]] if "key" in dims else rows
            assert (stage["dims"], stage["shape"]) == (dims, list(rows.shape)), stage["name"]
            torch.testing.assert_close(values_of(stage), rows, equal_nan=True, **ROUNDING)


def check_steps(service: Running, prompt: Sequence[int], shown: Shown, stages: Sequence[str] = ("*",)) -> None:
    """Every position that nobody had computed is shown once, in order, as in one pass over all the tokens."""
    ids = [*prompt, *shown.tokens]
    assert shown.positions == list(range(shown.num_cached, len(ids) - 1))
    whole = Pass.over(service, ids, stages=list(stages))
    for trace in shown.traces:
        whole.check(trace)
        assert all(
            stage["shape"][-1] == trace["positions"][-1] + 1 for stage in trace["stages"] if "key" in stage["dims"]
        )


@both_ways
class TestValues:
    @pytest.mark.parametrize("encoding", ["json", "base64"])
    def test_each_step_shows_its_rows_of_every_stage_of_one_pass_over_all_the_tokens(
        self, tiny: Running, stream: bool, encoding: str
    ) -> None:
        trace = {"stages": ["*"], "detail": "values", "encoding": encoding}
        (shown,) = generate(tiny, stream, **BODY, trace=trace)
        assert [len(step["positions"]) for step in shown.traces] == [5] + [1] * 11
        catalogue = [stage["name"] for stage in tiny.get("/model").json()["stages"]]
        assert [stage["name"] for stage in shown.traces[-1]["stages"]] == catalogue
        kinds = {type(stage["values"]) for step in shown.traces for stage in step["stages"]}
        assert kinds == {list if encoding == "json" else str}
        check_steps(tiny, PROMPT, shown)

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
    def test_a_trace_changes_nothing_else_of_an_answer(self, tiny: Running, stream: bool, more: dict[str, Any]) -> None:
        body = BODY | {"prompt": "the cat sat on", "max_tokens": 20} | more

        def without_trace(**traced: Any) -> list[Any]:
            events = tiny.stream(**body, **traced) if stream else [tiny.answer("/generate", **body, **traced)]
            return [dropped(event) for event in events]

        def dropped(event: Any) -> Any:
            if isinstance(event, list):
                return [dropped(part) for part in event]
            if not isinstance(event, dict):
                return event
            # Where all rows of the prompt are decoded and not the last one alone, the last digit may be another.
            left_out = ("id", "timings", "trace") if "choice" in event else ("logprob",)
            return {name: dropped(part) for name, part in event.items() if name not in left_out}

        assert without_trace(trace=EVERYTHING) == without_trace()

    def test_summaries_are_of_the_rows_that_are_shown_and_none_comes_where_none_is_asked_for(
        self, tiny: Running, stream: bool
    ) -> None:
        (shown,) = generate(tiny, stream, **BODY, trace={"detail": "values"})
        (summary,) = generate(tiny, stream, **BODY, trace={})
        (nothing,) = generate(tiny, stream, **BODY, trace={"detail": "none"})
        for trace, short, bare in zip(shown.traces, summary.traces, nothing.traces, strict=True):
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

    def test_heads_and_positions_select_as_in_forward_and_nothing_is_shown_of_other_steps(
        self, tiny: Running, stream: bool
    ) -> None:
        stages, heads, positions = ["*.pattern", "*.k", "*.resid_mid", "logits"], [4, 1], [9, 3, 1, 15]
        trace = {"stages": stages, "detail": "values", "heads": heads, "positions": positions}
        (shown,) = generate(tiny, stream, **BODY, trace=trace)
        assert [step["positions"] for step in shown.traces] == [[1, 3], [9], [15]]
        whole = Pass.over(tiny, PROMPT + shown.tokens, stages=stages, heads=heads)
        for step in shown.traces:
            whole.check(step)
        keys = [stage["shape"][-1] for step in shown.traces for stage in step["stages"] if "key" in stage["dims"]]
        assert keys == [5, 5, 10, 10, 16, 16]  # of the whole step, whatever is shown of it

    @pytest.mark.parametrize("positions", [None, [2, 6]])
    def test_top_k_shows_the_predictions_of_forward_at_each_position(
        self, tiny: Running, stream: bool, positions: list[int] | None
    ) -> None:
        trace = {"stages": ["embed"], "detail": "none", "top_k": 4, "positions": positions}
        (shown,) = generate(tiny, stream, **BODY, trace=trace)
        answer = tiny.answer("/forward", prompt=PROMPT + shown.tokens, stages=["embed"], detail="none", top_k=4)
        found = [row for step in shown.traces for row in step["predictions"]]
        assert [row["position"] for row in found] == shown.positions == (positions or list(range(16)))
        for row in found:
            check_top(row["top"], answer["predictions"][row["position"]]["top"])
        (without_top_k,) = generate(tiny, stream, **BODY, trace=trace | {"top_k": 0})
        assert [step["predictions"] for step in without_top_k.traces] == [[]] * len(shown.traces)

    @pytest.mark.parametrize("top_k", [None, 0, 2])
    def test_the_lens_decodes_each_layers_residual_at_the_position_that_chose_the_token(
        self, tiny: Running, stream: bool, top_k: int | None
    ) -> None:
        (shown,) = generate(tiny, stream, **BODY, trace={"logit_lens": True, "top_k": top_k})
        whole = Pass.over(tiny, PROMPT + shown.tokens, stages=["blocks.*.resid_post"])
        with torch.inference_mode():
            residuals = torch.cat([values.float() for _, values in whole.stages.values()])
            logits = tiny.checkpoint.model.decode(residuals)  # (L, T, V)
        assert len(shown.traces) == len(shown.tokens)
        for index, (step, chosen) in enumerate(zip(shown.traces, shown.tokens, strict=True)):
            assert step["stages"] == []  # none were asked for
            assert [guess["layer"] for guess in step["logit_lens"]] == [0, 1]
            for guess, row in zip(step["logit_lens"], logits[:, len(PROMPT) - 1 + index], strict=True):
                chances = row.softmax(-1)
                assert guess["chosen_probability"] == pytest.approx(chances[chosen].item(), **TOLERANCE)
                top = row.topk(5 if top_k is None else top_k)
                expected = [
                    {"id": token_id, "text": text_of(tiny, token_id), "logit": logit, "probability": chances[token_id]}
                    for token_id, logit in zip(top.indices.tolist(), top.values.tolist(), strict=True)
                ]
                check_top(guess["top"], expected)

    def test_the_echoed_prompt_comes_before_the_trace_of_its_step(self, tiny: Running, stream: bool) -> None:
        body = BODY | {"echo": True, "trace": EVERYTHING}
        (shown,) = generate(tiny, stream, **body)
        assert shown.positions == list(range(16))
        if stream:
            *events, _ = tiny.stream(**body)
            assert ["trace" in event for event in events] == [False] * len(PROMPT) + [True] * 12

    def test_no_lens_is_there_where_none_was_asked_for(self, tiny: Running, stream: bool) -> None:
        (shown,) = generate(tiny, stream, **BODY, trace={"stages": ["embed"]})
        assert [step["logit_lens"] for step in shown.traces] == [None] * 12


TOLERANCE = {"rel": 1e-5, "abs": 1e-5}


def check_top(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same tokens, with the same numbers up to rounding."""
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
    """Whatever divides a sequence into steps, each of its new positions is shown once, in order."""

    def test_a_prompt_cut_into_steps_is_shown_part_by_part_before_the_first_token(
        self, tiny_directory: Path, start: Start, stream: bool
    ) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=4, max_step_tokens=8)
        body = BODY | {"prompt": LONG_PROMPT, "trace": EVERYTHING}
        (shown,) = generate(service, stream, **body)
        sizes = [len(step["positions"]) for step in shown.traces]
        assert sizes[:5] == [8, 8, 8, 8, 5]
        assert [step["logit_lens"] is None for step in shown.traces] == [True] * 4 + [False] * 12
        check_steps(service, LONG_PROMPT, shown)
        if stream:
            events = service.stream(**body | {"prompt": [*LONG_PROMPT[1:], 1]})
            assert [event["token"] is None for event in events[:-1]] == [True] * 4 + [False] * 12

    def test_a_cached_prefix_is_counted_and_not_shown_again(
        self, tiny_directory: Path, start: Start, stream: bool
    ) -> None:
        service = start(model=str(tiny_directory))
        body = BODY | {"prompt": LONG_PROMPT, "trace": EVERYTHING}
        (first,), (again,) = generate(service, stream, **body), generate(service, stream, **body)
        assert (first.num_cached, again.num_cached) == (0, 2 * BLOCK)
        assert (first.tokens, first.text) == (again.tokens, again.text)
        longer = [*LONG_PROMPT, *first.tokens, 5]  # what was generated is cached like a prompt
        (third,) = generate(service, stream, **body | {"prompt": longer})
        assert third.num_cached == 3 * BLOCK
        for prompt, shown in ((LONG_PROMPT, first), (LONG_PROMPT, again), (longer, third)):
            check_steps(service, prompt, shown)

    def test_positions_that_were_asked_for_are_shown_though_others_computed_them(
        self, tiny_directory: Path, start: Start, stream: bool
    ) -> None:
        service = start(model=str(tiny_directory))
        generate(service, stream, **BODY | {"prompt": LONG_PROMPT})
        for positions, num_cached in (([3, 36], 0), ([20, 40], BLOCK), ([36], 2 * BLOCK)):
            trace = EVERYTHING | {"positions": positions}
            (shown,) = generate(service, stream, **BODY | {"prompt": LONG_PROMPT, "trace": trace})
            assert (shown.positions, shown.num_cached) == (positions, num_cached)
            whole = Pass.over(service, LONG_PROMPT + shown.tokens)
            for step in shown.traces:
                if step["positions"]:
                    whole.check(step)

    def test_the_continuations_of_a_prompt_each_show_their_own_tokens(
        self, tiny_directory: Path, start: Start, stream: bool
    ) -> None:
        service = start(model=str(tiny_directory))
        shown = generate(service, stream, **BODY | {"prompt": LONG_PROMPT, "n": 3}, trace=EVERYTHING)
        assert len({tuple(choice.tokens) for choice in shown}) == 3
        assert [choice.num_cached for choice in shown] == [0, 2 * BLOCK, 2 * BLOCK]
        for choice in shown:
            check_steps(service, LONG_PROMPT, choice)

    def test_one_that_is_traced_among_others_shows_its_own_rows_and_they_show_nothing(
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
        for index, (shown, expected) in enumerate(zip(together, alone, strict=True)):
            assert (shown.tokens, shown.text, shown.end) == (expected.tokens, expected.text, expected.end)
            if index in traced:
                check_steps(tiny, bodies[index]["prompt"], shown)
            else:
                assert shown.traces == []

    def test_what_is_computed_again_after_a_preemption_is_not_shown_again(
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
        assert [shown.tokens for shown in together] == [generate(service, stream, **body)[0].tokens for body in bodies]
        for shown in together:
            check_steps(service, PROMPT, shown)


class TestBudget:
    def test_an_answer_over_the_limit_is_refused_before_anything_runs_and_a_narrower_one_is_not(
        self, tiny_directory: Path, start: Start
    ) -> None:
        service = start(model=str(tiny_directory), max_response_bytes=200_000)
        body = BODY | {"trace": {"detail": "values"}}
        with service.blocked():
            refused = [service.post("/generate", body | {"stream": stream}) for stream in (False, True)]
            assert service.metric("num_requests_waiting") == 0
        for response in refused:
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (413, "response_too_large")
            assert "200000" in error["message"]
            hint = error["message"].partition("narrow")[2]
            assert all(name in hint for name in ("trace.stages", "positions", "heads", "detail", "top_k", "max_tokens"))
        assert service.metric("trace_refused_total") == 2
        assert service.metric("generation_tokens_total") == 0
        for narrower in (
            {"trace": {"detail": "values", "stages": ["embed"]}},
            {"trace": {"detail": "values", "positions": [1]}},
            {"trace": {"detail": "summary"}, "max_tokens": 1},
            {"trace": {"detail": "values"}, "max_tokens": 1, "prompt": [5]},
        ):
            assert service.post("/generate", body | narrower).status_code == 200

    @given(data=st.data())
    @settings(max_examples=60, deadline=None, derandomize=True)
    def test_no_answer_is_larger_than_its_estimate_and_the_estimate_itself_is_allowed(
        self, tiny: Running, data: st.DataObject
    ) -> None:
        num_prompt, max_tokens = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))

        def some(size: int) -> st.SearchStrategy[list[int] | None]:
            return st.none() | st.lists(st.integers(0, size - 1), min_size=1, unique=True)

        body = {
            "prompt": data.draw(st.lists(st.integers(0, 270), min_size=num_prompt, max_size=num_prompt)),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "seed": 1,
            "n": data.draw(st.integers(1, 3)),
            "stream": data.draw(st.booleans()),
            "echo": data.draw(st.booleans()),
            "logprobs": data.draw(st.none() | st.integers(0, 20)),
        }
        trace: dict[str, Any] = {
            "stages": data.draw(
                st.sampled_from([None, ["*.pattern"], ["embed"], ["loss"], ["*.scale"], ["blocks.0.*", "logits"]])
            ),
            "detail": data.draw(st.sampled_from(["none", "summary", "values", "values"])),
            "positions": data.draw(some(num_prompt + max_tokens - 1)),
            "heads": data.draw(some(6)),
            "top_k": data.draw(st.none() | st.integers(0, 20) | st.just(VOCAB_SIZE)),
            "encoding": data.draw(st.sampled_from(["json", "base64"])),
            "logit_lens": data.draw(st.booleans()),
        }
        if data.draw(st.booleans()) or body["logprobs"] is None:  # text alone has no limit
            body["trace"] = trace
        estimate = estimate_of(tiny, body)
        response = post_within(tiny, estimate, body)
        assert response.status_code == 200
        assert len(response.content) <= estimate

    @pytest.mark.parametrize(
        "trace",
        [
            {"stages": ["logits"], "detail": "values"},
            {"stages": ["logits"], "detail": "values", "encoding": "base64"},
            {"stages": ["*"], "detail": "values"},
            {"stages": ["*.pattern", "*.scores"], "detail": "values", "positions": [39]},
            {"stages": ["embed"], "top_k": 200},
            {"stages": ["embed"], "detail": "none", "logit_lens": True, "top_k": 200},
        ],
        ids=str,
    )
    def test_the_estimate_of_a_large_trace_is_near_its_size(self, tiny: Running, trace: dict[str, Any]) -> None:
        body = BODY | {"prompt": [1], "max_tokens": 40, "trace": trace}
        size = len(tiny.post("/generate", body).content)
        assert size <= estimate_of(tiny, body) <= 5 * size

    def test_the_estimate_knows_how_many_heads_are_asked_for(self, tiny: Running) -> None:
        trace = {"stages": ["*.attn.scores"], "detail": "values", "heads": [1]}
        body = BODY | {"prompt": [1] * 60, "max_tokens": 1, "trace": trace}
        size = len(tiny.post("/generate", body).content)
        assert size <= estimate_of(tiny, body) <= 5 * size


def estimate_of(service: Running, body: dict[str, Any]) -> int:
    """What the service says that an answer will take."""
    response = post_within(service, 0, body)
    assert response.status_code == 413
    found = re.search(r"up to (\d+) bytes", response.json()["error"]["message"])
    assert found is not None
    return int(found[1])


def post_within(service: Running, limit: int, body: dict[str, Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.state.settings, "max_response_bytes", limit)
        return service.post("/generate", body)


class TestMetrics:
    @both_ways
    def test_the_bytes_and_the_seconds_of_traces_are_counted_and_those_of_other_requests_are_not(
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
        assert num_steps == 12  # the prompt's step and those of all tokens but the last
        assert 0 < seconds < PATIENCE_SECONDS


def raw_traces(content: bytes) -> list[bytes]:
    """The traces of an answer or a stream as they were sent: what is last in its event, or in its list."""
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
            "model.trace.Keeper.__call__",
            "model.trace.Keeper.finish",
            "model.engine.tracing.predict",
            "service.routes.generate.trace_answer",
        ],
    )
    def test_a_trace_that_fails_ends_its_own_request_with_an_error_and_no_other(
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
