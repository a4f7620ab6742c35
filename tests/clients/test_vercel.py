"""The Vercel AI SDK, which opencode and many web pages use, through a whole session: `vercel/session.mjs`."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.published_models import CACHE
from tests.service.running import Running

pytestmark = pytest.mark.slow
SOURCES = Path(__file__).parent / "vercel"
INSTALL_SECONDS, SESSION_SECONDS = 180, 300


@pytest.fixture(scope="module")
def packages() -> Path:
    """A directory with the session and the packages of npm, which are installed once."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs Node.js and npm")
    directory = CACHE / "vercel"
    directory.mkdir(parents=True, exist_ok=True)
    for source in SOURCES.iterdir():
        shutil.copy(source, directory)
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"]
    try:
        subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=INSTALL_SECONDS)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm cannot install the Vercel AI SDK: {error}")
    return directory


@pytest.mark.parametrize(
    ("provider", "too_long"),
    [
        ("compatible", "maximum context length is 8192 tokens"),
        ("openai", "maximum context length is 8192 tokens"),
        ("anthropic", "> 8192 maximum"),
    ],
)
def test_a_session_with_tools_streams_and_objects(
    instruct: Running, packages: Path, provider: str, too_long: str
) -> None:
    command = ["node", "session.mjs", f"{instruct.client.base_url}/v1", instruct.checkpoint.name, provider]
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, timeout=SESSION_SECONDS)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert len(found["turns"]) == 3
    for turn in found["turns"]:
        ((call,), (result,)) = turn["calls"], turn["results"]
        assert call["toolName"] == "getWeather"
        assert result == {"city": call["input"]["city"], "weather": "rain"}
        assert turn["finishReasons"][0] == "tool-calls"
        assert turn["text"]
    sizes = [turn["inputTokens"] for turn in found["turns"]]
    assert sizes == sorted(set(sizes)), "each turn has the whole conversation before it"
    assert {"tool-call", "tool-result", "text-delta", "finish"} <= {*found["stream"]["types"]}
    assert found["stream"]["text"]
    assert found["stream"]["outputTokens"] > 0
    assert found["object"]["city"] in ("Paris", "Rome")
    assert found["tooLong"]["status"] == 400
    assert too_long in found["tooLong"]["message"]
