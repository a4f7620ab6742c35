"""The view "Network" with edits: where they act, what they change, and which numbers the page shows without them."""

import json
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.service.running import Running
from tests.web.browsing import open_table, open_view, wait_until_ready
from tests.web.reading import SIGNIFICANT, percent, quoted, read_number, shown
from tests.web.test_network import PROMPT, lens_of, texts_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

EDITS = [{"stage": "blocks.2.attn_out", "op": "zero"}]


def test_an_edited_number_says_so_and_has_the_number_without_the_edit(
    page: "Page", bundled: Running, base: str
) -> None:
    stage = "blocks.2.attn_out"
    open_view(page, base, "network", prompt=PROMPT, edits=json.dumps(EDITS), at=stage, cell=20)
    (plain,) = bundled.answer("/forward", prompt=PROMPT, stages=[stage], detail="values")["stages"]
    panel = page.locator("cell-arithmetic")
    assert read_number(panel.locator("output").inner_text()) == 0
    before = plain["values"][0][-1][20]
    words = panel.get_by_text("Without the edits").inner_text()
    assert read_number(words) == pytest.approx(before, rel=SIGNIFICANT)
    assert "Changed by an edit: Set the attention output of L2 to zero." in panel.inner_text()
    assert panel.locator(".differs").count() == 0
    would = re.search(r"The formula would give (\S+)\.$", panel.inner_text(), re.MULTILINE)
    assert would is not None
    assert read_number(would[1]) == pytest.approx(before, rel=0.02)


def test_the_predictions_are_those_with_the_edits_and_those_without(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT, edits=json.dumps(EDITS))
    assert "1 edit is applied." in page.locator("#edits-note").inner_text()
    edited, plain = (
        bundled.answer("/forward", prompt=PROMPT, stages=["loss"], top_k=2, **fields)["predictions"]
        for fields in ({"edits": EDITS}, {})
    )
    parts = page.locator("network-view .answer").inner_text().split("; without the edits, ")
    for part, predictions in zip(parts, (edited, plain), strict=True):
        best = predictions[-1]["top"][0]
        assert f"{quoted(best['text'])} ({percent(best['probability'])})" in part
    table = open_table(page.locator("network-view > details.data-table")).all()
    for row, with_edits, without in zip(table, edited, plain, strict=True):
        texts = row.locator("td").all_inner_texts()[-2:]
        tops = [each["top"][0] for each in (with_edits, without)]
        assert texts == [f"{shown(top['text'])} {percent(top['probability'])}" for top in tops]
    changed = [
        (without["top"][0]["text"], with_edits["top"][0]["text"])
        for with_edits, without in zip(edited, plain, strict=True)
        if with_edits["top"][0]["text"] != without["top"][0]["text"]
    ]
    assert changed
    texts = [each["text"] for each in texts_of(page, base, edits=json.dumps(EDITS))]
    assert all(f"{shown(before)} → {shown(after)}" in texts for before, after in changed)


def test_the_lens_shows_the_edited_pass_and_both_while_the_change_is_shown(
    page: "Page", bundled: Running, base: str
) -> None:
    edits = [{"stage": "blocks.5.mlp_out", "op": "zero"}]
    state = {"edits": json.dumps(edits)}
    edited, plain = (
        [layer["positions"][0]["top"][0]["text"] for layer in lens_of(bundled, -1, **fields)]
        for fields in ({"edits": edits}, {})
    )
    assert edited[-1] != plain[-1]
    texts = [each["text"] for each in texts_of(page, base, **state)]
    lens = texts[texts.index("expects") :]
    assert {shown(each) for each in edited[1:]} <= set(lens)  # that of the embedding needs room
    assert not [text for text in lens if "→" in text]
    page.goto("about:blank")
    texts = [each["text"] for each in texts_of(page, base, **state, show="change")]
    lens = texts[texts.index("expects") :]
    (both,) = (text for text in lens if "→" in text)
    assert f"{shown(plain[-1])} → {shown(edited[-1])}".startswith(both.removesuffix("…"))
    behind = [{"stage": "ln_final.out", "op": "scale", "factor": 2}]
    page.goto("about:blank")
    texts = [each["text"] for each in texts_of(page, base, edits=json.dumps(behind))]
    assert "expects" not in texts  # the lens does not see this edit


def test_the_change_is_what_the_edits_add_to_each_number(page: "Page", bundled: Running, base: str) -> None:
    state = {"prompt": PROMPT, "edits": json.dumps(EDITS), "show": "change"}
    for stage in ("blocks.1.mlp_out", "blocks.2.attn_out", "blocks.3.resid_mid"):
        open_view(page, base, "network", **state, at=stage)
        edited, plain = (
            np.array(
                bundled.answer("/forward", prompt=PROMPT, stages=[stage], detail="values", **fields)["stages"][0][
                    "values"
                ][0]
            )
            for fields in ({"edits": EDITS}, {})
        )
        rows = open_table(page.locator("network-view > details.data-table"))
        found = [[read_number(each) for each in row.locator("td").all_inner_texts()[:8]] for row in rows.all()]
        assert np.array(found) == pytest.approx((edited - plain)[:, :8], rel=SIGNIFICANT, abs=1e-6)
        assert np.any(edited != plain) == (stage != "blocks.1.mlp_out")
    assert "With the edits \u2212 without" in page.locator(".network-legend").inner_text()


COLOURS = """(names) => {
  const { strips, line, layout, pass } = document.querySelector("network-canvas").scene;
  return names.map((name) => {
    const item = line.items.find((each) => each.name === name);
    const { canvas } = strips.get(item, [0, item.columns], layout.rows, 1e5);
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Set(new Uint32Array(data.buffer)).size;
  });
}"""


def test_the_picture_shows_where_the_change_begins_and_the_switch_shows_the_numbers_again(
    page: "Page", base: str
) -> None:
    """Before the edit, a stage has one colour, that of no change, and nothing where it has no numbers."""
    page.emulate_media(reduced_motion="reduce")
    names = ["blocks.1.mlp.post", "blocks.1.resid_post", "blocks.2.attn_out", "blocks.5.resid_post"]
    open_view(page, base, "network", prompt=PROMPT, edits=json.dumps(EDITS))
    assert all(size > 20 for size in page.evaluate(COLOURS, names)[:2])
    switch = page.get_by_role("switch", name="Show the change")
    switch.check()
    page.wait_for_url("**show=change**")
    wait_until_ready(page)
    before, unchanged, first, last = page.evaluate(COLOURS, names)
    assert before <= 2 >= unchanged
    assert min(first, last) > 20
    page.get_by_role("button", name="Copy as curl").click()
    code = page.get_by_label("The copied text").inner_text()
    assert json.dumps(EDITS, separators=(",", ":")) in code
    assert '"baseline":true' in code
    switch.uncheck()
    wait_until_ready(page)
    assert "show=" not in page.url
    assert page.evaluate(COLOURS, names)[0] > 20
    page.get_by_role("button", name="Remove the edit").click()
    wait_until_ready(page)
    assert switch.is_hidden()
    assert "without the edits" not in page.locator("network-view").inner_text()


def test_the_river_of_a_change_begins_where_the_edit_is_added(page: "Page", base: str) -> None:
    """From afar, it grows at the end of the layer, and not before the sign of the edit."""
    page.emulate_media(reduced_motion="reduce")
    open_view(page, base, "network", prompt=PROMPT, edits=json.dumps(EDITS), show="change")
    found = page.evaluate("""async () => {
      const { drawRivers } = await import("/page/network/river.js");
      const { scene } = document.querySelector("network-canvas");
      const { layout, line, row } = scene;
      const points = drawRivers(scene).get(row).map(({ along, half }) => ({ along, half }));
      const sign = layout.startOf(line.items.findIndex(({ name }) => name === "blocks.2.attn_out"));
      return { points, sign, end: layout.startOf(line.blocks[2].last) };
    }""")
    sizes = [(point["along"], point["half"]) for point in found["points"]]
    before = max(along for along, half in sizes if half <= 1)
    assert found["sign"] < before <= found["end"]
    assert max(half for along, half in sizes if along >= found["end"]) > 1


def test_a_change_of_values_has_bands_although_the_attention_is_the_same(
    page: "Page", bundled: Running, base: str
) -> None:
    values, pattern = "blocks.2.attn.v", "blocks.2.attn.pattern"
    edits = [{"stage": values, "op": "zero", "positions": [1]}]
    page.emulate_media(reduced_motion="reduce")
    open_view(page, base, "network", prompt=PROMPT, edits=json.dumps(edits), show="change")
    found = page.evaluate("""async () => {
      const { sharesOf } = await import("/page/network/bands.js");
      const { pass, row } = document.querySelector("network-canvas").scene;
      return [null, 5].map((head) => sharesOf(pass, 2, row, head));
    }""")
    answer = bundled.answer("/forward", prompt=PROMPT, stages=[values, pattern], detail="values")
    numbers = {stage["name"]: np.array(stage["values"][0]) for stage in answer["stages"]}
    lengths = np.linalg.norm(numbers[values], axis=-1)  # (position, key head)
    usual = np.mean(np.sqrt(np.mean(lengths**2, axis=1)))
    weights = numbers[pattern][:, -1, 1]  # (head,)
    expected = -weights * lengths[1, np.arange(8) // 4] / usual
    for shares, size in zip(found, (expected.mean(), expected[5]), strict=True):
        assert {each["key"] for each in shares} == {1}
        assert shares[0]["weight"] == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize("at", ["", "L2", "blocks.2.attn.z"])
def test_a_sign_stands_where_an_edit_acts(page: "Page", base: str, at: str) -> None:
    edits = [{"stage": "blocks.2.attn.z", "op": "zero", "heads": [3], "positions": [1, -1]}]
    page.emulate_media(reduced_motion="reduce")
    open_view(page, base, "network", prompt=PROMPT, at=at, edits=json.dumps(edits))
    count, frames = page.evaluate("""async () => {
      const { palette } = document.querySelector("network-canvas").scene;
      const { fill, strokeRect } = CanvasRenderingContext2D.prototype;
      const ink = document.createElement("canvas").getContext("2d");
      ink.fillStyle = palette.edit;
      const found = [0, 0];
      CanvasRenderingContext2D.prototype.fill = function (...all) {
        if (this.fillStyle === ink.fillStyle) found[0] += 1;
        return fill.apply(this, all);
      };
      CanvasRenderingContext2D.prototype.strokeRect = function (...all) {
        if (this.strokeStyle === ink.fillStyle) found[1] += 1;
        return strokeRect.apply(this, all);
      };
      document.querySelector("network-canvas").redraw();
      await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
      return found;
    }""")
    assert count == 2  # rows
    assert frames == (0 if at == "" else 2)  # from near, around one head of each row
