"""The picture of the README is made by a command, and shows the page of today."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.running import ROOT
from tests.web.draw_page import PICTURE

PNG = b"\x89PNG\r\n\x1a\n"


def size_of(path: Path) -> tuple[int, int]:
    """The width and the height of a PNG file."""
    content = path.read_bytes()
    assert content.startswith(PNG)
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


@pytest.mark.usefixtures("page")  # skips the test where there is no browser
def test_the_command_draws_the_picture(tmp_path: Path) -> None:
    output = tmp_path / "page.png"
    command = [sys.executable, "-m", "tests.web.draw_page", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    assert size_of(output) == size_of(PICTURE)
    assert len(output.read_bytes()) > 0.5 * len(PICTURE.read_bytes())  # not an empty page
