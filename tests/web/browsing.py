"""Open the web page in headless Chromium, and note everything that must not happen there.

This module imports Playwright only for types, so that the tests can be collected without it.
"""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import (
        Browser,
        BrowserContext,
        ConsoleMessage,
        Locator,
        Page,
        Playwright,
        Request,
        ViewportSize,
    )

# The browser sends nothing of its own to the internet.
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")  # the first one is the fastest
PATIENCE_MILLISECONDS = 60_000  # how long one step in the browser may take on a slow and busy machine
POLL_MILLISECONDS = 50
TEST_SECONDS = 300.0  # how long one test may take there
LOOPBACK = ("127.0.0.1", "localhost")
DESKTOP: "ViewportSize" = {"width": 1280, "height": 900}
PHONE: "ViewportSize" = {"width": 380, "height": 800}
# Runs before the page's own scripts. A violation of the Content-Security-Policy is an event, not an error.
REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error(`Content-Security-Policy: ${event.violatedDirective} blocks ${event.blockedURI} ${event.sample}`));
"""


def find_chromium() -> str:
    """The path of Chromium. The calling test is skipped if there is none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("needs Chromium, which is not installed here")
    return path


@contextlib.contextmanager
def playwright_driver() -> Iterator["Playwright"]:
    """The driver of browsers. The calling test is skipped if Playwright is missing.

    While it is open, `asyncio.run` fails in this thread, because Playwright keeps an event loop running.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install '.[dev,web]'")
    with playwright.sync_playwright() as driver:
        yield driver


def launch(driver: "Playwright") -> "Browser":
    environment: dict[str, str | float | bool] = {**os.environ}
    return driver.chromium.launch(executable_path=find_chromium(), args=list(OPTIONS), env=environment)


@contextlib.contextmanager
def chromium() -> Iterator["Browser"]:
    """A headless browser. The calling test is skipped if Playwright or Chromium is missing."""
    with playwright_driver() as driver:
        browser = launch(driver)
        try:
            yield browser
        finally:
            browser.close()


class SharedBrowser:
    """A browser for many tests, with one context for each look, so that the files of the page stay in its cache.

    It starts with the first page. If it was ended, it starts again with the next page.
    """

    def __init__(self) -> None:
        self._resources = contextlib.ExitStack()
        self._driver: Playwright | None = None
        self._browser: Browser | None = None
        self._process_id: int | None = None
        self._contexts: dict[tuple[tuple[str, bool], ...], BrowserContext] = {}

    def new_page(self, **look: bool) -> "Page":
        """A new tab with the look of `new_context`. Its session storage is empty; the cache of files is not."""
        if self._browser is None or not self._browser.is_connected():
            self._start()
        assert self._browser is not None
        key = tuple(sorted(look.items()))
        if key not in self._contexts:
            self._contexts[key] = new_context(self._browser, **look)
        return self._contexts[key].new_page()

    def _start(self) -> None:
        if self._driver is None:
            self._driver = self._resources.enter_context(playwright_driver())
        self._contexts.clear()
        self._browser = launch(self._driver)
        session = self._browser.new_browser_cdp_session()
        processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
        self._process_id = next(each["id"] for each in processes if each["type"] == "browser")
        session.detach()

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Fail if the block takes longer. Some calls of Playwright wait forever, but not if the browser has ended."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            if self._process_id is not None:
                os.kill(self._process_id, signal.SIGKILL)

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            if is_late.is_set():
                pytest.fail(f"this took longer than {seconds:g} s, so the browser was ended")

    def close(self) -> None:
        if self._browser is not None and self._browser.is_connected():
            self._browser.close()
        self._resources.close()


class Findings(list[str]):
    """Browser events that fail a test, such as errors. A test that expects an entry clears the list."""

    def watch(self, page: "Page") -> None:
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self.append(f"exception: {error}"))
        page.on("request", lambda request: self._note_request(page, request))

    def wait_for(self, page: "Page", expected: str) -> None:
        """Wait until an entry has a text. Fails if none comes."""
        for _ in range(PATIENCE_MILLISECONDS // POLL_MILLISECONDS):
            if any(expected in entry for entry in self):
                return
            page.wait_for_timeout(POLL_MILLISECONDS)
        pytest.fail(f"“{expected}” is not among the findings: {list(self)}")

    def _note_message(self, message: "ConsoleMessage") -> None:
        if message.type in ("error", "warning"):
            self.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _note_request(self, page: "Page", request: "Request") -> None:
        """Each request goes to the service that serves the page. Only navigation may choose another service."""
        target = urlsplit(request.url)
        if target.scheme in ("data", "blob"):
            return
        is_same = request.is_navigation_request() or target.netloc == urlsplit(page.url).netloc
        if target.hostname not in LOOPBACK or not is_same:
            self.append(f"request to another origin: {request.url}")


def new_context(
    browser: "Browser", *, dark: bool = False, phone: bool = False, touch: bool = False
) -> "BrowserContext":
    """A context with its own storage, in which animations are off. `touch`: a touch screen in place of a mouse."""
    context = browser.new_context(
        viewport=PHONE if phone else DESKTOP,
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        accept_downloads=True,
        has_touch=touch,
        is_mobile=touch,
    )
    context.add_init_script(REPORT_VIOLATIONS)
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    return context


def url_of(base: str, view: str, **params: str | float) -> str:
    """The address of a view in a state, as a query: unlike a fragment, it always loads the page."""
    return f"{base.rstrip('/')}/?{urlencode({'view': view, **params})}"


def open_view(page: "Page", base: str, view: str, **params: str | float) -> None:
    """Open a view in a state, and wait until it is complete. `base` is the address of the service."""
    page.goto(url_of(base, view, **params))
    wait_until_ready(page)


def wait_until_ready(page: "Page") -> None:
    """Wait until the page shows its state completely. Fails with the page's message if the page shows an error."""
    assert wait_until_settled(page) == "ready", page.locator("#error").inner_text()


def wait_until_settled(page: "Page") -> str:
    """Wait until the page is complete or shows an error, and return which: "ready" or "error"."""
    # Not `wait_for_function`, whose texts of scripts the Content-Security-Policy forbids.
    state = "busy"
    while state == "busy":  # again, if a lesson has moved on meanwhile
        page.locator("body[data-state]:not([data-state=busy])").wait_for()
        state = str(page.evaluate("document.body.dataset.state"))
    return state


def wait_for(page: "Page", condition: Callable[[], bool], description: str) -> None:
    """Wait for a condition on events of the page, which arrive only while a call of Playwright waits."""
    for _ in range(PATIENCE_MILLISECONDS // POLL_MILLISECONDS):
        if condition():
            return
        page.wait_for_timeout(POLL_MILLISECONDS)
    pytest.fail(f"the page does not get so far: {description}")


def open_table(details: "Locator") -> "Locator":
    """Open a <details> with a table, unless it is open, and return the rows of the table.

    The browser fills the table in a later task, and a list of all rows does not wait for it.
    """
    if details.get_attribute("open") is None:
        details.locator("summary").click()
    rows = details.locator("tbody tr")
    rows.first.wait_for()
    return rows
