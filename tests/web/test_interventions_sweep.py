"""The view "Interventions": a patch at every layer and position, with the numbers of the API."""

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.service.running import Running
from tests.web.browsing import Findings, open_table, open_view, wait_for, wait_until_ready
from tests.web.reading import read_number

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

PROMPT = "When Mary and John went to the park, John gave a ball to"
OTHER = "When Mary and John went to the park, Mary gave a ball to"
FIELD = "patch-sweep [name=other]"
SAME_ANSWER = ("The girl was very happy", "The boy was very happy")


def sweep_of(service: Running, prompt: str, other: str, token: int, minus: int) -> dict[str, Any]:
    fields = {"method": "patching", "stages": ["*.resid_pre"], "by": ["position"], "token": token, "minus": minus}
    return service.answer("/attribute", prompt=other, corrupted=prompt, **fields)


def best_token(service: Running, prompt: str) -> dict[str, Any]:
    answer = service.answer("/forward", prompt=prompt, stages=["logits"], detail="none", positions=[-1], top_k=1)
    best: dict[str, Any] = answer["predictions"][0]["top"][0]
    return best


def shares_of(answer: dict[str, Any]) -> list[list[float]]:
    plain, goal = answer["corrupted_value"], answer["clean_value"]
    return [[(value - plain) / (goal - plain) for value in stage["values"]] for stage in answer["stages"]]


def try_patches(page: "Page") -> None:
    page.get_by_role("button", name="Try every patch").click()
    page.locator("patch-sweep .answer").wait_for()
    wait_until_ready(page)


@contextlib.contextmanager
def held_sweep(page: "Page") -> Iterator[None]:
    """Begin a sweep that gets no answer. The block must make the page give it up."""
    held: list[Route] = []
    ended: list[str] = []
    page.route("**/attribute", lambda route: held.append(route))
    page.on("requestfailed", lambda request: ended.append(request.url))
    page.get_by_role("button", name="Try every patch").click()
    wait_for(page, lambda: len(held) == 1, "the sweep is asked for")
    yield
    wait_for(page, lambda: held[0].request.url in ended, "the sweep is given up")
    held[0].abort()  # Playwright waits for an end of its own
    page.unroute("**/attribute")


def table_of(page: "Page") -> list[list[float]]:
    rows = open_table(page.locator("patch-sweep .data-table")).all()
    return [[read_number(text) for text in row.locator("td").all_inner_texts()] for row in rows]


def test_one_click_shows_the_sweep_of_the_service(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "edits")  # with the first prompt, the form offers another one
    assert page.locator(FIELD).input_value() == OTHER
    try_patches(page)
    here, there = best_token(bundled, PROMPT), best_token(bundled, OTHER)
    answer = sweep_of(bundled, PROMPT, OTHER, there["id"], here["id"])
    expected = shares_of(answer)
    found = table_of(page)
    assert [len(row) for row in found] == [len(answer["tokens"])] * 6
    for row, values in zip(found, expected, strict=True):
        assert row == pytest.approx(values, rel=1e-3, abs=1e-6)
    said = page.locator("patch-sweep .answer").inner_text()
    assert f"“\N{NO-BREAK SPACE}{there['text'].strip()}”" in said
    first = max(range(len(expected[0])), key=lambda position: expected[0][position])
    assert f"(position {first})" in said
    assert page.locator("patch-sweep [role=status]").first.inner_text() == f"{answer['num_cells']} of 84 patches."


def test_a_chosen_cell_becomes_an_edit_which_has_its_effect(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "edits")
    try_patches(page)
    canvas = page.locator("patch-sweep canvas")
    canvas.focus()
    for key in ["ArrowRight"] + ["ArrowDown"] * 3 + ["ArrowRight"] * 9:  # the first key goes to the first cell
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    here, there = best_token(bundled, PROMPT), best_token(bundled, OTHER)
    answer = sweep_of(bundled, PROMPT, OTHER, there["id"], here["id"])
    line = page.locator("patch-sweep p.row")
    assert line.inner_text().startswith("Before L3 at position 9, ␣John←␣Mary: share ")
    assert read_number(line.inner_text().split("share")[1]) == pytest.approx(shares_of(answer)[3][9], rel=1e-3)
    value = read_number(line.inner_text().split("logits")[1])
    assert value == pytest.approx(answer["stages"][3]["values"][9], rel=1e-3)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("button", name="Add this patch").click()
    page.locator(".chip", has_text="Take the residual stream before L3 at position 9").wait_for()
    wait_until_ready(page)
    assert not any(url.endswith("/attribute") for url in asked)  # neither the sweep nor the shares change
    edit = {"stage": "blocks.3.resid_pre", "op": "patch", "positions": [9], "source": {"prompt": OTHER}}
    assert json.loads(page.get_by_label("All edits as JSON").input_value()) == [edit]
    logits = bundled.answer("/logits", prompt=PROMPT, edits=[edit], positions=[-1])["positions"][0]["logits"]
    assert logits[there["id"]] - logits[here["id"]] == pytest.approx(value, abs=0.1)  # both are rounded to bfloat16


def test_a_link_shows_the_sweep_and_another_prompt_ends_it(page: "Page", base: str) -> None:
    open_view(page, base, "edits", other=OTHER)
    assert page.locator("patch-sweep canvas").is_visible()
    page.get_by_label("Prompt", exact=True).fill("The old man was")
    page.get_by_role("button", name="Run").click()
    page.locator("patch-sweep canvas").wait_for(state="hidden")
    wait_until_ready(page)
    assert page.locator(FIELD).input_value() == "The old man was"
    assert "other=" not in page.url


def test_two_prompts_with_the_same_answer_are_compared_by_the_tokens_that_change_most(
    page: "Page", bundled: Running, base: str
) -> None:
    here, there = SAME_ANSWER
    assert best_token(bundled, here)["id"] == best_token(bundled, there)["id"]
    bodies: list[str] = []
    page.on("request", lambda request: bodies.append(request.post_data or ""))
    open_view(page, base, "edits", prompt=here, other=there)
    (body,) = (json.loads(text) for text in bodies if '"patching"' in text)
    assert body["token"] != body["minus"]
    answer = sweep_of(bundled, here, there, body["token"], body["minus"])
    for row, values in zip(table_of(page), shares_of(answer), strict=True):
        assert row == pytest.approx(values, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("The old man", "This prompt has 14 tokens, and the other one 3."),
        (PROMPT, "Both prompts are the same."),
    ],
)
def test_a_sweep_that_cannot_work_says_why_beside_its_field(page: "Page", base: str, other: str, said: str) -> None:
    open_view(page, base, "edits")
    try_patches(page)
    field = page.locator(FIELD)
    field.fill(other)
    page.get_by_role("button", name="Try every patch").click()
    page.locator("#sweep-message", has_text=said).wait_for()
    wait_until_ready(page)
    assert field.get_attribute("aria-invalid") == "true"
    assert page.locator("patch-sweep canvas").is_hidden()  # that of the earlier sweep
    field.fill(OTHER)
    assert page.locator("#sweep-message").is_hidden()
    try_patches(page)


def test_a_sweep_can_be_stopped_and_begun_again(page: "Page", base: str) -> None:
    start = {"model": "bundled", "target": {}, "clean_value": 1.0, "corrupted_value": -1.0, "num_cells": 84}
    cells = {"cells": [{"stage": "blocks.0.resid_pre", "position": 2, "head": None, "value": 0.0}]}
    open_view(page, base, "edits")
    with held_sweep(page):
        page.get_by_role("button", name="Stop").click()
    wait_until_ready(page)
    assert page.get_by_role("button", name="Stop").is_hidden()
    assert page.locator("patch-sweep [role=status]").first.inner_text() == "Stopped."
    frames = "".join(f"data: {json.dumps(each)}\n\n" for each in (start, cells)) + "data: [DONE]\n\n"
    page.route("**/attribute", lambda route: route.fulfill(body=frames, content_type="text/event-stream"))
    try_patches(page)
    assert page.locator("patch-sweep [role=status]").first.inner_text() == "1 of 84 patches."
    rows = open_table(page.locator("patch-sweep .data-table"))
    assert rows.first.locator("td").all_inner_texts()[2:4] == ["0.5000", "not computed"]
    page.unroute("**/attribute")
    try_patches(page)
    page.get_by_text("84 of 84 patches.").wait_for()


def test_another_view_ends_a_sweep(page: "Page", base: str) -> None:
    open_view(page, base, "edits")
    with held_sweep(page):
        page.get_by_role("link", name="Status").click()
    page.go_back()
    wait_until_ready(page)
    page.get_by_text("84 of 84 patches.").wait_for()


def test_too_many_cells_are_refused_beside_the_form(page: "Page", base: str, findings: Findings) -> None:
    open_view(page, base, "edits")
    refusal = {"error": {"message": "the sweep has 9000 cells", "param": "stages", "code": "too_many_cells"}}
    page.route("**/attribute", lambda route: route.fulfill(status=413, body=json.dumps(refusal)))
    page.get_by_role("button", name="Try every patch").click()
    page.locator("#sweep-message", has_text="the sweep has 9000 cells").wait_for()
    wait_until_ready(page)
    page.unroute("**/attribute")
    findings.clear()
