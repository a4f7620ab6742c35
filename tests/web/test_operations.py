"""Pictures of operations, above the arithmetic of a number: they show the numbers of the service."""

import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.service.running import Running
from tests.web.browsing import open_view, wait_until_ready
from tests.web.reading import SIGNIFICANT, percent, quoted, read_number
from tests.web.test_network import family as family  # a fixture

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PROMPT = "The captain was in the"
LAYER = "blocks.3."
ROTATED = 19  # a number of a head: the second one of its pair
# The stages whose numbers have a picture, and the stages to which the numbers of the picture lead.
PICTURES = {
    "attn.scores": {"attn.rot_q", "attn.rot_k"},
    "attn.attn_scores": {"attn.scores", "attn.attn_scores"},
    "attn.pattern": {"attn.attn_scores"},
    "attn.rot_q": {"attn.q", "attn.rot_q"},
    "attn.rot_k": {"attn.k", "attn.rot_k"},
    "attn.z": {"attn.pattern", "attn.v"},
    "ln1.scale": {"resid_pre"},
    "ln2.normalized": {"resid_mid"},
    "mlp.post": {"mlp.pre", "mlp.pre_linear"},
    "resid_mid": {"resid_pre", "attn_out"},
    "resid_post": {"resid_mid", "mlp_out"},
}
HITS = "operation-picture .hit"
TIMES = "\N{MULTIPLICATION SIGN} "


def open_number(page: "Page", base: str, part: str, row: int, column: int, **state: Any) -> "Locator":
    """Open a number of a layer, and return the panel with its arithmetic."""
    open_view(page, base, "network", prompt=PROMPT, at=LAYER + part, position=row, cell=column, **state)
    return page.locator("cell-arithmetic")


def stages_of(bundled: Running, *parts: str) -> dict[str, Any]:
    """The numbers of some stages of the layer."""
    answer = bundled.answer("/forward", prompt=PROMPT, stages=[LAYER + part for part in parts], detail="values")
    return {stage["name"].removeprefix(LAYER): stage["values"][0] for stage in answer["stages"]}


def texts_of(page: "Page", start: str) -> list[str]:
    """The texts of the elements of the picture that begin with `start`."""
    texts: list[str] = page.locator(HITS).evaluate_all("(hits) => hits.map(({ dataset }) => dataset.text)")
    return [text for text in texts if text.startswith(start)]


def check_fit(panel: "Locator", width: int) -> None:
    """Check that the picture and its texts are inside the panel, and the page is no wider than the window."""
    picture = panel.locator("operation-picture svg")
    box, around = picture.bounding_box(), panel.bounding_box()
    assert box is not None
    assert around is not None
    assert box["height"] <= 190
    texts = picture.locator("text").evaluate_all("(all) => all.map((text) => text.getBoundingClientRect().toJSON())")
    assert min(box["x"], *(text["left"] for text in texts)) >= around["x"]
    right = max(box["x"] + box["width"], *(text["right"] for text in texts))
    assert right <= around["x"] + around["width"]
    assert panel.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [380, 1280, 2560])
@pytest.mark.parametrize("part", PICTURES)
def test_each_operation_has_a_picture_that_fits_and_leads_to_what_it_reads(
    page: "Page", base: str, part: str, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    panel = open_number(page, base, part, 4, 0 if part.endswith("scale") else 3)
    check_fit(panel, width)
    assert panel.locator("operation-picture svg").get_attribute("role") == "img"
    led = page.locator(f"{HITS}.leads").evaluate_all("(hits) => hits.map(({ dataset }) => dataset.stage)")
    assert {stage.removeprefix(LAYER) for stage in led} == PICTURES[part]


def test_a_score_shows_each_product_of_the_query_and_the_key(page: "Page", bundled: Running, base: str) -> None:
    count = len(bundled.answer("/tokenize", prompt=PROMPT)["tokens"])
    panel = open_number(page, base, "attn.scores", 4, 2 * count + 1)
    stages = stages_of(bundled, "attn.rot_q", "attn.rot_k", "attn.scores")
    keys = stages["attn.rot_k"][1]
    query, key = stages["attn.rot_q"][4][2], keys[2 // (8 // len(keys))]
    texts = texts_of(page, "number ")
    assert len(texts) == 3 * len(query)  # the query, the key and the products
    for index, text in enumerate(texts[: len(query)]):
        one, other, product = (read_number(part) for part in re.split(f" {TIMES}| = ", text.split(": ")[1]))
        assert (one, other) == pytest.approx((query[index], key[index]), rel=SIGNIFICANT)
        assert product == pytest.approx(one * other, rel=4 * SIGNIFICANT)
    total, score = (read_number(text) for text in panel.locator("operation-picture .frame + text").all_text_contents())
    products = sum(one * other for one, other in zip(query, key, strict=True))
    assert total == pytest.approx(products, rel=SIGNIFICANT)
    assert score == pytest.approx(products / math.sqrt(len(query)), rel=SIGNIFICANT)
    label = panel.locator("operation-picture svg").get_attribute("aria-label")
    assert label is not None
    assert f"The query of {quoted(' the')} times the key of {quoted(' captain')}" in label


def test_a_pointed_number_is_said_and_a_click_leads_to_it(page: "Page", bundled: Running, base: str) -> None:
    panel = open_number(page, base, "attn.scores", 4, 0)
    line = panel.locator("operation-picture + p")
    sentence = line.inner_text()
    page.locator(HITS).nth(5).hover()
    assert line.inner_text().startswith("number 5: ")
    assert page.locator("operation-picture .ring").count() == 3  # of the query, of the key, and their product
    panel.locator("h3").hover()
    assert line.inner_text() == sentence
    page.locator(HITS).nth(5).click()
    wait_until_ready(page)
    assert f"at={LAYER}attn.rot_q&" in page.url
    query = stages_of(bundled, "attn.rot_q")["attn.rot_q"][4][0]
    assert read_number(panel.locator("output").inner_text()) == pytest.approx(query[5], rel=SIGNIFICANT)


def test_the_keyboard_goes_along_the_numbers_of_a_picture(page: "Page", base: str) -> None:
    panel = open_number(page, base, "attn.scores", 4, 0)
    page.locator("operation-picture").focus()
    line = panel.locator("operation-picture + p")
    sentence = line.inner_text()
    for key, start in (("ArrowRight", "number 0: "), ("ArrowDown", "number 1: "), ("ArrowLeft", "number 0: ")):
        page.keyboard.press(key)
        assert line.inner_text().startswith(start)
    page.keyboard.press("Enter")
    wait_until_ready(page)
    assert f"at={LAYER}attn.rot_q&" in page.url
    page.go_back()
    wait_until_ready(page)
    page.locator("operation-picture").focus()
    page.keyboard.press("End")
    page.keyboard.press("Tab")
    assert line.inner_text() == sentence


def test_the_shares_of_a_softmax_are_those_of_the_service(page: "Page", bundled: Running, base: str) -> None:
    weights = stages_of(bundled, "attn.pattern")["attn.pattern"][2][3]
    open_number(page, base, "attn.pattern", 3, 2 * len(weights) + 1)
    texts = texts_of(page, "")
    assert [text.split(" ")[0] for text in texts] == [str(key) for key in range(len(weights))]
    shares = [read_number(text.split("becomes")[1]) for text in texts]
    assert shares == pytest.approx([100 * weight for weight in weights], rel=0.02, abs=0.01)
    assert sum(shares) == pytest.approx(100, abs=0.1)
    assert "masked" in texts[-1]
    assert page.locator("operation-picture rect.chosen").count() == 2  # its score, and its share


def test_a_probability_is_drawn_among_the_most_likely_tokens(page: "Page", bundled: Running, base: str) -> None:
    top = bundled.answer("/forward", prompt=PROMPT, stages=["loss"], top_k=10)["predictions"][-1]["top"]
    open_view(page, base, "network", prompt=PROMPT, at="predictions", cell=top[3]["id"])
    picture = page.locator("operation-picture").first
    texts = picture.locator(".hit").evaluate_all("(hits) => hits.map(({ dataset }) => dataset.text)")
    assert [text.split(": ")[0] for text in texts] == [quoted(token["text"]) for token in top]
    for text, token in zip(texts, top, strict=True):
        assert read_number(text.split("becomes")[1]) == pytest.approx(100 * token["probability"], rel=0.02)
    chosen = picture.locator("text.result").all_text_contents()
    assert chosen[0] == quoted(top[3]["text"])
    assert "others share" in picture.inner_text()


def test_of_a_long_prompt_the_largest_weights_are_drawn(page: "Page", base: str) -> None:
    prompt = "The captain was in the house. " * 20
    open_view(page, base, "network", prompt=prompt, at=f"{LAYER}attn.pattern", cell=0)
    texts = page.locator(HITS)
    assert texts.count() == 10
    first = texts.first.get_attribute("data-text")
    assert first is not None
    assert first.startswith("0 ")
    rest = page.locator("operation-picture").inner_text()
    assert "others share" in rest
    count = page.locator("cell-arithmetic .small").first.inner_text()
    assert f"{int(read_number(count.removeprefix('Show all'))) - 10} others share" in rest


def test_a_rotation_turns_the_pair_by_the_angle_of_its_position(page: "Page", bundled: Running, base: str) -> None:
    stages = stages_of(bundled, "attn.q", "attn.rot_q")
    (plain, turned) = (stages[part][4][1] for part in ("attn.q", "attn.rot_q"))
    half = len(plain) // 2
    panel = open_number(page, base, "attn.rot_q", 4, len(plain) + ROTATED)
    theta = bundled.client.get("/model").json()["config"]["rope_theta"]
    angle = 4 * theta ** (-(ROTATED - half) / half)
    label = str(panel.locator("operation-picture svg").get_attribute("aria-label"))
    assert f"Numbers {ROTATED - half} and {ROTATED} as an arrow: at position 4 it turns by " in label
    words, before, after = label.split(": at position 4 it turns by ")[1].split("(")
    assert read_number(words) == pytest.approx(math.degrees(angle), abs=0.06)
    for text, numbers in ((before, plain), (after, turned)):
        pair = [read_number(number) for number in text.split(", ")[:2]]
        assert pair == pytest.approx([numbers[ROTATED - half], numbers[ROTATED]], abs=0.02)
    assert len(texts_of(page, "at position ")) == 5  # where the arrow would point at positions 0 to 4
    clocks = texts_of(page, "numbers ")
    assert len(clocks) == half
    assert read_number(clocks[1].split("turn by")[1]) == pytest.approx(4 * theta ** (-1 / half), rel=SIGNIFICANT)
    panel.get_by_role("img").locator(".clock + .hit").nth(1).click()
    wait_until_ready(page)
    assert read_number(panel.locator("output").inner_text()) == pytest.approx(turned[half + 1], rel=SIGNIFICANT)


def test_a_head_adds_the_values_of_the_tokens(page: "Page", bundled: Running, base: str) -> None:
    panel = open_number(page, base, "attn.z", 4, 2)
    stages = stages_of(bundled, "attn.pattern", "attn.z", "attn.v")
    weights = stages["attn.pattern"][0][4]
    assert [read_number(text.split("weight")[1]) for text in texts_of(page, "") if ": weight" in text] == (
        pytest.approx(weights, rel=0.005)  # small ones are shown with three digits
    )
    for token, text in enumerate(texts_of(page, "number 2: ")):
        value = stages["attn.v"][token][0][2]
        assert text.startswith(f"number 2: {percent(weights[token])} {TIMES}")
        assert read_number(text.split(TIMES)[1]) == pytest.approx(value, rel=SIGNIFICANT)
    sums = [read_number(text.split(": ")[1]) for text in texts_of(page, "number ") if "of the sum" in text]
    assert sums == pytest.approx(stages["attn.z"][4][0], rel=0.02, abs=0.01)
    assert read_number(str(panel.locator("operation-picture text.result").text_content())) == pytest.approx(sums[2])


def test_a_norm_shows_the_numbers_before_and_after_it(page: "Page", bundled: Running, base: str) -> None:
    open_number(page, base, "ln2.normalized", 4, 7)
    stages = stages_of(bundled, "resid_mid", "ln2.scale", "ln2.normalized")
    before, after = (stages[part][4][7] for part in ("resid_mid", "ln2.normalized"))
    (text,) = set(texts_of(page, "number 7: "))
    assert read_number(text.split(": ")[1]) == pytest.approx(before, rel=SIGNIFICANT)
    assert read_number(text.split("becomes")[1]) == pytest.approx(after, rel=0.01)
    assert f"÷ {read_number(str(stages['ln2.scale'][4][0])):.4g}"[:6] in page.locator("operation-picture").inner_text()


def test_an_activation_stands_on_its_curve(page: "Page", bundled: Running, base: str) -> None:
    panel = open_number(page, base, "mlp.post", 4, 7)
    stages = stages_of(bundled, "mlp.pre", "mlp.pre_linear", "mlp.post")
    gate, linear, result = (stages[part][4][7] for part in ("mlp.pre", "mlp.pre_linear", "mlp.post"))
    (point,) = texts_of(page, "silu(")
    assert read_number(point.removeprefix("silu(")) == pytest.approx(gate, rel=SIGNIFICANT)
    assert read_number(point.split("=")[1]) == pytest.approx(gate / (1 + math.exp(-gate)), rel=SIGNIFICANT)
    assert read_number(texts_of(page, f"{TIMES}linear part: ")[0]) == pytest.approx(linear, rel=SIGNIFICANT)
    assert read_number(texts_of(page, "= product: ")[0]) == pytest.approx(result, rel=0.01)
    assert panel.locator("operation-picture .curve").count() == 1


def test_an_edited_number_is_drawn_as_the_formula_gives_it(page: "Page", bundled: Running, base: str) -> None:
    edits = json.dumps([{"stage": f"{LAYER}resid_mid", "op": "set", "value": 0.5}])
    panel = open_number(page, base, "resid_mid", 4, 7, edits=edits)
    stages = stages_of(bundled, "resid_pre", "attn_out")
    total = stages["resid_pre"][4][7] + stages["attn_out"][4][7]
    assert read_number(panel.locator("output").inner_text()) == 0.5
    drawn = str(panel.locator("operation-picture text.result").text_content())
    assert read_number(drawn) == pytest.approx(total, rel=SIGNIFICANT)
    assert "✓" not in panel.inner_text()


def test_few_numbers_stand_in_their_cells(page: "Page", base: str) -> None:
    prompt = "AI rocks <EOS>"
    open_view(page, base, "network", model="ai-rocks", prompt=prompt, at="blocks.0.attn.scores", position=1, cell=0)
    texts = [text.split(": ")[1].split(f" {TIMES}")[0] for text in texts_of(page, "number ")[:2]]
    cells = page.locator("operation-picture .in-cell").all_text_contents()
    assert [read_number(cell) for cell in cells[:2]] == pytest.approx([read_number(text) for text in texts], rel=0.01)


def test_a_picture_moves_once(page: "Page", base: str) -> None:
    moving = "document.querySelector('operation-picture').getAnimations({ subtree: true }).length"
    open_number(page, base, "attn.scores", 4, 0)
    assert page.evaluate(moving) == 0  # the tests ask for less motion
    page.emulate_media(reduced_motion="no-preference")
    page.evaluate("document.querySelector('operation-picture').after(document.querySelector('operation-picture'))")
    assert page.evaluate(moving) >= 5
    length = page.evaluate(
        "Math.max(...document.querySelector('operation-picture').getAnimations({ subtree: true })"
        ".map((animation) => animation.effect.getComputedTiming().endTime))"
    )
    assert length <= 900
    page.locator("network-canvas canvas").focus()
    page.keyboard.press("ArrowRight")  # the next number of the same stage
    wait_until_ready(page)
    assert "cell=1" in page.url
    assert page.evaluate(moving) == 0


def test_the_colours_of_a_picture_follow_the_theme(page: "Page", base: str) -> None:
    open_number(page, base, "attn.scores", 4, 0)
    first = page.locator(HITS).first
    light = first.get_attribute("fill")
    page.locator("#theme").click()
    assert first.get_attribute("fill") != light
    page.locator("#theme").click()
    assert first.get_attribute("fill") == light


def test_the_pictures_of_every_family_fit_a_phone(page: "Page", family: str) -> None:
    page.set_viewport_size({"width": 380, "height": 900})
    names = [stage["name"] for stage in json.loads(page.request.get(f"{family}/model").text())["stages"]]
    drawn = 0
    for name in names:
        part = name.removeprefix("blocks.1.")
        if part not in {*PICTURES, "mlp.expert_weights"}:
            continue
        open_view(page, family, "network", prompt="a bc", at=name, position=2, cell=0)
        if page.locator("operation-picture").count() == 0:
            continue  # a norm whose input is no stage, for example
        drawn += 1
        check_fit(page.locator("cell-arithmetic"), 380)
        numbers = page.locator("operation-picture").inner_text()
        assert "NaN" not in numbers
        assert "not a number" not in numbers
    assert drawn >= 6
