"""Start of the service: loading, the command line, the process with its log, and the number of threads."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from model import control_groups
from service.__main__ import main
from service.loading import POPULATE_PAUSE_SECONDS, load, load_model, num_threads, populate_cache
from service.network_thread import NetworkThread
from service.settings import Settings
from service.state import State
from tests.service.checkpoints import write_checkpoint
from tests.service.running import PATIENCE_SECONDS, ROOT, Running, Start, process, run_command, wait_until

PROMPT = "the cat sat on"
SHORT: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}


class TestLoading:
    def test_a_service_is_healthy_while_it_loads_and_ready_afterwards(
        self, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded = threading.Event()

        def load_slowly(settings: Settings, ranks: Any) -> Any:
            assert loaded.wait(PATIENCE_SECONDS)
            return load_model(settings)

        monkeypatch.setattr("service.loading.load_model", load_slowly)
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

    def test_the_memory_of_the_cache_is_provided_slowly_while_the_network_computes(self) -> None:
        network_thread = NetworkThread(lambda *_: None, lambda _: None)
        computes, release, provided = threading.Event(), threading.Event(), []
        num_parts, num_pauses = 5_000, 3

        def populate() -> Iterator[None]:
            for part in range(num_parts):
                provided.append(part)
                yield

        def compute() -> None:
            computes.set()
            assert release.wait(PATIENCE_SECONDS)

        wait_until(lambda: network_thread.is_idle, "the thread to wait")
        pass_of_a_request = network_thread.submit(compute)
        assert computes.wait(PATIENCE_SECONDS)
        thread = threading.Thread(
            target=populate_cache, args=(SimpleNamespace(populate_cache=populate), network_thread), daemon=True
        )
        thread.start()
        time.sleep(num_pauses * POPULATE_PAUSE_SECONDS)
        assert len(provided) <= num_pauses + 1
        release.set()
        pass_of_a_request.result(PATIENCE_SECONDS)
        thread.join(PATIENCE_SECONDS)
        assert len(provided) == num_parts
        network_thread.close()

    def test_a_service_without_a_checkpoint_is_ready_and_its_errors_say_what_is_missing(self, empty: Running) -> None:
        assert empty.get("/ready").status_code == 200
        assert [entry["kind"] for entry in empty.get("/models").json()["models"]] == ["worked_example"] * 3
        for response in (empty.get("/model"), empty.post("/generate", SHORT), empty.post("/forward", {"prompt": [1]})):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_checkpoint")

    @pytest.mark.parametrize("damage", ["directory", "config", "vocab_size", "layers", "tensor", "cut", "tokenizer"])
    def test_a_broken_checkpoint_ends_the_service_with_a_message(
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
    def test_wrong_generation_defaults_end_the_service_with_a_message(
        self, tmp_path: Path, generation: dict[str, Any], named: str, errors_logged: list[str]
    ) -> None:
        check_refused(write_checkpoint(tmp_path / "broken", generation=generation), named)
        errors_logged.clear()

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ({"max_step_tokens": 8, "max_num_seqs": 64}, "8 tokens per step are fewer than the 64 sequences"),
            ({"cache_bytes": 100}, "cache_bytes: 100"),
            ({"cache_bytes": 1 << 60}, "1152921504.6 GB for the key-value cache are needed, but"),
        ],
        ids=str,
    )
    def test_unusable_settings_end_the_service_with_a_message(
        self, tiny_directory: Path, wrong: dict[str, Any], named: str, errors_logged: list[str]
    ) -> None:
        check_refused(tiny_directory, named, **wrong)
        (message,) = errors_logged
        assert named in message
        assert "Traceback" not in message
        errors_logged.clear()


def break_checkpoint(directory: Path, damage: str) -> str:
    """Damage a checkpoint, and return what the error message must name."""
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
    """Check that loading fails with a message that contains `named`, and that the service is told to stop."""
    arguments: dict[str, Any] = {"model": str(directory), "threads": 1}
    state = State(Settings(**arguments | settings))
    stopped: list[bool] = []
    try:
        asyncio.run(load(state, lambda: stopped.append(True)))
    finally:
        state.worker.close()
    assert stopped == [True]
    assert not state.loaded.is_set()
    assert state.failure is not None
    assert named in state.failure


class Started(Exception):
    """The application would have been made now."""


class TestCommandLine:
    @pytest.fixture
    def settings_of(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
        """Run the command with arguments and environment variables, and return the settings that it uses."""

        def run(*arguments: str, **environment: str) -> Settings:
            for name, value in environment.items():
                monkeypatch.setenv(f"FORWARDSCOPE_{name}", value)
            found: list[Settings] = []

            def create_app(settings: Settings, **_: Any) -> Any:
                found.append(settings)
                raise Started

            monkeypatch.setattr("service.commands.serving.create_app", create_app)
            monkeypatch.setattr("logging.basicConfig", lambda **_: None)
            monkeypatch.setattr(sys, "argv", ["forwardscope", *arguments])
            with pytest.raises(Started):
                main()
            return found[0]

        return run

    def test_the_command_line_overrides_the_environment(self, settings_of: Callable[..., Settings]) -> None:
        environment = {"MODEL": "/from/env", "PORT": "1234", "API_KEY": "secret", "MAX_WAITING_REQUESTS": "7"}
        settings = settings_of("--port", "4321", "--dtype", "bfloat16", "--max-num-seqs", "3", **environment)
        assert (settings.model, settings.port, settings.dtype) == ("/from/env", 4321, "bfloat16")
        assert (settings.max_waiting_requests, settings.max_num_seqs) == (7, 3)
        assert settings.api_key is not None
        assert settings.api_key.get_secret_value() == "secret"
        assert "secret" not in repr(settings)

    def test_an_empty_value_means_the_default(self, settings_of: Callable[..., Settings]) -> None:
        for settings in (settings_of(API_KEY="", CACHE_BYTES="", MODEL=""), settings_of("--api-key", "")):
            assert (settings.api_key, settings.cache_bytes, settings.model) == (None, None, "bundled")

    def test_a_variable_that_is_not_a_setting_is_named_in_a_warning(
        self, settings_of: Callable[..., Settings], caplog: pytest.LogCaptureFixture
    ) -> None:
        settings_of(MODLE="/x", PORT="1234")
        assert [record.getMessage() for record in caplog.records] == [
            "FORWARDSCOPE_MODLE is ignored: there is no such setting"
        ]

    def test_the_defaults_listen_on_loopback_without_a_key(self, settings_of: Callable[..., Settings]) -> None:
        settings = settings_of()
        assert (settings.model, settings.host, settings.port) == ("bundled", "127.0.0.1", 8000)
        assert settings.api_key is None

    @pytest.mark.parametrize(
        ("arguments", "environment", "origins"),
        [
            ([], {}, []),
            (["--cors-origin", "*"], {}, ["*"]),
            (["--cors-origin", "https://a.org, http://b:1"], {}, ["https://a.org", "http://b:1"]),
            (["--cors-origin", "https://a.org", "--cors-origin", "http://b:1"], {}, ["https://a.org", "http://b:1"]),
            ([], {"CORS_ORIGIN": "https://a.org,tauri://localhost"}, ["https://a.org", "tauri://localhost"]),
            ([], {"CORS_ORIGIN": ""}, []),
        ],
    )
    def test_origins_are_repeated_or_separated_by_commas(
        self,
        settings_of: Callable[..., Settings],
        arguments: list[str],
        environment: dict[str, str],
        origins: list[str],
    ) -> None:
        assert settings_of(*arguments, **environment).cors_origin == origins

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--cors-origin", "example.org"], "--cors-origin: 'example.org' is not an origin"),
            (["--cors-origin", "https://a.org/"], "--cors-origin"),
            (["--cors-origin", "https://a.org/path"], "--cors-origin"),
            (["--cors-origin", "HTTPS://a.org"], "--cors-origin: 'HTTPS://a.org'"),
            (["--port", "http"], "--port: 'http' is not a whole number from 0 to 65535"),
            (["--port", "70000"], "--port: '70000' is not a whole number from 0 to 65535"),
            (["--port"], "--port: needs a value"),
            (["--max-num-seqs", "0"], "--max-num-seqs: '0' is not a whole number from 1 on"),
            (["--max-num-seqs", "2.5"], "--max-num-seqs: '2.5' is not a whole number from 1 on"),
            (["--max-step-stretch", "nan"], "--max-step-stretch: 'nan' is not a number above 1"),
            (["--idle-timeout-seconds", "long"], "--idle-timeout-seconds: 'long' is not a number above 0"),
            (["--dtype", "flaot32"], "'flaot32' is not auto, float32, bfloat16 or float16; did you mean float32?"),
            (["--quantize", "fp8"], "--quantize: 'fp8' is not stored, none, int8, int5, int4 or auto"),
            (["--kv-cache-dtype", "x"], "--kv-cache-dtype: 'x' is not auto or int8"),
            (["--cache-bytes", "4X"], "--cache-bytes: '4X' is not a size; give a number of bytes, or one with K, M"),
            (["--cache-bytes", "0"], "--cache-bytes: '0' is not a size"),
            (["--quantize-loss", "1%"], "--quantize-loss: is only for --quantize auto"),
            (["--adapter", "x"], "--adapter: 'x' is not NAME=PATH"),
            (["--page=3"], "--page/--no-page: takes no value, but is given '3'"),
            (["--threads", "0", "--port", "8000"], "--threads: '0' is not a whole number from 1 on"),
            (["--threads", "1000000"], "--threads: 1000000 is more than"),
            (["--no-such-setting", "1"], "--no-such-setting is not an option; `forwardscope serve --help`"),
            (["--prot", "1"], "--prot is not an option; did you mean --port?"),
            (["--speculat"], "--speculat is not an option; did you mean --speculate?"),
            (["--max_num_seqs=3"], "--max_num_seqs is not an option; did you mean --max-num-seqs?"),
            (["--served-model-name", "a"], "--served-model-name is not an option; did you mean --model-name?"),
            (["--alias", "a"], "--alias is not an option; did you mean --model-name?"),
            (["-m", "a"], "-m is not an option; did you mean --model?"),
            (["-tp", "2"], "-tp is not an option; did you mean --tensor-parallel?"),
            (["--tensor-parallel-size=2"], "--tensor-parallel-size is not an option; did you mean --tensor-parallel?"),
            (["--gpu-memory-utilization", "1"], "-utilization is not an option; did you mean --cache-bytes?"),
            (["-ngl", "99"], "-ngl is not an option; did you mean --device?"),
            (["--max-model-len", "9"], "--max-model-len is not an option; the context is that of the checkpoint"),
            (["-c", "9"], "-c is not an option; the context is that of the checkpoint"),
            (["--root-path", "/fs/"], "--root-path: '/fs/' is not a path such as /fs or /models/fs; begin"),
            (["--api-key", "k\n"], "--api-key: is empty, begins or ends with a space or a line end"),
            (["--api-key", " "], "--api-key: is empty, begins"),
            (["--api-key", "two\nkeys"], "has a control character, so no HTTP header can carry it"),
            (["--allowed-hosts", "a.org,https://b.org"], "--allowed-hosts: 'https://b.org' is not a name of a host"),
            (["--allowed-hosts", "a.org:8000"], "--allowed-hosts: 'a.org:8000' is not a name of a host"),
            (["--allowed-hosts", "*.a.org"], "--allowed-hosts: '*.a.org' is not a name of a host"),
            (["--model", "none", "--lens", "x"], "--lens: --model none serves no checkpoint; leave it out"),
            (["--model", "none", "--adapter", "a=x"], "--adapter: --model none serves no checkpoint; leave it out"),
            (["--model", "none", "--vectors", "x"], "--vectors: --model none serves no checkpoint; leave it out"),
            (
                ["--model", "none", "--chat-template", "x"],
                "--chat-template: --model none serves no checkpoint; leave it out",
            ),
            (["--model", "none", "--revision", "x"], "--revision: --model none serves no checkpoint; leave it out"),
            (["--model", "none", "--model-name", "x"], "--model-name: --model none serves no checkpoint; leave it out"),
            (["--seed", "1"], "--seed is not an option; it is a field of each request"),
            (["-hf", "org/name"], "-hf is not an option; did you mean --model?"),
            (["serve", "a", "b"], "'b' is one argument too many"),
        ],
    )
    def test_a_mistake_ends_the_process_with_2_and_one_line_in_words_of_the_command_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
    ) -> None:
        assert run_command(monkeypatch, *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("forwardscope serve: ")
        assert named in line

    def test_a_wrong_environment_variable_ends_the_process_with_2_and_the_name_of_the_setting(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("FORWARDSCOPE_MAX_BODY_BYTES", "much")
        monkeypatch.setenv("FORWARDSCOPE_PAGE", "maybe")
        assert run_command(monkeypatch, "--port", "x") == 2
        first, second, third = sorted(capsys.readouterr().err.splitlines())
        assert "--port: 'x' is not" in first
        assert "FORWARDSCOPE_MAX_BODY_BYTES: 'much' is not a size" in second
        assert "FORWARDSCOPE_PAGE: 'maybe' is not true or false" in third

    @pytest.mark.parametrize(
        ("text", "num_bytes"),
        [
            ("1048576", 1 << 20),
            ("512M", 512 << 20),
            ("4G", 4 << 30),
            ("4g", 4 << 30),
            ("4GiB", 4 << 30),
            ("4GB", 4 * 10**9),
            ("1.5K", 1536),
            ("2T", 2 << 40),
            ("7B", 7),
        ],
    )
    def test_sizes_may_have_units(self, settings_of: Callable[..., Settings], text: str, num_bytes: int) -> None:
        assert settings_of("--cache-bytes", text).cache_bytes == num_bytes
        assert settings_of(MAX_BUFFERED_BYTES="8G", CACHE_BYTES=text).cache_bytes == num_bytes


class TestFailures:
    def test_a_missing_checkpoint_ends_the_command_with_1(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str]
    ) -> None:
        assert run_command(monkeypatch, "--model", str(tmp_path / "nothing"), "--port", "0", "--threads", "1") == 1
        check_error(errors_logged, str(tmp_path / "nothing"))

    @pytest.mark.parametrize("device", ["cuda:99", "tpu"])
    def test_a_missing_device_ends_the_command_with_1_and_the_name_of_the_device(
        self, device: str, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str]
    ) -> None:
        assert run_command(monkeypatch, "--device", device, "--port", "0", "--threads", "1") == 1
        check_error(errors_logged, f"device '{device}' cannot be used here")

    @pytest.mark.parametrize(
        ("settings", "is_warned"),
        [
            ({"host": "0.0.0.0"}, True),
            ({"host": "0.0.0.0", "api_key": "secret"}, False),
            ({"host": "127.0.0.1"}, False),
            ({"host": "localhost"}, False),
        ],
    )
    def test_listening_on_all_addresses_without_a_key_is_a_warning(
        self, start: Start, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], is_warned: bool
    ) -> None:
        caplog.set_level("INFO")
        start(model="none", **settings)
        wait_until(lambda: "metrics: http" in caplog.text, "the service is announced")
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == is_warned
        assert all("everybody who can reach this machine may use the service" in line for line in warnings)
        assert all("set FORWARDSCOPE_API_KEY" in line for line in warnings)


def check_error(errors_logged: list[str], named: str) -> None:
    """Check that one line was logged, without a traceback, that contains `named`."""
    (message,) = errors_logged
    assert named in message
    assert "Traceback" not in message
    errors_logged.clear()


@pytest.mark.slow
class TestProcess:
    def test_an_address_in_use_ends_the_process_with_1_and_a_message(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, process("--port", str(taken.getsockname()[1])) as service:
            _, log = service.communicate(timeout=3 * PATIENCE_SECONDS)
        assert service.returncode == 1
        assert "Address already in use" in log
        assert "Traceback" not in log
        assert "terminate called" not in log
        assert "Traceback" not in log

    def test_the_log_names_the_served_checkpoint_and_the_address(self) -> None:
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
        assert f"documentation: {address[1]}/docs" in log
        assert f"metrics: {address[1]}/metrics" in log
        assert re.search(r"serving bundled: [\d,]+ parameters, cpu, bfloat16, context 512", log)
        assert "shutting down" in rest

    def test_neither_the_start_nor_a_request_imports_the_compiler_of_torch(self) -> None:
        """Importing `torch._dynamo` takes as long as importing everything else."""
        code = (
            "import sys; from service.app import *; from service.loading import *;"
            "from service.settings import Settings;"
            "from model.engine.request import Request; from model.text.transcript import GenerationParams;"
            "settings = Settings(); engine = build_engine(load_model(settings), settings);"
            "engine.add(Request(id='', prompt_ids=[1, 2, 3], params=GenerationParams(max_tokens=5)));"
            "assert sum(len(output.tokens) for _ in range(5) for output in engine.step().outputs) == 5;"
            "assert 'torch' in sys.modules; print([name for name in sys.modules if name == 'torch._dynamo'])"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("limits", "asked", "expected"),
    [
        ({}, None, 8),
        ({"": "max 100000"}, None, 8),
        ({"": ""}, None, 8),
        ({"": "1600000 100000"}, None, 8),
        ({"": "250000 100000"}, None, 2),
        ({"": "50000 100000"}, None, 1),
        ({"": "250000 100000"}, 5, 5),
        ({"system.slice/own.service": "300000 100000"}, None, 3),
        ({"system.slice": "300000 100000", "system.slice/own.service": "400000 100000"}, None, 3),
        ({"other.slice": "300000 100000"}, None, 8),
    ],
)
def test_the_default_number_of_threads_is_limited_to_the_cpus_of_the_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, str], asked: int | None, expected: int
) -> None:
    (tmp_path / "own").write_text("0::/system.slice/own.service\n")
    for group, limit in limits.items():
        (tmp_path / "groups" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / group / "cpu.max").write_text(f"{limit}\n")
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    assert num_threads(Settings(threads=asked)) == expected


@pytest.mark.parametrize("setting", ["draft", "adapter", "lens", "vectors"])
def test_a_named_file_that_does_not_exist_is_an_error_before_the_checkpoint_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr("service.loading.load_checkpoint", lambda *_, **__: pytest.fail("the checkpoint was loaded"))
    missing = str(tmp_path / "missing")
    value: Any = [f"own={missing}"] if setting == "adapter" else missing
    with pytest.raises(ValueError, match="missing: no such"):
        load_model(Settings(model="bundled", **{setting: value}))
