"""Status: what the service does, once a second while the tab is visible."""

import re
from typing import TYPE_CHECKING

import pytest

from tests.service.running import Running, Start
from tests.web.browsing import open_view, wait_until_ready

if TYPE_CHECKING:
    from playwright.sync_api import Page


def value(page: "Page", name: str) -> str:
    return page.get_by_role("row", name=re.compile(f"^{name}")).get_by_role("cell").first.inner_text()


def test_the_values_are_those_of_the_service(page: "Page", start: Start) -> None:
    service = start(model="bundled")
    service.answer("/generate", prompt="Emma was", max_tokens=200, ignore_eos=True)
    open_view(page, str(service.client.base_url), "status")
    status = service.get("/status").json()
    cache = status["cache"]
    assert value(page, "Running requests") == str(status["requests_running"]) == "0"
    assert value(page, "Texts in the batch") == f"0 of at most {status['max_sequences']}"
    assert value(page, "Tokens in the key-value cache").startswith(
        f"{cache['used_tokens']:,} of {cache['total_tokens']:,}"
    )
    assert value(page, "Prompt tokens found") == f"{cache['prompt_tokens_found']} of {cache['prompt_tokens_looked_up']}"
    assert value(page, "Version") == status["version"]
    assert float(value(page, "Generated tokens a second")) > 0


def test_a_request_that_runs_is_seen_within_seconds(page: "Page", start: Start) -> None:
    service = start(model="bundled")
    open_view(page, str(service.client.base_url), "status")
    with service.blocked(), service.send("/generate", {"prompt": "Emma was", "max_tokens": 4}):
        page.get_by_role("row", name=re.compile("^(Running|Waiting) requests 1")).first.wait_for()
    page.get_by_role("row", name=re.compile("^Running requests 0")).wait_for()
    page.get_by_role("row", name=re.compile("^Waiting requests 0")).wait_for()


def test_the_chart_and_its_table_have_the_same_samples(page: "Page", base: str) -> None:
    open_view(page, base, "status")
    page.get_by_text("Show as a table").click()
    page.locator(".data-table tbody tr").nth(2).wait_for()
    path = page.locator("line-chart path.line-0").first.get_attribute("d")
    assert path is not None
    assert path.count("L") >= 2
    assert page.locator("line-chart svg[role=img]").get_attribute("aria-label") is not None


def test_it_says_over_how_many_seconds_the_rates_are_means(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "status")
    said = re.search(r"over the last (\d+\.\d) seconds", page.locator("status-view").inner_text())
    assert said is not None
    seconds = bundled.get("/status").json()["tokens_per_second"]["window_seconds"]
    assert float(said[1]) == pytest.approx(seconds, abs=2.5)


def test_another_view_ends_the_requests(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "status")
    page.get_by_role("link", name="Generate").click()
    wait_until_ready(page)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.wait_for_timeout(1500)
    assert requests == []
    page.get_by_role("link", name="Status").click()
    wait_until_ready(page)
    assert sum(url.endswith("/status") for url in requests) == 1


def test_a_hidden_tab_sends_no_requests(page: "Page", base: str) -> None:
    open_view(page, base, "status")
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.wait_for_timeout(1500)
    assert requests == []
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    with page.expect_request("**/status"):
        pass
