"""Open the web page in headless Chromium, and note everything that must not happen there.

This module imports Playwright only for types, so that the tests can be collected without it.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request

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
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MILLISECONDS = 20_000
LOOPBACK = ("127.0.0.1", "localhost")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 380, "height": 800}
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
def chromium() -> Iterator["Browser"]:
    """A headless browser. The calling test is skipped if Playwright or Chromium is missing.

    While it is open, `asyncio.run` fails in this thread, because Playwright keeps an event loop running.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install '.[dev,web]'")
    path = find_chromium()
    environment: dict[str, str | float | bool] = {**os.environ}
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(OPTIONS), env=environment)
        try:
            yield browser
        finally:
            browser.close()


class Findings(list[str]):
    """What must not happen in a browser. A test that expects an entry clears the list."""

    def watch(self, page: "Page") -> None:
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self.append(f"exception: {error}"))
        page.on("request", lambda request: self._note_request(page, request))

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


def new_context(browser: "Browser", *, dark: bool = False, phone: bool = False) -> "BrowserContext":
    """A context with its own storage, in which animations are off."""
    context = browser.new_context(
        viewport=PHONE if phone else DESKTOP,  # type: ignore[arg-type]  # a TypedDict
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        accept_downloads=True,
    )
    context.add_init_script(REPORT_VIOLATIONS)
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    return context


def url_of(base: str, view: str, **params: str | float) -> str:
    """The address of a view in a state."""
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
    page.locator("body[data-state]:not([data-state=busy])").wait_for()
    return str(page.evaluate("document.body.dataset.state"))
