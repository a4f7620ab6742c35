"""GET /status, and what GET /model and GET /models tell a program about the service."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import service.token_rates
from forwardscope.results.server import ModelInfo, ServedModels, ServiceStatus
from model import __version__
from model.ops.cpu.libraries import kernel_status
from model.worked_examples import WORKED_EXAMPLES
from service.token_rates import TokenRates
from tests.service.running import Running, Start, validate, wait_until


def test_an_idle_service_says_what_it_serves(tiny: Running) -> None:
    status = validate(ServiceStatus, tiny.get("/status").json())
    assert (status.version, status.ready, status.model) == (__version__, True, tiny.checkpoint.name)
    assert (status.requests_running, status.requests_waiting) == (0, 0)
    assert status.uptime_seconds > 0
    assert status.cache is not None
    assert status.cache.total_tokens == tiny.get("/model").json()["limits"]["cache_tokens"]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_kernels_that_compute_are_named(start: Start, tiny_directory: Path, kernels: str) -> None:
    """The instruction level of this CPU where our kernels run, and "torch" where PyTorch computes."""
    service = start(model=str(tiny_directory), kernels=kernels)
    expected = (kernel_status().level if kernels == "auto" else None) or "torch"
    assert service.get("/status").json()["kernels"] == expected


def test_the_numbers_of_the_engine_are_shown(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.state.engine
    assert engine is not None
    stats = replace(
        engine.stats(), num_running=3, num_waiting=2, cache_usage=0.5, num_prefix_queries=40, num_prefix_hits=30
    )
    monkeypatch.setattr(engine, "stats", lambda: stats)
    status = tiny.get("/status").json()
    assert (status["sequences_running"], status["sequences_waiting"]) == (3, 2)
    assert status["cache"] == {
        "used_tokens": engine.num_cache_tokens // 2,
        "total_tokens": engine.num_cache_tokens,
        "prompt_tokens_looked_up": 40,
        "prompt_tokens_found": 30,
    }


def test_running_requests_are_counted(tiny: Running) -> None:
    with tiny.blocked():
        assert tiny.get("/status").json()["requests_running"] == 1
    wait_until(lambda: tiny.get("/status").json()["requests_running"] == 0, "nothing runs")


def test_a_waiting_request_is_counted(tiny: Running) -> None:
    with tiny.blocked():
        connection = tiny.send("/generate", {"prompt": [1, 2], "max_tokens": 1})
        wait_until(lambda: tiny.get("/status").json()["requests_waiting"] == 1, "it waits")
    connection.recv(1)
    connection.close()


def test_generated_tokens_and_prompts_count_in_the_rates(tiny: Running) -> None:
    tiny.answer("/generate", prompt=[1] * 30, max_tokens=20, ignore_eos=True)
    rates = tiny.get("/status").json()["tokens_per_second"]
    assert rates["window_seconds"] > 0
    assert rates["generated"] * rates["window_seconds"] >= 19.9
    assert rates["prompt"] * rates["window_seconds"] >= 29.9


def test_without_a_checkpoint_there_is_no_cache(empty: Running) -> None:
    status = empty.get("/status").json()
    assert (status["model"], status["cache"], status["ready"]) == (None, None, True)


def test_the_rates_are_those_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, counts = [100.0], [0, 0]
    monkeypatch.setattr("service.token_rates.time", SimpleNamespace(perf_counter=lambda: now[0]))
    rates = TokenRates(lambda: (counts[0], counts[1]))
    assert rates.rates().generated == 0.0
    for second in range(20):  # 10 tokens a second, then 4
        now[0] += 1
        counts[1] += 10 if second < 10 else 4
        counts[0] += 1
        rates.sample()
        assert rates.rates().window_seconds <= service.token_rates.WINDOW_SECONDS + 1
    assert rates.rates().generated == pytest.approx(4)
    assert rates.rates().prompt == pytest.approx(1)
    assert len(rates._samples) < 10


def test_the_rates_are_sampled_while_nobody_asks(tiny: Running) -> None:
    before = tiny.state.token_rates._samples[-1].time
    wait_until(lambda: tiny.state.token_rates._samples[-1].time > before, "a sample is taken")
    assert time.perf_counter() - tiny.state.token_rates._samples[-1].time < 5


def test_the_key_is_needed(start: Start) -> None:
    service = start(model="none", api_key="secret")
    assert service.get("/status").status_code == 401


def test_each_worked_example_has_the_prompt_of_its_article(tiny: Running) -> None:
    models = validate(ServedModels, tiny.get("/models").json()).models
    for entry in models:
        if entry.kind == "worked_example":
            assert entry.prompt is not None
            answer = tiny.answer("/forward", model=entry.name, prompt=entry.prompt.text, stages=["embed"])
            assert "worked_example" in answer
            assert answer["tokens"] == [dict(token) for token in entry.prompt.tokens]
        else:
            assert entry.prompt is None
    assert {entry.name for entry in models if entry.prompt} == set(WORKED_EXAMPLES)


def test_the_capabilities_follow_the_settings(tiny: Running, tiny_directory: Path, start: Start) -> None:
    offered = validate(ModelInfo, tiny.get("/model").json()).capabilities
    assert (offered.tokenizer, offered.chat_template, offered.edits, offered.gradients) == (True, True, True, True)
    absent = (offered.tuned_lens, offered.adapters, offered.store_vectors, offered.compare_files)
    assert not any(absent)
    directory = tiny_directory.parent
    service = start(model=str(tiny_directory), gradients="off", api_key="k", compare_directory=directory)
    service.client.headers["Authorization"] = "Bearer k"
    offered = validate(ModelInfo, service.get("/model").json()).capabilities
    assert (offered.gradients, offered.store_vectors, offered.compare_files) == (False, True, True)


def test_a_checkpoint_without_a_tokenizer_says_so(tmp_path: Path, start: Start) -> None:
    from tests.service.checkpoints import write_checkpoint

    directory = write_checkpoint(tmp_path / "plain")
    (directory / "tokenizer.json").unlink()
    (directory / "chat_template.jinja").unlink()
    offered = start(model=str(directory)).get("/model").json()["capabilities"]
    assert (offered["tokenizer"], offered["chat_template"]) == (False, False)
