"""A browser, and services whose page it opens. Without Playwright or Chromium, these tests are skipped.

A test fails at its end if the page had a console error or warning, an exception, a violation of its
Content-Security-Policy or a request to another origin, or if the service logged an error.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.service.conftest import errors_logged, start
from tests.service.running import Running, running
from tests.web.browsing import Findings, chromium, new_context

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["errors_logged", "start"]  # fixtures


@pytest.fixture(scope="package")
def browser() -> Iterator["Browser"]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def bundled() -> Iterator[Running]:
    """A service with the bundled model and default settings."""
    with running(model="bundled") as service:
        yield service


@pytest.fixture(scope="session")
def base(bundled: Running) -> str:
    """The address of the service with the bundled model, such as `http://127.0.0.1:41234`."""
    return str(bundled.client.base_url).rstrip("/")


@pytest.fixture
def findings() -> Iterator[Findings]:
    """What must not happen in the browser. A test that expects an entry clears the list."""
    found = Findings()
    yield found
    assert found == []


@pytest.fixture
def page(browser: "Browser", findings: Findings) -> Iterator["Page"]:
    """A page in a light theme, with the size of a desktop, and with its own storage."""
    with new_context(browser) as context:
        page = context.new_page()
        findings.watch(page)
        yield page
        with contextlib.suppress(Exception):  # the page was closed, or is navigating
            page.evaluate("new Promise((done) => setTimeout(done))")  # the messages so far have arrived now
