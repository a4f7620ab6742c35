"""The metrics count requests, tokens, steps and times; neither they nor the log have text of the users."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.metrics import Metrics
from tests.service.checkpoints import CACHE_BYTES, write_checkpoint
from tests.service.running import PATIENCE_SECONDS, Running, Start, wait_until


def samples(service: Running) -> dict[str, dict[tuple[str, ...], float]]:
    """All metrics: sample name -> label values -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(service.get("/metrics").text):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in sorted(sample.labels))
            found.setdefault(sample.name.removeprefix("forwardscope_"), {})[labels] = sample.value
    return found


def family(service: Running, name: str) -> list[dict[str, str]]:
    """The labels of each sample of a gauge."""
    families = {each.name: each for each in text_string_to_metric_families(service.get("/metrics").text)}
    found = families[f"forwardscope_{name}"]
    assert found.type == "gauge"
    return [sample.labels for sample in found.samples]


class TestMetrics:
    def test_requests_tokens_bytes_and_refusals_are_counted(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory), max_response_bytes=100_000)
        generated = service.answer("/generate", prompt=[1, 2, 3], max_tokens=5, ignore_eos=True)
        service.stream(prompt=[1, 2], max_tokens=4, stop_token_ids=list(range(284)))
        forward = service.post("/forward", {"prompt": [1], "stages": ["embed"]})
        logits = service.post("/logits", {"prompt": [1, 2], "top_k": 2})
        assert service.post("/forward", {"prompt": [1] * 64, "detail": "values"}).status_code == 413
        assert service.post("/logits", {"prompt": []}).status_code == 400
        found = samples(service)

        def http(route: str, status: int) -> float:
            return found["http_requests_total"][("POST", route, str(status))]

        assert len(generated["tokens"]) == 5
        assert found["generation_tokens_total"][()] == 6  # the second request stopped at its first token
        assert found["prompt_tokens_total"][()] == 3 + 2 + 1 + 2
        assert found["trace_bytes_total"][()] == len(forward.content) + len(logits.content)
        assert found["trace_refused_total"][()] == 1
        ends = {("length",): 1, ("stop",): 1, ("cancelled",): 0, ("error",): 0}
        assert found["request_success_total"] == ends
        assert (http("/generate", 200), http("/forward", 200), http("/forward", 413)) == (2, 1, 1)
        assert (http("/logits", 200), http("/logits", 400)) == (1, 1)
        assert found["time_to_first_token_seconds_count"][()] == 2
        assert found["inter_token_latency_seconds_count"][()] == 4
        assert found["request_queue_time_seconds_count"][()] == 4
        assert found["num_requests_running"][()] == found["num_requests_waiting"][()] == 0

    def test_steps_times_and_the_prefix_cache_are_measured(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory))
        prompt = [*range(20, 57)]  # two full blocks, and five tokens
        with ThreadPoolExecutor(1) as pool:
            with service.blocked():
                pending = pool.submit(service.answer, "/generate", prompt=prompt, max_tokens=5, ignore_eos=True)
                wait_until(lambda: service.metric("num_requests_waiting") == 1, "it waits")
                time.sleep(0.1)
            pending.result(PATIENCE_SECONDS)
        found = samples(service)

        def count_and_sum(name: str) -> tuple[float, float]:
            return found[f"{name}_count"][()], found[f"{name}_sum"][()]

        assert count_and_sum("iteration_tokens_total") == (5, 37 + 4)
        assert count_and_sum("iteration_sequences") == (5, 5)
        assert count_and_sum("iteration_seconds")[0] == 5
        whole, first = count_and_sum("e2e_request_latency_seconds"), count_and_sum("time_to_first_token_seconds")
        queue, prefill, decode = (
            count_and_sum(f"request_{name}_time_seconds") for name in ("queue", "prefill", "decode")
        )
        assert [count for count, _ in (whole, first, queue, prefill, decode)] == [1] * 5
        assert first[1] == pytest.approx(queue[1] + prefill[1])
        assert whole[1] == pytest.approx(queue[1] + prefill[1] + decode[1])
        assert queue[1] > 0.1
        between = count_and_sum("inter_token_latency_seconds")
        assert between[0] == 4
        assert between[1] == pytest.approx(decode[1])
        assert 0 < count_and_sum("iteration_seconds")[1] < prefill[1] + decode[1]
        assert (found["prefix_cache_queries_total"][()], found["prefix_cache_hits_total"][()]) == (37, 0)

        again = service.answer("/generate", prompt=prompt, max_tokens=3, ignore_eos=True, n=2, echo=True)
        found = samples(service)
        assert [choice["usage"]["cached_tokens"] for choice in again["choices"]] == [32, 32]
        assert (found["prefix_cache_queries_total"][()], found["prefix_cache_hits_total"][()]) == (3 * 37, 2 * 32)
        assert count_and_sum("iteration_tokens_total")[1] == 41 + 2 * (5 + 2)
        assert count_and_sum("iteration_sequences")[1] == 5 + 2 * 3
        assert count_and_sum("request_prefill_time_seconds")[0] == count_and_sum("time_to_first_token_seconds")[0] == 2
        assert count_and_sum("e2e_request_latency_seconds")[0] == 3  # one for each choice
        assert count_and_sum("inter_token_latency_seconds")[0] == 4 + 2 * 2
        assert (found["prompt_tokens_total"][()], found["generation_tokens_total"][()]) == (2 * 37, 5 + 2 * 3)
        assert found["num_preemptions_total"][()] == found["kv_cache_usage_perc"][()] == 0

    def test_a_cancelled_request_is_counted_but_its_latency_is_not(self, tmp_path: Path, start: Start) -> None:
        service = start(model=str(write_checkpoint(tmp_path, max_position_embeddings=1 << 14)), cache_bytes=CACHE_BYTES)
        connection = service.send("/generate", {"prompt": [1], "max_tokens": 9000, "ignore_eos": True})
        wait_until(lambda: service.metric("generation_tokens_total") > 1, "tokens are generated")
        connection.close()
        name = 'request_success_total{finished_reason="cancelled"}'
        wait_until(lambda: service.metric(name) == 1, "it has ended")
        found = samples(service)
        for part in ("e2e_request_latency", "request_decode_time"):
            assert found[f"{part}_seconds_count"][()] == 0
        assert found["time_to_first_token_seconds_count"][()] == 1

    def test_the_time_of_passes_is_measured(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory))
        service.answer("/forward", prompt=[1], stages=["embed"])
        service.answer("/logits", prompt=[1])
        assert samples(service)["trace_seconds_count"][()] == 2

    def test_the_blocks_of_the_cache_and_the_absence_of_adapters_are_shown_to_an_endpoint_picker(
        self, tiny_directory: Path, start: Start
    ) -> None:
        service = start(model=str(tiny_directory), cache_bytes=1 << 20)
        assert service.state.engine is not None
        (labels,) = family(service, "cache_config_info")
        assert labels.keys() == {"block_size", "num_gpu_blocks"}
        assert int(labels["block_size"]) == service.state.engine.config.block_size
        num_tokens = service.get("/status").json()["cache"]["total_tokens"]
        assert int(labels["block_size"]) * int(labels["num_gpu_blocks"]) == num_tokens
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        assert family(service, "lora_requests_info") == [adapters]
        assert family(service, "kernels_info") == [{"kernels": service.get("/status").json()["kernels"]}]

    def test_labels_never_contain_text_of_a_user(self, tiny: Running) -> None:
        secret = "Zanzibar42"
        for path in (f"/{secret}", f"/generate/{secret}", f"/%00{secret}", f"/docs/{secret}"):
            tiny.client.request("POST", path, json={secret: secret})
            tiny.get(path)
        tiny.post("/generate", {"prompt": secret, "max_tokens": 1, secret: 1})
        tiny.post("/forward", {"prompt": secret, "model": secret})
        tiny.post(
            "/generate", {"prompt": secret, "max_tokens": 2, "stop": [secret, "a"], "trace": {"stages": [secret]}}
        )
        tiny.post("/generate", {"prompt": "a", "max_tokens": 2, "logit_bias": {"41": 100}, "stop_token_ids": [41]})
        tiny.client.request(secret.upper(), "/generate")
        tiny.client.request("BREW", f"/{secret}?{secret}", headers={"User-Agent": secret, "X-Request-Id": secret})
        text = tiny.get("/metrics").text
        assert secret.lower() not in text.lower()
        assert "BREW" not in text
        found = samples(tiny)
        assert found["http_requests_total"][("other", "unmatched", "404")] >= 1
        assert set(found["request_success_total"]) <= {("stop",), ("length",), ("cancelled",), ("error",)}

    def test_prompts_and_texts_are_not_logged(self, tiny: Running, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        tiny.post("/generate", {"prompt": "Zanzibar42", "max_tokens": 2, "stop": "Zanzibar42"})
        tiny.post("/forward", {"prompt": "Zanzibar42", "stages": ["Zanzibar42"]})
        tiny.post("/tokenize", {"text": "Zanzibar42", "Zanzibar42": 1})
        assert "Zanzibar42" not in caplog.text


def test_the_text_is_kept_for_a_second_and_has_no_times_of_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr("service.metrics.time", SimpleNamespace(monotonic=lambda: clock, time=time.time))
    monkeypatch.setattr("service.metrics.TEXT_SECONDS", 1.0)
    metrics = Metrics()
    before = metrics.text()
    metrics.sweep_cells.inc()
    assert metrics.text() == before
    clock += 1.0
    assert b"forwardscope_sweep_cells_total 1.0" in metrics.text()
    assert b"_created" not in metrics.text()
