"""The README against the program: every example runs against a live service, and the tables are the program's.

The two lines of the quick start are run by `.ci/run`, in fresh environments.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service.app import BUNDLED
from service.settings import Settings
from tests.service.running import Running, process, running

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S)
REQUESTS = [example for example in EXAMPLES if "curl " in example]
COMMANDS = [example for example in EXAMPLES if example.startswith(".venv/bin/forwardscope")]
QUICK_START = [example for example in EXAMPLES if example.startswith("python3 -m venv")]
REPORTS = [example for example in EXAMPLES if example.startswith(".venv/bin/python -m model.drift")]
DOCKER = [example for example in EXAMPLES if example.startswith("docker ")]


@pytest.fixture(scope="module")
def bundled():
    with running(model="bundled") as service:
        yield service


def paste(service: Running, example: str, directory: Path) -> subprocess.CompletedProcess[str]:
    pasted = example.replace("http://localhost:8000", f"http://{service.address[0]}:{service.address[1]}").replace(
        "curl ", "curl --fail-with-body "
    )
    return subprocess.run(["bash", "-e", "-c", pasted], capture_output=True, text=True, cwd=directory, timeout=60)


@pytest.mark.parametrize("example", REQUESTS)
def test_every_curl_example_works_as_pasted(bundled: Running, example: str, tmp_path: Path) -> None:
    result = paste(bundled, example, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "event: error" not in result.stdout


def test_the_quick_start_answers_what_the_readme_shows(bundled: Running, tmp_path: Path) -> None:
    """Ids and texts of the streamed example; numbers may differ in their last digits from machine to machine."""
    shown = re.findall(r'"token":\{"id":(\d+),.*?\},"text":"(.*?)"\}', README)
    events = [line for line in paste(bundled, REQUESTS[0], tmp_path).stdout.splitlines() if '"token"' in line]
    streamed = [json.loads(line.removeprefix("data: ")) for line in events]
    assert len(shown) >= 3
    assert [(int(token_id), json.loads(f'"{text}"')) for token_id, text in shown] == [
        (event["token"]["id"], event["text"]) for event in streamed[: len(shown)]
    ]


@pytest.mark.parametrize("example", COMMANDS)
def test_every_command_that_serves_a_checkpoint_serves_it(example: str) -> None:
    options = example.replace("/path/to/checkpoint", str(BUNDLED)).split()[1:]
    with process(*options) as service:
        assert service.stderr is not None
        log = []
        for line in service.stderr:
            log.append(line)
            if "ready: http://" in line:
                break
        assert any("serving bundled" in line and "bfloat16" in line for line in log), log


@pytest.mark.slow
@pytest.mark.parametrize("example", DOCKER[:1])
def test_the_image_is_built_and_serves(example: str) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode != 0:
        pytest.skip("no Docker engine runs here")
    build, run = example.splitlines()
    subprocess.run(build.split(), cwd=ROOT, check=True)
    command = run.replace("--rm", "--rm --detach --read-only").replace("8000:8000", "127.0.0.1::8000")
    container = subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout.strip()
    try:
        port = subprocess.run([docker, "port", container, "8000"], capture_output=True, text=True, check=True)
        address = port.stdout.strip()
        ready = f"curl --silent --fail --retry 60 --retry-all-errors --retry-delay 1 http://{address}/ready"
        subprocess.run(ready.split(), check=True)
    finally:
        subprocess.run([docker, "stop", container], check=True)


@pytest.mark.parametrize("example", REPORTS)
def test_every_report_is_printed(example: str) -> None:
    options = example.split()[1:]
    made = subprocess.run([sys.executable, *options], capture_output=True, text=True, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    stages = re.findall(r"^(\S+) +(\d\.\d\de[-+]\d\d)", README, re.M)
    assert len(stages) > 3
    assert all(re.search(f"^{re.escape(name)} ", made.stdout, re.M) for name, _ in stages)


def test_every_example_is_run_by_some_test() -> None:
    assert sorted(REQUESTS + COMMANDS + QUICK_START + DOCKER + REPORTS) == sorted(EXAMPLES)
    assert len(REPORTS) == 1
    assert len(QUICK_START) == len(DOCKER) == 2
    assert {route for route in ("/forward", "/logits", "/generate") if any(route in block for block in REQUESTS)} == {
        "/forward",
        "/logits",
        "/generate",
    }


def test_the_settings_table_is_the_settings() -> None:
    rows = []
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else f"`{field.default}`"
        rows.append(
            f"| `--{name.replace('_', '-')}` | `FORWARDSCOPE_{name.upper()}` | {default} | {field.description} |"
        )
    assert table(rows) in README, "the table should be:\n" + table(rows)


def test_the_metrics_table_is_the_metrics(bundled: Running) -> None:
    rows = []
    for metric in bundled.state.metrics.registry.collect():
        if metric.name.startswith("forwardscope_"):
            name = metric.name + ("_total" if metric.type == "counter" else "")
            rows.append(f"| `{name}` | {metric.type} | {metric.documentation} |")
    assert len(rows) > 20
    assert table(rows) in README, "the table should be:\n" + table(rows)


def table(rows: list[str]) -> str:
    """Below its header, up to its end: a row more, or one less, is another table."""
    return "|---|\n" + "\n".join(rows) + "\n\n"


def test_the_model_page_answers_for_the_bundled_model(bundled: Running) -> None:
    answer = bundled.get("/model").json()
    assert answer["name"] == "bundled"
    assert answer["parameters"]["total"] == sum(answer["parameters"]["components"].values())


def test_every_link_leads_to_a_file() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_test_that_the_security_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text(encoding="utf-8")))
    found = set(re.findall(r"def (test_\w+)", "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))))
    assert len(named) > 25
    assert named <= found, named - found
