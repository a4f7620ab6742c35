"""The log as text and as JSON: every line has one form, and those of a request have its ids."""

import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.log_format import JsonFormatter, RequestIds, TextFormatter, current_ids
from tests.service.running import PATIENCE_SECONDS, ROOT, Running, process, wait_until

IDS = RequestIds("mine", "1" * 32, "2" * 16)
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def record(message: str = "a message", **extra: Any) -> logging.LogRecord:
    made = logging.getLogger("some.module").makeRecord(
        "some.module", logging.WARNING, __file__, 1, message, (), None, extra=extra
    )
    made.created = 1_700_000_000.25
    return made


def as_json(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter().format(made)
    assert "\n" not in line
    content: dict[str, Any] = json.loads(line)
    return content


def test_a_json_line_has_time_level_logger_and_message() -> None:
    assert as_json(record()) == {
        "timestamp": "2023-11-14T22:13:20.250Z",
        "level": "WARNING",
        "logger": "some.module",
        "message": "a message",
    }


def test_lines_of_a_request_have_its_ids_in_both_formats() -> None:
    token = current_ids.set(IDS)
    line = as_json(record())
    text = TextFormatter().format(record())
    current_ids.reset(token)
    assert (line["request_id"], line["trace_id"], line["span_id"]) == ("mine", "1" * 32, "2" * 16)
    assert text.endswith(f" WARNING a message id=mine trace={'1' * 32}")
    assert "request_id" not in as_json(record())
    assert TextFormatter().format(record()).endswith(" WARNING a message")


def test_ids_that_a_caller_passes_take_precedence_and_an_id_is_written_once() -> None:
    token = current_ids.set(RequestIds("other"))
    passed = record("GET / 200 id=mine", request_ids=IDS, request_fields={"status": 200})
    line, text = as_json(passed), TextFormatter().format(passed)
    current_ids.reset(token)
    assert (line["request_id"], line["status"]) == ("mine", 200)
    assert text.endswith(f"GET / 200 id=mine trace={'1' * 32}")


def test_an_exception_is_one_field_and_its_lines_stay_in_it() -> None:
    failed = record()
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        failed.exc_info = sys.exc_info()
    line = as_json(failed)
    assert line["message"] == "a message"
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("ValueError: first\nsecond")


def test_a_lone_surrogate_does_not_break_a_line() -> None:
    assert as_json(record("a \ud800 b"))["message"] == "a \\ud800 b"


def test_an_error_inside_a_request_is_logged_with_the_id_of_the_request(
    tiny: Running, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Once on the event loop, and once in a job on another thread."""
    lines: list[dict[str, Any]] = []

    class Lines(logging.Handler):
        def emit(self, made: logging.LogRecord) -> None:
            lines.append(as_json(made))

    def log_and_fail(*_: Any, **__: Any) -> None:
        logging.getLogger("job").error("in a job")
        raise RuntimeError("detail")

    handler = Lines()
    logging.getLogger().addHandler(handler)
    try:
        monkeypatch.setattr("service.routes.logits.prepare_answer", log_and_fail)
        response = tiny.post("/logits", {"prompt": [1]}, headers={"X-Request-Id": "mine"})
        wait_until(lambda: len(lines) >= 2, "the lines are written")
    finally:
        logging.getLogger().removeHandler(handler)
    assert response.status_code == 500
    assert [(line["logger"], line["request_id"]) for line in lines[:2]] == [
        ("job", "mine"),
        ("service.http.errors", "mine"),
    ]
    assert "RuntimeError: detail" in lines[1]["exception"]
    errors_logged.clear()


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["json", "text"])
def test_every_line_of_the_process_has_the_chosen_form(tiny_directory: Path, log_format: str) -> None:
    arguments = ("--model", str(tiny_directory), "--log-format", log_format, "--log-level", "debug")
    with process(*arguments) as service:
        assert service.stderr is not None
        lines: list[str] = []
        address = None
        while address is None or not any(re.search(r"\bready: http", line) for line in lines):
            lines.append(service.stderr.readline())
            assert lines[-1], "the service has ended"
            address = address or next(iter(re.findall(r"http://127\.0\.0\.1:\d+", lines[-1])), None)
        headers = {"X-Request-Id": "mine"}
        with httpx.Client(base_url=address, timeout=PATIENCE_SECONDS, trust_env=False) as client:
            body = {"prompt": "the zebra", "max_tokens": 2, "ignore_eos": True}
            assert client.post("/generate", json=body, headers=headers).status_code == 200
            assert client.get("/nothing", headers=headers).status_code == 404
        service.send_signal(signal.SIGTERM)
        lines += service.communicate(timeout=PATIENCE_SECONDS)[0:2][1].splitlines()
    lines = [line.rstrip("\n") for line in lines]
    if log_format == "text":
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ", line) for line in lines)
        assert [line.count("id=mine") for line in lines if " ms=" in line] == [1, 1]
        return
    found = [json.loads(line) for line in lines]
    assert all(TIMESTAMP.fullmatch(line["timestamp"]) for line in found)
    assert all({"level", "logger", "message"} <= line.keys() for line in found)
    assert {"uvicorn.error", "access", "service.http.server"} <= {line["logger"] for line in found}
    answered, unmatched = [line for line in found if line.get("request_id") == "mine" and line["logger"] == "access"]
    assert (answered["method"], answered["route"], answered["status"]) == ("POST", "/generate", 200)
    assert answered["generated_tokens"] == 2
    assert answered["prompt_tokens"] > 0
    assert answered["duration_ms"] > 0
    assert (unmatched["route"], unmatched["status"]) == ("unmatched", 404)
    assert not any("zebra" in line for line in lines)


def test_warnings_and_the_exception_that_ends_the_process_are_json_lines() -> None:
    code = (
        "import warnings\n"
        "from service.log_format import configure_logging\n"
        "configure_logging('info', 'json')\n"
        "warnings.warn('careful')\n"
        "raise RuntimeError('the end')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_SECONDS
    )
    warning, last = map(json.loads, result.stderr.splitlines())
    assert (warning["logger"], warning["level"]) == ("py.warnings", "WARNING")
    assert "careful" in warning["message"]
    assert last["level"] == "CRITICAL"
    assert last["exception"].endswith("RuntimeError: the end")
    assert result.returncode == 1
