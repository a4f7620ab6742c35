"""A service that stops, returns, or is still loading: the page says so, waits, and then shows its state again."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.service.running import LOADING_SECONDS, process
from tests.web.browsing import Findings, wait_until_ready
from tests.web.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Page

ADDRESS = "/?view=generate&prompt=Emma+was&max_tokens=5"


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
        deadline = threading.Timer(LOADING_SECONDS, service.kill)  # this ends the lines
        deadline.start()
        lines = []
        for line in service.stderr:
            lines.append(line)
            if "listening at" in line:
                break
        else:
            pytest.fail("the service does not take connections:\n" + "".join(lines))
        deadline.cancel()
        yield


def test_pages_wait_for_a_service_that_stops_and_returns(open_page: OpenPage, port: int, findings: Findings) -> None:
    """One runs another prompt, one opens a view that was not loaded yet, and one shows the status."""
    base = f"http://127.0.0.1:{port}"
    page, other, status = open_page(), open_page(), open_page()
    with serving(port):
        for each, address in ((page, ADDRESS), (other, ADDRESS), (status, "/?view=status")):
            each.goto(base + address)
            wait_until_ready(each)
    page.get_by_label("Prompt").fill("Emma was not")
    page.get_by_role("button", name="Run").click()
    page.get_by_text("The service does not answer. The page tries again until it does.").first.wait_for()
    assert page.evaluate("document.body.dataset.service") == "away"
    other.get_by_role("link", name="Status").click()
    for each in (other, status):
        each.locator("#banner:visible").wait_for()
    with serving(port):
        for each in (page, other, status):
            each.locator("body:not([data-service])").wait_for()
            wait_until_ready(each)
            assert not each.locator("#banner").is_visible()
            assert not each.locator("#failure").is_visible()
        assert page.locator("token-strip [role=option]").count() == 5
        assert page.locator("generate-view .prompt-text").inner_text() == "Emma was not"
        for each in (other, status):
            each.get_by_role("row", name="Version").wait_for()
        with status.expect_response("**/status"):  # it goes on
            pass
        for each in (page, other, status):
            each.close()  # before the service ends, which would be an error on the page
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
