"""Setup that all tests share: the development data, kernels compiled once, and a limit on the cost of a case."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes of tests share the CPUs; PyTorch reads it on import

from pathlib import Path

import pytest

from tests.case_costs import CaseCosts
from tests.kernels import compile_kernels

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(relative: str) -> Path:
    """A path inside the development data. The calling test is skipped if the path does not exist."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"needs the development data shared/{relative}, which a plain checkout does not have")
    return path


def source_tree() -> Path:
    """The checkout. The calling module or test is skipped where the tests run with an installed package alone."""
    root = Path(__file__).parents[1]
    if not (root / "model").is_dir():
        pytest.skip("reads the source, which lies elsewhere: the package is installed", allow_module_level=True)
    return root


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels before the first test, in the process that starts the others."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        compile_kernels()
    config.pluginmanager.register(CaseCosts(), "case-costs")


def pytest_collection_finish() -> None:
    """Keep the modules and the cases out of later collections of garbage, each of which would take half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate with a few short texts, and keep the result in a temporary folder."""
    module = "model.analysis.auto_quantization"
    monkeypatch.setattr(f"{module}.prepare_cache", lambda: tmp_path)
    monkeypatch.setattr(f"{module}.NUM_TEXTS", 3)
    monkeypatch.setattr(f"{module}.NUM_TOKENS", 12)
