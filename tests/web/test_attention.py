"""The view "Attention": the numbers of the page are those of POST /patterns and POST /forward."""

import base64
import json
import re
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from forwardscope.results.passes import Patterns
from tests.service.checkpoints import write_checkpoint
from tests.service.running import PATIENCE_SECONDS, Start, validate
from tests.web.browsing import open_table, open_view, wait_until_ready, wait_until_settled
from tests.web.conftest import OpenPage
from tests.web.reading import ZERO, percent, quoted, read_number, shown

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

PROMPT = "The captain was in the dark night"
NUM_LAYERS, NUM_HEADS = 6, 8  # of the bundled model
VIEW = "attention-view"


def patterns(base: str, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"prompt": prompt, **fields}).encode()
    request = urllib.request.Request(f"{base}/patterns", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    validate(Patterns, answer)
    return answer


def weights_of(base: str, layer: int, head: int, **fields: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The exact map of one head."""
    answer = patterns(base, layers=[layer], heads=[head], dtype="float32", **fields)
    values = np.frombuffer(base64.b64decode(answer["maps"][0]["values"]), "<f4")
    return values.reshape(answer["size"], answer["size"])


def test_the_ranking_and_the_answer_are_the_means_of_the_service(page: "Page", base: str) -> None:
    maps = patterns(base)["maps"]
    chosen = next(each for each in maps if (each["layer"], each["head"]) == (1, 2))
    for target, words in (
        ("previous", "the previous token"),
        ("first", "the first token"),
        ("itself", "the token itself"),
    ):
        open_view(page, base, "attention", prompt=PROMPT, layer=1, head=2, find=target)
        best = sorted(maps, key=lambda each: -each["means"][target])[:5]
        answer = page.locator("attention-ranking .answer").inner_text()
        share = percent(best[0]["means"][target])
        assert answer.startswith(f"L{best[0]['layer']} H{best[0]['head']} attends most to {words}: {share}")
        is_best = (best[0]["layer"], best[0]["head"]) == (1, 2)
        assert answer.endswith("The large picture shows L1 H2.") != is_best
        buttons = page.locator("attention-ranking button.small").all_inner_texts()
        assert buttons == [f"L{each['layer']} H{each['head']}: {percent(each['means'][target])}" for each in best]
        described = page.locator("attention-head .answer").first.inner_text()
        assert f"{percent(chosen['means'][target])} to {words}" in described


def test_the_head_that_answers_is_shown_unless_the_address_names_one(page: "Page", base: str) -> None:
    maps = patterns(base)["maps"]
    best = {
        target: max(maps, key=lambda each, target=target: each["means"][target])  # type: ignore[misc]
        for target in ("previous", "first")
    }
    names = {target: f"L{each['layer']} H{each['head']}" for target, each in best.items()}
    assert names["previous"] != names["first"] != "L1 H2" != names["previous"]
    title = page.locator("attention-head h3").first
    chosen = page.locator("pattern-grid [aria-selected=true]")
    open_view(page, base, "attention", prompt=PROMPT)
    assert title.inner_text() == names["previous"]
    assert (chosen.get_attribute("aria-label") or "").startswith(f"{names['previous']}: ")
    page.get_by_label("Find the heads").select_option("first")
    page.wait_for_url("**find=first**")
    wait_until_ready(page)
    assert title.inner_text() == names["first"]
    page.locator("pattern-grid [data-layer='1'][data-head='2']").click()
    page.wait_for_url("**layer=1&head=2**")
    wait_until_ready(page)
    assert title.inner_text() == "L1 H2"
    page.reload()
    wait_until_ready(page)
    assert title.inner_text() == "L1 H2"
    page.get_by_label("Find the heads").select_option("previous")
    page.wait_for_url(re.compile("^(?!.*layer=)"))
    wait_until_ready(page)
    assert title.inner_text() == names["previous"]


def test_a_click_in_the_picture_of_a_head_keeps_the_head(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT, find="chosen", pos=5, key=2)
    title = page.locator("attention-head h3").first
    before = title.inner_text()
    page.locator("#arc-token-2").click()
    page.wait_for_url("**pos=2**")
    wait_until_ready(page)
    assert title.inner_text() == before
    answer = page.locator("attention-ranking .answer").inner_text()
    assert answer.startswith(f"{before} ") != answer.endswith(f"The large picture shows {before}.")


def test_the_strongest_keys_and_the_arcs_are_those_of_the_pattern(page: "Page", base: str) -> None:
    tokens, weights = patterns(base)["tokens"], weights_of(base, 3, 5)
    open_view(page, base, "attention", prompt=PROMPT, layer=3, head=5, pos=4)
    rows = page.locator("attention-head table.bars tbody tr").all()
    for row, position in zip(rows, np.argsort(-weights[4], kind="stable"), strict=False):
        cells = row.locator("th, td").all_inner_texts()
        assert cells[0] == shown(tokens[position]["text"])
        assert int(cells[2]) == position
        assert cells[3] in (percent(weights[4, position]), ZERO)
    labels = [option.text_content() for option in page.locator("attention-arcs [role=option] title").all()]
    assert len(labels) == len(tokens)
    for position, label in enumerate(labels):
        assert label is not None
        assert label.startswith(f"{shown(tokens[position]['text'])}, position {position}: ")


def test_each_stage_has_the_numbers_of_the_service_in_its_table(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT, layer=2, head=1)
    for label, stage in (("Masked scores", "attn_scores"), ("Scores", "scores"), ("Pattern", "pattern")):
        page.get_by_role("button", name=label, exact=True).click()
        wait_until_ready(page)
        expected = weights_of(base, 2, 1, stage=stage)
        rows = open_table(page.locator("attention-head heat-map details.data-table"))
        for row, cells in enumerate(rows.all()):
            texts = cells.locator("td").all_inner_texts()
            for text, value in zip(texts, expected[row], strict=True):
                assert (text == "masked") == (value == -np.inf)
                if text != "masked":
                    assert abs(read_number(text) - value) <= 6e-4 * abs(value)


def test_pointing_at_a_row_shows_its_keys_and_a_click_keeps_it(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT)
    said = page.locator("attention-head .answer").nth(1)
    canvas = page.locator("attention-head heat-map canvas")
    before = said.inner_text()
    canvas.focus()
    page.keyboard.press("ArrowDown")  # the first cell
    page.keyboard.press("ArrowDown")
    page.locator("attention-head .answer", has_text="(position 1) attends most to").wait_for()
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("pos=1"))
    wait_until_ready(page)
    assert "(position 1) attends most to" in said.inner_text()
    page.go_back()
    wait_until_ready(page)
    assert said.inner_text() == before


def test_the_arcs_follow_the_mouse_and_return_to_the_chosen_token(page: "Page", base: str) -> None:
    tokens, weights = patterns(base)["tokens"], weights_of(base, 0, 0)
    open_view(page, base, "attention", prompt=PROMPT, layer=0, head=0)
    said = page.locator("attention-head .answer").nth(1)
    before, address = said.inner_text(), page.url
    for query in (3, 2):
        page.locator(f"#arc-token-{query}").hover()
        best = int(weights[query].argmax())
        to = "itself" if best == query else f"{quoted(tokens[best]['text'])} (position {best})"
        words = f"(position {query}) attends most to {to}: {percent(weights[query, best])}"
        page.locator("attention-head .answer", has_text=words).wait_for()
        page.locator(f"#arc-token-{query}[aria-selected=true]").wait_for()
    page.mouse.move(5, 5)
    page.locator("attention-head .answer", has_text=before).wait_for()
    assert page.url == address
    page.locator("#arc-token-2").hover()
    page.locator("#arc-token-2[aria-selected=true]").wait_for()
    page.locator("#arc-token-2").click()
    page.wait_for_url("**pos=2**")
    wait_until_ready(page)
    assert "(position 2) attends most to" in said.inner_text()


@pytest.mark.parametrize("copies", [1, 2, 5])
def test_on_a_phone_no_arc_or_token_is_cut_off(open_page: OpenPage, base: str, copies: int) -> None:
    page = open_page(phone=True)
    prompt = " ".join(["the cat sat on the mat and looked at the dark night"] * copies)
    open_view(page, base, "attention", prompt=prompt)
    box = page.locator("attention-arcs .scroll")
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    outside = box.evaluate(
        """box => { const { left, right, top, bottom } = box.getBoundingClientRect();
        return [...box.querySelectorAll("path, text, rect")].map((each) => each.getBoundingClientRect())
          .filter((each) => each.left < left || each.right > right || each.top < top || each.bottom > bottom + 1)
          .length; }"""
    )
    assert outside == 0
    drawn, number = page.locator(".arc-token").count(), len(patterns(base, prompt)["tokens"])
    assert drawn == number or f"{drawn} of {number} tokens are drawn" in page.locator("attention-arcs p").inner_text()
    assert drawn >= 10


def test_on_a_phone_the_large_picture_is_in_sight_after_a_head_was_chosen(
    open_page: OpenPage, tmp_path: Path, start: Start
) -> None:
    model = write_checkpoint(tmp_path / "deep", num_hidden_layers=30)
    base = str(start(model=str(model)).client.base_url).rstrip("/")
    page = open_page(phone=True)
    open_view(page, base, "attention")
    box = page.locator("pattern-grid > .scroll")
    assert box.evaluate("box => box.clientHeight < 300 && box.scrollHeight > 2 * box.clientHeight")
    page.locator("pattern-grid [role=gridcell][data-layer='29']").first.click()
    page.wait_for_url("**layer=29**")
    wait_until_ready(page)
    picture = page.locator("attention-head heat-map canvas").bounding_box()
    assert picture is not None
    assert 0 <= picture["y"] <= 500
    chosen = page.locator("pattern-grid [aria-selected=true]")
    assert chosen.get_attribute("data-layer") == "29"
    edges = "each => { const { top, bottom } = each.getBoundingClientRect(); return [top, bottom]; }"
    (above, below), (top, bottom) = chosen.evaluate(edges), box.evaluate(edges)
    assert top <= above < below <= bottom


def test_the_head_that_is_shown_can_be_ablated(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT, layer=5, head=3)
    page.get_by_role("button", name="Ablate this head").click()
    page.locator(".chip", has_text="Set L5 H3 to zero").wait_for()
    wait_until_ready(page)
    assert page.locator("#prompt").input_value() == PROMPT
    page.go_back()
    wait_until_ready(page)
    assert page.locator("attention-head h3").first.inner_text() == "L5 H3"
    open_view(page, base, "attention", layer=0, head=0, edits='[{"stage": "blocks.1.mlp_out", "op": "zero"}]')
    page.get_by_role("button", name="Ablate this head").click()
    page.locator(".chip", has_text="Set L0 H0 to zero").wait_for()
    assert page.locator(".chip").count() == 2  # the edit that was there stays
    wait_until_ready(page)
    open_view(page, base, "attention", model="a-tokens-journey")
    assert page.get_by_role("button", name="Ablate this head").is_hidden()


def test_the_grid_is_one_tab_stop_and_enter_chooses_a_head(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT, layer=0, head=0)
    assert page.locator("pattern-grid [role=gridcell]").count() == NUM_LAYERS * NUM_HEADS
    assert page.locator("pattern-grid [tabindex='0'][role=gridcell]").count() == 1
    page.locator("pattern-grid [role=gridcell][tabindex='0']").press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url("**layer=1&head=1**")
    wait_until_ready(page)
    assert page.locator("attention-head h3").first.inner_text() == "L1 H1"
    assert page.evaluate("document.activeElement.dataset.layer + document.activeElement.dataset.head") == "11"
    page.reload()
    wait_until_ready(page)
    assert page.locator("pattern-grid [aria-selected=true]").get_attribute("aria-label", timeout=1000) is not None
    assert page.locator("attention-head h3").first.inner_text() == "L1 H1"


def test_small_patterns_have_the_numbers_of_the_service(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT)
    expected = {(each["layer"], each["head"]): each["means"] for each in patterns(base)["maps"]}
    for cell in page.locator("pattern-grid [role=row][data-layer='0'] [role=gridcell]").all():
        place = int(cell.get_attribute("data-layer") or ""), int(cell.get_attribute("data-head") or "")
        assert f"{percent(expected[place]['previous'])} to the previous token" in (
            cell.get_attribute("aria-label") or ""
        )
    darkest = page.evaluate(
        """(() => { const canvas = document.querySelector("pattern-grid [data-layer='0'][data-head='0'] canvas");
        return [canvas.width, ...canvas.getContext("2d").getImageData(0, 0, 1, 1).data] })()"""
    )
    assert darkest == [len(patterns(base)["tokens"]), 8, 48, 107, 255]  # the first token attends to itself only: 100 %


def test_only_visible_layers_are_fetched_until_the_page_scrolls(page: "Page", base: str) -> None:
    requests: list[list[int]] = []

    def note(request: "Request") -> None:
        body = request.post_data_json if request.url.endswith("/patterns") else None
        if body and body.get("max_size") == 64:
            requests.append(body["layers"])

    page.on("request", note)
    page.set_viewport_size({"width": 380, "height": 300})
    open_view(page, base, "attention", prompt=PROMPT)
    first = {layer for layers in requests for layer in layers}
    assert first < set(range(NUM_LAYERS))
    page.locator(f"pattern-grid [role=row][data-layer='{NUM_LAYERS - 1}']").scroll_into_view_if_needed()
    page.locator(f"pattern-grid [data-layer='{NUM_LAYERS - 1}'][role=gridcell]:not(.is-empty)").first.wait_for()
    fetched = [layer for layers in requests for layer in layers]
    assert len(fetched) == len(set(fetched))


def test_a_worked_example_without_a_mask_has_weights_on_later_tokens(page: "Page", base: str) -> None:
    open_view(page, base, "attention", model="a-tokens-journey", pos=0, layer=0, head=0)
    weights = weights_of(base, 0, 0, prompt="the cat sat on", model="a-tokens-journey")
    assert "mask hides" not in page.locator("attention-head").inner_text()
    rows = page.locator("attention-head table.bars tbody tr").all()
    found = {int(cells[2]): cells[3] for cells in (row.locator("th, td").all_inner_texts() for row in rows)}
    assert found == {position: percent(float(weight)) for position, weight in enumerate(weights[0])}


def test_a_wrong_layer_head_position_or_stage_is_an_error(page: "Page", base: str) -> None:
    for wrong in ({"layer": 6}, {"head": -1}, {"pos": 99}, {"stage": "z"}, {"find": "last"}, {"layer": "1.5"}):
        page.goto(f"{base}/?view=attention&" + "&".join(f"{name}={value}" for name, value in wrong.items()))
        assert wait_until_settled(page) == "error"
        ((_, value),) = wrong.items()
        assert f"“{value}”" in page.locator("#error").inner_text()


def test_the_heads_are_compared_for_one_query_and_one_key(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT, pos=5, key=2)
    page.get_by_label("Find the heads").select_option("chosen")
    page.wait_for_url("**find=chosen**")
    wait_until_ready(page)
    tokens = patterns(base)["tokens"]
    for query, key in ((5, 2), (5, 3)):
        weights = {
            (layer, head): float(weights_of(base, layer, head)[query, key])
            for layer in range(NUM_LAYERS)
            for head in range(NUM_HEADS)
        }
        best = sorted(weights, key=lambda place: -weights[place])[:5]
        said = page.locator("attention-ranking .answer").inner_text()
        assert said.startswith(f"L{best[0][0]} H{best[0][1]} attends most to ")
        assert (
            f"{quoted(tokens[key]['text'])} (position {key}), when {quoted(tokens[query]['text'])} (position {query})"
            in said
        )
        assert f": {percent(weights[best[0]])} of its weight." in said
        assert "The large picture" not in said
        assert page.locator("attention-head h3").first.inner_text() == f"L{best[0][0]} H{best[0][1]}"
        buttons = page.locator("attention-ranking button.small").all_inner_texts()
        assert buttons == [f"L{layer} H{head}: {percent(weights[layer, head])}" for layer, head in best]
        page.locator("attention-ranking select[name=key]").select_option("3")
        page.wait_for_url("**key=3**")
        wait_until_ready(page)
    page.locator("attention-ranking select[name=key]").select_option("6")
    page.wait_for_url("**key=6**")
    wait_until_ready(page)
    assert "the causal mask hides later tokens" in page.locator("attention-ranking .answer").inner_text()


def test_the_keyboard_stays_on_the_button_of_the_head_that_it_chose(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT)
    button = page.locator("attention-ranking button.small").nth(1)
    name = button.inner_text()
    button.press("Enter")
    page.wait_for_url("**layer=**")
    page.locator("attention-ranking button.small[aria-pressed=true]", has_text=name).wait_for()
    wait_until_ready(page)
    assert page.evaluate("document.activeElement.textContent") == name


def test_induction_needs_tokens_that_are_repeated(page: "Page", base: str) -> None:
    prompt = "The cat sat. The cat sat. The cat"
    maps = patterns(base, prompt)["maps"]
    best = max(maps, key=lambda each: each["means"]["induction"])
    open_view(page, base, "attention", prompt=prompt, find="induction")
    said = page.locator("attention-ranking .answer").inner_text()
    assert said.startswith(f"L{best['layer']} H{best['head']} attends most to ")
    assert percent(best["means"]["induction"]) in said
    open_view(page, base, "attention", prompt="The cat sat", find="induction")
    assert "no earlier copy" in page.locator("attention-ranking .answer").inner_text()
    assert page.locator("attention-ranking button.small").count() == 0


def test_shares_that_look_alike_get_more_digits_and_equal_ones_are_a_tie(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT)
    texts = page.evaluate(
        """([values]) => { const ranking = document.createElement("attention-ranking");
        document.body.append(ranking);
        const heads = values.map((previous, head) => ({ layer: 0, head, means: { previous } }));
        const tokens = [{ id: 1, text: "a" }, { id: 2, text: "b" }];
        const shown = { heads, target: "previous", tokens, query: 1, key: 0, chosen: { layer: 0, head: 0 } };
        ranking.show(shown);
        const apart = [...ranking.querySelectorAll("button.small")].map((button) => button.textContent);
        ranking.show({ ...shown, heads: heads.map((each) => ({ ...each, means: { previous: 0.5 } })) });
        return [apart, ranking.querySelector(".answer").textContent]; }""",
        [[0.98712, 0.98708, 0.3]],
    )
    assert texts[0] == [
        f"L0 H{head}: {share}\N{NO-BREAK SPACE}%" for head, share in enumerate(("98.712", "98.708", "30.000"))
    ]
    assert texts[1].startswith("3 heads tie, among them L0 H0, L0 H1, L0 H2")


def test_the_table_of_all_heads_scrolls_in_a_box(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT)
    assert open_table(page.locator("attention-ranking details.data-table")).count() == NUM_LAYERS * NUM_HEADS
    box = page.locator("attention-ranking .data-table .scroll")
    assert box.evaluate("box => box.clientHeight < 400 && box.scrollHeight > box.clientHeight")


def test_the_picture_of_all_heads_holds_heads_that_were_out_of_sight(page: "Page", base: str) -> None:
    page.set_viewport_size({"width": 380, "height": 300})
    open_view(page, base, "attention", prompt=PROMPT)
    empty = page.locator("pattern-grid .is-empty")
    assert empty.count() > 0
    assert "Hatched" in page.locator("attention-view .legend").first.inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="PNG: all heads").click()
    assert download.value.path().stat().st_size > 1000
    assert empty.count() == 0
    assert "Hatched" not in page.locator("attention-view .legend").first.inner_text()


def test_a_long_prompt_says_which_keys_are_drawn_and_lists_all_on_request(page: "Page", base: str) -> None:
    prompt = "the cat sat on the mat and looked at the dark night " * 5
    row = weights_of(base, 0, 0, prompt=prompt)[-1]
    open_view(page, base, "attention", prompt=prompt, layer=0, head=0)
    drawn = page.locator(".arc-token").count()
    assert 10 <= drawn <= 21
    others = sorted(row[:-1], reverse=True)[: drawn - 1]
    assert (
        f"{drawn} of {len(row)} tokens are drawn: the query, and the {drawn - 1} with the largest weights, "
        f"from {percent(float(others[-1]))} on" in page.locator("attention-arcs p").inner_text()
    )
    rows = page.locator("attention-head table.bars tbody tr")
    assert rows.count() == 8
    page.get_by_role("button", name=f"Show all {len(row)} keys").click()
    found = {int(each.locator("td").nth(1).inner_text()): each.locator("td").last.inner_text() for each in rows.all()}
    assert len(found) == len(row)
    assert all(text == percent(float(row[key])) for key, text in found.items() if row[key] >= 1e-4)


def test_a_tap_on_a_cell_shows_its_value_and_keeps_it(open_page: OpenPage, base: str) -> None:
    page = open_page(phone=True, touch=True)
    open_view(page, base, "attention", prompt=PROMPT, layer=0, head=0)
    canvas = page.locator("attention-head heat-map canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    page.touchscreen.tap(box["x"] + 0.4 * box["width"], box["y"] + 0.8 * box["height"])
    page.wait_for_url("**key=**")
    wait_until_ready(page)
    said = page.locator("attention-head heat-map .under-pointer").inner_text()
    found = re.fullmatch(r"query (\d+) .*, key (\d+) .*: weight (.*)", said)
    assert found is not None, said
    expected = weights_of(base, 0, 0)[int(found[1]), int(found[2])]
    assert abs(read_number(found[3]) - expected) <= 6e-4 * expected


def test_a_head_that_is_chosen_out_of_sight_of_its_picture_is_scrolled_to(page: "Page", base: str) -> None:
    page.set_viewport_size({"width": 380, "height": 640})
    open_view(page, base, "attention", prompt=PROMPT)
    page.locator("pattern-grid [role=gridcell]").first.click()
    page.locator("pattern-grid [role=gridcell]").nth(1).click()
    page.wait_for_url("**head=1**")
    wait_until_ready(page)
    assert page.locator("attention-head h3").first.evaluate("title => Math.abs(title.getBoundingClientRect().top) < 60")


def test_a_prompt_of_one_token_is_shown(page: "Page", base: str) -> None:
    open_view(page, base, "attention", prompt="the")
    assert "one token only" in page.locator("attention-ranking .answer").inner_text()


def test_edits_are_applied_and_the_head_that_they_change_the_most_is_found(page: "Page", base: str) -> None:
    edits = [{"stage": "blocks.1.attn_out", "op": "zero"}]
    text = json.dumps(edits)
    open_view(page, base, "attention", prompt=PROMPT, layer=3, head=2, find="changed", edits=text)
    moved = {}
    for layer in range(NUM_LAYERS):
        for head in range(NUM_HEADS):
            edited, plain = (weights_of(base, layer, head, **fields)[-1] for fields in ({"edits": edits}, {}))
            moved[layer, head] = float(np.abs(edited - plain).sum() / 2)
    assert max(value for (layer, _), value in moved.items() if layer < 2) == 0.0
    layer, head = max(moved, key=lambda place: moved[place])
    answer = page.locator("attention-ranking .answer").inner_text()
    assert answer.startswith(f"L{layer} H{head} changes the most")
    assert f"move {percent(moved[layer, head])} of the weight" in answer
    tokens = patterns(base)["tokens"]
    edited, plain = (weights_of(base, 3, 2, **fields)[-1] for fields in ({"edits": edits}, {}))
    rows = page.locator("attention-head table.bars tbody tr").all()
    found = {row.locator("td").all_inner_texts()[1]: row.locator("td").all_inner_texts()[2:] for row in rows}
    assert found == {
        str(position): [percent(float(plain[position])), percent(float(edited[position]))]
        for position in range(len(tokens))
    }
    open_view(page, base, "attention", prompt=PROMPT)
    assert "without the edits" not in page.locator("attention-head").inner_text()
    assert not page.locator("attention-ranking option[value=changed]").is_visible()


@pytest.mark.parametrize("prompt", [PROMPT, "Once upon a time"])
def test_the_parts_stand_in_two_columns_that_the_arcs_fill(page: "Page", base: str, prompt: str) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    open_view(page, base, "attention", prompt=prompt)
    left = "attention-view .narrow", "attention-arcs"
    right = "attention-head heat-map", "attention-head .bars"
    for parts in (left, right):
        places = [page.locator(each).first.evaluate("each => each.getBoundingClientRect().x") for each in parts]
        assert max(places) - min(places) < 1
    room, drawn = page.evaluate(
        """["attention-arcs", "attention-arcs svg"].map((each) =>
        document.querySelector(each).getBoundingClientRect().width)"""
    )
    assert drawn <= room
    assert prompt != PROMPT or drawn > 0.9 * room


@pytest.mark.parametrize("stage", ["scores", "pattern"])
def test_a_chosen_number_leads_to_its_arithmetic(page: "Page", base: str, stage: str) -> None:
    open_view(page, base, "attention", prompt=PROMPT, layer=2, head=1, stage=stage)
    button = page.get_by_role("button", name="How this number comes about")
    assert button.is_hidden()
    page.locator("attention-head heat-map canvas").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**pos=2**")
    wait_until_ready(page)
    button.click()
    page.wait_for_url("**at=blocks.2.attn.**")
    wait_until_ready(page)
    panel = page.locator("cell-arithmetic")
    expected = weights_of(base, 2, 1, stage=stage)[2, 1]
    assert read_number(panel.locator("output").inner_text()) == pytest.approx(expected, rel=1e-3)
    assert panel.locator("h3").inner_text().startswith("L2 H1")


def test_a_number_with_edits_leads_to_its_arithmetic_with_them_and_back(page: "Page", base: str) -> None:
    edits = [{"stage": "blocks.0.attn.z", "op": "zero"}]
    place = {"layer": "2", "head": "1", "pos": "3", "key": "1"}
    state = {"prompt": PROMPT, "edits": json.dumps(edits), **place}
    open_view(page, base, "attention", **state)
    value = page.locator("attention-head heat-map .under-pointer")
    said = value.inner_text()
    assert re.match(r"query 3 .*, key 1 .*: weight ", said)
    page.get_by_role("button", name="How this number comes about").click()
    page.wait_for_url("**at=blocks.2.attn.pattern**")
    wait_until_ready(page)
    panel = page.locator("cell-arithmetic")
    edited, plain = (weights_of(base, 2, 1, **fields)[3, 1] for fields in ({"edits": edits}, {}))
    assert edited != plain
    assert read_number(panel.locator("output").inner_text()) == pytest.approx(edited, rel=1e-3)
    before = panel.get_by_text("Without the edits").inner_text()
    assert read_number(before) == pytest.approx(plain, rel=1e-3)
    assert "✓" in panel.inner_text()
    page.get_by_role("button", name="Show in the view Attention").click()
    page.wait_for_url("**view=attention**")
    wait_until_ready(page)
    assert all(f"{name}={each}" in page.url for name, each in place.items())
    assert value.inner_text() == said
    page.reload()  # the address has the cell
    wait_until_ready(page)
    assert value.inner_text() == said
    assert page.get_by_role("button", name="How this number comes about").is_visible()
