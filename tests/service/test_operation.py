"""How the service starts, refuses, counts and stops."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from model.generation import Transcript
from service import app
from service.__main__ import main
from service.app import load, load_model, num_threads
from service.settings import Settings
from service.state import State
from tests.service.checkpoints import write_checkpoint
from tests.service.running import PATIENCE_SECONDS, ROOT, Running, Start, process, wait_until

PROMPT = "the cat sat on"
SHORT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}


class TestLoading:
    def test_a_service_is_healthy_while_it_loads_and_ready_once_it_has(
        self, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded = threading.Event()

        def load_slowly(settings: Settings) -> Any:
            assert loaded.wait(PATIENCE_SECONDS)
            return load_model(settings)

        monkeypatch.setattr("service.app.load_model", load_slowly)
        loading = Running(Settings(model=str(tiny_directory), threads=1))
        try:
            assert loading.get("/health").status_code == 200
            assert "num_requests_running" in loading.get("/metrics").text
            assert loading.metric("ready") == 0
            refused = [loading.get("/ready"), loading.get("/model")]
            refused += [loading.post(path, {"prompt": PROMPT}) for path in ("/generate", "/forward", "/logits")]
            refused += [loading.post("/tokenize", {"text": "a"}), loading.post("/detokenize", {"tokens": [1]})]
            for response in refused:
                assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
                assert response.json()["error"]["type"] == "unavailable_error"
                assert int(response.headers["retry-after"]) >= 1
            loaded.set()
            wait_until(lambda: loading.get("/ready").status_code == 200, "/ready")
            assert loading.metric("ready") == 1
            assert loading.post("/generate", SHORT).status_code == 200
        finally:
            loaded.set()
            loading.stop()

    def test_a_service_without_a_checkpoint_is_ready_and_says_what_is_missing(self, empty: Running) -> None:
        assert empty.get("/ready").status_code == 200
        assert [entry["kind"] for entry in empty.get("/models").json()["models"]] == ["worked_example"] * 3
        for response in (empty.get("/model"), empty.post("/generate", SHORT), empty.post("/forward", {"prompt": [1]})):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_checkpoint")

    @pytest.mark.parametrize("damage", ["directory", "config", "vocab_size", "layers", "tensor", "cut", "tokenizer"])
    def test_a_checkpoint_that_cannot_be_loaded_ends_the_service_with_a_message(
        self, tmp_path: Path, damage: str, errors_logged: list[str]
    ) -> None:
        directory = write_checkpoint(tmp_path / "broken")
        named = break_checkpoint(directory, damage)
        check_refused(directory, named)
        assert any(named in message for message in errors_logged)
        errors_logged.clear()

    @pytest.mark.parametrize(
        ("generation", "named"),
        [
            ({"temperature": "hot"}, "temperature"),
            ({"temperature": -1.0}, "temperature"),
            ({"top_p": 2}, "top_p"),
            ({"top_k": 1.5}, "top_k"),
            ({"top_k": True}, "top_k"),
            ({"eos_token_id": "2"}, "eos_token_id"),
            ({"eos_token_id": [2, None]}, "eos_token_id"),
        ],
        ids=str,
    )
    def test_generation_defaults_that_no_request_could_use_are_refused_at_once(
        self, tmp_path: Path, generation: dict[str, Any], named: str, errors_logged: list[str]
    ) -> None:
        check_refused(write_checkpoint(tmp_path / "broken", generation=generation), named)
        errors_logged.clear()

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ({"max_step_tokens": 8, "max_num_seqs": 64}, "8 a step is below the 64 sequences"),
            ({"cache_bytes": 100}, "cache_bytes: 100"),
            ({"cache_bytes": 1 << 60}, "more than there is memory for"),
        ],
        ids=str,
    )
    def test_settings_that_nothing_can_run_with_end_the_service_with_a_message(
        self, tiny_directory: Path, wrong: dict[str, Any], named: str, errors_logged: list[str]
    ) -> None:
        check_refused(tiny_directory, named, **wrong)
        (message,) = errors_logged
        assert named in message
        assert "Traceback" not in message
        errors_logged.clear()


def break_checkpoint(directory: Path, damage: str) -> str:
    """What the message must name."""
    config = directory / "config.json"
    content = json.loads(config.read_text())
    if damage == "directory":
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()
        return str(directory)
    if damage == "config":
        config.write_text("{")
        return "config.json"
    if damage == "vocab_size":
        config.write_text(json.dumps(content | {"vocab_size": "284"}))
        return "vocab_size"
    if damage == "layers":
        config.write_text(json.dumps(content | {"num_hidden_layers": None}))
        return "num_hidden_layers"
    if damage == "tensor":
        config.write_text(json.dumps(content | {"num_hidden_layers": 3}))
        return "model.layers.2."
    name = {"cut": "model.safetensors", "tokenizer": "tokenizer.json"}[damage]
    (directory / name).write_bytes((directory / name).read_bytes()[:1000])
    return name


def check_refused(directory: Path, named: str, **settings: Any) -> None:
    """Loading ends in a failure whose message holds `named`, and the service is told to stop."""
    state = State(Settings(**{"model": str(directory), "threads": 1} | settings))
    stopped: list[bool] = []
    try:
        asyncio.run(load(state, lambda: stopped.append(True)))
    finally:
        state.worker.close()
    assert stopped == [True]
    assert not state.loaded.is_set()
    assert state.failure is not None
    assert named in state.failure


class TestCommandLine:
    @pytest.fixture
    def settings_of(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
        """The settings that the command line and the environment give."""

        def run(*arguments: str, **environment: str) -> Settings:
            for name, value in environment.items():
                monkeypatch.setenv(f"FORWARDSCOPE_{name}", value)
            found: list[Settings] = []

            def create_app(settings: Settings, **_: Any) -> Any:
                found.append(settings)
                raise KeyboardInterrupt

            monkeypatch.setattr("service.__main__.create_app", create_app)
            monkeypatch.setattr("logging.basicConfig", lambda **_: None)
            monkeypatch.setattr(sys, "argv", ["forwardscope", *arguments])
            with pytest.raises(KeyboardInterrupt):
                main()
            return found[0]

        return run

    def test_the_environment_sets_and_the_command_line_wins(self, settings_of: Callable[..., Settings]) -> None:
        environment = {"MODEL": "/from/env", "PORT": "1234", "API_KEY": "secret", "MAX_WAITING_REQUESTS": "7"}
        settings = settings_of("--port", "4321", "--dtype", "bfloat16", "--max-num-seqs", "3", **environment)
        assert (settings.model, settings.port, settings.dtype) == ("/from/env", 4321, "bfloat16")
        assert (settings.max_waiting_requests, settings.max_num_seqs) == (7, 3)
        assert settings.api_key is not None
        assert settings.api_key.get_secret_value() == "secret"
        assert "secret" not in repr(settings)

    def test_an_empty_value_is_none(self, settings_of: Callable[..., Settings]) -> None:
        for settings in (settings_of(API_KEY="", CACHE_BYTES="", MODEL=""), settings_of("--api-key", "")):
            assert (settings.api_key, settings.cache_bytes, settings.model) == (None, None, "bundled")

    def test_a_variable_that_is_no_setting_is_named(
        self, settings_of: Callable[..., Settings], caplog: pytest.LogCaptureFixture
    ) -> None:
        settings_of(MODLE="/x", PORT="1234")
        assert [record.getMessage() for record in caplog.records] == [
            "FORWARDSCOPE_MODLE is no setting, and changes nothing"
        ]

    def test_the_defaults_listen_on_loopback_and_ask_for_no_key(self, settings_of: Callable[..., Settings]) -> None:
        settings = settings_of()
        assert (settings.model, settings.host, settings.port) == ("bundled", "127.0.0.1", 8000)
        assert settings.api_key is None

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--port", "http"], "port"),
            (["--port", "70000"], "port"),
            (["--max-num-seqs", "0"], "max_num_seqs"),
            (["--dtype", "int8"], "dtype"),
            (["--no-such-setting", "1"], "no-such-setting"),
            (["--threads", "0", "--port", "8000"], "threads"),
        ],
    )
    def test_a_wrong_setting_ends_with_2_and_its_name(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["forwardscope", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert named in capsys.readouterr().err

    def test_a_wrong_environment_variable_ends_with_2_and_its_name(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("FORWARDSCOPE_MAX_BODY_BYTES", "much")
        monkeypatch.setattr(sys, "argv", ["forwardscope"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert "max_body_bytes" in capsys.readouterr().err


class TestProcess:
    def test_the_process_of_a_checkpoint_that_is_not_there_exits_with_1(self, tmp_path: Path) -> None:
        with process("--model", str(tmp_path / "nothing")) as service:
            _, log = service.communicate(timeout=3 * PATIENCE_SECONDS)
        assert service.returncode == 1
        assert str(tmp_path / "nothing") in log
        assert "Traceback" not in log

    @pytest.mark.parametrize("device", ["cuda:99", "tpu"])
    def test_a_device_that_is_not_there_ends_with_1_and_its_name(self, device: str) -> None:
        with process("--device", device) as service:
            _, log = service.communicate(timeout=3 * PATIENCE_SECONDS)
        assert service.returncode == 1
        assert f"device '{device}' cannot be used here" in log
        assert "Traceback" not in log

    def test_an_address_that_is_taken_ends_with_1_and_a_message(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, process("--port", str(taken.getsockname()[1])) as service:
            _, log = service.communicate(timeout=3 * PATIENCE_SECONDS)
        assert service.returncode == 1
        assert "Address already in use" in log
        assert "Traceback" not in log
        assert "terminate called" not in log
        assert "Traceback" not in log

    def test_its_log_says_what_it_serves_and_where(self) -> None:
        with process() as service:
            assert service.stderr is not None
            log = ""
            while "metrics: " not in log:
                line = service.stderr.readline()
                assert line, log
                log += line
            service.terminate()
            rest = service.communicate(timeout=PATIENCE_SECONDS)[1]
        address = re.search(r"ready: (http://127\.0\.0\.1:[1-9]\d*)$", log, re.M)
        assert address is not None, log
        assert f"page: {address[1]}/docs" in log
        assert f"metrics: {address[1]}/metrics" in log
        assert re.search(r"serving bundled: [\d,]+ parameters, cpu, bfloat16, context 512", log)
        assert "shutting down" in rest

    def test_neither_a_start_nor_a_request_imports_a_compiler(self) -> None:
        """It takes as long to import as all the rest."""
        code = (
            "import sys; from service.app import *; from service.settings import Settings;"
            "from model.engine.request import Request; from model.generation import GenerationParams;"
            "settings = Settings(); engine = build_engine(load_model(settings), settings);"
            "engine.add(Request(id='', prompt_ids=[1, 2, 3], params=GenerationParams(max_tokens=5)));"
            "assert sum(len(output.tokens) for _ in range(5) for output in engine.step().outputs) == 5;"
            "assert 'torch' in sys.modules; print([name for name in sys.modules if name == 'torch._dynamo'])"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("limit", "asked", "expected"),
    [
        (None, None, 8),
        ("max 100000\n", None, 8),
        ("", None, 8),
        ("1600000 100000\n", None, 8),
        ("250000 100000\n", None, 2),
        ("50000 100000\n", None, 1),
        ("250000 100000\n", 5, 5),
    ],
)
def test_threads_are_no_more_than_the_processors_that_a_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, asked: int | None, expected: int
) -> None:
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(app, "CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    assert num_threads(Settings(threads=asked)) == expected


def test_the_page_of_examples_loads_nothing_from_elsewhere(empty: Running) -> None:
    page = empty.get("/docs").text
    assert "swagger-ui-bundle.js" in page
    links = re.findall(r"(?:src|href)=\"([^\"]+)\"", page)
    assert len(links) >= 3
    for link in links:
        assert link.startswith("/")
        assert empty.get(link).status_code == 200, link


class TestLoad:
    def test_a_full_queue_answers_429_and_when_to_come_back(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=1, max_waiting_requests=1)
        with ThreadPoolExecutor(2) as pool, service.blocked():
            pending = [pool.submit(service.post, "/generate", SHORT | {"stream": True})]
            wait_until(lambda: service.metric("num_requests_waiting") == 1, "one waits")
            refused = [
                service.post("/generate", SHORT),
                service.post("/generate", SHORT | {"stream": True}),
                service.post("/forward", {"prompt": PROMPT}),
                service.post("/logits", {"prompt": PROMPT}),
            ]
            assert service.post("/tokenize", {"text": PROMPT}).status_code == 200
        for response in refused:
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert response.json()["error"]["type"] == "overloaded_error"
            assert int(response.headers["retry-after"]) >= 1
        assert pending[0].result(PATIENCE_SECONDS).status_code == 200
        wait_until(lambda: service.metric("num_requests_running") == 0, "all are done")
        assert service.post("/generate", SHORT).status_code == 200

    def test_waiting_prompts_with_too_many_tokens_answer_429_and_one_alone_does_not(
        self, tiny_directory: Path, start: Start
    ) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=1, max_waiting_tokens=10)
        long = {"prompt": [40] * 30, "max_tokens": 2}
        with ThreadPoolExecutor(1) as pool, service.blocked():
            pending = pool.submit(service.post, "/generate", long)
            wait_until(lambda: service.metric("num_requests_waiting") == 1, "one waits")
            refused = service.post("/generate", SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "30 tokens" in refused.json()["error"]["message"]
        assert pending.result(PATIENCE_SECONDS).status_code == 200

    def test_200_requests_at_once_are_all_answered_right(self, tiny: Running) -> None:
        def request(i: int) -> tuple[str, dict[str, Any]]:
            prompt = [40 + i % 10, 60]
            return [
                ("/generate", {"prompt": prompt, "seed": i % 20, "max_tokens": 4}),
                ("/forward", {"prompt": prompt, "stages": ["*.resid_post"], "detail": "values", "top_k": 1}),
                ("/logits", {"prompt": prompt, "top_k": 3}),
                ("/tokenize", {"text": f"the cat {i % 10}"}),
            ][i // 20 % 4]

        def essence(answer: dict[str, Any]) -> dict[str, Any]:
            return {name: part for name, part in answer.items() if name not in ("id", "timings")}

        alone = [essence(tiny.answer(*[request(i)[0]], **request(i)[1])) for i in range(80)]

        responses = asyncio.run(at_once(tiny, [request(i) for i in range(200)]))
        assert [response.status_code for response in responses] == [200] * 200
        for i, response in enumerate(responses):
            assert essence(response.json()) == alone[i % 80]

    def test_streams_take_turns_and_each_gets_the_text_it_would_get_alone(self, tiny: Running) -> None:
        bodies = [{"prompt": PROMPT, "seed": seed, "max_tokens": 40, "ignore_eos": True} for seed in range(6)]

        def outcome(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
            return [(event["token"]["id"], event["text"]) for event in events[:-1]]

        alone = [outcome(tiny.stream(**body)) for body in bodies]
        with ThreadPoolExecutor(len(bodies)) as pool:
            with tiny.blocked():
                pending = [pool.submit(lambda body=body: tiny.stream(**body)) for body in bodies]
                wait_until(lambda: tiny.metric("num_requests_waiting") == len(bodies), "all wait for one step")
            streams = [future.result(PATIENCE_SECONDS) for future in pending]
        assert [outcome(events) for events in streams] == alone
        ends = [events[-1]["timings"] for events in streams]
        assert all(end["queue_seconds"] > 0 for end in ends)
        # Every stream had its first token before any had its last.
        assert max(end["time_to_first_token_seconds"] for end in ends) < min(end["total_seconds"] for end in ends)

    def test_one_request_that_fails_leaves_its_neighbours_alone(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str]
    ) -> None:
        push = Transcript.push

        def fail_for_the_seed(transcript: Transcript, *arguments: Any) -> Any:
            if transcript._params.sampling.seed == 666:
                raise RuntimeError("this one fails")
            return push(transcript, *arguments)

        expected = tiny.answer("/generate", **SHORT, seed=3)["tokens"]
        monkeypatch.setattr(Transcript, "push", fail_for_the_seed)
        with ThreadPoolExecutor(8) as pool:
            with tiny.blocked():
                pending = [
                    pool.submit(tiny.post, "/generate", SHORT | {"seed": 666 if i == 2 else 3}) for i in range(6)
                ]
                wait_until(lambda: tiny.metric("num_requests_waiting") == 6, "all wait for one step")
            responses = [future.result(PATIENCE_SECONDS) for future in pending]
        assert [response.status_code for response in responses] == [200, 200, 500, 200, 200, 200]
        assert all(response.json()["tokens"] == expected for i, response in enumerate(responses) if i != 2)
        wait_until(lambda: "this one fails" in "".join(errors_logged), "the failure is logged")
        errors_logged.clear()


async def at_once(service: Running, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[httpx.Response]:
    """The answers of POST requests that are all sent before any is answered."""
    limits = httpx.Limits(max_connections=len(requests))
    async with httpx.AsyncClient(
        base_url=service.client.base_url, timeout=PATIENCE_SECONDS, limits=limits, trust_env=False
    ) as client:
        return await asyncio.gather(*(client.post(path, json=body) for path, body in requests))


def samples(service: Running) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> label values -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(service.get("/metrics").text):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in sorted(sample.labels))
            found.setdefault(sample.name.removeprefix("forwardscope_"), {})[labels] = sample.value
    return found


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
        assert found["generation_tokens_total"][()] == 6  # the second stopped at its first token
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

    def test_steps_times_and_the_prefix_cache_are_counted(self, tiny_directory: Path, start: Start) -> None:
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
        assert between == (4, pytest.approx(decode[1]))
        assert 0 < count_and_sum("iteration_seconds")[1] < prefill[1] + decode[1]
        assert (found["prefix_cache_queries_total"][()], found["prefix_cache_hits_total"][()]) == (37, 0)

        again = service.answer("/generate", prompt=prompt, max_tokens=3, ignore_eos=True, n=2, echo=True)
        found = samples(service)
        assert [choice["usage"]["cached_tokens"] for choice in again["choices"]] == [32, 32]
        assert (found["prefix_cache_queries_total"][()], found["prefix_cache_hits_total"][()]) == (3 * 37, 2 * 32)
        assert count_and_sum("iteration_tokens_total")[1] == 41 + 2 * (5 + 2)
        assert count_and_sum("iteration_sequences")[1] == 5 + 2 * 3
        assert count_and_sum("request_prefill_time_seconds")[0] == count_and_sum("time_to_first_token_seconds")[0] == 2
        assert count_and_sum("e2e_request_latency_seconds")[0] == 3  # one a continuation
        assert count_and_sum("inter_token_latency_seconds")[0] == 4 + 2 * 2
        assert (found["prompt_tokens_total"][()], found["generation_tokens_total"][()]) == (2 * 37, 5 + 2 * 3)
        assert found["num_preemptions_total"][()] == found["kv_cache_usage_perc"][()] == 0

    def test_one_that_is_given_up_is_counted_by_its_end_alone(self, tmp_path: Path, start: Start) -> None:
        service = start(model=str(write_checkpoint(tmp_path, max_position_embeddings=1 << 14)))
        connection = service.send("/generate", {"prompt": [1], "max_tokens": 9000, "ignore_eos": True})
        wait_until(lambda: service.metric("generation_tokens_total") > 1, "tokens are generated")
        connection.close()
        name = 'request_success_total{finished_reason="cancelled"}'
        wait_until(lambda: service.metric(name) == 1, "it has ended")
        found = samples(service)
        for part in ("e2e_request_latency", "request_decode_time"):
            assert found[f"{part}_seconds_count"][()] == 0
        assert found["time_to_first_token_seconds_count"][()] == 1

    def test_the_time_of_traced_passes_is_counted(self, tiny_directory: Path, start: Start) -> None:
        service = start(model=str(tiny_directory))
        service.answer("/forward", prompt=[1], stages=["embed"])
        service.answer("/logits", prompt=[1])
        assert samples(service)["trace_seconds_count"][()] == 2

    def test_labels_never_hold_what_a_user_sent(self, tiny: Running) -> None:
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


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/generate", "/forward", "/health", "/ready", "/metrics", "/model", "/docs"])
def test_head_and_options_are_answered_without_a_body_or_with_an_error(tiny: Running, method: str, path: str) -> None:
    response = tiny.client.request(method, path)
    assert response.status_code in (200, 404, 405)
    assert method == "OPTIONS" or response.content == b""
    assert tiny.post("/tokenize", {"text": "a"}).status_code == 200  # on the same connection: no body was left in it


@pytest.mark.parametrize("path", ["/forward", "/logits", "/generate", "/tokenize"])
def test_a_text_that_takes_long_to_tokenize_holds_up_nobody_else(
    tiny: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun, gate = threading.Event(), threading.Event()
    encode = tiny.checkpoint.tokenizer.encode

    def slow(text: str, **options: bool) -> list[int]:
        begun.set()
        assert gate.wait(20)
        return encode(text, **options)

    monkeypatch.setattr(tiny.checkpoint.tokenizer, "encode", slow)
    with ThreadPoolExecutor(1) as client:
        try:
            slow_one = client.submit(tiny.post, path, {"text" if path == "/tokenize" else "prompt": PROMPT})
            assert begun.wait(20)
            assert tiny.get("/health").status_code == 200
            assert tiny.post("/generate", {"prompt": [40, 41], "max_tokens": 2}).status_code == 200
        finally:
            gate.set()
        assert slow_one.result().status_code == 200
