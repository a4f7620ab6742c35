"""A browser, and services whose page it opens. Without Playwright or Chromium, these tests are skipped.

A test fails at its end if the page had a console error or warning, an exception, a violation of its
Content-Security-Policy or a request to another origin, or if the service logged an error.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.service.conftest import empty, errors_logged, start
from tests.service.running import Running, Start, running
from tests.web.browsing import TEST_SECONDS, Findings, SharedBrowser

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

__all__ = ["empty", "errors_logged", "start"]  # fixtures

HERE = Path(__file__).parent
API_KEY = "open sesame"
OpenPage = Callable[..., "Page"]  # takes the looks of `new_context`


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests in a browser are slow."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def browser() -> Iterator[SharedBrowser]:
    """The browser of all these tests."""
    shared = SharedBrowser()
    yield shared
    shared.close()


@pytest.fixture(autouse=True)
def time_limit(browser: SharedBrowser) -> Iterator[None]:
    """A test that hangs fails, and does not stop the others."""
    with browser.limited(TEST_SECONDS):
        yield


@pytest.fixture(scope="session")
def bundled() -> Iterator[Running]:
    """A service with the bundled model and default settings."""
    with running(model="bundled") as service:
        yield service


@pytest.fixture(scope="session")
def base(bundled: Running) -> str:
    """The address of the service with the bundled model, such as `http://127.0.0.1:41234`."""
    return str(bundled.client.base_url).rstrip("/")


@pytest.fixture(scope="session")
def keyed() -> Iterator[str]:
    """The address of a service that asks for `API_KEY`."""
    with running(model="bundled", model_name="a-secret-name", api_key=API_KEY) as service:
        yield str(service.client.base_url).rstrip("/")


@pytest.fixture
def findings() -> Iterator[Findings]:
    """Collect browser events that fail the test. A test that expects an entry clears the list."""
    found = Findings()
    yield found
    assert found == []


@pytest.fixture
def held() -> list["Route"]:
    """Requests that get no answer unless the test gives one: `page.route(path, lambda route: held.append(route))`."""
    return []


@pytest.fixture
def open_page(browser: SharedBrowser, findings: Findings, held: list["Route"], start: Start) -> Iterator[OpenPage]:
    """Open pages with a look, such as `open_page(dark=True)`. They are closed at the end, before the services stop."""
    pages: list[Page] = []

    def open_one(**look: bool) -> "Page":
        page = browser.new_page(**look)
        findings.watch(page)
        pages.append(page)
        return page

    yield open_one
    for page in pages:
        with contextlib.suppress(Exception):  # the page was closed, or is navigating
            page.evaluate("new Promise((done) => setTimeout(done))")  # the messages so far have arrived now
            page.evaluate("localStorage.clear()")  # other tests have the same storage, such as a chosen theme
            page.goto("about:blank")  # gives up all requests
        for route in held:
            with contextlib.suppress(Exception):  # it has its answer
                route.abort()  # otherwise Playwright reports an error later, in another test
        page.close()


@pytest.fixture
def page(open_page: OpenPage) -> "Page":
    """A page in a light theme, with the size of a desktop."""
    return open_page()
