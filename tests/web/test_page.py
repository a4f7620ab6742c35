"""The shell of the page: form, menu, address, errors, API key, theme, explanations, and a service that goes away."""

import contextlib
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.service.running import Running, wait_until
from tests.web.browsing import DESKTOP, Findings, open_view, url_of, wait_for, wait_until_ready, wait_until_settled
from tests.web.conftest import API_KEY, OpenPage
from tests.web.reading import percent
from tests.web.views import VIEWS

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

EXAMPLE = "When Mary and John went to the park, John gave a ball to"
PROMPT = "Emma was sitting in"
REFUSED = "net::ERR_CONNECTION_REFUSED"


def read_address(page: "Page") -> dict[str, str]:
    state = parse_qs(urlsplit(page.url).fragment, keep_blank_values=True)
    return {name: values[0] for name, values in state.items()}


def shown_prompt(page: "Page") -> str:
    text: str = page.locator("generate-view .prompt-text").inner_text()
    return text


def run_prompt(page: "Page", prompt: str) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_role("button", name="Run").click()
    wait_until_ready(page)


def test_the_first_view_is_complete_without_any_input(page: "Page", bundled: Running, base: str) -> None:
    page.goto(base)
    wait_until_ready(page)
    top = bundled.answer("/forward", prompt=EXAMPLE, stages=["loss"])["predictions"][-1]["top"][0]
    assert percent(top["probability"]) in page.locator("network-view .answer").inner_text()
    assert page.get_by_label("Prompt").input_value() == EXAMPLE
    assert page.title() == "Network · Forwardscope"
    assert "5,131,520 parameters" in page.locator("#served").inner_text()


def test_back_forward_and_reload_restore_the_state(page: "Page", base: str) -> None:
    open_view(page, base, "generate")
    run_prompt(page, PROMPT)
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("Max tokens").press("Enter")
    page.locator("token-strip [role=option]").nth(3).wait_for(state="detached")
    wait_until_ready(page)
    assert read_address(page) == {"view": "generate", "prompt": PROMPT, "max_tokens": "3"}
    page.reload()
    wait_until_ready(page)
    assert shown_prompt(page) == PROMPT
    assert page.locator("token-strip [role=option]").count() == 3
    page.go_back()
    wait_until_ready(page)
    assert page.locator("token-strip [role=option]").count() == 24
    page.go_back()
    wait_until_ready(page)
    assert shown_prompt(page) == EXAMPLE == page.get_by_label("Prompt").input_value()
    page.go_forward()
    wait_until_ready(page)
    assert shown_prompt(page) == PROMPT == page.get_by_label("Prompt").input_value()


STATES: dict[str, dict[str, str | int]] = {
    "network": {"at": "blocks.1.attn.pattern", "position": 3, "cell": 7, "head": 2},
    "generate": {"max_tokens": 5, "token": 2, "try_temperature": "0.5"},
    "forward": {"layer": "1", "stage": "blocks.1.attn.q", "head": 3},
    "weights": {"weight": "blocks.1.attn.W_O", "head": 3},
    "attention": {"layer": 2, "head": 4, "pos": 3, "stage": "scores", "find": "first"},
    "lens": {"row": 2, "pos": 3, "cells": "rank"},
    "loss": {"position": 2},
    "worked": {"example": "a-tokens-journey", "stage": "blocks.0.attn_out"},
    "steps": {"step": 2, "tokens": 4},
    "edits": {"edits": '[{"stage": "blocks.5.attn.z", "op": "zero", "heads": [2]}]', "pos": 2},
    "status": {},
}


def shown_state(page: "Page") -> list[str]:
    """The texts of the view without times, the state of its fields, and the address."""
    fields = "all => all.map((each) => `${each.name}=${each.value}${each.checked ?? ''}`)"
    text = page.locator("main").inner_text()
    times = r"\d+ tokens? in .* s\.|\d+ s\b|\d+ min\b|Prompt tokens found in the cache.*|a second\t.*|\d+\.\d seconds"
    text = re.sub(times, "", text)
    if page.locator("status-view").is_visible():
        text = re.sub(r"[\d.,]+|\s*Show as a table", "", text)  # the service goes on, and the table needs two answers
    return [page.url, text, *page.locator("main :is(input, select)").evaluate_all(fields)]


def settled_state(page: "Page") -> list[str]:
    """The state of the view once it stays the same: the browser fills tables in a later task."""
    states = [shown_state(page)]

    def has_settled() -> bool:
        page.wait_for_timeout(500)
        states.append(shown_state(page))
        return states[-1] == states[-2]

    wait_until(has_settled, "the view stays the same")
    return states[-1]


def assert_shows(page: "Page", expected: list[str]) -> None:
    """Wait until the view has this state."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: shown_state(page) == expected, "the state of the view")
    assert shown_state(page) == expected


@pytest.mark.parametrize("view", VIEWS)
def test_back_forward_and_reload_restore_every_view(page: "Page", base: str, view: str) -> None:
    other = "loss" if view != "loss" else "lens"
    prompt = {} if view in ("worked", "status") else {"prompt": PROMPT}
    open_view(page, base, view, **prompt, **STATES[view])
    expected = settled_state(page)
    page.get_by_role("link", name={"loss": "Loss", "lens": "Logit lens"}[other]).click()
    wait_until_ready(page)
    assert read_address(page)["view"] == other
    page.go_back()
    wait_until_ready(page)
    assert_shows(page, expected)
    page.go_forward()
    wait_until_ready(page)
    assert read_address(page)["view"] == other
    page.go_back()
    wait_until_ready(page)
    page.reload()
    wait_until_ready(page)
    assert_shows(page, expected)


@pytest.mark.parametrize("view", ["forward", "status"])
def test_copies_and_downloads_are_one_step_away_from_the_top(page: "Page", base: str, view: str) -> None:
    open_view(page, base, view)
    page.get_by_role("button", name="Copy and download").click()
    heading = page.locator("export-bar h3")
    assert heading.evaluate("each => each === document.activeElement")
    box = page.get_by_role("button", name="Copy as curl").bounding_box()
    assert box is not None
    assert 0 <= box["y"] < DESKTOP["height"]


def test_a_prompt_that_is_run_again_adds_no_step_to_the_history(page: "Page", base: str) -> None:
    open_view(page, base, "generate")
    before = page.evaluate("history.length")
    for _ in range(2):
        page.get_by_role("button", name="Run").click()
        wait_until_ready(page)
    assert page.evaluate("history.length") == before


def test_the_links_of_the_menu_are_addresses_that_keep_model_and_prompt(page: "Page", base: str) -> None:
    open_view(page, base, "generate", prompt=PROMPT, max_tokens=2)
    link = page.get_by_role("link", name="Status")
    address = link.evaluate("link => link.href")
    assert parse_qs(urlsplit(address).fragment) == {"view": ["status"], "prompt": [PROMPT]}
    link.click()
    wait_until_ready(page)
    assert page.url == address
    assert page.locator("#views [aria-current=page]").all_inner_texts() == ["Status"]
    page.get_by_role("link", name="Generate").click()
    wait_until_ready(page)
    assert shown_prompt(page) == PROMPT


def test_a_prompt_that_was_typed_but_not_run_stays_and_the_page_says_so(page: "Page", base: str) -> None:
    open_view(page, base, "generate")
    draft = page.get_by_text("This prompt has not been run yet")
    assert not draft.is_visible()
    page.get_by_label("Prompt").fill(PROMPT)
    assert draft.is_visible()
    for name in ("Status", "Generate"):
        page.get_by_role("link", name=name).click()
        wait_until_ready(page)
    assert page.get_by_label("Prompt").input_value() == PROMPT
    assert draft.is_visible()
    assert shown_prompt(page) == EXAMPLE
    page.get_by_label("Prompt").press("Enter")
    wait_until_ready(page)
    assert not draft.is_visible()
    assert shown_prompt(page) == PROMPT


def test_a_prompt_that_is_typed_while_another_model_is_read_stays(page: "Page", base: str, held: list["Route"]) -> None:
    prompt = page.get_by_role("textbox", name="Prompt")
    open_view(page, base, "forward")
    page.route("**/weights?*", lambda route: held.append(route))
    page.get_by_label("Model").select_option("a-tokens-journey")
    wait_for(page, lambda: bool(held), "the request for the facts of the model")
    assert prompt.input_value() == "the cat sat on"
    prompt.fill("the cat sat")
    held[0].continue_()
    wait_until_ready(page)
    assert prompt.input_value() == "the cat sat"


def test_an_empty_prompt_is_an_error_of_the_service(
    page: "Page", bundled: Running, base: str, findings: Findings
) -> None:
    open_view(page, base, "generate")
    page.get_by_label("Prompt").fill("")
    page.get_by_role("button", name="Run").click()
    assert wait_until_settled(page) == "error"
    expected = bundled.post("/generate", {"prompt": ""}).json()["error"]["message"]
    assert page.locator("#error").inner_text() == expected
    assert read_address(page)["prompt"] == ""
    findings.clear()
    run_prompt(page, PROMPT)
    assert not page.locator("#error").is_visible()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"model": "nonsense"}, "'nonsense' is not served"),
        ({"seed": "-1"}, "seed: "),
        ({"max_tokens": "100000"}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"top_k": "-3"}, "top_k"),
        ({"token": "90"}, "The continuation has no token 90"),
        ({"model": "ai-rocks"}, "Choose bundled as the model"),
    ],
)
def test_what_is_wrong_in_the_address_is_an_error_with_its_reason(
    page: "Page", base: str, findings: Findings, params: dict[str, str], expected: str
) -> None:
    with pytest.raises(AssertionError, match=re.escape(expected)):
        open_view(page, base, "generate", **params)
    assert read_address(page) == {"view": "generate", **params}
    findings.clear()


def test_another_model_gets_its_own_prompt_but_a_typed_prompt_stays(
    page: "Page", base: str, findings: Findings
) -> None:
    open_view(page, base, "generate", prompt=PROMPT)
    page.get_by_label("Model").select_option("a-tokens-journey")
    assert wait_until_settled(page) == "error"
    assert page.get_by_label("Prompt").input_value() == "the cat sat on"
    page.get_by_label("Model").select_option("bundled")
    wait_until_ready(page)
    assert page.get_by_label("Prompt").input_value() == EXAMPLE
    assert read_address(page) == {"view": "generate"}
    findings.clear()


def test_without_a_checkpoint_the_page_says_so(page: "Page", empty: Running) -> None:
    page.goto(url_of(str(empty.client.base_url), "generate"))
    assert wait_until_settled(page) == "error"
    assert "no checkpoint, only worked examples" in page.locator("#error").inner_text()


def test_the_key_is_asked_for_until_it_is_right_and_kept_for_the_tab(
    page: "Page", keyed: str, findings: Findings
) -> None:
    page.goto(keyed)
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Key").fill("wrong")
    dialog.get_by_role("button", name="Use this key").click()
    page.get_by_role("heading", name="The service refused this API key").wait_for()
    dialog.get_by_label("Key").fill(API_KEY)
    dialog.get_by_label("Key").press("Enter")
    wait_until_ready(page)
    assert "the network expects" in page.locator("network-view .answer").inner_text()
    page.reload()
    wait_until_ready(page)
    assert page.evaluate("[Object.keys(localStorage).length, document.cookie]") == [0, ""]
    assert "sesame" not in page.url
    findings.clear()


def test_a_dialog_that_is_closed_leaves_the_error_and_can_be_opened_again(
    page: "Page", keyed: str, findings: Findings
) -> None:
    page.goto(keyed)
    page.get_by_role("dialog").get_by_label("Key").press("Escape")
    assert wait_until_settled(page) == "error"
    assert "API key" in page.locator("#error").inner_text()
    page.get_by_role("button", name="Try again").click()
    page.get_by_role("dialog").get_by_label("Key").fill(API_KEY)
    page.get_by_role("dialog").get_by_role("button", name="Use this key").click()
    wait_until_ready(page)
    findings.clear()


def test_the_theme_follows_the_system_until_a_button_changes_it(open_page: OpenPage, base: str) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    page = open_page(dark=True)
    open_view(page, base, "generate")
    dark = page.evaluate(background)
    page.get_by_role("button", name="Light theme").click()
    assert page.evaluate(background) == "rgb(255, 255, 255)" != dark
    page.reload()
    wait_until_ready(page)
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    page.get_by_role("button", name="Dark theme").click()
    assert page.evaluate(background) == dark


def test_a_term_is_explained_in_place_with_a_link_to_its_article(page: "Page", base: str) -> None:
    open_view(page, base, "generate")
    page.get_by_role("button", name="seed", exact=True).focus()
    page.keyboard.press("Enter")
    explanation = page.locator(".explanation:popover-open")
    assert "The same seed with the same settings" in explanation.inner_text()
    page.keyboard.press("Escape")
    assert explanation.count() == 0
    page.get_by_role("button", name="temperature", exact=True).first.click()
    target = explanation.get_by_role("link").get_attribute("href")
    assert target is not None
    assert target.startswith("https://www.vitorsousa.com/")
    box = explanation.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 1280


def test_the_header_says_in_which_numbers_the_model_computes(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "generate", max_tokens=1)
    model = bundled.get("/model").json()
    assert f"{model['config']['num_layers']} layers" in page.locator("#served").inner_text()
    page.locator("#served").get_by_role("button", name=model["dtype"]).click()
    assert "16 bits" in page.locator(".explanation:popover-open").inner_text()


@pytest.mark.parametrize("width", [380, 800, 1280, 1400])
def test_the_facts_of_the_header_are_all_in_sight(page: "Page", base: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    open_view(page, base, "status")
    facts = page.locator("#served .together")
    assert facts.count() >= 5
    for fact in facts.all():
        box = fact.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["height"] < 30  # on one line
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_header_names_the_sizes_of_the_network_that_is_shown(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "network", model="ai-rocks")
    weights = bundled.get("/weights?model=ai-rocks").json()["weights"]
    total = sum(each["num_parameters"] for each in weights if each["tied_to"] is None)
    served = page.locator("#served")
    assert served.inner_text().startswith(f"ai-rocks: {total} parameters, 1 layer, 2 heads, numbers in float64")
    page.locator("#model").select_option("bundled")
    served.get_by_text("5,131,520 parameters").wait_for()
    wait_until_ready(page)


EDIT = '{"stage": "blocks.5.attn.z", "op": "zero", "heads": [2]}'


@pytest.mark.parametrize("view", ["forward", "weights", "loss", "steps"])
def test_a_view_that_does_not_apply_the_edits_says_so(page: "Page", base: str, view: str) -> None:
    open_view(page, base, view, prompt=PROMPT, edits=f"[{EDIT}]")
    note = page.locator("#edits-note")
    assert note.inner_text().startswith("1 edit is set in the view Interventions. This view does not apply edits")
    note.get_by_role("link", name="Open Interventions").click()
    wait_until_ready(page)
    assert note.is_hidden()
    assert page.get_by_role("button", name="Remove: Set L5 H2 to zero").is_visible()


def test_edits_stay_in_the_address_of_other_views_until_they_are_removed(page: "Page", base: str) -> None:
    open_view(page, base, "edits", prompt=PROMPT, edits=f"[{EDIT}]")
    page.get_by_role("link", name="Loss").click()
    wait_until_ready(page)
    assert read_address(page) == {"view": "loss", "prompt": PROMPT, "edits": f"[{EDIT}]"}
    page.get_by_role("link", name="Status").click()
    wait_until_ready(page)
    assert page.locator("#edits-note").is_hidden()  # this view shows no pass
    page.get_by_role("link", name="Interventions").click()
    wait_until_ready(page)
    page.get_by_role("button", name="Remove: ").click()
    page.get_by_text("There are no edits yet.").wait_for()
    wait_until_ready(page)
    page.get_by_role("link", name="Loss").click()
    wait_until_ready(page)
    assert read_address(page) == {"view": "loss", "prompt": PROMPT}
    assert page.locator("#edits-note").is_hidden()


def test_a_button_beside_the_note_removes_the_edits(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT, edits=f"[{EDIT}]")
    page.get_by_role("button", name="Remove the edit").click()
    wait_until_ready(page)
    assert read_address(page) == {"view": "attention", "prompt": PROMPT}
    assert page.locator("#edits-note").is_hidden()


@pytest.mark.parametrize("has_field_sizing", [True, False])
def test_the_prompt_box_grows_with_its_text_up_to_six_lines(page: "Page", base: str, has_field_sizing: bool) -> None:
    open_view(page, base, "status")
    if not has_field_sizing:
        page.locator("#prompt").evaluate("box => { box.style.fieldSizing = 'fixed'; }")
    page.get_by_role("link", name="Loss").click()
    wait_until_ready(page)
    heights = []
    for lines in (1, 3, 12):
        page.locator("#prompt").fill("\n".join(["line"] * lines))
        heights.append(round(page.locator("#prompt").evaluate("box => (box.clientHeight - 9.6) / 24")))
    assert heights == [1, 3, 6]


@pytest.mark.parametrize("width", [1440, 2560])
def test_the_form_stands_in_one_line_that_ends_at_the_edge(page: "Page", base: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    open_view(page, base, "loss", prompt=PROMPT)
    boxes = [page.locator(each).bounding_box() for each in ("#model", "#prompt", "#run")]
    tops = {round(box["y"]) for box in boxes if box}
    last = boxes[-1]
    assert len(tops) == 1
    assert last is not None
    assert last["x"] + last["width"] >= width - 40


def test_on_a_phone_the_header_leaves_room_and_the_menu_shows_the_current_view(open_page: OpenPage, base: str) -> None:
    page = open_page(phone=True)
    for view in ("generate", "worked", "status"):
        open_view(page, base, view)
        menu, link = page.locator("#views").bounding_box(), page.locator("#views [aria-current]").bounding_box()
        title = page.locator("#title").bounding_box()
        assert menu is not None
        assert link is not None
        assert title is not None
        assert menu["x"] - 1 <= link["x"]
        assert link["x"] + link["width"] <= menu["x"] + menu["width"] + 1
        assert menu["height"] < 60
        assert title["y"] < 240


def test_the_list_of_terms_can_be_filtered(page: "Page", base: str) -> None:
    open_view(page, base, "status")
    page.get_by_text("All terms explained").click()
    page.get_by_label("Find a term").fill("nat")
    names = page.locator(".glossary dt:visible").all_inner_texts()
    assert "nat" in names
    assert "seed" not in names
    page.get_by_label("Find a term").fill("no such term")
    assert page.get_by_text("No term has this word.").is_visible()


def test_a_term_is_found_by_its_other_names(page: "Page", base: str) -> None:
    open_view(page, base, "status")
    page.get_by_text("All terms explained").click()
    box, names = page.get_by_label("Find a term"), page.locator(".glossary dt:visible")
    for typed, expected in (
        ("MLP", "feed-forward network"),
        ("W_U", "unembedding"),
        ("RMSNorm", "norm"),
        ("induction", "induction head"),
        ("gqa", "shared key-value heads"),
        ("Hidden states", "residual stream"),
        ("ReLU/GELU", "activation function"),
        ("KV-cache", "key-value cache"),
        ("attention weights", "attention pattern"),
    ):
        box.fill(typed)
        assert expected in names.all_inner_texts()
        assert names.count() < 8
    box.fill("hidden state")
    assert "Also called hidden state." in page.locator(".glossary dd:visible").inner_text()


def test_all_terms_are_listed_below_the_view(page: "Page", base: str) -> None:
    open_view(page, base, "generate")
    page.get_by_text("All terms explained").click()
    page.locator(".glossary dt").nth(30).wait_for()
    names = page.locator(".glossary dt").all_inner_texts()
    assert names == sorted(names, key=str.lower)
    assert page.locator(".glossary dd").count() == len(names)


def test_every_article_of_the_glossary_is_one_of_the_five(page: "Page", base: str) -> None:
    page.goto(base)
    terms = page.evaluate("import('/page/terms_list.js').then(({TERMS}) => TERMS)")
    assert len(terms) >= 60
    assert len({entry["article"]["address"] for entry in terms.values() if entry["article"]}) == 5
    assert all(entry["text"].endswith(".") for entry in terms.values())
    wait_until_ready(page)


def test_on_a_phone_nothing_is_wider_than_the_screen(open_page: OpenPage, base: str) -> None:
    page = open_page(phone=True)
    for view in ("generate", "status"):
        open_view(page, base, view, **({"token": 3} if view == "generate" else {}))
        assert page.evaluate("document.documentElement.scrollWidth") == 380


def test_header_and_menu_stay_at_the_left_edge_in_all_views(page: "Page", base: str) -> None:
    page.set_viewport_size({"width": 2560, "height": 1440})
    places = []
    for view in VIEWS:
        open_view(page, base, view)
        boxes = [page.locator(each).bounding_box() for each in ("h1", "#theme", "#views a >> nth=0")]
        places.append([(box["x"], box["y"]) for box in boxes if box])
    assert all(place == places[0] for place in places)
    assert places[0][0][0] < 32
