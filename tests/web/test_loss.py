"""The view "Loss": the loss of each token, as POST /forward gives it."""

import math
from typing import TYPE_CHECKING

import pytest

from tests.service.running import Running
from tests.web.browsing import Findings, open_table, open_view, url_of, wait_until_ready, wait_until_settled
from tests.web.conftest import OpenPage
from tests.web.reading import SIGNIFICANT, percent, quoted, read_number, shown

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROMPT = "The captain was in the elephant."


def losses_of(page: "Page") -> list[str]:
    return [str(each.get_attribute("data-said")) for each in page.locator("token-strip [role=option]").all()]


def select(page: "Page", index: int) -> None:
    page.locator("token-strip [role=option]").nth(index).click()
    wait_until_ready(page)


def test_each_token_has_the_loss_of_predicting_it_from_those_before(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "loss", prompt=PROMPT)
    answer = bundled.answer("/forward", prompt=PROMPT, stages=["loss"])
    first, *others = losses_of(page)
    assert first == "–"  # noqa: RUF001
    *expected, last = answer["loss"]["per_token"]
    assert last is None
    assert [read_number(text) for text in others] == pytest.approx(expected, rel=SIGNIFICANT, abs=6e-4)


def test_it_states_the_mean_the_perplexity_and_the_most_surprising_tokens(
    page: "Page", bundled: Running, base: str
) -> None:
    open_view(page, base, "loss", prompt=PROMPT)
    answer = bundled.answer("/forward", prompt=PROMPT, stages=["loss"])
    per_token = answer["loss"]["per_token"][:-1]
    said = page.locator("loss-view .answer").first.inner_text()
    for loss in sorted(per_token)[-3:]:
        position = per_token.index(loss) + 1
        named, found, rest = said.partition(
            f"{quoted(answer['tokens'][position]['text'])} at position {position} (loss "
        )
        assert found, (named, position)
        assert read_number(rest) == pytest.approx(loss, rel=SIGNIFICANT)
    assert said.count("at position") == 3
    mean, perplexity = said.split("mean loss is ")[1].split(", the perplexity ")
    assert read_number(mean) == pytest.approx(answer["loss"]["mean"], rel=SIGNIFICANT)
    assert read_number(perplexity) == pytest.approx(answer["loss"]["perplexity"], rel=SIGNIFICANT)


def test_the_selected_token_has_the_formula_and_what_was_expected_instead(
    page: "Page", bundled: Running, base: str
) -> None:
    open_view(page, base, "loss", prompt=PROMPT)
    select(page, 3)
    answer = bundled.answer("/forward", prompt=PROMPT, stages=["loss", "probabilities"], detail="values", top_k=5)
    token = answer["tokens"][3]
    probability = answer["stages"][0]["values"][0][2][token["id"]]
    section = page.get_by_role("region", name="The selected token")
    said = section.locator(".answer").inner_text()
    assert f"{quoted(token['text'])} had a probability of {percent(probability)}" in said
    formula = said.split("ln ")[2].split(":")[0].split(" = ")
    assert [read_number(text) for text in formula] == pytest.approx(
        [probability, -math.log(probability)],
        rel=2e-3,  # the probabilities are bfloat16
    )
    rows = section.locator("tbody tr").all()
    for row, guess in zip(rows, answer["predictions"][2]["top"], strict=True):
        assert row.locator("th").inner_text() == shown(guess["text"])
        assert row.locator("td").last.inner_text() == percent(guess["probability"])


def test_the_selected_token_is_in_the_address_and_can_be_reached_with_the_keyboard(page: "Page", base: str) -> None:
    open_view(page, base, "loss", prompt=PROMPT)
    strip = page.get_by_role("listbox")
    strip.focus()
    strip.press("Home")
    strip.press("ArrowRight")
    strip.press("Enter")
    wait_until_ready(page)
    assert "position=1" in page.url
    assert strip.evaluate("strip => strip === document.activeElement")
    page.reload()
    wait_until_ready(page)
    assert page.locator("loss-view h3").first.inner_text() == "␣captain (position 1)"
    select(page, 0)
    assert "nothing to predict it from" in page.get_by_role("region", name="The selected token").inner_text()
    page.go_back()
    wait_until_ready(page)
    assert page.locator("loss-view h3").first.inner_text() == "␣captain (position 1)"


def test_the_table_has_all_losses(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "loss", prompt=PROMPT)
    rows = open_table(page.locator("loss-view details.data-table"))
    cells = [row.locator("td").all_inner_texts() for row in rows.all()]
    answer = bundled.answer("/forward", prompt=PROMPT, stages=["loss"], top_k=1)
    for row, loss, prediction in zip(cells[1:], answer["loss"]["per_token"], answer["predictions"], strict=False):
        assert read_number(row[2]) == pytest.approx(loss, rel=SIGNIFICANT)
        assert row[3] == shown(prediction["top"][0]["text"])


def test_tokens_fit_into_their_boxes_and_their_spaces_have_signs(page: "Page", base: str) -> None:
    open_view(page, base, "loss", prompt=PROMPT)
    tokens = page.locator("token-strip [role=option]")
    assert tokens.nth(1).inner_text() == "␣captain"
    assert tokens.evaluate_all("all => all.every((each) => each.scrollWidth <= each.clientWidth + 1)")


def test_on_a_phone_the_table_shows_what_was_most_likely_instead(open_page: OpenPage, base: str) -> None:
    page = open_page(phone=True)
    open_view(page, base, "loss", prompt=PROMPT)
    open_table(page.locator("loss-view details.data-table"))
    box = page.get_by_role("columnheader", name="its probability").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= 380


def test_a_prompt_of_one_token_has_no_loss(page: "Page", base: str) -> None:
    open_view(page, base, "loss", prompt="The")
    assert "at least two tokens" in page.locator("loss-view .answer").first.inner_text()


@pytest.mark.parametrize("position", ["-1", "99", "x"])
def test_a_position_that_does_not_exist_is_an_error(page: "Page", base: str, position: str) -> None:
    page.goto(url_of(base, "loss", prompt=PROMPT, position=position))
    assert wait_until_settled(page) == "error"
    assert f"position: {position} is out of range" in page.locator("#error").inner_text()


def test_an_empty_prompt_is_the_error_of_the_service(page: "Page", base: str, findings: Findings) -> None:
    page.goto(url_of(base, "loss", prompt=""))
    assert wait_until_settled(page) == "error"
    assert "prompt: is empty" in page.locator("#error").inner_text()
    findings.clear()  # the browser logs answers with an error status


class TestWorkedExamples:
    def test_the_losses_are_those_that_the_article_prints(self, page: "Page", base: str) -> None:
        open_view(page, base, "loss", model="i-like-transformers")
        assert losses_of(page)[1:] == ["1.903", "1.612", "1.848", "1.956"]
        said = page.locator("loss-view .answer").first.inner_text()
        assert "“<EOS>” at position 4" in said
        assert "The mean loss is 1.830, the perplexity 6.233." in said

    def test_a_target_after_the_prompt_is_named(self, page: "Page", bundled: Running, base: str) -> None:
        open_view(page, base, "loss", model="a-tokens-journey")
        assert page.locator("loss-view h3").first.inner_text() == "mat (position 4)"
        answer = bundled.answer("/forward", model="a-tokens-journey", prompt="the cat sat on", stages=["loss"])
        (mat,) = [each for each in answer["predictions"][-1]["top"] if each["text"] == "mat"]
        assert -math.log(mat["probability"]) == pytest.approx(answer["loss"]["per_token"][-1])
        assert losses_of(page) == ["–", "–", "–", "–", "1.891"]  # noqa: RUF001


def test_a_shorter_prompt_drops_a_position_that_it_does_not_have(page: "Page", base: str) -> None:
    open_view(page, base, "loss", prompt=PROMPT, position=6)
    page.get_by_role("textbox", name="Prompt").fill("The captain")
    page.get_by_role("button", name="Run").click()
    wait_until_ready(page)
    assert page.locator("loss-view h3").first.inner_text() == "␣captain (position 1)"
    assert "position=" not in page.url
