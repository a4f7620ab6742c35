"""`deploy/release` refuses a checkout that is not ready for a release, and builds one without publishing anything."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from model import __version__
from model.ops.cpu.instruction_levels import TARGETS
from tests.conftest import source_tree

ROOT = source_tree()


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=3000)


def copy_checkout(checkout: Path, *patterns: str) -> Path:
    """Make a repository of one commit with the files of these patterns, and with notes for the version."""
    listed = run("git", "ls-files", "-co", "--exclude-standard", *patterns, cwd=ROOT)
    if listed.returncode != 0:
        pytest.skip("needs git and a checkout")
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.splitlines()):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    (checkout / "CHANGELOG.md").write_text(f"# Changelog\n\n## {__version__} (2026-12-01)\n\nThe first release.\n")
    run("git", "init", "--quiet", cwd=checkout)
    commit(checkout)
    return checkout


def commit(checkout: Path) -> None:
    run("git", "add", "--all", cwd=checkout)
    author = ("-c", "user.name=tests", "-c", "user.email=tests@example.com")
    assert run("git", *author, "commit", "--quiet", "--message", "All", cwd=checkout).returncode == 0


def without_notes(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    commit(checkout)


def with_an_older_build(checkout: Path) -> None:
    (checkout / "dist").mkdir()
    (checkout / "dist" / "old.whl").touch()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without_notes, f"CHANGELOG.md has no section '## {__version__}'"),
        (lambda checkout: (checkout / "model" / "new.py").touch(), "there are changes that are not committed"),
        (with_an_older_build, "dist is not empty"),
        (lambda checkout: run("git", "tag", f"v{__version__}", cwd=checkout), f"v{__version__} exists"),
    ],
)
def test_a_checkout_that_is_not_ready_is_refused_with_the_reason(
    tmp_path: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    checkout = copy_checkout(tmp_path, "deploy/release", "model/__init__.py", ".gitignore")
    spoil(checkout)
    refused = run("deploy/release", cwd=checkout)
    assert refused.returncode == 1
    assert refused.stderr.startswith("release: ")
    assert reason in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    "FORWARDSCOPE_TEST_RELEASE" not in os.environ, reason="FORWARDSCOPE_TEST_RELEASE=1 builds a release"
)
def test_a_dry_run_builds_checks_and_lists_everything_and_makes_no_tag(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "checkout", ":!docs", ":!tests")
    built = run("deploy/release", "--dry-run", str(tmp_path / "out"), cwd=checkout)
    assert built.returncode == 0, built.stdout + built.stderr
    name = f"forwardscope-{__version__}"
    tags = [target.wheel for target in TARGETS.values()]
    packages = {*(f"{name}-py3-none-{tag}.whl" for tag in (*tags, "any")), f"{name}.tar.gz"}
    listed = {"sbom.cdx.json", *packages}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*listed, "SHA256SUMS"}
    assert run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=tmp_path / "out").returncode == 0
    sums = (tmp_path / "out" / "SHA256SUMS").read_text()
    assert {line.split()[1] for line in sums.splitlines()} == listed
    assert '"torch"' in (tmp_path / "out" / "sbom.cdx.json").read_text()
    assert run("git", "tag", cwd=checkout).stdout == ""
