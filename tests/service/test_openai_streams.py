"""Answers of the OpenAI routes that end early, several prompts in one request, and traces."""

import json
from typing import Any

import pytest
import torch

from model.text.sampling import TokenLogprobs
from model.text.transcript import Transcript
from service.answers.openai_answers import TokenStrings
from tests.service.checkpoints import CACHE_BYTES, write_checkpoint
from tests.service.running import Running, Start, read_events, wait_until

PATHS = {
    "/v1/completions": {"prompt": ["the cat", "the dog", " on"], "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the cat"}], "n": 2},
}


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_ends_all_its_sequences(tmp_path: Any, start: Start, path: str) -> None:
    directory = write_checkpoint(tmp_path / "long", max_position_embeddings=1 << 16)
    service = start(model=str(directory), cache_bytes=CACHE_BYTES)
    body = PATHS[path] | {"max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with service.client.stream("POST", path, json=body) as response:
        parts = response.iter_bytes()  # kept: when it is deleted, httpx closes the connection
        next(parts)
        wait_until(lambda: service.metric("num_requests_running") > 0, "it runs")
    wait_until(lambda: service.metric("num_requests_running") == 0, "all have ended")
    assert service.metric("kv_cache_usage_perc") == 0
    connection = service.send(path, body | {"stream": False})
    wait_until(lambda: service.metric("num_requests_running") > 0, "it runs")
    connection.close()
    wait_until(lambda: service.metric("num_requests_running") == 0, "all have ended")


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_request_that_takes_too_long_is_503_and_never_looks_complete(tmp_path: Any, start: Start, path: str) -> None:
    directory = write_checkpoint(tmp_path / "long", max_position_embeddings=8192)
    service = start(model=str(directory), request_timeout_seconds=0.4)
    body = PATHS[path] | {"max_tokens": 8000, "ignore_eos": True}
    whole = service.post(path, body)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "timeout")
    streamed = service.post(path, body | {"stream": True})
    *chunks, error, done, rest = streamed.content.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert json.loads(error.partition(b"data: ")[2])["error"]["code"] == "timeout"
    assert all(b'"finish_reason":null' in chunk for chunk in chunks)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kind", "answer"), [(RuntimeError, (500, "internal")), (torch.OutOfMemoryError, (503, "out_of_memory"))]
)
def test_a_bug_is_500_and_a_full_gpu_503_or_they_are_error_events(
    tiny: Running,
    monkeypatch: pytest.MonkeyPatch,
    errors_logged: list[str],
    path: str,
    kind: type[Exception],
    answer: tuple[int, str],
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise kind("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(Transcript, "push", fail)
        whole = tiny.post(path, PATHS[path] | {"max_tokens": 3})
        streamed = tiny.post(path, PATHS[path] | {"max_tokens": 3, "stream": True})
    assert (whole.status_code, whole.json()["error"]["code"]) == answer
    assert streamed.content.count(answer[1].encode()) >= 1
    assert streamed.content.count(b"event: error") == (6 if path == "/v1/completions" else 2)
    assert b"secret" not in whole.content + streamed.content
    assert tiny.answer(path, **PATHS[path], max_tokens=3)["usage"]["completion_tokens"] > 0
    assert any("secret detail" in message for message in errors_logged)
    errors_logged.clear()


def shown(trace: dict[str, Any]) -> list[float]:
    """Numbers of the trace of a step: its positions, its stages, and its logit lens."""
    lens = [
        number for layer in trace["logit_lens"] or [] for number in (layer["chosen_probability"], layer["top"][0]["id"])
    ]
    return [*trace["positions"], *(stage["summary"]["l2"] for stage in trace["stages"]), *lens]


@pytest.mark.parametrize("path", PATHS)
def test_a_trace_is_that_of_generate(tiny: Running, path: str) -> None:
    """Last bits may differ: PyTorch computes attention for heads of 4 dims, and its sums depend on the batch."""
    trace = {"stages": "*.resid_post", "logit_lens": True, "top_k": 2}
    fields = {"max_tokens": 4, "seed": 3, "trace": trace, "ignore_eos": True}
    body = PATHS[path] | fields | {"return_token_ids": True}
    answer = tiny.answer(path, **body)
    events = read_events(tiny.post(path, body | {"stream": True}).content.replace(b"event: error\n", b""))
    for index, choice in enumerate(answer["choices"]):
        ids = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
        expected = tiny.answer("/generate", prompt=ids, **(fields | {"seed": 3 + index % 2, "cache_salt": f"{index}"}))
        assert choice["token_ids"] == expected["tokens"]
        for found, wanted in zip(choice["trace"], expected["trace"], strict=True):
            assert shown(found) == pytest.approx(shown(wanted), rel=1e-5)
        streamed = [
            part["trace"] for event in events for part in event["choices"] if part["index"] == index and "trace" in part
        ]
        for found, wanted in zip([step for steps in streamed for step in steps], choice["trace"], strict=True):
            assert shown(found) == pytest.approx(shown(wanted), rel=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_has_the_ids_of_all_tokens_also_of_those_without_text(tiny: Running, path: str) -> None:
    """The random network writes many halves of characters."""
    body = PATHS[path] | {"max_tokens": 12, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    whole = tiny.answer(path, **body)["choices"]
    streamed: list[list[int]] = [[] for _ in whole]
    for event in read_events(tiny.post(path, body | {"stream": True}).content):
        for part in event["choices"]:
            streamed[part["index"]] += part.get("token_ids") or []
    assert streamed == [choice["token_ids"] for choice in whole]
    assert all(len(ids) == 12 for ids in streamed)


def test_a_long_prompt_keeps_its_logprobs_in_a_traced_stream(tmp_path: Any, start: Start) -> None:
    """The first output of the stream is the trace of a part of the prompt."""
    directory = write_checkpoint(tmp_path / "long", max_position_embeddings=256)
    service = start(model=str(directory), max_step_tokens=64)
    body = {
        "messages": [{"role": "user", "content": "the cat sat on the mat " * 20}],
        "max_tokens": 2,
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "trace": {"stages": "embed"},
    }
    whole = service.answer("/v1/chat/completions", **body)
    assert len(whole["prompt_logprobs"]) == len(whole["prompt_token_ids"]) > 64
    events = read_events(service.post("/v1/chat/completions", body | {"stream": True}).content)
    assert [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event] == [whole["prompt_logprobs"]]
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [whole["prompt_token_ids"]]
    assert sum(len(event["choices"][0].get("trace", ())) for event in events) == len(whole["choices"][0]["trace"])


def test_a_token_has_its_own_logprob_under_its_string_even_if_another_one_has_the_same_string() -> None:
    class Alike:
        vocab_size = 9

        def token_text(self, token_id: int) -> str:
            return "!" if token_id < 3 else "a"

    strings = TokenStrings(Alike(), as_ids=False)  # type: ignore[arg-type]  # only what is used here
    assert strings.top(1, TokenLogprobs(-2.5, [(0, -0.5), (4, -1.0)], 3), 2) == {
        "token_id:0": -0.5,
        "a": -1.0,
        "!": -2.5,
    }
    assert strings.top(0, TokenLogprobs(-0.5, [(0, -0.5), (1, -1.0)], 1), 2) == {"!": -0.5, "token_id:1": -1.0}


def test_a_prompt_among_many_that_is_wrong_is_named_before_anything_runs(tiny: Running) -> None:
    before = tiny.metric("prompt_tokens_total")
    for prompt, param in (
        ([[1], [2] * 65], "prompt.1"),
        (["a", "b" * 65], "prompt.1"),
        ([[1], [2, 284]], "prompt.1.1"),
    ):
        response = tiny.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    response = tiny.post("/v1/completions", {"prompt": [[1], [2] * 60], "max_tokens": 8})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
    assert tiny.metric("prompt_tokens_total") == before


def test_many_prompts_are_one_request(tiny: Running) -> None:
    prompts = [[1 + i % 200, 2, 3] for i in range(300)]
    answer = tiny.answer("/v1/completions", prompt=prompts, max_tokens=2, temperature=0, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(300))
    assert answer["usage"]["prompt_tokens"] == 900
    single = tiny.answer("/v1/completions", prompt=prompts[7], max_tokens=2, temperature=0, ignore_eos=True)
    assert answer["choices"][7]["text"] == answer["choices"][207]["text"] == single["choices"][0]["text"]
    assert tiny.post("/v1/completions", {"prompt": [[1]] * 40, "n": 64}).json()["error"]["param"] == "prompt"
