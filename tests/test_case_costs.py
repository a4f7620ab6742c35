"""Cases that cost much and have no mark fail, and say what to do."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import case_costs
case_costs.MAX_CPU_SECONDS, case_costs.slowness, case_costs.is_busy = 0.1, lambda: 1.0, lambda: False
def pytest_configure(config):
    config.addinivalue_line("markers", "slow: ")
    config.addinivalue_line("markers", "compiles: ")
    config.pluginmanager.register(case_costs.CaseCosts())
"""
CASES = """
import time
import pytest
from model.ops.cpu import build

def work():
    began = time.process_time()
    while time.process_time() - began < 0.15:
        pass

@pytest.fixture
def costly():
    work()

@pytest.fixture(scope="session")
def shared():
    work()

@pytest.fixture
def compiled(tmp_path):
    (tmp_path / "a.so").touch()
    does_nothing = build.Compiler(("true",), (), ("true",))
    build.run_compiler(does_nothing, tmp_path / "a.cpp", build.LEVELS[0], tmp_path / "a.so")

def test_cheap(): pass
def test_shared(shared): pass
def test_costly_call(): work()
def test_costly_fixture(costly): pass
@pytest.mark.slow
def test_marked(costly): work()
def test_compiling(compiled): pass
@pytest.mark.compiles
def test_compiling_with_a_mark(compiled): pass
def test_clock(monkeypatch): monkeypatch.setattr(time, "monotonic", lambda: 0.0)
"""
REASONS = {
    "test_costly_call": "took N",
    "test_costly_fixture": "took N",
    "test_compiling": "compiled a.cpp:",
    "test_clock": "changed `time.monotonic`",
}


def test_costly_cases_without_a_mark_fail_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    found = subprocess.run([*command, "-c", "/dev/null"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert "4 failed, 4 passed" in found.stdout, found.stdout + found.stderr
    reasons = dict(re.findall(r"^_+ (test_\w+) _+$.*?^E +Failed: (\w+ \S+)", found.stdout, re.M | re.S))
    assert {name: re.sub(r"\d+\.\d", "N", reason) for name, reason in reasons.items()} == REASONS
