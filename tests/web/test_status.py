"""Status: what the service does, once a second while the tab is visible."""

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.service.running import Running, Start, wait_until
from tests.web.browsing import open_table, open_view, wait_until_ready

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route


def value(page: "Page", name: str) -> str:
    text: str = page.get_by_role("row", name=re.compile(f"^{name}")).get_by_role("cell").first.inner_text()
    return text


def repeat_first_answer(page: "Page") -> dict[str, Any]:
    """Answer each GET /status with the first answer of the service, which is returned when there is one."""
    first: dict[str, Any] = {}

    def answer(route: "Route") -> None:
        if not first:
            first.update(route.fetch().json())
        route.fulfill(json=first)

    page.route("**/status", answer)
    return first


def test_the_values_are_those_of_the_service(page: "Page", bundled: Running, base: str) -> None:
    bundled.answer("/generate", prompt="Emma was", max_tokens=20, ignore_eos=True)
    status = repeat_first_answer(page)
    open_view(page, base, "status")
    cache, speed = status["cache"], status["tokens_per_second"]
    assert value(page, "Running requests") == str(status["requests_running"])
    assert value(page, "Waiting requests") == str(status["requests_waiting"])
    assert value(page, "Texts in the batch") == f"{status['sequences_running']} of at most {status['max_sequences']}"
    assert value(page, "Tokens in the key-value cache").startswith(
        f"{cache['used_tokens']:,} of {cache['total_tokens']:,}"
    )
    found, looked_up = cache["prompt_tokens_found"], cache["prompt_tokens_looked_up"]
    assert value(page, "Prompt tokens found") == f"{found:,} of {looked_up:,}"
    assert value(page, "Kernels") == status["kernels"]
    assert value(page, "Version") == status["version"]
    assert float(value(page, "Generated tokens a second")) == pytest.approx(speed["generated"], abs=0.051)
    assert float(value(page, "Prompt tokens a second")) == pytest.approx(speed["prompt"], abs=0.051)
    said = re.search(r"over the last (\d+\.\d) seconds", page.locator("status-view").inner_text())
    assert said is not None
    assert float(said[1]) == pytest.approx(speed["window_seconds"], abs=0.051)
    page.unroute_all(behavior="wait")  # no answer is under way when the page closes


def test_requests_and_the_speed_are_seen_while_they_run(page: "Page", start: Start) -> None:
    service = start(model="bundled")
    open_view(page, str(service.client.base_url), "status")
    with service.blocked(), service.send("/generate", {"prompt": "Emma was", "max_tokens": 4}):
        page.get_by_role("row", name=re.compile("^(Running|Waiting) requests 1")).first.wait_for()
        busy = re.compile(r"^The service is busy: \d requests? running, \d waiting\.$")
        page.get_by_text(busy).wait_for()
    page.get_by_text("The service is idle.").wait_for()
    page.get_by_role("row", name=re.compile("^Running requests 0")).wait_for()
    page.get_by_role("row", name=re.compile("^Waiting requests 0")).wait_for()
    body = {"prompt": "Emma was", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with service.send("/generate", body):
        page.get_by_role("row", name=re.compile(r"^Generated tokens a second (?!0\.0)\d")).wait_for()


def test_the_chart_and_its_table_have_the_same_samples(page: "Page", base: str) -> None:
    open_view(page, base, "status")
    open_table(page.locator("status-view details.data-table")).nth(2).wait_for()
    path = page.locator("line-chart path.line-0").first.get_attribute("d")
    assert path is not None
    assert path.count("L") >= 2
    assert page.locator("line-chart svg[role=img]").get_attribute("aria-label") is not None


def status_requests(page: "Page") -> list[str]:
    """The requests of GET /status from now on."""
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url) if request.url.endswith("/status") else None)
    return urls


def test_another_view_ends_the_requests(page: "Page", base: str) -> None:
    open_view(page, base, "status")
    page.get_by_role("link", name="Generate").click()
    wait_until_ready(page)
    requests = status_requests(page)
    page.wait_for_timeout(1500)
    assert requests == []
    with page.expect_request("**/status"):
        page.get_by_role("link", name="Status").click()


def test_a_hidden_tab_sends_no_requests(page: "Page", base: str) -> None:
    open_view(page, base, "status")
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    requests = status_requests(page)
    page.wait_for_timeout(1500)
    assert requests == []
    with page.expect_request("**/status"):
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: false, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )


def test_a_slow_answer_is_waited_for_before_the_next_request(page: "Page", base: str) -> None:
    open_view(page, base, "status")
    asked: list[Route] = []

    def hold_first(route: "Route") -> None:
        asked.append(route)
        if len(asked) > 1:
            route.continue_()

    page.route("**/status", hold_first)
    page.wait_for_timeout(3500)
    assert len(asked) == 1
    asked[0].continue_()

    def is_asked_again() -> bool:
        page.wait_for_timeout(50)
        return len(asked) > 1

    wait_until(is_asked_again, "the next request")
    page.unroute_all(behavior="wait")  # no answer is under way when the page closes
