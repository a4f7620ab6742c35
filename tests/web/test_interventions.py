"""The view "Interventions": chips, both runs and attribution show the numbers of the API."""

import json
import re
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.service.checkpoints import write_checkpoint
from tests.service.running import PATIENCE_SECONDS, Start
from tests.web.browsing import Findings, open_view, url_of, wait_until_ready, wait_until_settled
from tests.web.conftest import OpenPage
from tests.web.reading import NO_BREAK, TINY, percent, read_number, shown

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

PROMPT = "It was a dark night, and the captain"
EDITS: list[dict[str, Any]] = [
    {"stage": "blocks.5.attn.z", "op": "zero", "heads": [2], "positions": "last"},
    {"stage": "blocks.2.mlp_out", "op": "scale", "factor": 0.5},
]


def post(base: str, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def both_runs(base: str, edits: list[dict[str, Any]] = EDITS, position: int = -1) -> dict[str, Any]:
    fields: dict[str, Any] = {"stages": ["*.resid_post", "logits"], "detail": "none", "top_k": 1000}
    return post(base, "/forward", prompt=PROMPT, positions=[position], edits=edits, baseline=True, **fields)


def rows_of(page: "Page", table: int, within: str = "edit-comparison") -> list[list[str]]:
    rows = page.locator(f"{within} table.bars").nth(table).locator("tbody tr").all()
    return [row.locator("th, td").all_inner_texts() for row in rows]


def field(page: "Page", name: str) -> "Locator":
    return page.locator(f"edit-form [name={name}]")


def open_edits(page: "Page", base: str, **params: str | int) -> None:
    """Open the view with the form that adds any edit."""
    open_view(page, base, "edits", prompt=PROMPT, **params)
    page.get_by_text("Other edits").click()


def add_edit(page: "Page", words: str) -> None:
    """Add the edit of the form, and wait for a chip with these words."""
    page.get_by_role("button", name="Add this edit").click()
    page.locator(".chip", has_text=words).wait_for()
    wait_until_ready(page)


def bar_starts(page: "Page") -> list[tuple[float, float]]:
    """Measure the start and the length of each bar in the first table of the attribution, in percent of its cell."""
    bars = page.locator("direct-attribution table.bars").first.locator(".bar").all()
    script = "bar => [parseFloat(bar.style.marginLeft), parseFloat(bar.style.width)]"
    return [tuple(bar.evaluate(script)) for bar in bars]


def test_both_runs_stand_side_by_side_with_their_differences(page: "Page", base: str) -> None:
    open_view(page, base, "edits", prompt=PROMPT, edits=json.dumps(EDITS))
    answer = both_runs(base)
    plain, edited = (
        {each["id"]: each for each in run["predictions"][0]["top"]} for run in (answer["baseline"], answer)
    )
    named = [*list(plain)[:10], *list(edited)[:10]]
    size = {key: max(run[key]["probability"] for run in (plain, edited) if key in run) for key in named}
    ids = sorted(size, key=lambda key: -size[key])
    rows = rows_of(page, 0)
    assert len(rows) == len(ids)
    by_text = {row[0]: row for row in rows}
    for key in ids:
        row = by_text[shown(plain[key]["text"])]
        before, after = plain[key]["probability"], edited[key]["probability"]
        assert row[2:4] == [percent(before), percent(after)]
        assert abs(read_number(row[4]) - 100 * (after - before)) < 0.06
        assert (
            abs(read_number(row[5]) - (edited[key]["logit"] - plain[key]["logit"]))
            < 6e-4 * abs(read_number(row[5])) + 1e-9
        )
    headings = page.locator("edit-comparison thead").first.inner_text()
    assert "difference, percentage points" in headings
    longest = max(size.values())
    assert f"The longest bar is {percent(longest)}." in page.locator("edit-comparison p.faint").first.inner_text()
    said = page.locator("edit-comparison .answer").inner_text()
    assert percent(max(each["probability"] for each in edited.values())) in said
    assert f"{answer['baseline']['loss']['mean']:.4g}" in page.locator("edit-comparison").inner_text()


def test_a_token_below_the_listed_ones_has_a_bound_with_one_sign(page: "Page", base: str) -> None:
    open_view(page, base, "edits", prompt=PROMPT)
    texts = page.evaluate(
        """([values]) => values.map((last) => {
          const comparison = document.createElement("edit-comparison");
          document.body.append(comparison);
          const run = (id, rest) => ({ predictions: [{ position: 0, top: [
            { id, text: String(id), probability: 0.9, logit: 1 }, ...rest] }], loss: { mean: 1 } });
          const other = { id: 3, text: "3", probability: last, logit: 0 };
          comparison.show({ ...run(1, [other]), baseline: run(2, [other]), tokens: [{ text: "a" }], changes: [] });
          return comparison.querySelector("tbody tr").cells[3].textContent;
        })""",
        [[0.00001, 0.02]],
    )
    assert texts == [TINY, f"≤{NO_BREAK}{percent(0.02)}"]


def test_bars_say_how_far_each_stage_moved(page: "Page", base: str) -> None:
    open_view(page, base, "edits", prompt=PROMPT, edits=json.dumps(EDITS), pos=4)
    changes = both_runs(base, position=4)["changes"]
    rows = rows_of(page, 1)
    assert [row[0] for row in rows] == [*(f"after L{layer}" for layer in range(6)), "logits"]
    for row, change in zip(rows, changes, strict=True):
        assert row[2] == percent(change["relative"])
        assert abs(read_number(row[3]) - change["norm"]) <= 6e-4 * change["norm"]


def test_chips_are_added_and_removed_and_the_address_has_them(page: "Page", base: str) -> None:
    open_edits(page, base)
    assert page.locator("edit-comparison .answer").inner_text().startswith("Without edits, the most likely token")
    field(page, "layer").select_option("5")
    field(page, "head").select_option("2")
    add_edit(page, "Set L5 H2 to zero")
    field(page, "op").select_option("scale")
    field(page, "part").select_option("mlp_out")
    field(page, "factor").fill("0.5")
    field(page, "positions").fill("0, 2-3")
    add_edit(page, "Multiply the feed-forward output of L5 at positions 0, 2\N{EN DASH}3 by 0.5")
    text = page.evaluate("new URLSearchParams(location.hash.slice(1)).get('edits')")
    assert json.loads(text) == [
        {"stage": "blocks.5.attn.z", "op": "zero", "heads": [2]},
        {"stage": "blocks.5.mlp_out", "op": "scale", "positions": [0, [2, 3]], "factor": 0.5},
    ]
    page.reload()
    wait_until_ready(page)
    assert page.locator(".chip").count() == 2
    page.get_by_role("button", name="Remove: Set L5 H2 to zero").click()
    page.locator(".chip", has_text="Set L5").wait_for(state="detached")
    wait_until_ready(page)
    assert page.locator(".chip").count() == 1
    page.go_back()
    page.locator(".chip", has_text="Set L5").wait_for()


def test_a_patch_takes_numbers_from_another_prompt(page: "Page", base: str) -> None:
    other = "It was a dark night, and the lady"
    open_edits(page, base)
    field(page, "op").select_option("patch")
    field(page, "part").select_option("resid_post")
    field(page, "layer").select_option("3")
    field(page, "source").fill(other)
    field(page, "positions").fill("last")
    add_edit(page, f"Take the residual stream after L3 at the last position from the prompt “{other}”")
    edit = {"stage": "blocks.3.resid_post", "op": "patch", "positions": "last", "source": {"prompt": other}}
    best = both_runs(base, [edit])["predictions"][0]["top"][0]
    assert percent(best["probability"]) in page.locator("edit-comparison .answer").inner_text()


def test_a_stored_vector_is_added(page: "Page", tmp_path: Path, start: Start) -> None:
    save_file({"vector": 5 * torch.ones(256)}, tmp_path / "upward.safetensors")
    service = start(model="bundled", vectors=str(tmp_path))
    base = str(service.client.base_url).rstrip("/")
    open_edits(page, base)
    field(page, "op").select_option("add")
    field(page, "part").select_option("resid_post")
    field(page, "scale").fill("-2")
    add_edit(page, "Add -2 \N{MULTIPLICATION SIGN} the vector “upward” to the residual stream after L0")
    edit = {"stage": "blocks.0.resid_post", "op": "add", "vector": "upward", "scale": -2}
    best = both_runs(base, [edit])["predictions"][0]["top"][0]
    assert percent(best["probability"]) in page.locator("edit-comparison .answer").inner_text()


def test_attribution_has_the_shares_of_the_service_and_a_part_can_be_ablated(page: "Page", base: str) -> None:
    open_view(page, base, "edits", prompt=PROMPT, explain=" was", minus=" had")
    answer = post(base, "/attribute", method="direct", prompt=PROMPT, token=" was", minus=" had")
    heads = {f"L{i} H{j}": v for i, layer in enumerate(answer["layers"]) for j, v in enumerate(layer["heads"])}
    shares = heads | {f"L{i} FFN": layer["mlp"] for i, layer in enumerate(answer["layers"])}
    rows = rows_of(page, 0, "direct-attribution")
    largest = sorted(shares, key=lambda name: -abs(shares[name]))[:10]
    assert [row[0] for row in rows] == [
        *largest, "the 44 other parts", "token embedding", "rounding", "sum: the difference"
    ]  # fmt: skip
    assert abs(read_number(rows[11][2]) - answer["embed"]) <= 6e-4 * abs(answer["embed"])
    assert abs(read_number(rows[13][2]) - answer["logit"]) <= 6e-4 * abs(answer["logit"])
    assert abs(sum(read_number(row[2]) for row in rows[:13]) - answer["logit"]) < 0.01
    starts = bar_starts(page)
    assert len(starts) == 12  # rounding is no share, and the sum has no bar
    zero = max(start for start, _ in starts)
    for row, (start, length) in zip(rows, starts, strict=False):
        end = start + length if row[2].startswith("\N{MINUS SIGN}") else start
        assert abs(end - zero) < 0.01
    for row in rows[:10]:
        assert abs(read_number(row[2]) - shares[row[0]]) <= 6e-4 * abs(shares[row[0]])
    said = page.locator("direct-attribution .answer").inner_text()
    assert said.startswith(f"Without edits, {rows[0][0]} ")
    assert "“␣was” (id " in said
    assert "“␣had” (id " in said
    layer, head = re.findall(r"\d+", next(row[0] for row in rows if " H" in row[0]))
    page.get_by_role("button", name=f"Ablate L{layer} H{head}").click()
    page.locator(".chip", has_text=f"Set L{layer} H{head} to zero").wait_for()
    wait_until_ready(page)


def test_a_small_vocabulary_is_no_obstacle(page: "Page", tmp_path: Path, start: Start) -> None:
    base = str(start(model=str(write_checkpoint(tmp_path / "tiny"))).client.base_url).rstrip("/")
    open_view(page, base, "edits", edits=json.dumps([{"stage": "blocks.1.mlp_out", "op": "zero"}]))
    assert len(rows_of(page, 0)) >= 10


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"edits": "[{"}, "JSON"),
        ({"edits": "{}"}, "a list of objects"),
        ({"edits": json.dumps([{"stage": "blocks.9.mlp_out", "op": "zero"}])}, "blocks.9.mlp_out"),
        ({"edits": json.dumps([{"stage": "blocks.0.attn.z", "op": "zero", "heads": [99]}])}, "99"),
        ({"pos": 99}, "99"),
        ({"explain": "two words"}, "token"),
    ],
)
def test_a_wrong_edit_position_or_token_is_an_error(
    page: "Page", base: str, findings: Findings, params: dict[str, str | int], said: str
) -> None:
    page.goto(url_of(base, "edits", **params))
    assert wait_until_settled(page) == "error"
    assert said in page.locator("#error").inner_text()
    assert all("status of 4" in finding for finding in findings)
    findings.clear()


def test_an_edit_that_cannot_work_is_not_added(page: "Page", base: str, findings: Findings) -> None:
    open_edits(page, base)
    add = page.get_by_role("button", name="Add this edit")
    message = page.locator("#edit-message")
    field(page, "positions").fill("here")
    add.click()
    assert "“here” is neither a position nor a range" in message.inner_text()
    assert field(page, "positions").get_attribute("aria-describedby") == "edit-message"
    field(page, "positions").fill("99")
    assert message.is_hidden()
    add.click()
    page.locator("#edit-message", has_text="edits.0.positions").wait_for()
    field(page, "positions").fill("all")
    field(page, "op").select_option("patch")
    add.click()
    assert message.inner_text() == "Write the prompt from which the numbers are taken."
    assert field(page, "source").get_attribute("aria-invalid") == "true"
    field(page, "source").fill("A prompt of another length, which is longer")
    add.click()
    page.locator("#edit-message", has_text="edits.0.source.positions").wait_for()
    assert page.locator(".chip").count() == 0
    assert page.evaluate("location.hash").count("edits") == 1  # the view
    assert all("status of 4" in finding for finding in findings)
    findings.clear()


def test_a_patch_says_which_positions_it_copies(page: "Page", base: str) -> None:
    other = "It was a dark night, and the lady of the house"
    open_edits(page, base)
    here, there = (post(base, "/tokenize", text=text) for text in (PROMPT, other))
    field(page, "op").select_option("patch")
    field(page, "source").fill(other)
    field(page, "positions").fill("last")
    field(page, "positions").blur()
    counts = f"This prompt has {here['count']} tokens, and the other one {there['count']}."
    ends = [f"{each['tokens'][-1]['position']} “{shown(each['tokens'][-1]['text'])}”" for each in (here, there)]
    page.locator(
        ".edit-patch", has_text=f"{counts} Copied (this prompt ← other prompt): {' ← '.join(ends)}."
    ).wait_for()
    field(page, "positions").fill("all")
    field(page, "positions").blur()
    page.locator(".edit-patch", has_text=f"it would copy {there['count']} positions to {here['count']}").wait_for()


def test_an_error_of_the_edits_leaves_no_earlier_numbers_and_keeps_the_request(
    page: "Page", base: str, findings: Findings
) -> None:
    open_edits(page, base)
    page.get_by_text("Edits as JSON").click()
    page.get_by_label("All edits as JSON").fill('[{"stage": "blocks.9.mlp_out", "op": "zero"}]')
    page.get_by_role("button", name="Apply the JSON").click()
    page.locator("body[data-state=error]").wait_for()
    assert page.locator("edit-comparison").inner_text().strip() == ""
    assert page.locator("both-texts").inner_text().strip() == ""
    assert page.locator("direct-attribution").is_hidden()
    page.get_by_role("button", name="Copy as curl").click()
    page.locator("export-bar pre", has_text="blocks.9.mlp_out").wait_for()
    page.get_by_role("button", name="Remove: ").click()
    wait_until_ready(page)
    assert "Without edits" in page.locator("edit-comparison").inner_text()
    findings.clear()


def test_there_is_one_bar_for_exports_although_its_module_arrives_after_the_view(
    page: "Page", base: str, held: list["Route"]
) -> None:
    page.route("**/export.js", lambda route: held.append(route))
    open_view(page, base, "edits", prompt=PROMPT, edits=json.dumps(EDITS))  # asks for the bar at two moments
    held[0].continue_()
    page.get_by_role("button", name="Copy as curl").first.wait_for()
    assert page.locator("export-bar").count() == 1


def test_the_edited_pass_is_complete_while_the_shares_are_computed(
    page: "Page", base: str, held: list["Route"]
) -> None:
    page.route("**/attribute", lambda route: held.append(route))
    with page.expect_request("**/attribute"):
        page.goto(url_of(base, "edits", prompt=PROMPT, edits=json.dumps(EDITS)))
    page.get_by_text("Computing the shares").wait_for()
    assert rows_of(page, 0)
    assert page.locator("#title").evaluate("title => getComputedStyle(title, '::after').content") == "none"
    page.get_by_role("button", name="Copy and download").wait_for()
    held[0].continue_()
    wait_until_ready(page)
    assert page.get_by_text("Computing the shares").is_hidden()
    assert rows_of(page, 0, "direct-attribution")


def test_the_most_likely_token_is_explained_at_once(page: "Page", base: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    open_view(page, base, "edits", prompt=PROMPT, edits=json.dumps(EDITS))
    best = both_runs(base)["baseline"]["predictions"][0]["top"][0]
    answer = post(base, "/attribute", method="direct", prompt=PROMPT, token=best["id"])
    said = page.locator("direct-attribution").inner_text()
    assert f"“{shown(best['text'])}” (id {best['id']})" in said
    assert f"Sum of all shares: {answer['total']:.4g}; the logit: {answer['logit']:.4g}" in said
    assert sum(url.endswith("/attribute") for url in asked) == 1


def test_a_token_without_its_space_gets_a_hint(page: "Page", base: str) -> None:
    open_view(page, base, "edits", prompt=PROMPT, explain="the")
    meant = post(base, "/tokenize", text=" the")["tokens"][0]
    hint = page.locator("direct-attribution", has_text=f"Did you mean “␣the” (id {meant['id']})")
    assert hint.count() == 1
    page.get_by_role("button", name="“␣the”").click()
    page.locator("direct-attribution .answer", has_text=f"“␣the” (id {meant['id']})").wait_for()
    wait_until_ready(page)
    assert hint.count() == 0


def test_no_column_is_cut_off_on_a_phone(open_page: OpenPage, base: str) -> None:
    page = open_page(phone=True)
    open_view(page, base, "edits", prompt=PROMPT, edits=json.dumps(EDITS))
    tables = page.locator(".scroll:has(> table.bars)").all()
    assert tables
    for table in tables:
        assert table.evaluate("box => box.scrollWidth - box.clientWidth") <= 0


def edits_of(page: "Page") -> list[dict[str, Any]]:
    """The edits as the page has them."""
    edits: list[dict[str, Any]] = json.loads(page.get_by_label("All edits as JSON").input_value())
    return edits
