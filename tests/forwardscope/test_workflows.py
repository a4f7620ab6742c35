"""The programs of docs/workflows.md and docs/harvesting.md run on published models; test_readme.py has their output."""

from typing import Any

import pytest

import forwardscope
from tests import published_models
from tests.test_readme import PROGRAMS

PAGES = ("docs/workflows.md", "docs/harvesting.md")


@pytest.mark.slow
@pytest.mark.parametrize("published", [published_models.smollm2_gguf, published_models.gemma3_gguf])
def test_every_workflow_runs_on_a_published_model(
    published: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one model for all, and with fewer prompts, because loading and attributions take most of the time."""
    model = forwardscope.load(published())
    monkeypatch.setattr(forwardscope, "load", lambda name, **options: model)
    for program in PROGRAMS:
        if program.page in PAGES:
            code = program.code.replace("range(50)", "range(4)")
            exec(compile(code, program.page, "exec"), {"__name__": "__main__"})
            assert capsys.readouterr().out, program
