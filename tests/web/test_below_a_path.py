"""The page, the documentation and the Python client work behind an nginx that serves them below a path."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from forwardscope import Client
from forwardscope.results.generations import TokenEvent
from tests.service.nginx import needs_nginx, nginx
from tests.service.running import Running
from tests.web.browsing import Findings, open_view, wait_until_ready
from tests.web.test_export import copied, run
from tests.web.views import VIEWS

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_nginx


@pytest.fixture(scope="module")
def below(bundled: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the service below a path, such as `http://127.0.0.1:41234/models/small`."""
    with nginx(bundled, tmp_path_factory.mktemp("nginx"), 60, "/models/small/") as url:
        yield url


def test_every_view_works_below_a_path(page: "Page", below: str) -> None:
    """A request that leaves the path gets 404, which the browser writes to its console."""
    page.goto(f"{below}/")
    wait_until_ready(page)
    for view in VIEWS:
        page.locator(f"#views a[data-name={view}]").click()
        wait_until_ready(page)
        assert page.url.startswith(f"{below}/")
    page.reload()
    wait_until_ready(page)
    assert page.locator("#views a[aria-current]").get_attribute("data-name") == VIEWS[-1]
    page.go_back()
    wait_until_ready(page)
    assert page.locator("#views a[aria-current]").get_attribute("data-name") == VIEWS[-2]


def test_links_and_copied_commands_stay_below_the_path(page: "Page", below: str) -> None:
    open_view(page, below, "status")
    links = page.evaluate("[...document.links].map((link) => link.href).filter((href) => href.startsWith(origin))")
    assert f"{below}/docs" in links
    assert all(link.startswith(f"{below}/") for link in links)
    assert json.loads(run(["bash", "-c", copied(page, "Copy as curl")]))["ready"] is True
    assert f'Client("{below}")' in copied(page, "Copy as Python")


def test_the_documentation_sends_requests_below_the_path(page: "Page", below: str, findings: Findings) -> None:
    page.goto(f"{below}/docs")
    operation = page.locator(".opblock", has=page.locator("[data-path='/health']"))
    operation.locator(".opblock-summary-control").click()
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_role("button", name="Execute").click()
    assert operation.locator(".request-url pre").inner_text().strip() == f"{below}/health"
    assert operation.locator(".live-responses-table tbody .response-col_status").first.inner_text().startswith("200")
    assert findings == []
    page.goto(f"{below}/redoc")
    page.wait_for_selector("[data-section-id]")
    assert f"{below}/./health" in (page.locator("body").text_content() or "")
    assert all("cdn.redoc.ly" in finding for finding in findings)  # the logo of ReDoc, which the policy blocks
    findings.clear()


def test_the_client_reaches_the_service_below_the_path(below: str, bundled: Running) -> None:
    expected = bundled.answer("/generate", prompt="One day", max_tokens=4, temperature=0)["tokens"]
    with Client(below) as client:
        assert list(client.generate("One day", max_tokens=4, temperature=0).tokens) == expected
        streamed = client.stream("One day", max_tokens=4, temperature=0)
        assert [event.token.id for event in streamed if isinstance(event, TokenEvent) and event.token] == expected
        assert client.weight("blocks.0.attn.W_O", head=1).shape == (1, 32, 256)
