"""The view "Logit lens": the grid, the ranks and the answer are those of POST /attribute."""

import json
import math
import re
import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.service.running import PATIENCE_SECONDS
from tests.web.browsing import Findings, open_view, wait_until_ready, wait_until_settled
from tests.web.conftest import OpenPage
from tests.web.reading import percent, quoted, shown
from tests.web.test_draw import luminance

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

PROMPT = "The captain was in the dark night"
NUM_ROWS = 7  # of the bundled model: before layer 0, and after each of six layers


def post(base: str, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def lens(base: str, prompt: str | list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    """The logit lens at every position."""
    if "positions" not in fields:
        size = len(prompt) if isinstance(prompt, list) else post(base, "/tokenize", text=prompt)["count"]
        fields["positions"] = list(range(size))
    return post(base, "/attribute", method="logit_lens", prompt=prompt, top_k=5, **fields)


def grid_of(page: "Page") -> list[list[tuple[str, str]]]:
    """The texts of each cell, row by row."""
    rows = page.locator("cell-grid tbody tr").all()
    cells = [row.locator("td").all_inner_texts() for row in rows]
    return [[(text.split("\n")[0], text.split("\n")[1]) for text in row] for row in cells]


def displayed(probability: float) -> str:
    """A probability, which is never 0: the service's numbers can be too coarse for it."""
    return percent(max(probability, 1e-9))


def test_each_cell_has_the_most_likely_token_and_its_probability(page: "Page", base: str) -> None:
    open_view(page, base, "lens", prompt=PROMPT)
    layers = lens(base)["layers"]
    assert len(layers) == NUM_ROWS
    expected = [
        [(shown(place["top"][0]["text"]), displayed(place["top"][0]["probability"])) for place in layer["positions"]]
        for layer in layers
    ]
    assert grid_of(page) == expected
    names = page.locator("cell-grid tbody th").all_inner_texts()
    assert names == ["before L0", *(f"after L{layer}" for layer in range(5)), "after L5 (output)"]


def test_cells_can_show_the_rank_or_the_probability_of_the_followed_token(page: "Page", base: str) -> None:
    answer = lens(base)
    names = [shown(token["text"]) for token in answer["final"]]
    open_view(page, base, "lens", prompt=PROMPT)
    texts: dict[str, Callable[[dict[str, Any]], str]] = {
        "rank": lambda each: f"{each['rank']:,}",
        "probability": lambda each: displayed(each["probability"]),
    }
    for cells, text in texts.items():
        page.get_by_label("Cells show").select_option(cells)
        page.wait_for_url(f"**cells={cells}**")
        wait_until_ready(page)
        for row, layer in zip(grid_of(page), answer["layers"], strict=True):
            assert row == [(text(each), name) for each, name in zip(layer["final"], names, strict=True)]


def test_with_ranks_the_colour_is_that_of_the_rank_on_a_logarithmic_scale(page: "Page", base: str) -> None:
    open_view(page, base, "lens", prompt=PROMPT, cells="rank")
    size = json.load(urllib.request.urlopen(f"{base}/model", timeout=PATIENCE_SECONDS))["sizes"]["d_vocab"]
    legend = page.locator("lens-view .legend").inner_text()
    assert f"{size - 1:,}" in legend
    assert "Rank 0 (bold): none" in legend
    ranks = [[each["rank"] for each in layer["final"]] for layer in lens(base)["layers"]]
    shares = [[1 - math.log1p(rank) / math.log(size) for rank in row] for row in ranks]
    script = """(shares) => import('/page/draw/colours.js').then(({ colour }) =>
        shares.map((row) => row.map((share) => `rgb(${colour(share).join(", ")})`)))"""
    assert backgrounds(page) == page.evaluate(script, shares)


def backgrounds(page: "Page") -> list[list[str]]:
    colours: list[list[str]] = page.evaluate(
        """[...document.querySelectorAll("cell-grid tbody tr")].map((row) =>
        [...row.querySelectorAll("td")].map((cell) => getComputedStyle(cell).backgroundColor))"""
    )
    return colours


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("cells", ["token", "rank"])
def test_the_texts_of_all_cells_have_the_contrast_of_wcag(
    open_page: OpenPage, base: str, dark: bool, cells: str
) -> None:
    page = open_page(dark=dark)
    open_view(page, base, "lens", prompt=PROMPT, cells=cells)
    pairs = page.evaluate(
        """[...document.querySelectorAll("cell-grid td :is(span, small)")].map((text) =>
        [getComputedStyle(text).color, getComputedStyle(text.parentNode).backgroundColor])"""
    )
    assert len(pairs) > 50
    for pair in pairs:
        lights = [luminance([int(part) for part in re.findall(r"\d+", colour)]) for colour in pair]
        assert (max(lights) + 0.05) / (min(lights) + 0.05) >= 4.5


@pytest.mark.parametrize("dark", [False, True])
def test_the_legend_has_the_colours_of_the_cells(open_page: OpenPage, base: str, dark: bool) -> None:
    page = open_page(dark=dark)
    open_view(page, base, "lens", prompt=PROMPT)
    gradient = page.locator("lens-view .legend .legend-bar").evaluate("bar => getComputedStyle(bar).backgroundImage")
    stops = [[int(part) for part in stop] for stop in re.findall(r"rgb\((\d+), (\d+), (\d+)\)", gradient)]
    script = "import('/page/draw/colours.js').then((m) => [0, 0.25, 0.5, 0.75, 1].map((share) => m.colour(share)))"
    assert stops == page.evaluate(script)


def columns_in_sight(page: "Page") -> tuple[int, int, int]:
    """How many columns there are, how many are wholly in sight, and how many are cut."""
    boxes: list[list[float]] = page.evaluate(
        """(() => { const [corner, ...names] = document.querySelectorAll("cell-grid thead th");
        const [left, right] = [corner.getBoundingClientRect().right,
          document.querySelector("cell-grid .scroll").getBoundingClientRect().right];
        return names.map((name) => name.getBoundingClientRect()).map((box) => [box.left - left, right - box.right,
          right - box.left, box.right - left]) })()"""
    )
    whole = sum(left > -2 and right > -2 for left, right, *_ in boxes)
    touched = sum(left > 2 and right > 2 for *_, left, right in boxes)
    return len(boxes), whole, touched - whole


def test_columns_are_narrowed_until_they_fit_and_none_is_cut(page: "Page", base: str) -> None:
    tokens = post(base, "/tokenize", text="the cat sat on the mat " * 4)["tokens"][:14]
    open_view(page, base, "lens", prompt="".join(token["text"] for token in tokens))
    count, whole, cut = columns_in_sight(page)
    assert (count, whole, cut) == (14, 14, 0)
    assert page.locator("cell-grid.more-left, cell-grid.more-right").count() == 0
    page.set_viewport_size({"width": 380, "height": 800})
    page.locator("cell-grid.more-left").wait_for()  # the last column is selected
    count, whole, cut = columns_in_sight(page)
    assert 3 <= whole < count
    assert cut == 0
    page.locator("cell-grid .scroll").evaluate("box => { box.scrollLeft = 0; }")
    page.locator("cell-grid.more-right:not(.more-left)").wait_for()
    assert columns_in_sight(page)[2] == 0


def test_the_selected_cell_has_its_five_most_likely_tokens(page: "Page", base: str) -> None:
    open_view(page, base, "lens", prompt=PROMPT, row=3, pos=2)
    top = lens(base)["layers"][3]["positions"][2]["top"]
    rows = page.locator("lens-view section table").first.locator("tbody tr").all()
    cells = [row.locator("th, td").all_inner_texts() for row in rows]
    assert [(row[0], row[2], row[3]) for row in cells] == [
        (shown(each["text"]), str(each["id"]), displayed(each["probability"])) for each in top
    ]


def test_the_answer_says_from_which_layer_on_the_final_token_is_the_most_likely(page: "Page", base: str) -> None:
    answer = lens(base)
    size = len(answer["tokens"])
    for position in range(size):
        open_view(page, base, "lens", prompt=PROMPT, pos=position)
        ranks = [layer["final"][position]["rank"] for layer in answer["layers"]]
        first = next(row for row in range(NUM_ROWS) if not any(ranks[row:]))
        said = page.locator("lens-view .answer").inner_text()
        text = answer["final"][position]["text"].replace("\n", "↵")
        since = f"It is the most likely token after L{first - 1}, and after every later layer."
        if first == 0:
            since = "It is the most likely token from the start: before L0, and after every layer."
        if first == NUM_ROWS - 1:
            since = f"It becomes the most likely token only after L{first - 1}, the last layer."
        probability = displayed(answer["layers"][-1]["final"][position]["probability"])
        assert said.startswith(
            f"After position {position}, the network predicts {quoted(text)} ({probability}). {since}"
        )


def test_another_token_can_be_followed(page: "Page", base: str) -> None:
    open_view(page, base, "lens", prompt=PROMPT, cells="rank")
    page.get_by_label("Follow the token").fill(" was")
    page.get_by_role("button", name="Apply").click()
    page.wait_for_url("**token=+was**")
    wait_until_ready(page)
    answer = lens(base, token=" was")
    ranks = [[(f"{each['rank']:,}", "␣was") for each in layer["token"]] for layer in answer["layers"]]
    assert grid_of(page) == ranks
    best = min(layer["token"][-1]["rank"] for layer in answer["layers"])
    assert f"Its best rank is {best:,}" in page.locator("lens-view .answer").inner_text()


def test_a_token_typed_without_its_space_is_offered_with_it(page: "Page", base: str, findings: Findings) -> None:
    open_view(page, base, "lens", prompt=PROMPT)
    tops = [each for layer in lens(base)["layers"] for place in layer["positions"] for each in place["top"]]
    texts = {each["text"] for each in tops}
    top = next(each for each in tops if re.fullmatch(r" [a-z]{3,}", each["text"]) and each["text"][1:] not in texts)
    box, hint = page.get_by_label("Follow the token"), page.locator("lens-view", has_text="Did you mean")
    box.fill(top["text"].strip())
    hint.wait_for()  # while typing, before anything is sent
    box.fill(top["text"])
    hint.wait_for(state="detached")
    box.fill(top["text"].strip())
    box.press("Enter")
    wait_until_settled(page)  # the token may not exist without the space
    page.get_by_role("button", name=f"“{shown(top['text'])}”").click()
    page.wait_for_url(f"**token=+{top['text'].strip()}**")
    wait_until_ready(page)
    assert hint.count() == 0
    findings.clear()


def test_an_earlier_result_is_grey_while_a_new_one_is_computed(page: "Page", base: str, held: list["Route"]) -> None:
    open_view(page, base, "lens", prompt=PROMPT)
    look = "grid => getComputedStyle(grid).filter"
    grid = page.locator("cell-grid")
    assert grid.evaluate(look) == "none"
    with page.expect_request("**/attribute"):
        page.route("**/attribute", lambda route: held.append(route))
        page.get_by_label("Follow the token").fill(" was")
        page.get_by_role("button", name="Apply").click()
    page.locator("body[data-late]").wait_for()
    assert "opacity" in grid.evaluate(look)
    held[0].continue_()
    wait_until_ready(page)
    assert grid.evaluate(look) == "none"


def test_the_space_mark_of_labels_is_a_space_in_the_followed_token(page: "Page", base: str) -> None:
    open_view(page, base, "lens", prompt=PROMPT, token="␣was", cells="rank")
    ranks = [[(f"{each['rank']:,}", "␣was") for each in layer["token"]] for layer in lens(base, token=" was")["layers"]]
    assert grid_of(page) == ranks


def test_the_lens_covers_generated_tokens(page: "Page", base: str) -> None:
    open_view(page, base, "lens", prompt=PROMPT, generate=4)
    ids = post(base, "/generate", prompt=PROMPT, max_tokens=4, temperature=0, echo=True)["tokens"]
    answer = lens(base, ids)
    headings = page.locator("cell-grid thead th").all_inner_texts()[1:]
    size = len(ids)
    assert headings == [
        f"{'+' if position >= size - 4 else ''}{position} {shown(token['text'])}"
        for position, token in enumerate(answer["tokens"])
    ]
    tops = [shown(place["top"][0]["text"]) for place in answer["layers"][-1]["positions"]]
    assert [text for text, _ in grid_of(page)[-1]] == tops
    assert [shown(token["text"]) for token in answer["tokens"][-4:]] == tops[-5:-1]  # greedy


def test_the_keyboard_moves_and_chooses_and_the_address_restores_it(page: "Page", base: str) -> None:
    open_view(page, base, "lens", prompt=PROMPT)
    assert page.locator("cell-grid td[tabindex='0']").count() == 1
    page.locator("cell-grid td[tabindex='0']").press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("row=5"))
    wait_until_ready(page)
    heading = page.locator("lens-view h3").inner_text()
    assert heading.endswith("after L4")
    assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    page.reload()
    wait_until_ready(page)
    assert page.locator("lens-view h3").inner_text() == heading
    page.go_back()
    wait_until_ready(page)
    assert page.locator("lens-view h3").inner_text().endswith("(output)")


def test_a_long_prompt_is_shown_in_parts(page: "Page", base: str) -> None:
    prompt = "the cat sat on " * 15
    size = post(base, "/tokenize", text=prompt)["count"]
    open_view(page, base, "lens", prompt=prompt)
    assert page.locator("cell-grid thead th").count() == 1 + 24
    page.get_by_role("button", name="Earlier positions").click()
    page.wait_for_url("**from=**")
    wait_until_ready(page)
    first = size - 48
    expected = lens(base, prompt, positions=list(range(first, first + 24)))["layers"][-1]["positions"]
    assert [text for text, _ in grid_of(page)[-1]] == [shown(each["top"][0]["text"]) for each in expected]


def test_a_wide_screen_shows_as_many_positions_as_fit(page: "Page", base: str) -> None:
    page.set_viewport_size({"width": 2560, "height": 1440})
    open_view(page, base, "lens", prompt="Once upon a time, " * 12)
    number, in_sight, num_cut = columns_in_sight(page)
    assert number == in_sight == 36
    assert num_cut == 0
    page.get_by_role("button", name="Earlier positions").click()
    wait_until_ready(page)
    assert columns_in_sight(page)[:2] == (36, 36)


def test_a_wrong_row_position_or_number_of_tokens_is_an_error(page: "Page", base: str, findings: Findings) -> None:
    for wrong, said in (
        ("row=9", "“9”"),
        ("pos=-1", "“-1”"),
        ("generate=x", "“x”"),
        ("generate=5000", "512"),
        ("token=zzzz", "token"),
        ("cells=all", "“all”"),
    ):
        page.goto(f"{base}/?view=lens&{wrong}")
        assert wait_until_settled(page) == "error"
        assert said in page.locator("#error").inner_text()
    assert all("status of 400" in finding for finding in findings)
    findings.clear()


def test_edits_are_applied_and_the_cells_that_they_change_are_marked(page: "Page", base: str) -> None:
    edits = [{"stage": "blocks.2.mlp_out", "op": "scale", "factor": -3}]
    open_view(page, base, "lens", prompt=PROMPT, edits=json.dumps(edits))
    edited, plain = lens(base, edits=edits)["layers"], lens(base)["layers"]
    tops = [[[place["top"][0] for place in layer["positions"]] for layer in layers] for layers in (edited, plain)]
    texts = [[(shown(top["text"]), displayed(top["probability"])) for top in row] for row in tops[0]]
    assert grid_of(page) == texts
    changed = [
        (row, column)
        for row, (ours, theirs) in enumerate(zip(*tops, strict=True))
        for column, (one, other) in enumerate(zip(ours, theirs, strict=True))
        if one["id"] != other["id"]
    ]
    assert changed
    assert min(row for row, _ in changed) >= 3, "rows above the edit do not change"
    marked = page.locator("cell-grid td.is-changed").all()
    assert [(int(td.get_attribute("data-row") or ""), int(td.get_attribute("data-column") or "")) for td in marked] == (
        changed
    )
    size = len(tops[0]) * len(tops[0][0])
    answer = page.locator("lens-view > .answer").inner_text()
    assert f"The edits change the most likely token of {len(changed)} of {size} cells" in answer
    assert "1 edit is applied." in page.locator("#edits-note").inner_text()
    open_view(page, base, "lens", prompt=PROMPT)
    assert page.locator("cell-grid td.is-changed").count() == 0
