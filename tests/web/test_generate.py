"""Generate: streamed tokens, their probabilities, alternatives, and other distributions without a new pass."""

import itertools
import json
import math
import re
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import torch

from model.engine.engine import Engine
from model.engine.request import Step
from model.ops.interface import Draw
from model.ops.torch_sampling import keep_top
from tests.service.running import Running, Start, wait_until
from tests.web.browsing import PHONE, Findings, open_table, open_view, wait_until_ready, wait_until_settled
from tests.web.conftest import OpenPage
from tests.web.reading import percent

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PROMPT = "When Mary and John went to the park, John gave a ball to"
ICON = "/page/icon.svg"  # Chromium asks for it whenever the address changes
SOFTMAX = "([logits, options]) => import('/page/softmax.js').then((m) => Array.from(m.distribution(logits, options)))"


def options(page: "Page") -> "Locator":
    return page.locator("token-strip [role=option]")


def table_rows(page: "Page") -> list[list[str]]:
    """The texts of the cells of the alternatives, without the column of bars."""
    rows: list[list[str]] = page.locator("table.bars tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].filter(cell => !cell.matches('.bar-cell')).map(cell => cell.innerText))"
    )
    return rows


def row_before(service: Running, prompt: str, tokens: list[int]) -> list[float]:
    """The logits after the tokens of a prompt and of its continuation."""
    ids = [token["id"] for token in service.answer("/tokenize", text=prompt)["tokens"]]
    (position,) = service.answer("/logits", prompt=ids + tokens)["positions"]
    logits: list[float] = position["logits"]
    return logits


def test_tokens_have_the_probabilities_of_the_service(page: "Page", bundled: Running, base: str) -> None:
    settings: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 40, "top_k": 30}
    open_view(page, base, "generate", **settings)
    answer = bundled.answer("/generate", prompt=PROMPT, logprobs=1, **settings)
    said = [option.get_attribute("data-said") for option in options(page).all()]
    assert said == [percent(math.exp(entry["logprob"])) for entry in answer["logprobs"]]
    table = open_table(page.locator("generate-view details.data-table"))
    rows = table.evaluate_all("rows => rows.map(row => row.cells[2].innerText)")
    assert rows == [str(token_id) for token_id in answer["tokens"]]
    visible = "".join(options(page).all_inner_texts()).replace("↵", "\n").replace("␣", " ").replace("\u00a0", " ")
    assert visible.split() == answer["text"].split()


def test_a_seed_gives_the_same_text_and_another_one_gives_another(page: "Page", base: str) -> None:
    texts = []
    for seed in (3, 3, 4):
        open_view(page, base, "generate", temperature=1.2, seed=seed)
        texts.append(options(page).all_inner_texts())
    assert texts[0] == texts[1] != texts[2]
    page.get_by_role("button", name="New seed").click()
    page.wait_for_url("**seed=*")
    wait_until_ready(page)
    assert not page.url.endswith("seed=4")


def test_a_chosen_token_shows_the_ten_most_likely_ones(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "generate", temperature=0.8, seed=1)
    options(page).nth(5).click()
    page.get_by_role("heading", name="Token 6 of the continuation").wait_for()
    wait_until_ready(page)
    assert "token=5" in page.url
    answer = bundled.answer("/generate", prompt=PROMPT, temperature=0.8, seed=1, max_tokens=24, logprobs=10)
    top = answer["logprobs"][5]["top"]
    num_prompt = len(bundled.answer("/tokenize", text=PROMPT)["tokens"])
    assert (
        f"Position {num_prompt + 5} in the other views" in page.get_by_role("region", name="Alternatives").inner_text()
    )
    logits = torch.tensor(row_before(bundled, PROMPT, answer["tokens"][:5]), dtype=torch.float64)
    chosen = torch.softmax(logits, -1)[answer["tokens"][5]]
    rank = 1 + int((logits > logits[answer["tokens"][5]]).sum())
    heading = page.get_by_role("region", name="Alternatives").locator("h3").inner_text()
    assert heading.endswith(f", probability {percent(float(chosen))}, no. {rank:,} of {len(logits):,}")
    rows = table_rows(page)
    assert len(rows) == 10 + (answer["tokens"][5] not in [entry["id"] for entry in top])
    for row, entry in zip(rows, top, strict=False):
        token_id = entry["id"]
        assert row[1] == percent(float((logits / 0.8).softmax(-1)[token_id]))
        assert row[2] == percent(float(logits.softmax(-1)[token_id])) == percent(math.exp(entry["logprob"]))
        assert float(row[3].replace("\N{MINUS SIGN}", "-")) == pytest.approx(float(logits[token_id]), rel=1e-3)
        assert row[4] == str(token_id)
        assert ("← chosen" in row[0]) == (token_id == answer["tokens"][5])


def test_the_sliders_of_a_token_change_its_distribution_without_a_request(
    page: "Page", bundled: Running, base: str
) -> None:
    open_view(page, base, "generate", token=2)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(urlsplit(request.url).path))
    tokens = bundled.answer("/generate", prompt=PROMPT, temperature=0, max_tokens=2)["tokens"]
    logits = torch.tensor(row_before(bundled, PROMPT, tokens), dtype=torch.float64)
    slider = page.get_by_role("slider", name="temperature, for this token")
    for key, temperature in (("Home", 0.0), ("ArrowRight", 0.05), ("End", 2.0), ("ArrowLeft", 1.95)):
        slider.press(key)
        shown = [row[1] for row in table_rows(page)]
        ids = [int(row[4]) for row in table_rows(page)]
        if temperature == 0:
            assert shown == ["100.0\N{NO-BREAK SPACE}%"] + 9 * ["excluded"]
        else:
            expected = (logits / temperature).softmax(-1)
            assert shown == [percent(float(expected[token_id])) for token_id in ids]
    page.get_by_role("spinbutton", name="top-k, for this token").fill("3")
    assert [row[1] for row in table_rows(page)][3:] == 7 * ["excluded"]
    assert "3 of 4,096 tokens can be drawn" in page.locator(".card").last.inner_text()
    page.get_by_role("spinbutton", name="top-k, for this token").press("Enter")
    wait_until_ready(page)
    assert set(requests) <= {ICON}
    assert "try_top_k=3" in page.url
    page.reload()
    wait_until_ready(page)
    assert [row[1] for row in table_rows(page)][3:] == 7 * ["excluded"]


def test_an_emptied_box_of_a_token_gives_a_message_in_place_of_numbers(page: "Page", base: str) -> None:
    open_view(page, base, "generate", max_tokens=2, token=1)
    page.get_by_role("spinbutton", name="temperature, for this token").fill("")
    assert page.get_by_text("The temperature must be a number of at least 0.").is_visible()
    assert "NaN" not in page.locator("generate-view").inner_text()


def test_the_distribution_is_the_one_that_the_service_draws_from(page: "Page", base: str) -> None:
    open_view(page, base, "status")
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3
    logits[7] = logits[70]  # equally likely
    limits = [(0, 1.0), (5, 1.0), (0, 0.5), (40, 0.9), (1, 1.0), (9999, 0.01)]
    for temperature, (top_k, top_p) in itertools.product([0.05, 0.7, 1.0, 1.9], limits):
        draw = Draw(row=0, temperature=temperature, top_k=top_k, top_p=top_p, min_p=0.0, key=0)
        kept = (logits[None] / temperature).softmax(-1)
        if top_k > 0 or top_p < 1:  # the service cuts no other rows: their sums are rounded, and can reach 1 early
            kept = keep_top(kept, [draw])
        expected = kept[0].double() / kept[0].double().sum()
        options = {"temperature": temperature, "topK": top_k, "topP": top_p}
        shown = torch.tensor(page.evaluate(SOFTMAX, [logits.tolist(), options]), dtype=torch.float64)
        torch.testing.assert_close(shown, expected, rtol=1e-4, atol=1e-9, msg=partial("{}: {}".format, options))


def test_the_text_can_continue_with_an_alternative(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "generate", token=1)
    first, second = bundled.answer("/generate", prompt=PROMPT, temperature=0, max_tokens=2, logprobs=2)["logprobs"]
    other = next(each["text"] for each in second["top"] if each["id"] != second["id"])
    page.get_by_role("button", name="Continue from this token instead").first.click()
    page.wait_for_url("**prompt=*")
    wait_until_ready(page)
    assert page.get_by_label("Prompt").input_value() == PROMPT + first["text"] + other
    assert page.locator("generate-view .prompt-text").text_content() == page.get_by_label("Prompt").input_value()
    notice = page.get_by_text(f"The prompt now goes on to “{other}”".replace("\n", "↵"))
    assert notice.evaluate("notice => notice === document.activeElement")
    page.go_back()
    wait_until_ready(page)
    assert not notice.is_visible()
    assert page.get_by_label("Prompt").input_value() == PROMPT


def test_the_keyboard_reaches_every_token(page: "Page", base: str) -> None:
    open_view(page, base, "generate")
    page.locator("token-strip [role=listbox]").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    page.get_by_role("heading", name="Token 23 of the continuation").wait_for()
    wait_until_ready(page)
    assert page.locator("token-strip [aria-selected=true]").get_attribute("data-index") == "22"
    assert page.evaluate("document.activeElement.getAttribute('role')") == "listbox"


def test_stop_ends_the_request_and_says_after_how_many_tokens(
    page: "Page", bundled: Running, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def slow_step(engine: Engine) -> Step:
        time.sleep(0.02)  # a slow browser, too, stops it before the end
        return step(engine)

    open_view(page, base, "generate", prompt="It was a dark night, and the captain", max_tokens=1)  # has no early end
    before = page.get_by_role("button", name="Stop").bounding_box()
    page.get_by_label("Max tokens").fill("490")
    page.get_by_label("Seed").fill("2")
    monkeypatch.setattr(Engine, "step", slow_step)
    page.get_by_role("spinbutton", name="temperature, for the generation").fill("1")
    page.get_by_role("spinbutton", name="temperature, for the generation").press("Enter")
    options(page).nth(3).wait_for()
    assert page.get_by_role("button", name="Stop").bounding_box() == before
    page.get_by_role("button", name="Stop").click()
    wait_until_ready(page)
    number = options(page).count()
    assert number < 490
    assert page.locator(".status-line").inner_text() == f"Stopped after {number} tokens."
    wait_until(lambda: bundled.state.worker.num_running == 0, "the request ends")
    monkeypatch.undo()
    page.get_by_role("button", name="Run").click()
    options(page).nth(number).wait_for()
    wait_until_ready(page)
    assert options(page).count() > number


def test_a_click_while_tokens_arrive_does_not_begin_again(page: "Page", base: str) -> None:
    page.goto(f"{base}/?view=generate&max_tokens=400&temperature=1&seed=5")
    options(page).nth(2).click()
    page.get_by_role("heading", name="Token 3 of the continuation").wait_for()
    wait_until_ready(page)
    page.locator(".status-line").get_by_text("tokens in").wait_for()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(urlsplit(request.url).path))
    options(page).nth(9).click()
    page.get_by_role("heading", name="Token 10 of the continuation").wait_for()
    wait_until_ready(page)
    assert set(requests) - {ICON} == {"/logits"}


def test_the_defaults_of_the_model_are_one_click_away(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "generate")
    page.get_by_role("button", name="Use the model's defaults").click()
    page.wait_for_url("**temperature=*")
    wait_until_ready(page)
    temperature = bundled.get("/model").json()["generation_defaults"]["temperature"]
    assert f"temperature={temperature}" in page.url


def test_the_view_says_how_many_tokens_fit_and_shows_the_field_of_an_error(
    page: "Page", bundled: Running, base: str, findings: Findings
) -> None:
    open_view(page, base, "generate", max_tokens=2)
    room = bundled.get("/model").json()["limits"]["max_positions"]
    room -= len(bundled.answer("/tokenize", text=PROMPT)["tokens"])
    field = page.get_by_label("Max tokens")
    assert field.get_attribute("max") == str(room)
    assert page.get_by_text(f"at most {room} (context ").is_visible()
    page.locator(".settings > summary").click()
    field.evaluate("field => { field.value = 9999; field.dispatchEvent(new Event('change')); }")
    assert wait_until_settled(page) == "error"
    assert f"at most {room} fit" in page.locator("#error").inner_text()
    assert field.is_visible()
    assert field.get_attribute("aria-invalid") == "true"
    findings.clear()


def test_settings_that_exclude_nothing_are_called_off(page: "Page", base: str) -> None:
    open_view(page, base, "generate", temperature=1, max_tokens=2, token=0, try_top_k=4)
    assert page.locator(".settings .off").all_inner_texts() == ["(off)", "(off)"]
    assert page.get_by_role("region", name="Alternatives").locator(".off").all_inner_texts() == ["", "(off)"]
    assert "top-k 0 (off), top-p 1 (off), seed 0" in page.locator(".settings > summary").inner_text()


def test_the_continuation_begins_on_the_line_of_the_prompt(page: "Page", base: str) -> None:
    open_view(page, base, "generate", max_tokens=3)
    before, first = page.locator(".prompt-text").bounding_box(), options(page).first.bounding_box()
    assert before is not None
    assert first is not None
    assert first["x"] >= before["x"] + before["width"] - 1
    assert abs(first["y"] + first["height"] / 2 - before["y"] - before["height"] / 2) < 6


def test_on_a_phone_text_and_stop_are_on_the_screen_of_run_and_tokens_are_large(open_page: OpenPage, base: str) -> None:
    page = open_page(phone=True, touch=True)
    open_view(page, base, "generate", token=1)
    for element in (page.get_by_role("button", name="Stop"), options(page).first):
        box = element.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < PHONE["height"]
    sizes = options(page).evaluate_all("all => all.map((each) => each.getBoundingClientRect().toJSON())")
    assert min(min(size["width"], size["height"]) for size in sizes) >= 24
    button = page.get_by_role("button", name="Continue from this token instead").first.bounding_box()
    assert button is not None
    assert button["x"] + button["width"] <= PHONE["width"]
    assert page.get_by_role("columnheader", name="network alone").is_visible()


def test_a_worked_example_has_no_continuation(page: "Page", base: str, findings: Findings) -> None:
    page.goto(f"{base}/?view=generate&model=ai-rocks")
    assert wait_until_settled(page) == "error"
    assert not page.locator("generate-view").is_visible()


def test_a_chat_uses_the_template_of_the_model(page: "Page", start: Start, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[reply]")
    service = start(model="bundled", chat_template=template)
    base = str(service.client.base_url)
    open_view(page, base, "generate", prompt="Who are you?")
    page.get_by_label("As a chat message").check()
    page.wait_for_url("**chat=1*")
    wait_until_ready(page)
    page.get_by_text("What is sent: the prompt in the chat template").click()
    assert page.locator("generate-view details pre").inner_text().strip() == "[user] Who are you?\n[reply]"
    messages = [{"role": "user", "content": "Who are you?"}]
    answer = service.answer("/v1/chat/completions", messages=messages, temperature=0, max_tokens=24)
    visible = "".join(options(page).all_inner_texts()).replace("↵", "\n").replace("␣", " ").replace("\u00a0", " ")
    assert visible.split() == answer["choices"][0]["message"]["content"].split()


def test_a_model_without_a_template_offers_no_chat(page: "Page", base: str) -> None:
    open_view(page, base, "generate")
    assert not page.get_by_label("As a chat message").is_visible()


def test_edits_change_the_text_and_the_text_without_them_stands_below(
    page: "Page", bundled: Running, base: str
) -> None:
    edits = [{"stage": "blocks.4.attn_out", "op": "zero"}]
    open_view(page, base, "generate", prompt=PROMPT, edits=json.dumps(edits), max_tokens=12)
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    edited, plain = bundled.answer("/generate", **body, edits=edits), bundled.answer("/generate", **body)
    texts = [strip.inner_text() for strip in page.locator("generate-view token-strip").all()]
    first, second = (re.sub(r"[\s␣]", "", text) for text in texts)
    for shown, answer in ((first, edited), (second, plain)):
        assert shown == re.sub(r"\s", "", answer["text"].replace("\n", "↵"))
    number = next(
        index for index, ids in enumerate(zip(edited["tokens"], plain["tokens"], strict=True)) if ids[0] != ids[1]
    )
    assert (
        f"The first new token that differs is no. {number + 1}: "
        in page.locator("generate-view > .answer").inner_text()
    )
    assert "1 edit is applied." in page.locator("#edits-note").inner_text()


def test_without_edits_one_text_is_written(page: "Page", base: str) -> None:
    open_view(page, base, "generate", prompt=PROMPT, max_tokens=4)
    assert page.locator("text-continuation").count() == 0
