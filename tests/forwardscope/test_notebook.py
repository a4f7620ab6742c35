"""The notebooks of the documentation run, and show what they print.

To write the outputs into the notebooks again, after a change:

    python -m tests.forwardscope.test_notebook
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forwardscope.conftest import url_of
from tests.service.running import ROOT, Running, running
from tests.test_readme import assert_alike

NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))
SHOWN_URL = "http://localhost:8000"
# In a process of its own, because Jupyter's packages raise warnings.
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False).execute()
nbformat.write(notebook, sys.argv[1])
"""


def executed(path: Path, service: Running, directory: Path) -> dict[str, Any]:
    """Run all cells against a service, and return the notebook with its outputs."""
    copy = directory / "notebook.ipynb"
    copy.write_text(path.read_text(encoding="utf-8").replace(SHOWN_URL, url_of(service)), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", EXECUTE, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(copy.read_text(encoding="utf-8").replace(url_of(service), SHOWN_URL))
    return content


def outputs(notebook: dict[str, Any]) -> list[str]:
    """The text that each cell of code prints or shows."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            texts = (output.get("text") or output["data"]["text/plain"] for output in cell["outputs"])
            found.append("".join("".join(text) for text in texts))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_the_notebook_prints_what_it_shows(path: Path, service: Running, tmp_path: Path) -> None:
    for name in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, which the extra `dev` installs")
    shown = outputs(json.loads(path.read_text(encoding="utf-8")))
    found = outputs(executed(path, service, tmp_path))
    assert len(shown) == len(found) > 3
    for printed, expected in zip(found, shown, strict=True):
        assert_alike(printed, expected)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_has_no_pictures(path: Path) -> None:
    assert path.stat().st_size < 32_000
    assert "image/png" not in path.read_text(encoding="utf-8")


if __name__ == "__main__":
    import tempfile

    with running(model="bundled") as service:
        for path in NOTEBOOKS:
            with tempfile.TemporaryDirectory() as directory:
                content = executed(path, service, Path(directory))
            for cell in content["cells"]:
                cell["metadata"] = {}
            content["metadata"]["language_info"] = {"name": "python"}
            path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
