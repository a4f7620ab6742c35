"""The fixtures of these tests notice what must not happen on the page."""

from typing import TYPE_CHECKING

import pytest

from tests.web.browsing import Findings, SharedBrowser, open_view, wait_until_settled

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("console.error('wrong')", "console: wrong"),
        ("setTimeout(() => { throw new Error('wrong') })", "exception: wrong"),
        ("setTimeout(() => location.assign('http://127.0.0.2:9/'))", "another origin"),
        ("void fetch('http://127.0.0.2:9/').catch(() => {})", "connect-src blocks http://127.0.0.2:9/"),
        ("document.body.append(Object.assign(document.createElement('script'), {text: 'x = 1'}))", "blocks inline"),
        ("document.body.setAttribute('style', 'color: red')", "style-src-attr blocks inline"),
        ("void fetch('/nothing')", "404"),
    ],
)
def test_what_must_not_happen_is_found(page: "Page", base: str, findings: Findings, script: str, expected: str) -> None:
    page.goto(base)
    wait_until_settled(page)
    findings.clear()
    page.evaluate(script)
    findings.wait_for(page, expected)
    findings.clear()


def test_a_view_that_does_not_exist_is_an_error_with_its_name(page: "Page", base: str, findings: Findings) -> None:
    with pytest.raises(AssertionError, match="nonsense"):
        open_view(page, base, "nonsense")
    findings.clear()


def test_a_step_that_never_ends_fails_and_the_next_test_has_a_new_browser(browser: SharedBrowser, base: str) -> None:
    page = browser.new_page()
    with pytest.raises(pytest.fail.Exception, match="took longer"), browser.limited(0.5):
        page.evaluate("new Promise(() => {})")
    again = browser.new_page()
    open_view(again, base, "status")
    again.close()
