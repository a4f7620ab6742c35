"""A service that stops, returns, or is still loading: the page says so, waits, and then shows its state again."""

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.service.running import process
from tests.web.browsing import Findings, wait_until_ready

if TYPE_CHECKING:
    from playwright.sync_api import Page

ADDRESS = "/?prompt=Emma+was&max_tokens=5"


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


@contextlib.contextmanager
def serving(port: int) -> Iterator[None]:
    """Run a service in a process of its own, and wait until it takes connections."""
    with process("--port", str(port)) as service:
        assert service.stderr is not None
        for line in service.stderr:
            if "listening at" in line:
                break
        yield


def test_the_page_waits_for_a_service_that_stops_and_returns(page: "Page", port: int, findings: Findings) -> None:
    base = f"http://127.0.0.1:{port}"
    with serving(port):
        page.goto(base + ADDRESS)
        wait_until_ready(page)
    page.get_by_label("Prompt").fill("Emma was not")
    page.get_by_role("button", name="Run").click()
    page.get_by_text("The service does not answer. The page tries again until it does.").first.wait_for()
    assert page.evaluate("document.body.dataset.service") == "away"
    with serving(port):
        page.locator("body:not([data-service])").wait_for()
        wait_until_ready(page)
        assert page.locator("token-strip [role=option]").count() == 5
        assert page.locator("generate-view .prompt-text").inner_text() == "Emma was not"
        assert not page.locator("#banner").is_visible()
        assert not page.locator("#failure").is_visible()
    findings.clear()


def test_a_view_that_was_not_loaded_yet_opens_when_the_service_is_back(
    page: "Page", port: int, findings: Findings
) -> None:
    with serving(port):
        page.goto(f"http://127.0.0.1:{port}{ADDRESS}")
        wait_until_ready(page)
    page.get_by_role("link", name="Status").click()
    page.locator("#banner:visible").wait_for()
    with serving(port):
        page.locator("body:not([data-service])").wait_for()
        page.get_by_role("row", name="Version").wait_for()
        wait_until_ready(page)
    findings.clear()


def test_the_status_goes_on_when_the_service_is_back(page: "Page", port: int, findings: Findings) -> None:
    with serving(port):
        page.goto(f"http://127.0.0.1:{port}/?view=status")
        wait_until_ready(page)
    page.locator("#banner:visible").wait_for()
    with serving(port):
        page.locator("body:not([data-service])").wait_for()
        wait_until_ready(page)
    findings.clear()


def test_a_page_that_is_opened_while_the_model_loads_shows_its_state_afterwards(
    page: "Page", port: int, findings: Findings
) -> None:
    with serving(port):  # it listens, but its model is not loaded yet
        page.goto(f"http://127.0.0.1:{port}{ADDRESS}")
        page.locator("token-strip [role=option]").nth(4).wait_for()
        wait_until_ready(page)
        assert not page.locator("#banner").is_visible()
    findings.clear()
