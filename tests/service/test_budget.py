"""No answer is larger than its estimate, and requests whose estimate is over a limit are refused before they run."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forwardscope.results.passes import PassTimings
from model.text.tokenizer import Tokenizer
from model.worked_examples import WORKED_EXAMPLES, WorkedExample, worked_example
from service.answers.forward_plan import ForwardPlan, make_planner
from service.answers.passes import SAFETENSORS_MEDIA_TYPE, Encoder
from service.answers.prompt_passes import PromptPlan
from service.answers.subject import find_subject
from service.http.encoding import Encoding, json_array, to_json, value_bytes
from service.http.forward_schemas import ForwardRequest
from service.routes.forward import prepare_answer
from service.state import State
from tests.service.checkpoints import CONTEXT, NUM_TOKENS, VOCAB_SIZE, write_checkpoint
from tests.service.running import Running, Start
from tests.service.test_forward import AS_SAFETENSORS, DTYPES

PROMPT = [257, 69, 270, 273, 264]
BODY: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "max_tokens": 12, "ignore_eos": True}
# Stages of requests.
WITH_HEADS, WITHOUT_HEADS = [["*.pattern"], ["blocks.0.*", "logits"]], [["embed"], ["loss"], ["*.scale"]]


def plan_of(body: ForwardRequest, state: State, as_safetensors: bool) -> ForwardPlan:
    """Plan a request as the route does."""
    subject = find_subject(state, body.model, body.adapter)
    assert not isinstance(body.prompt, str)
    prompt_ids: list[Any] = list(body.prompt)
    plan = make_planner(body, subject, 1, False, as_safetensors)
    return plan(0, PromptPlan(subject=subject, ids=prompt_ids))


def size_of(plan: ForwardPlan) -> int:
    """The size of the answer, encoded as the route does."""
    encoder = Encoder(is_list=False, as_safetensors=plan.encoding == "safetensors")
    prepared = prepare_answer(plan)
    with torch.inference_mode():
        logits = [each.compute() for each in prepared.passes]
    encoder.add(prepared.make_answer(logits, PassTimings(0.0, 0.0)))
    return len(encoder.encode())


class TestForward:
    @pytest.mark.parametrize(
        "worked", [None, *map(worked_example, WORKED_EXAMPLES)], ids=["checkpoint", *WORKED_EXAMPLES]
    )
    @given(data=st.data())
    @settings(max_examples=30, deadline=None, derandomize=True)
    def test_no_answer_of_forward_is_larger_than_its_estimate(
        self, tiny: Running, worked: WorkedExample | None, data: st.DataObject
    ) -> None:
        longest, vocab_size, num_heads = CONTEXT, VOCAB_SIZE, 6
        if worked is not None:
            longest, vocab_size, num_heads = worked.max_positions, len(worked.vocabulary), worked.num_heads
        prompts = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=longest)
        prompt = data.draw(prompts if worked is None else prompts | st.just(worked.prompt_ids))

        def some(size: int) -> st.SearchStrategy[list[int] | None]:
            return st.none() | st.lists(st.integers(0, size - 1), min_size=1, unique=True)

        as_safetensors = data.draw(st.booleans())
        stages = data.draw(st.sampled_from([["*"], *WITH_HEADS, *WITHOUT_HEADS]))
        body = ForwardRequest(
            prompt=prompt,
            model=None if worked is None else worked.name,
            stages=stages,
            detail=data.draw(st.sampled_from(["none", "summary", "values"])),
            positions=data.draw(some(len(prompt))),
            heads=None if stages in WITHOUT_HEADS else data.draw(some(num_heads)),
            top_k=data.draw(st.none() | st.integers(0, vocab_size)),
            dtype=data.draw(st.sampled_from([None, *DTYPES])),
            encoding="json" if as_safetensors else data.draw(st.sampled_from(["json", "base64"])),
        )
        plan = plan_of(body, tiny.state, as_safetensors)
        assert size_of(plan) <= plan.make_budget().response_bytes

    @pytest.mark.parametrize("encoding", ["json", "base64", "safetensors"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_estimate_of_many_numbers_is_close_to_their_size_and_not_below_it(
        self, tiny: Running, dtype: str, encoding: Encoding
    ) -> None:
        body = {"prompt": [1] * CONTEXT, "stages": ["logits"], "detail": "values", "top_k": 0, "dtype": dtype}
        body |= {"encoding": "base64"} if encoding == "base64" else {}
        plan = plan_of(ForwardRequest.model_validate(body), tiny.state, encoding == "safetensors")
        estimate, size = plan.make_budget().response_bytes, size_of(plan)
        assert size <= estimate <= 2 * size + 64 * CONTEXT * 3

    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    def test_no_number_is_longer_in_json_than_its_estimate(self, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        generator = np.random.default_rng(1)
        bits: Any = {8: np.int64, 4: np.int32, 2: np.int16}[info.bits // 8]
        any_bits = torch.from_numpy(generator.integers(np.iinfo(bits).min, np.iinfo(bits).max, 20_000, dtype=bits))
        edges = torch.tensor([info.min, info.max, -info.tiny, -info.smallest_normal / 2, -info.eps, -0.1, -1 / 3])
        for numbers in (any_bits.view(dtype), edges.to(dtype)):
            assert len(to_json(json_array(numbers))) <= value_bytes(len(numbers), dtype, "json") + 1

    @pytest.mark.parametrize("as_safetensors", [False, True])
    def test_the_estimate_covers_tokens_with_long_texts(
        self, tmp_path: Path, start: Start, as_safetensors: bool
    ) -> None:
        service = start(model=str(write_checkpoint(tmp_path, extra_token="-" * 4000)))
        body = ForwardRequest(prompt=[NUM_TOKENS] * CONTEXT, stages=["embed"], detail="none", top_k=0)
        plan = plan_of(body, service.state, as_safetensors)
        assert size_of(plan) <= plan.make_budget().response_bytes

    def test_a_request_over_the_limit_is_refused_before_any_pass_and_the_message_says_what_to_reduce(
        self, tiny_directory: Path, start: Start
    ) -> None:
        service = start(model=str(tiny_directory), max_response_bytes=20_000)
        body: dict[str, Any] = {"prompt": [1] * CONTEXT, "detail": "values", "top_k": 0}
        with service.blocked():
            responses = [
                service.post("/forward", body),
                service.post("/forward", body, headers=AS_SAFETENSORS),
                service.post("/logits", {"prompt": [1] * CONTEXT, "positions": "all"}),
            ]
        for response, hint in zip(responses, ("stages", "stages", "positions"), strict=True):
            assert response.status_code == 413
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("too_large_error", "response_too_large")
            assert "20000" in error["message"]
            assert hint in error["message"].partition("reduce")[2]
        plan = plan_of(ForwardRequest(**body), service.state, False)
        assert str(plan.make_budget().response_bytes) in responses[0].json()["error"]["message"]
        assert service.metric("trace_refused_total") == 3
        narrow = body | {"stages": ["blocks.0.attn.pattern"], "heads": [0], "positions": [0]}
        assert service.post("/forward", narrow).status_code == 200

    def test_an_estimate_equal_to_the_limit_is_allowed(self, tiny_directory: Path, start: Start, tiny: Running) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "stages": ["embed"], "detail": "values"}
        estimate = plan_of(ForwardRequest(**body), tiny.state, False).make_budget().response_bytes
        at = start(model=str(tiny_directory), max_response_bytes=estimate)
        below = start(model=str(tiny_directory), max_response_bytes=estimate - 1)
        assert (at.post("/forward", body).status_code, below.post("/forward", body).status_code) == (200, 413)


@pytest.mark.parametrize("as_safetensors", [False, True])
@pytest.mark.parametrize("top_k", [None, 1, VOCAB_SIZE])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_no_answer_of_logits_is_larger_than_its_estimate(
    tiny: Running,
    monkeypatch: pytest.MonkeyPatch,
    as_safetensors: bool,
    top_k: int | None,
    logprobs: bool,
    num_tokens: int,
) -> None:
    body = {"prompt": list(range(num_tokens)), "positions": "all", "top_k": top_k, "logprobs": logprobs}
    headers = {"Accept": SAFETENSORS_MEDIA_TYPE if as_safetensors else "*/*"}
    response = tiny.post("/logits", body, headers=headers)
    assert response.status_code == 200
    monkeypatch.setattr(tiny.state.settings, "max_response_bytes", 1)
    refusal = tiny.post("/logits", body, headers=headers).json()["error"]["message"]
    assert len(response.content) <= int(refusal.split(" bytes")[0].split()[-1])


class TestTracedGeneration:
    def test_a_trace_over_the_limit_is_refused_before_anything_runs_and_a_narrower_one_is_served(
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
            hint = error["message"].partition("reduce")[2]
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

    @pytest.mark.slow
    @given(data=st.data())
    @settings(max_examples=60, deadline=None, derandomize=True)
    def test_no_traced_answer_is_larger_than_its_estimate_and_a_limit_equal_to_it_is_enough(
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
        stages, logit_lens = data.draw(st.sampled_from([None, *WITH_HEADS, *WITHOUT_HEADS])), data.draw(st.booleans())
        has_heads = stages in WITH_HEADS or (stages is None and not logit_lens)
        trace: dict[str, Any] = {
            "stages": stages,
            "detail": data.draw(st.sampled_from(["none", "summary", "values", "values"])),
            "positions": data.draw(some(num_prompt + max_tokens - 1)),
            "heads": data.draw(some(6)) if has_heads else None,
            "top_k": data.draw(st.none() | st.integers(0, 20) | st.just(VOCAB_SIZE)),
            "encoding": data.draw(st.sampled_from(["json", "base64"])),
            "logit_lens": logit_lens,
        }
        if data.draw(st.booleans()) or body["logprobs"] is None:  # answers of text and ids alone have no estimate
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
    def test_the_estimate_of_a_large_trace_is_close_to_its_size(self, tiny: Running, trace: dict[str, Any]) -> None:
        body = BODY | {"prompt": [1], "max_tokens": 40, "trace": trace}
        size = len(tiny.post("/generate", body).content)
        assert size <= estimate_of(tiny, body) <= 5 * size

    def test_the_estimate_counts_only_the_selected_heads(self, tiny: Running) -> None:
        trace = {"stages": ["*.attn.scores"], "detail": "values", "heads": [1]}
        body = BODY | {"prompt": [1] * 60, "max_tokens": 1, "trace": trace}
        size = len(tiny.post("/generate", body).content)
        assert size <= estimate_of(tiny, body) <= 5 * size


def estimate_of(service: Running, body: dict[str, Any]) -> int:
    """The estimate for a request, from the message of its refusal."""
    response = post_within(service, 0, body)
    assert response.status_code == 413
    found = re.search(r"up to (\d+) bytes", response.json()["error"]["message"])
    assert found is not None
    return int(found[1])


def post_within(service: Running, limit: int, body: dict[str, Any]) -> Any:
    """POST /generate while `max_response_bytes` is `limit`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.state.settings, "max_response_bytes", limit)
        return service.post("/generate", body)


class TestLogprobs:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/generate", {"prompt": [1, 2], "max_tokens": 50, "logprobs": 20}),
            ("/generate", {"prompt": [1, 2], "max_tokens": 50, "logprobs": 20, "stream": True}),
            ("/generate", {"prompt": [1] * 50, "max_tokens": 1, "logprobs": 20, "echo": True}),
            ("/generate", {"prompt": [1, 2], "max_tokens": 20, "logprobs": 2, "n": 20}),
            ("/logits", {"prompt": [1] * 50, "positions": "all", "logprobs": True}),
        ],
        ids=lambda value: value if isinstance(value, str) else "-".join(value),
    )
    def test_log_probabilities_over_the_limit_are_refused_before_anything_runs(
        self, tiny_directory: Path, start: Start, path: str, body: dict[str, Any]
    ) -> None:
        service = start(model=str(tiny_directory), max_response_bytes=100_000)
        with service.blocked():
            response = service.post(path, body)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "response_too_large")
        few = {"logprobs": 0, "n": 1} if path == "/generate" else {"positions": "last"}
        assert service.post(path, body | few).status_code == 200


class TestTexts:
    def test_answers_of_tokenize_and_detokenize_over_the_limit_are_refused_before_they_are_computed(
        self, tiny_directory: Path, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service = start(model=str(tiny_directory), max_response_bytes=10_000)
        assert service.answer("/tokenize", text="a" * 100)["count"] >= 1
        assert service.post("/detokenize", {"tokens": [40] * 100}).status_code == 200
        monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("the text was tokenized"))
        monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: pytest.fail("the tokens were decoded"))
        for path, body, field in (
            ("/tokenize", {"text": "a" * 1000}, "text"),
            ("/detokenize", {"tokens": [40] * 1000}, "tokens"),
        ):
            response = service.post(path, body)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "response_too_large")
            assert f"reduce {field}" in response.json()["error"]["message"]

    @pytest.mark.parametrize("text", ["a" * 3000, "\x01" * 3000, "\u20ac" * 1000, '"\\' * 1000, "the cat " * 300, ""])
    def test_no_answer_of_tokenize_is_larger_than_its_estimate(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        estimates: list[int] = []
        monkeypatch.setattr(
            "service.answers.budget.Budget.check", lambda budget, _: estimates.append(budget.response_bytes)
        )
        response = tiny.post("/tokenize", {"text": text})
        assert response.status_code == 200
        assert len(response.content) <= estimates[0] + 64  # for the count and the context
        answer = response.json()
        assert answer["count"] == len(answer["tokens"])
        assert [token["position"] for token in answer["tokens"]] == list(range(answer["count"]))
