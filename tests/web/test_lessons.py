"""Lessons in the view "Network": their steps lead to the right places, and their answers are those of the service."""

import math
import re
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.service.running import Running
from tests.web.browsing import open_view, wait_for, wait_until_ready
from tests.web.reading import SIGNIFICANT, percent, read_number
from tests.web.test_network import PROMPT, deciding_of, lens_of, quoted_share, texts_of
from tests.web.test_network import family as family  # a fixture

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

Card = tuple[str, str, str]  # the heading or title, the sentence, and the answer


def take_tour(page: "Page", base: str, prompt: str) -> list[Card]:
    """The steps of the way of a token."""
    with page.expect_response(lambda answer: '"direct"' in (answer.request.post_data or "")):
        open_view(page, base, "network", prompt=prompt)
    page.get_by_role("button", name="Follow a token").click()
    found = read_lesson(page)
    numbers = [re.fullmatch(r"(\d+) of (\d+) · (.*)", heading) for heading, _, _ in found]
    assert [number and number[1] for number in numbers] == [str(index + 1) for index in range(len(found))]
    assert {number and number[2] for number in numbers} == {str(len(found))}
    return [(heading.partition(" · ")[2], sentence, answer) for heading, sentence, answer in found]


def read_lesson(page: "Page") -> list[Card]:
    """All cards, read as a user reads them."""
    card = page.locator("tour-card")
    found: list[Card] = []
    while True:
        wait_until_ready(page)
        heading = card.locator("h3").inner_text()
        assert card.locator("details p").is_hidden()
        sentence = card.locator(":scope > p:not(.faint)").inner_text()
        card.locator("summary").click()
        found.append((heading, sentence, card.locator("details p").inner_text()))
        following = card.get_by_role("button", name="Next", exact=True)
        if following.is_disabled():
            return found
        following.click()
        card.locator("h3").filter(has_not_text=heading).wait_for()


def test_the_tour_follows_a_token_and_its_answers_are_the_numbers_of_the_service(
    page: "Page", bundled: Running, base: str
) -> None:
    cards = take_tour(page, base, PROMPT)
    answers = {title: answer for title, _, answer in cards}
    sentences = {title: sentence for title, sentence, _ in cards}
    answer = bundled.answer("/forward", prompt=PROMPT, detail="values", top_k=1)
    stages = {stage["name"]: stage["values"] for stage in answer["stages"] if "values" in stage}
    last = answer["tokens"][-1]
    assert f"id, {last['id']}, and its position, {last['position']}." in answers["A token"]
    row = stages["embed"][0][-1]
    column = max(range(len(row)), key=lambda index: abs(row[index]))
    assert answers["Embedding"].startswith(f"Number {column}: ")
    assert read_number(answers["Embedding"].split(": ")[1].rstrip(".")) == pytest.approx(row[column], rel=SIGNIFICANT)
    best = answer["predictions"][-1]["top"][0]
    writers = writers_of(bundled, best["id"])
    layer, head, _ = max((each for each in writers if each[1] is not None), key=lambda each: each[2])
    assert head is not None
    weights = sorted(stages[f"blocks.{layer}.attn.pattern"][0][head][-1], reverse=True)
    shares = [percent(weight) for weight in weights[:3]]
    assert f"L{layer} H{head}" in sentences["Attention"]
    assert f"with {shares[0]}." in sentences["Attention"]
    assert re.fullmatch(rf"The most to .* \({shares[1]}\) and .* \({shares[2]}\)\.", answers["Attention"])
    for title, part in (("What attention adds", head), ("Feed-forward", None)):
        (share,) = (each[2] for each in writers if each[:2] == (layer, part))
        added = re.search(r"(adds|takes) (\S+) (to|from) the logit of", sentences[title])
        assert added is not None
        assert read_number(added[2]) == pytest.approx(abs(share), rel=SIGNIFICANT)
        assert (added[1] == "adds") == (share >= 0)
    turned, plain = (stages[f"blocks.{layer}.attn.{part}"][0][-1][head] for part in ("rot_q", "q"))
    check_rotation(answers["Rotary positions"], turned, plain)
    scale = stages[f"blocks.{layer}.ln1.scale"][0][-1][0]
    assert read_number(answers["Norm"].removeprefix("By ").rstrip(".")) == pytest.approx(scale, rel=SIGNIFICANT)
    neurons = stages[f"blocks.{layer}.mlp.post"][0][-1]
    assert answers["Feed-forward"].startswith(f"Neuron {neurons.index(max(neurons, key=abs))}: ")
    assert percent(best["probability"]) in answers["The next token"]
    layers = lens_of(bundled, -1)
    deciding = deciding_of(layers)
    before, after = (layers[at]["positions"][0]["top"][0] for at in (deciding - 1, deciding))
    assert (
        f"Before layer {deciding - 1}, the network would still say {quoted_share(before)}; after it, "
        f"{quoted_share(after)}." in sentences["Which layer decides"]
    )
    names = [f"L{layer} {'FFN' if head is None else f'H{head}'}" for layer, head, _ in writers]
    most = sorted(range(len(writers)), key=lambda at: -writers[at][2])
    assert [answers["Which layer decides"].index(names[at]) for at in most[:5]] == sorted(
        answers["Which layer decides"].index(names[at]) for at in most[:5]
    )
    page.get_by_role("button", name="Leave the lesson").click()
    wait_until_ready(page)
    assert page.locator("tour-card").is_hidden()
    assert "step=" not in page.url


def writers_of(service: Running, token: int) -> list[tuple[int, int | None, float]]:
    """The share of each head and feed-forward network in the logit of a token: layer, head or None, and share."""
    layers = service.answer("/attribute", method="direct", prompt=PROMPT, token=token)["layers"]
    return [
        (layer, head, share)
        for layer, parts in enumerate(layers)
        for head, share in [*enumerate(parts["heads"]), (None, parts["mlp"])]
    ]


def check_rotation(answer: str, turned: list[float], plain: list[float]) -> None:
    """The pair that moves the most, its angle, and the sums with its numbers."""
    half = len(plain) // 2
    moved = [
        math.hypot(turned[index] - plain[index], turned[index + half] - plain[index + half]) for index in range(half)
    ]
    index = moved.index(max(moved))
    assert answer.startswith(f"Numbers {index} and {index + half}, ")
    number = r"\(?(\u2212?[\d.e\u2212]+?)\)?"
    exact = r"(?:\u2212?[\d.e\u2212]+, rounded to )?"
    found = re.search(
        rf"q₁ = {number} and q₂ = {number}\. .* cos = {number}, sin = {number}\. "
        rf"q₁\u2032 = q₁·cos \u2212 q₂·sin = {number}·{number} \u2212 {number}·{number} = {exact}{number}\. "
        rf"q₂\u2032 = q₁·sin \+ q₂·cos = {number}·{number} \+ {number}·{number} = {exact}{number}\.$",
        answer,
    )
    assert found is not None, answer
    one, other, cos, sin, a, b, c, d, first, e, f, g, h, second = map(read_number, found.groups())
    assert (one, other) == pytest.approx((plain[index], plain[index + half]), rel=SIGNIFICANT)
    assert (first, second) == pytest.approx((turned[index], turned[index + half]), rel=SIGNIFICANT)
    assert cos**2 + sin**2 == pytest.approx(1, abs=1e-3)
    assert ((a, b, c, d), (e, f, g, h)) == ((one, cos, other, sin), (one, sin, other, cos))
    assert first == pytest.approx(one * cos - other * sin, abs=0.02 * (abs(one) + abs(other)))
    assert second == pytest.approx(one * sin + other * cos, abs=0.02 * (abs(one) + abs(other)))


def test_the_tour_fits_every_family(page: "Page", family: str) -> None:
    titles = [title for title, _, _ in take_tour(page, family, "a bc")]
    assert titles[0] == "A token"
    assert {"Query, key and value", "Scores", "Attention", "After the layer"} <= set(titles)
    assert len({"Feed-forward", "Experts"} & set(titles)) == 1
    assert titles[-2:] == ["The next token", "Which layer decides"]
    rotates = any(stage["name"].endswith("rot_q") for stage in httpx.get(f"{family}/model").json()["stages"])
    assert ("Rotary positions" in titles) == rotates


def begin_lesson(page: "Page", title: str) -> list[Card]:
    page.get_by_label("Lessons").select_option(label=title)
    page.locator("tour-card h3").wait_for()
    return read_lesson(page)


def test_the_chapters_of_an_article_have_its_numbers_and_show_the_network_of_the_article(
    page: "Page", bundled: Running, base: str
) -> None:
    open_view(page, base, "network", prompt=PROMPT)
    cards = begin_lesson(page, "A token's journey (mustafabirinci.com)")
    chapters = {heading: answer for heading, _, answer in cards}
    assert [heading.split(" · ")[0] for heading in chapters] == [f"0{number}" for number in range(10)]
    assert page.locator("#model").input_value() == "a-tokens-journey"
    (entry,) = (each for each in bundled.get("/models").json()["models"] if each["name"] == "a-tokens-journey")
    answer = bundled.answer("/forward", model=entry["name"], prompt=entry["prompt"]["text"], stages=["*"])
    loss = answer["loss"]
    found = re.match(r"(\S+)\. The greatest surprise was .*: \u2212ln (\S+\s%) = (\S+)\.", chapters["09 · Loss"])
    assert found is not None, chapters["09 · Loss"]
    assert read_number(found[1]) == pytest.approx(loss["mean"], rel=SIGNIFICANT)
    assert read_number(found[3]) == pytest.approx(max(filter(None, loss["per_token"])), rel=SIGNIFICANT)
    first, second, total = re.findall(
        r"[\u2212\d.e]+(?= [+=]|\.$)", chapters["05 · Residual connection"].split(": ")[1]
    )
    assert read_number(first) + read_number(second) == pytest.approx(read_number(total), abs=2e-3)
    link = page.locator("tour-card a")
    assert link.get_attribute("href") == "https://mustafabirinci.com/content/files/embeds/a-token-journey.html"
    page.get_by_role("button", name="Leave the lesson").click()
    wait_until_ready(page)
    assert "lesson=" not in page.url
    assert page.get_by_role("button", name="Follow a token").is_visible()


def test_every_article_has_a_lesson(page: "Page", base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT)
    titles = page.get_by_label("Lessons").locator("option").all_inner_texts()[1:]
    assert len(titles) == 5
    for title in titles:
        chapters = begin_lesson(page, title)
        assert len(chapters) >= 4, title
        assert all("NaN" not in answer and "undefined" not in answer for card in chapters for answer in card), chapters
        page.get_by_role("button", name="Leave the lesson").click()
        wait_until_ready(page)


PICTURE = """() => {
  const canvas = document.querySelector("network-canvas");
  const { rowShift, numRows, rowSize, breadth } = canvas.scene.layout;
  return { height: canvas.clientHeight, rowShift, hidden: numRows * rowSize - breadth };
}"""


def test_the_picture_has_its_height_and_all_rows_again_after_a_lesson(page: "Page", base: str) -> None:
    page.emulate_media(reduced_motion="reduce")
    open_view(page, base, "network", prompt=PROMPT + " dark night and he")
    before = page.evaluate(PICTURE)
    page.get_by_role("button", name="Follow a token").click()
    wait_until_ready(page)
    assert page.evaluate(PICTURE)["height"] >= before["height"]  # the card does not push it down
    page.get_by_role("button", name="Leave the lesson").click()
    wait_until_ready(page)
    after = page.evaluate(PICTURE)
    assert after == before
    assert after["rowShift"] == 0 >= after["hidden"]


ROWS = """() => {
  const { layout, row, line } = document.querySelector("network-canvas").scene;
  const [from, to] = layout.span;
  const parts = line.items.slice(from, to).map(({ part }) => part);
  return { size: layout.rowSize, top: layout.rowStart(row), breadth: layout.breadth, parts };
}"""


def test_a_step_of_a_lesson_shows_few_high_rows_and_the_numbers_of_the_followed_token_only(
    page: "Page", bundled: Running, base: str
) -> None:
    prompt = PROMPT + " dark night and he saw a long red boat on the water"
    stage, cell = "blocks.5.attn.q", 20
    texts_of(page, base, prompt=prompt, at=stage, cell=cell)
    plain = page.evaluate(ROWS)
    assert plain["size"] < 40
    texts = {each["text"] for each in texts_of(page, base, prompt=prompt, at=stage, cell=cell, step=3)}
    step = page.evaluate(ROWS)
    assert step["size"] >= max(28, 1.5 * plain["size"])
    assert 0 <= step["top"] <= step["breadth"] - step["size"]
    numbers = [text for text in texts if re.fullmatch(r"\u2212?\d+\.\d+", text)]
    (answer,) = bundled.answer("/forward", prompt=prompt, stages=[stage], detail="values")["stages"]
    row = [value for head in answer["values"][0][-1] for value in head]
    assert numbers
    for text in numbers:
        assert any(read_number(text) == pytest.approx(value, rel=6e-3) for value in row)


def test_the_step_of_a_norm_shows_the_stream_before_it_and_its_result(page: "Page", base: str) -> None:
    texts_of(page, base, at="blocks.5.ln1.scale", cell=0, step=2)
    assert {"resid_pre", "ln1.scale", "ln1.out"} <= set(page.evaluate(ROWS)["parts"])


def test_the_keyboard_and_the_dots_go_through_the_lesson(page: "Page", base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT)
    page.get_by_role("button", name="Follow a token").click()
    heading = page.locator("tour-card h3")
    heading.filter(has_text="1 of").wait_for()
    page.keyboard.press("ArrowRight")  # the card has the focus
    heading.filter(has_text="2 of").wait_for()
    wait_until_ready(page)
    page.keyboard.press("ArrowRight")
    heading.filter(has_text="3 of").wait_for()
    wait_until_ready(page)
    page.keyboard.press("ArrowLeft")
    heading.filter(has_text="2 of").wait_for()
    wait_until_ready(page)
    dots = page.get_by_role("list", name="Steps").get_by_role("button")
    dots.last.click()
    heading.filter(has_text=f"{dots.count()} of {dots.count()}").wait_for()
    wait_until_ready(page)
    assert dots.last.get_attribute("aria-current") == "step"
    assert page.get_by_role("button", name="Next", exact=True).is_disabled()


def test_a_lesson_plays_by_itself_until_the_user_does_something(page: "Page", base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT)
    page.get_by_role("button", name="Follow a token").click()
    heading, play = page.locator("tour-card h3"), page.get_by_role("button", name="Play", exact=True)
    heading.filter(has_text="1 of").wait_for()
    assert play.is_hidden()  # the user wants less motion
    page.emulate_media(reduced_motion="no-preference")
    page.reload()
    wait_until_ready(page)
    page.evaluate("() => { const wait = setTimeout; window.setTimeout = (act, time) => wait(act, time / 6); }")
    play.click()
    heading.filter(has_text="2 of").wait_for()
    heading.filter(has_text="3 of").wait_for()
    page.mouse.wheel(0, 100)
    play.wait_for()
    stopped_at = heading.inner_text()
    page.wait_for_timeout(1500)
    assert heading.inner_text() == stopped_at


def test_a_step_shows_the_parts_that_write_the_token_when_they_are_known(
    page: "Page", base: str, held: list["Route"]
) -> None:

    def hold(route: "Route") -> None:
        if '"direct"' in (route.request.post_data or ""):
            held.append(route)
        else:
            route.continue_()

    page.route("**/attribute", hold)
    open_view(page, base, "network", prompt=PROMPT)
    wait_for(page, lambda: held != [], "the parts are asked for before the question")
    page.get_by_role("button", name="Why?").click()
    card = page.locator("tour-card")
    card.locator("h3").filter(has_text="Which layer decides").wait_for(timeout=2000)
    wait_until_ready(page)
    assert "would still say" in card.inner_text()
    assert "add the most to its logit: computing…" in card.inner_text()
    card.locator("summary").click()
    assert card.locator("details p").inner_text() == "computing…"
    held[0].continue_()
    card.locator("details p").filter(has_text="Against it").wait_for()  # the answer stays open
    assert "computing" not in card.inner_text()
    assert re.search(r"L\d \w+ \(\+.* add the most to its logit", card.inner_text())
    assert len(held) == 1


def test_the_question_why_is_answered_by_the_last_step(page: "Page", base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT)
    page.get_by_role("button", name="Why?").click()
    page.locator("tour-card h3").filter(has_text="Which layer decides").wait_for()
    page.locator("tour-card").get_by_text("add the most to its logit.").wait_for()
