"""The view "Interventions": two texts give a steering vector, and the text with it stands beside the one without."""

import base64
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.service.running import Running
from tests.web.browsing import Findings, open_view, wait_for, wait_until_ready
from tests.web.conftest import OpenPage

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

PROMPT = "It was a dark night, and the captain"
PAIR = ("They laughed", "They cried")
NAME = "More like “{}”, less like “{}”".format(*PAIR)
MIDDLE, NUM_LAYERS = 2, 6
MAX_TOKENS = 40


def steer(page: "Page") -> None:
    page.get_by_role("button", name="Steer", exact=True).click()
    page.locator(".chip", has_text=NAME).wait_for()
    wait_until_ready(page)


def edits_of(page: "Page") -> list[dict[str, Any]]:
    """The edits as the page has them."""
    edits: list[dict[str, Any]] = json.loads(page.get_by_label("All edits as JSON").input_value())
    return edits


def requests_of(edits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The edits as the API takes them."""
    return [{name: value for name, value in edit.items() if name != "steer"} for edit in edits]


def vector_of(edit: dict[str, Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(edit["vector"]["data"]), "<f4")


def expected_vector(service: Running, layer: int, prompt: str = PROMPT) -> np.ndarray[Any, Any]:
    """The difference of the residuals at the ends of both texts, as long as the one at the end of the prompt."""
    stage = f"blocks.{layer}.resid_post"
    fields = {"stages": [stage], "positions": [-1], "detail": "values", "dtype": "float32"}
    answers = [service.answer("/forward", prompt=text, **fields) for text in (*PAIR, prompt)]
    more, less, here = (np.array(answer["stages"][0]["values"][0][-1], np.float32) for answer in answers)
    difference = more - less
    return difference * (np.linalg.norm(here) / np.linalg.norm(difference))


def strip_tokens(page: "Page", heading: str) -> list[str]:
    tokens: list[str] = page.locator(f"text-continuation[heading='{heading}'] [role=option]").all_inner_texts()
    return tokens


def shown_text(page: "Page", heading: str) -> str:
    """The tokens of a strip, without white space and without the end of the text, which is a token, too."""
    return re.sub(r"[\s␣]", "", "".join(strip_tokens(page, heading))).removesuffix("<|endoftext|>")


def as_shown(answer: dict[str, Any]) -> str:
    return re.sub(r"\s", "", answer["text"].replace("\n", "↵"))


def test_one_click_steers_the_middle_of_the_network_by_the_offered_texts(
    page: "Page", bundled: Running, base: str
) -> None:
    open_view(page, base, "edits", prompt=PROMPT)
    steer(page)
    (edit,) = edits_of(page)
    assert {name: edit[name] for name in ("stage", "op", "scale", "steer")} == {
        "stage": f"blocks.{MIDDLE}.resid_post",
        "op": "add",
        "scale": 0.6,
        "steer": dict(zip(("more", "less"), PAIR, strict=True)),
    }
    np.testing.assert_allclose(vector_of(edit), expected_vector(bundled, MIDDLE), rtol=1e-4, atol=1e-4)


def test_the_offered_texts_change_the_first_prompt_of_the_page(page: "Page", base: str) -> None:
    open_view(page, base, "edits")
    steer(page)
    assert page.locator("both-texts > .answer").inner_text().startswith("The first new token that differs is no. ")
    assert "glad" not in "".join(strip_tokens(page, "Without the edits"))
    assert "glad" in "".join(strip_tokens(page, "With the edits"))


def test_both_texts_are_those_of_the_service_and_the_first_difference_is_marked(
    page: "Page", bundled: Running, base: str
) -> None:
    open_view(page, base, "edits", prompt=PROMPT)
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    plain = bundled.answer("/generate", **body)
    assert shown_text(page, "Without the edits") == as_shown(plain)
    assert page.locator("text-continuation[heading='With the edits']").is_hidden()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    steer(page)
    assert sum(url.endswith("/generate") for url in asked) == 1  # the text without edits stays
    edited = bundled.answer("/generate", **body, edits=requests_of(edits_of(page)))
    assert shown_text(page, "With the edits") == as_shown(edited)
    number = next(
        index for index, ids in enumerate(zip(edited["tokens"], plain["tokens"], strict=False)) if ids[0] != ids[1]
    )
    assert (
        f"The first new token that differs is no. {number + 1}: " in page.locator("both-texts > .answer").inner_text()
    )
    marks = page.locator("both-texts [aria-selected=true]").evaluate_all("all => all.map((each) => each.dataset.index)")
    assert marks == [str(number)] * 2


def test_a_reload_keeps_the_name_of_a_vector_and_requests_do_not_have_it(page: "Page", base: str) -> None:
    open_view(page, base, "edits", prompt=PROMPT)
    bodies: list[str] = []
    page.on("request", lambda request: bodies.append(request.post_data or ""))
    steer(page)
    page.reload()
    wait_until_ready(page)
    assert NAME in page.locator(".chip").inner_text()
    assert page.get_by_label("Layer of").input_value() == str(MIDDLE)
    page.get_by_role("link", name="Generate").click()
    wait_until_ready(page)
    assert page.locator("generate-view text-continuation [role=option]").count() > 0
    page.get_by_role("link", name="Interventions", exact=True).click()
    wait_until_ready(page)
    assert NAME in page.locator(".chip").inner_text()
    with_edits = [json.loads(body)["edits"] for body in bodies if '"edits":' in body]
    assert len(with_edits) > 3
    assert all("steer" not in edit for edits in with_edits for edit in edits)
    page.get_by_role("button", name="Copy as curl").click()
    assert '"steer"' not in page.locator("export-bar pre").inner_text()


def test_the_layer_and_the_strength_change_in_the_chip(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "edits", prompt=PROMPT)
    steer(page)
    assert page.get_by_label("Layer of").locator("option").count() == NUM_LAYERS
    page.get_by_label("Layer of").select_option("4")
    slider = page.get_by_label(f"Strength of: {NAME}, in the residual stream after L4")
    slider.wait_for()
    wait_until_ready(page)
    (edit,) = edits_of(page)
    assert edit["stage"] == "blocks.4.resid_post"
    np.testing.assert_allclose(vector_of(edit), expected_vector(bundled, 4), rtol=1e-4, atol=1e-4)
    slider.fill("1.2")
    slider.dispatch_event("change")
    page.locator(".chip", has_text="strength 1.2").wait_for()
    wait_until_ready(page)
    assert edits_of(page) == [edit | {"scale": 1.2}]
    page.get_by_role("button", name="Steer", exact=True).click()  # again: the same texts are no second edit
    page.locator(".chip", has_text="strength 0.6").wait_for()
    assert page.locator(".chip").count() == 1


def test_the_form_says_what_it_needs(page: "Page", base: str) -> None:
    open_view(page, base, "edits", prompt=PROMPT)
    button, more = page.get_by_role("button", name="Steer", exact=True), page.get_by_label("More like", exact=True)
    message = page.locator("#steer-message")
    more.fill("")
    button.click()
    assert message.inner_text() == "Write a text."
    assert more.get_attribute("aria-invalid") == "true"
    more.fill(PAIR[1])
    assert message.is_hidden()
    button.click()
    page.locator("#steer-message", has_text="does not tell these two texts apart").wait_for()
    assert page.locator(".chip").count() == 0


def test_the_next_change_ends_the_text_that_is_being_written(page: "Page", base: str, held: list["Route"]) -> None:
    ended: list[str] = []
    page.route("**/generate", lambda route: held.append(route))
    page.on("requestfailed", lambda request: ended.append(request.post_data or ""))
    page.goto(f"{base}/#view=edits")
    wait_for(page, lambda: len(held) == 1, "the first text is asked for")
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_role("button", name="Run").click()
    wait_for(page, lambda: held[0].request.post_data in ended, "the first text is given up")
    wait_for(page, lambda: len(held) == 2, "the next text is asked for")
    held[1].continue_()
    wait_until_ready(page)
    assert strip_tokens(page, "Without the edits")


def test_no_text_stands_beside_an_error(page: "Page", base: str, findings: Findings) -> None:
    open_view(page, base, "edits", prompt=PROMPT)
    assert page.locator("both-texts").inner_text().strip() != ""
    refusal = json.dumps({"error": {"message": "no room", "param": None, "code": None}})
    page.route("**/generate", lambda route: route.fulfill(status=400, body=refusal))
    steer_button = page.get_by_role("button", name="Steer", exact=True)
    steer_button.click()
    page.locator("body[data-state=error]").wait_for()
    assert page.locator("both-texts").inner_text().strip() == ""
    page.unroute("**/generate")
    findings.clear()


def test_a_prompt_that_fills_the_context_is_not_continued(page: "Page", bundled: Running, base: str) -> None:
    most = bundled.answer("/tokenize", text="word")["count"]
    limit = bundled.client.get("/model").json()["limits"]["max_positions"]
    open_view(page, base, "edits", prompt="word" + " word" * (limit - most))
    assert "fills the context" in page.locator("both-texts").inner_text()


@pytest.mark.parametrize("look", ["dark", "phone"])
def test_a_long_name_fits_a_phone(open_page: OpenPage, base: str, look: str) -> None:
    page = open_page(**{look: True})
    open_view(page, base, "edits")
    page.get_by_label("More like", exact=True).fill("x" * 80)
    page.get_by_role("button", name="Steer", exact=True).click()
    page.locator(".chip", has_text="xxx").wait_for()
    wait_until_ready(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth")
