"""The README against the program: every pasted line works, and the settings table is the settings."""

import re
import subprocess
from pathlib import Path

import pytest

from service.settings import Settings
from tests.service.running import Running, running

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
EXAMPLES = [block for block in re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S) if "curl" in block]


@pytest.fixture(scope="module")
def bundled():
    with running(model="bundled") as service:
        yield service


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_curl_example_works_as_pasted(bundled: Running, example: str, tmp_path: Path) -> None:
    pasted = example.replace("http://localhost:8000", f"http://{bundled.address[0]}:{bundled.address[1]}").replace(
        "curl ", "curl --fail-with-body "
    )
    result = subprocess.run(["bash", "-e", "-c", pasted], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "event: error" not in result.stdout


def test_there_are_examples_of_every_post_route() -> None:
    assert {route for route in ("/forward", "/logits", "/generate") if any(route in block for block in EXAMPLES)} == {
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
    assert "\n".join(rows) in README, "the table should be:\n" + "\n".join(rows)


def test_the_model_page_answers_for_the_bundled_model(bundled: Running) -> None:
    answer = bundled.get("/model").json()
    assert answer["name"] == "bundled"
    assert answer["parameters"]["total"] == sum(answer["parameters"]["components"].values())
