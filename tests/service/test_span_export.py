"""Traces are optional: the service runs without OpenTelemetry, and says what is missing if traces are asked for."""

import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

from service.metrics import Metrics
from service.settings import Settings
from service.span_export import open_tracer
from tests.service.running import LOADING_SECONDS, ROOT, Running

# As if the extra were not installed, also where it is.
WITHOUT_EXTRA = "import sys; sys.modules |= {'opentelemetry.sdk': None, 'opentelemetry.exporter': None}; "


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=LOADING_SECONDS, check=False
    )


@pytest.mark.slow
def test_without_the_extra_a_collector_is_an_error_of_one_line_and_exit_code_1() -> None:
    code = "sys.argv = ['forwardscope', '--otlp-endpoint', 'http://localhost:4318', '--port', '0']; "
    result = run(WITHOUT_EXTRA + code + "from service.__main__ import main; main()")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert "--otlp-endpoint needs opentelemetry." in line
    assert line.endswith("pip install 'forwardscope[otel]'")


@pytest.mark.slow
def test_the_service_imports_opentelemetrys_sdk_only_if_a_collector_is_given() -> None:
    code = "from service.app import create_app; from service.settings import Settings; "
    result = run(WITHOUT_EXTRA + code + "create_app(Settings(model='none')); import os; os._exit(0)")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_a_standard_endpoint_alone_sends_no_traces_and_one_line_says_so() -> None:
    code = "sys.argv = ['forwardscope', '--host', 'no.such.host.invalid']; "  # ends after the lines about settings
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
    result = run(WITHOUT_EXTRA + code + "from service.__main__ import main; main()", **variables)
    assert result.returncode == 1
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but traces are sent only with --otlp-endpoint" in result.stderr


def test_opentelemetrys_switch_turns_traces_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracer("http://localhost:4318", Metrics()) is None
    assert "OTEL_SDK_DISABLED is true" in caplog.text


def test_without_a_collector_responses_have_no_traceparent(tiny: Running) -> None:
    headers = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    assert not {"traceparent", "traceresponse"} & tiny.get("/model", headers=headers).headers.keys()


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", "http://a b", "http:///x"])
def test_an_endpoint_that_is_no_url_is_an_error_with_an_example(endpoint: str) -> None:
    with pytest.raises(ValidationError, match="http://localhost:4318"):
        Settings(otlp_endpoint=endpoint)
