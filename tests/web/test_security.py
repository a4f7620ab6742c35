"""The page and its key: what is public, what is kept, and what a page of another origin cannot do."""

import re
from typing import TYPE_CHECKING

import httpx
import pytest

from service.http.page_files import WEB
from tests.service.running import PATIENCE_SECONDS, Running
from tests.web.browsing import Findings, open_view, wait_until_ready
from tests.web.conftest import API_KEY, OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Page


def give_key(page: "Page", key: str) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()


def test_the_page_asks_for_the_key_and_keeps_it_for_the_tab(page: "Page", keyed: str, findings: Findings) -> None:
    page.goto(keyed)
    give_key(page, API_KEY)
    wait_until_ready(page)
    page.reload()
    wait_until_ready(page)
    assert page.evaluate("Object.values(sessionStorage)") == [API_KEY]
    assert API_KEY not in page.evaluate("JSON.stringify(Object.values(localStorage))")
    assert API_KEY not in page.url
    assert page.context.cookies() == []
    assert all("401" in each for each in findings)  # the browser itself writes a refused request to the console
    findings.clear()


def test_a_wrong_key_is_asked_for_again(page: "Page", keyed: str, findings: Findings) -> None:
    page.goto(keyed)
    give_key(page, "wrong")
    page.get_by_text("The service refused this API key").wait_for()
    give_key(page, API_KEY)
    wait_until_ready(page)
    findings.clear()


def test_another_tab_has_to_ask_again(page: "Page", open_page: OpenPage, keyed: str, findings: Findings) -> None:
    page.goto(keyed)
    give_key(page, API_KEY)
    wait_until_ready(page)
    other = open_page()
    other.goto(keyed)
    other.get_by_role("button", name="Use this key").wait_for()
    findings.clear()


@pytest.mark.parametrize("path", ["/", "/page/index.html", "/page/page.js"])
def test_no_file_of_the_page_has_the_key_or_the_model(keyed: str, path: str) -> None:
    response = httpx.get(keyed + path, timeout=PATIENCE_SECONDS, trust_env=False)
    assert response.status_code == 200
    assert API_KEY not in response.text
    assert "a-secret-name" not in response.text


@pytest.mark.parametrize("path", sorted(WEB.rglob("*.js")), ids=lambda path: path.name)
def test_no_module_writes_markup_or_evaluates_text(path: object) -> None:
    source = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|new Function)\b", source)


def test_no_html_file_has_inline_scripts_styles_or_addresses_of_others() -> None:
    pages = [path.read_text(encoding="utf-8") for path in WEB.rglob("*.html")]
    assert pages
    for text in pages:
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
        assert not re.search(r"(?:src|href)=\"(?!page/|docs\"|#)", text)  # relative, so that they work below any path


def test_text_of_a_prompt_is_never_markup(page: "Page", base: str) -> None:
    """The text of a prompt is shown as it is, in each view that has one."""
    prompt = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    for view in ("network", "generate", "forward", "loss"):
        open_view(page, base, view, prompt=prompt)
        assert page.locator("main img, main script").count() == 0


def test_another_page_cannot_frame_it(page: "Page", base: str, findings: Findings) -> None:
    page.goto(f"{base}/docs")
    page.evaluate("document.body.append(Object.assign(document.createElement('iframe'), {src: '/', id: 'framed'}))")
    findings.wait_for(page, "frame-ancestors 'none'")
    assert page.evaluate("document.querySelector('#framed').contentDocument") is None  # of another origin: an error
    findings.clear()


def test_a_page_of_another_site_cannot_read_answers(
    page: "Page", base: str, bundled: Running, findings: Findings
) -> None:
    """Without --cors-origin, a browser refuses the answer to scripts of other origins."""
    other = base.replace("127.0.0.1", "localhost")
    page.goto(f"{other}/health")  # which has no policy of its own
    read = f"fetch('{base}/models').then((answer) => answer.text(), () => 'refused')"
    assert page.evaluate(read) == "refused"
    findings.wait_for(page, "CORS")
    page.wait_for_timeout(200)  # another message follows
    findings.clear()


@pytest.mark.parametrize(("path", "shown"), [("/docs", ".opblock-summary"), ("/redoc", "[data-section-id]")])
def test_the_documentation_works_with_its_policy_and_allows_nothing_else(
    page: "Page", base: str, findings: Findings, path: str, shown: str
) -> None:
    answer = page.goto(f"{base}{path}")
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]
    page.wait_for_selector(shown)
    assert all("cdn.redoc.ly" in finding for finding in findings)  # the logo of ReDoc, which the policy blocks
    findings.clear()
    page.evaluate("document.head.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))")
    findings.wait_for(page, "script-src")
    assert page.evaluate("window.ran") is None
    findings.clear()
