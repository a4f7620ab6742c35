"""A list of prompts gets one answer per prompt, each the same as alone, and hurts no other request."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from forwardscope.results.passes import LogitsList, Traces
from service.answers.passes import SAFETENSORS_MEDIA_TYPE
from service.routes import forward
from tests.service.running import PATIENCE_SECONDS, Running, Start, validate, wait_until
from tests.service.test_forward import from_safetensors

IDS = [[257, 69, 270], [273], [264, 40, 41, 42, 43]]
TEXTS = ["the cat", "dog", "the cat sat on"]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/forward", {"detail": "values", "top_k": 2}),
    ("/forward", {"stages": "blocks.0.attn.pattern", "detail": "values", "positions": [-1], "heads": [1]}),
    ("/logits", {"positions": "all", "logprobs": True, "top_k": 3}),
    ("/logits", {}),
]
AS_SAFETENSORS = {"Accept": SAFETENSORS_MEDIA_TYPE}


def without_timings(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "timings"}


@pytest.mark.parametrize("prompts", [IDS, TEXTS, IDS[:1]], ids=["ids", "texts", "one"])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_each_answer_is_that_of_its_prompt_alone(tiny: Running, path: str, body: dict[str, Any], prompts: Any) -> None:
    answer = tiny.answer(path, **body, prompt=prompts)
    validate((Traces if path == "/forward" else LogitsList), answer)
    alone = [tiny.answer(path, **body, prompt=prompt) for prompt in prompts]
    assert set(answer) == {"results"}
    assert [*map(without_timings, answer["results"])] == [*map(without_timings, alone)]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_tensors_in_safetensors_have_the_index_of_their_prompt_in_their_name(
    tiny: Running, path: str, body: dict[str, Any]
) -> None:
    tensors, content = from_safetensors(tiny.post(path, body | {"prompt": IDS}, headers=AS_SAFETENSORS).content)
    expected: dict[str, torch.Tensor] = {}
    for index, prompt in enumerate(IDS):
        alone, answer = from_safetensors(tiny.post(path, body | {"prompt": prompt}, headers=AS_SAFETENSORS).content)
        expected |= {f"{index}/{name}": tensor for name, tensor in alone.items()}
        assert without_timings(content["results"][index]) == without_timings(answer)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, equal_nan=True)


def test_each_prompt_has_its_own_targets(tiny: Running) -> None:
    targets: list[list[int | None]] = [[1, None, 3], [None], [4, 5, 6, 7, 8]]
    answer = tiny.answer("/forward", prompt=IDS, targets=targets, stages="embed")
    alone = [
        tiny.answer("/forward", prompt=prompt, targets=target, stages="embed")["loss"]
        for prompt, target in zip(IDS, targets, strict=True)
    ]
    assert [result["loss"] for result in answer["results"]] == alone


def test_a_worked_example_takes_a_list_of_prompts(empty: Running) -> None:
    prompts = ["AI rocks <EOS>", "rocks AI"]
    results = empty.answer("/forward", model="ai-rocks", prompt=prompts)["results"]
    alone = [empty.answer("/forward", model="ai-rocks", prompt=prompt) for prompt in prompts]
    assert [*map(without_timings, results)] == [*map(without_timings, alone)]
    assert "worked_example" in results[0]
    assert "worked_example" not in results[1]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("headers", [{}, AS_SAFETENSORS], ids=["json", "safetensors"])
def test_the_budget_is_the_sum_of_all_prompts_and_bounds_the_response(
    tiny: Running, path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    def estimate(prompt: Any) -> int:
        with pytest.MonkeyPatch.context() as patch, tiny.blocked():  # refused before anything runs
            patch.setattr(tiny.state.settings, "max_response_bytes", 0)
            response = tiny.post(path, body | {"prompt": prompt}, headers=headers)
        assert response.status_code == 413
        return int(response.json()["error"]["message"].split("up to ")[1].split()[0])

    assert estimate(IDS) == sum(map(estimate, IDS))
    assert len(tiny.post(path, body | {"prompt": IDS}, headers=headers).content) <= estimate(IDS)


def test_a_pass_that_is_too_long_is_refused_before_anything_runs(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory), max_pass_tokens=4)
    with service.blocked():
        for path in ("/forward", "/logits"):
            error = service.post(path, {"prompt": IDS}).json()["error"]
            assert (error["code"], error["param"]) == ("prompt_too_long", "prompt.2")


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass is computed alone."""
    monkeypatch.setattr("service.answers.passes.MAX_COST", 1)
    monkeypatch.setattr("service.network_jobs.MAX_COST", 1)


@pytest.mark.usefixtures("small_groups")
def test_other_requests_are_served_between_the_passes_of_a_list(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of others do not wait for the whole list, which would run for many times as long."""
    order: list[int] = []
    original = forward.prepare_answer
    started = threading.Event()

    def prepare_answer(plan: Any) -> Any:
        order.append(len(plan.ids))
        started.set()
        threading.Event().wait(0.02)
        return original(plan)

    monkeypatch.setattr(forward, "prepare_answer", prepare_answer)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(tiny.answer, "/forward", prompt=[[1, 2]] * 50, stages="embed")
        assert started.wait(PATIENCE_SECONDS)
        tiny.answer("/forward", prompt=[1], stages="embed")
        tiny.answer("/generate", prompt=[1], max_tokens=2, ignore_eos=True)
        num_before = len(order)
        assert len(pending.result(PATIENCE_SECONDS)["results"]) == 50
    assert order.count(2) == 50
    assert order.index(1) < num_before < 40


def test_a_disconnect_stops_the_rest_of_a_list(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory))
    tokens = "prompt_tokens_total"
    with service.blocked():
        client = service.send("/logits", {"prompt": [[1]] * 200})
        wait_until(lambda: service.metric("num_requests_waiting") == 1, "the first pass waits")
        client.close()
        wait_until(lambda: service.metric("num_requests_waiting") == 0, "nothing waits")
    service.answer("/logits", prompt=[1, 2, 3])
    assert service.metric(tokens) == 3


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("grace", [20.0, 0.0])
def test_a_shutdown_waits_for_the_rest_of_a_list_within_the_grace_period_only(
    start: Start, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, grace: float
) -> None:
    service = start(model=str(tiny_directory))
    started, released = threading.Event(), threading.Event()
    original = forward.prepare_answer
    num_passes = 0

    def prepare_answer(plan: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        started.set()
        assert released.wait(PATIENCE_SECONDS)
        time.sleep(0.005)
        return original(plan)

    monkeypatch.setattr(forward, "prepare_answer", prepare_answer)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(service.post, "/forward", {"prompt": [[1, 2]] * 50, "stages": "embed"})
        assert started.wait(PATIENCE_SECONDS)
        drain = service.on_loop(service.state.worker.drain(grace))
        wait_until(lambda: service.state.worker.is_draining, "it drains")
        if not grace:
            drain.result(PATIENCE_SECONDS)  # gives up although a pass runs
        released.set()
        drain.result(PATIENCE_SECONDS)
        assert num_passes == (50 if grace else 1)
        response: httpx.Response = pending.result(PATIENCE_SECONDS)
    if grace:
        assert len(response.json()["results"]) == 50
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")


def test_the_metrics_count_every_pass_of_a_list(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory))
    response = service.post("/forward", {"prompt": IDS})
    assert service.metric("prompt_tokens_total") == sum(map(len, IDS))
    assert service.metric("trace_seconds_count") == len(IDS)
    assert service.metric("trace_bytes_total") == len(response.content)


def test_more_sequences_than_a_request_may_have_are_refused_with_their_number(tiny: Running) -> None:
    settings = tiny.state.settings
    limit = settings.max_num_seqs + settings.max_waiting_requests
    for fields, number in (
        ({}, f"{limit + 1} prompts are"),
        ({"n": 2}, f"{limit + 1} prompts with 2 choices each are"),
    ):
        body = {"prompt": [[1]] * (limit + 1), "max_tokens": 1, **fields}
        error = tiny.post("/v1/completions", body).json()["error"]
        assert error["param"] == "prompt"
        assert f"prompt: {number} more than the {limit} sequences" in error["message"]
