"""Accessibility: axe-core finds nothing serious in any view, light or dark, wide or narrow.

axe-core is downloaded from npm into a cache outside the repository. Without it, these tests are skipped.
"""

import io
import shutil
import subprocess
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.published_models import CACHE
from tests.web.browsing import open_view, wait_until_ready
from tests.web.conftest import OpenPage
from tests.web.views import VIEWS

if TYPE_CHECKING:
    from playwright.sync_api import Page

PACKAGE = "axe-core@4.14.1"
NPM_SECONDS = 120
LEVELS = ("serious", "critical")
RUN = "axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations)"


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    path = CACHE / f"{PACKAGE}.js"
    if not path.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"needs npm, which downloads {PACKAGE}")
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [npm, "pack", "--silent", PACKAGE]
        try:
            packed = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, timeout=NPM_SECONDS, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            pytest.skip(f"needs {PACKAGE}, which npm cannot download here")
        archive = CACHE / packed.stdout.split()[-1]
        with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as files:
            member = files.extractfile("package/axe.min.js")
            assert member is not None
            path.write_bytes(member.read())
        archive.unlink()
    return path.read_text(encoding="utf-8")


def serious_findings(page: "Page", axe: str) -> list[str]:
    """List the serious problems that axe-core finds, with the elements concerned."""
    page.evaluate(axe)
    violations: list[dict[str, Any]] = page.evaluate(RUN)
    return [
        f"{each['id']} ({each['help']}): {[node['html'][:200] for node in each['nodes'][:3]]}"
        for each in violations
        if each["impact"] in LEVELS
    ]


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious(open_page: OpenPage, base: str, axe: str, view: str, look: str) -> None:
    page = open_page(dark=look == "dark", phone=look == "phone")
    open_view(page, base, view)
    assert serious_findings(page, axe) == []


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_axe_finds_nothing_serious_in_steered_texts_and_a_sweep(
    open_page: OpenPage, base: str, axe: str, look: str
) -> None:
    page = open_page(dark=look == "dark", phone=look == "phone")
    open_view(page, base, "edits", prompt="The old man was", other="The old men was")
    page.get_by_role("button", name="Steer", exact=True).click()
    page.locator(".chip").wait_for()
    page.get_by_text("Other edits").click()
    wait_until_ready(page)
    assert page.locator("patch-sweep canvas").is_visible()
    assert serious_findings(page, axe) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_axe_finds_nothing_serious_in_pictures_of_operations(
    open_page: OpenPage, base: str, axe: str, look: str
) -> None:
    page = open_page(dark=look == "dark", phone=look == "phone")
    for part in ("attn.scores", "attn.pattern", "attn.rot_q", "attn.z", "ln1.normalized", "mlp.post", "resid_mid"):
        open_view(page, base, "network", prompt="The old man was", at=f"blocks.2.{part}", cell=1)
        page.locator("operation-picture").focus()
        page.keyboard.press("ArrowRight")
        assert serious_findings(page, axe) == []


@pytest.mark.parametrize("view", VIEWS)
def test_no_view_is_wider_than_a_phone(open_page: OpenPage, base: str, view: str) -> None:
    """At a width of 380 pixels, only the pictures themselves scroll to the side."""
    page = open_page(phone=True)
    open_view(page, base, view)
    assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_axe_finds_what_is_wrong(page: "Page", base: str, axe: str) -> None:
    """The check itself works: an image without a text is found."""
    open_view(page, base, "status")
    page.evaluate(
        "document.querySelector('main').append(Object.assign(document.createElement('img'), {src: '/page/icon.svg'}))"
    )
    assert any("image-alt" in each for each in serious_findings(page, axe))
