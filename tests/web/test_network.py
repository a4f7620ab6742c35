"""The view "Network": its numbers are those of the service, and every sum that it shows equals the served number."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from model.worked_examples import WORKED_EXAMPLES
from tests.service.checkpoints import NUM_TOKENS
from tests.service.running import Running, running
from tests.web.browsing import open_table, open_view, url_of, wait_for, wait_until_ready, wait_until_settled
from tests.web.reading import SIGNIFICANT, percent, quoted, read_number, shown
from tests.web.test_families import FAMILIES, post, write_family

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request, Route

PROMPT = "The captain was in the"
CONTEXT = 64
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    family: {"vocab_size": NUM_TOKENS, "max_position_embeddings": CONTEXT}
    for family in ("qwen3", "gemma3_text", "olmo2", "phi3", "gpt_neox")
}
# What the page cannot compute: the input of these norms is not a stage, and of experts only the sum is one.
UNEXPLAINED = re.compile(
    r"pos_embed|ln[12]_post\.(scale|normalized)|expert_indices|attn\.[qk]_norm\.(scale|normalized)"
)
# Explain some numbers of each stage in the browser: the first, the last, and some between.
EXPLAIN = """async ([model, prompt, edits]) => {
  const files = ["pass.js", "arithmetic/explain.js", "arithmetic/prediction.js"].map((file) => `network/${file}`);
  const [{ Pass }, { explain }, { explainPrediction }, { architectureOf, isWorkedExample }] =
    await Promise.all([...files, "articles.js"].map((file) => import(`/page/${file}`)));
  const { models } = await (await fetch("/models")).json();
  const served = await (await fetch("/model")).json();
  const service = { models, model: served.error ? null : served };
  const { signal } = new AbortController();
  const body = { ...(model ? { model } : {}), prompt, ...(edits.length > 0 && { edits }) };
  const pass = isWorkedExample(service, model)
    ? await Pass.ofExample(body, signal)
    : await Pass.ofModel(body, service.model, () => true, null, signal);
  const architecture = architectureOf(service, model);
  const found = [];
  const keep = ({ place, explanation }, name) => {
    const { row, head, within, served } = place;
    const { computed = null, slack = 0 } = explanation ?? {};
    const isEdited = pass.editsAt(name, row, head, within).length > 0;
    found.push({ name, row, head, within, served: Number.isFinite(served) ? served : null, computed, slack, isEdited });
  };
  for (const { name, heads, columns } of pass.stages.values()) {
    if (["logits", "probabilities", "loss"].includes(name)) continue;
    const [last, end] = [heads * columns - 1, pass.tokens.length - 1];
    for (const [row, share] of [[0, 0], [end, 1], [2, 0.4], [1, 0.7]])
      keep(await explain(pass, architecture, { name, row, column: Math.floor(share * last) }, signal), name);
  }
  for (const id of [0, 2]) {
    const [logit, probability] = await explainPrediction(pass, architecture, { row: 1, id }, signal);
    keep(logit, "logits");
    keep(probability, "probabilities");
  }
  return found;
}"""


def number_at(stage: dict[str, Any], row: int, head: int, within: int) -> float | None:
    """One number of a stage in an answer of `/forward`."""
    values = stage["values"][0]
    dims = [dim for dim in stage["dims"] if dim != "batch"]
    for dim in dims:
        values = values[{"position": row, "query": row, "head": head, "kv_head": head}.get(dim, within)]
    found: float | None = values
    return found


def check_arithmetic(
    page: "Page", base: str, model: str | None, prompt: Any, edits: tuple[dict[str, Any], ...] = ()
) -> list[dict[str, Any]]:
    """Check the sum of each number that no edit replaces. Returns all numbers."""
    open_view(page, base, "status")
    found: list[dict[str, Any]] = page.evaluate(EXPLAIN, [model, prompt, edits])
    named = {**({"model": model} if model else {}), **({"edits": edits} if edits else {})}
    answer = post(base, "/forward", prompt=prompt, detail="values", top_k=0, **named)
    stages = {stage["name"]: stage for stage in answer["stages"] if stage.get("dims")}
    assert {each["name"] for each in found} == set(stages) - {"loss"}
    wrong: list[str] = []
    for each in found:
        expected = number_at(stages[each["name"]], each["row"], each["head"], each["within"])
        is_served = each["served"] == (expected if expected is None else pytest.approx(expected, rel=1e-6))
        if each["isEdited"]:
            is_right = True
        elif each["computed"] is None:
            is_open = UNEXPLAINED.search(each["name"]) or is_sum_of_experts(each["name"], stages)
            is_right = expected is None or is_open is not None
        else:
            is_close = each["computed"] == pytest.approx(each["served"], abs=each["slack"], rel=0)
            is_right = is_close and each["slack"] <= max(0.04 * abs(each["served"]), 0.04)
        if not (is_served and is_right):
            wrong.append(f"{each} but the service has {expected}")
    assert wrong == []
    return found


def is_sum_of_experts(name: str, stages: dict[str, Any]) -> bool | None:
    return True if name.endswith("mlp_out") and name.replace("mlp_out", "mlp.router_logits") in stages else None


def test_every_sum_of_the_bundled_model_is_the_number_of_the_service(page: "Page", base: str) -> None:
    check_arithmetic(page, base, None, PROMPT)


def test_every_sum_of_an_edited_pass_is_the_number_of_the_service_but_where_an_edit_acts(
    page: "Page", base: str
) -> None:
    edits = (
        {"stage": "blocks.1.attn_out", "op": "zero"},
        {"stage": "blocks.2.attn.z", "op": "scale", "factor": -1, "heads": [0, 7]},
        {"stage": "blocks.3.mlp.post", "op": "set", "value": 0.5, "positions": "last", "neurons": [0, 671]},
        {"stage": "blocks.4.resid_pre", "op": "noise", "std": 0.5, "positions": [[1, 2]]},
        {"stage": "*.ln2.scale", "op": "scale", "factor": 2, "positions": [0]},
        {"stage": "blocks.4.attn.rot_k", "op": "zero", "heads": [5]},
    )
    found = check_arithmetic(page, base, None, PROMPT, edits)
    places = {(each["name"], each["row"], each["head"]) for each in found if each["isEdited"]}
    last = max(each["row"] for each in found)
    assert {name for name, _, _ in places} >= {"blocks.1.attn_out", "blocks.2.attn.z", "blocks.5.ln2.scale"}
    assert {head for name, _, head in places if name == "blocks.2.attn.z"} == {0, 7}
    assert {head for name, _, head in places if name == "blocks.4.attn.rot_k"} == {1}  # the key head of query head 5
    assert {row for name, row, _ in places if name == "blocks.3.mlp.post"} == {last}
    assert {row for name, row, _ in places if name == "blocks.4.resid_pre"} == {1, 2}
    assert {row for name, row, _ in places if name == "blocks.5.ln2.scale"} == {0}
    moved = [each for each in found if each["isEdited"] and abs(each["computed"] - each["served"]) > each["slack"]]
    assert len(moved) > 10  # the formula does not give these


@pytest.mark.parametrize("name", WORKED_EXAMPLES)
def test_every_sum_of_a_worked_example_is_the_number_of_the_service(page: "Page", base: str, name: str) -> None:
    words = WORKED_EXAMPLES[name].vocabulary
    check_arithmetic(page, base, name, " ".join(words[each] for each in WORKED_EXAMPLES[name].prompt_ids))


@pytest.fixture(scope="module", params=[*FAMILIES, *MORE_FAMILIES])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service with a tiny checkpoint of a family."""
    directory: Path = tmp_path_factory.mktemp("family")
    with pytest.MonkeyPatch.context() as patch:
        for name, options in MORE_FAMILIES.items():
            patch.setitem(FAMILIES, name, options)
        write_family(directory, request.param)
    with running(model=str(directory)) as service:
        yield str(service.client.base_url).rstrip("/")


def test_every_sum_of_every_family_is_the_number_of_the_service(page: "Page", family: str) -> None:
    check_arithmetic(page, family, None, "a bc")


def test_a_score_is_spelled_out_and_leads_to_its_query_and_back(page: "Page", bundled: Running, base: str) -> None:
    stage = "blocks.3.attn.scores"
    count = len(bundled.answer("/tokenize", prompt=PROMPT)["tokens"])
    open_view(page, base, "network", prompt=PROMPT, at=stage, position=4, cell=2 * count + 1)
    answer = bundled.answer("/forward", prompt=PROMPT, stages=[stage, "blocks.3.attn.rot_*"], detail="values")
    by_name = {each["name"]: each["values"][0] for each in answer["stages"]}
    scores, queries = (by_name[stage], by_name["blocks.3.attn.rot_q"])
    panel = page.locator("cell-arithmetic")
    assert read_number(panel.locator("output").inner_text()) == pytest.approx(scores[2][4][1], rel=SIGNIFICANT)
    assert "✓" in panel.inner_text()
    term = panel.locator("tbody tr").first
    index = int(term.locator("th").inner_text())
    number = term.get_by_role("button").first
    assert read_number(number.inner_text()) == pytest.approx(queries[4][2][index], rel=SIGNIFICANT)
    number.click()
    wait_until_ready(page)
    assert "at=blocks.3.attn.rot_q" in page.url
    assert read_number(panel.locator("output").inner_text()) == pytest.approx(queries[4][2][index], rel=SIGNIFICANT)
    page.go_back()
    wait_until_ready(page)
    assert read_number(panel.locator("output").inner_text()) == pytest.approx(scores[2][4][1], rel=SIGNIFICANT)


def test_the_keyboard_zooms_from_the_network_to_a_number_and_back(page: "Page", base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT)
    page.locator("network-canvas canvas").focus()
    trail = page.locator(".trail li")
    for steps in (2, 3, 4):
        page.keyboard.press("Enter")
        wait_until_ready(page)
        trail.nth(steps - 1).wait_for()
        assert trail.count() == steps
    assert page.locator("cell-arithmetic output").is_visible()
    for steps in (3, 2, 1):
        page.keyboard.press("Escape")
        wait_until_ready(page)
        trail.nth(steps).wait_for(state="detached")
    assert page.locator("cell-arithmetic").is_hidden()


def test_a_click_zooms_to_a_layer_and_the_path_leads_back(page: "Page", base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT)
    box = page.locator("network-canvas canvas").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    wait_until_ready(page)
    assert re.search(r"at=L[23]\b", page.url)
    page.get_by_role("button", name="Network", exact=True).click()
    wait_until_ready(page)
    assert "at=" not in page.url


def test_the_table_has_the_numbers_of_the_stage(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT, at="blocks.1.attn.q")
    (stage,) = bundled.answer("/forward", prompt=PROMPT, stages=["blocks.1.attn.q"], detail="values")["stages"]
    rows = open_table(page.locator("network-view > details.data-table"))
    for row, heads in zip(rows.all(), stage["values"][0], strict=True):
        expected = [number for head in heads for number in head]
        for text, number in zip(row.locator("td").all_inner_texts(), expected, strict=False):
            assert read_number(text) == pytest.approx(number, rel=SIGNIFICANT, abs=1e-9)


def test_the_answer_is_the_prediction_of_the_chosen_token(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT, position=1)
    top = bundled.answer("/forward", prompt=PROMPT, stages=["loss"])["predictions"][1]["top"]
    assert quoted_share(top[0]) in page.locator("network-view .answer").inner_text()


def quoted_share(token: dict[str, Any]) -> str:
    return f"{quoted(token['text'])} ({percent(token['probability'])})"


@pytest.mark.parametrize("position", [None, 1])
def test_each_layer_says_what_the_network_would_predict_there(
    page: "Page", bundled: Running, base: str, position: int | None
) -> None:
    """The lane below the followed token, the sentence and the table have the answer of the logit lens."""
    state: dict[str, Any] = {} if position is None else {"position": position}
    texts = [each["text"] for each in texts_of(page, base, **state)]
    layers = lens_of(bundled, -1 if position is None else position)
    best = [layer["positions"][0]["top"][0] for layer in layers]
    begin = texts.index("expects")
    found = texts[begin:]
    for token in best[1:]:  # that before the first layer has no room here, but is in the table
        assert shown(token["text"]) in found
        assert percent(token["probability"]) in found
    deciding = deciding_of(layers)
    assert deciding > 0
    said = page.locator("network-view .answer").inner_text()
    assert f"{quoted_share(best[-1])}; L{deciding - 1} decides." in said
    rows = open_table(page.locator("network-view > details.data-table"))
    row = rows.nth(bundled.answer("/tokenize", text=PROMPT)["count"] - 1 if position is None else position)
    assert [f"{shown(each['text'])} {percent(each['probability'])}" for each in best] == row.locator(
        "td"
    ).all_inner_texts()[-1 - len(best) : -1]


@pytest.mark.parametrize("width", [380, 1440])
def test_what_the_network_would_predict_after_a_layer_ends_where_the_layer_ends(
    page: "Page", bundled: Running, base: str, width: int
) -> None:
    """So the label of the last layer, which is the prediction, stands in the last layer."""
    page.set_viewport_size({"width": width, "height": 900})
    texts_of(page, base)
    ends, labels = page.evaluate("""async () => {
      const { drawLens } = await import("/page/network/lens_labels.js");
      const { scene } = document.querySelector("network-canvas");
      const { layout, plane } = scene;
      const edges = layout.line.blocks.map(({ first, last }) => [first, last + 1].map((at) => layout.startOf(at)));
      const before = CanvasRenderingContext2D.prototype.fillText;
      const labels = [];
      const [origin] = plane.point(0, 0), [, top] = plane.point(0, 0);
      CanvasRenderingContext2D.prototype.fillText = (text, x, y) =>
        labels.push({ text, along: plane.isDown ? y - top : x - origin });
      drawLens(scene);
      CanvasRenderingContext2D.prototype.fillText = before;
      return [edges, labels.filter(({ text }) => text !== "expects")];
    }""")
    best = [layer["positions"][0]["top"][0] for layer in lens_of(bundled, -1)][1:]
    assert len(labels) == 2 * len(best)
    columns = [[each["text"] for each in labels if start < each["along"] < end] for start, end in ends]
    assert [shares for _, shares in columns] == [percent(token["probability"]) for token in best]
    assert columns[-1][0] == shown(best[-1]["text"])
    predicted = bundled.answer("/forward", prompt=PROMPT, stages=["loss"])["predictions"][-1]["top"][0]
    assert columns[-1] == [shown(predicted["text"]), percent(predicted["probability"])]


def lens_of(service: Running, position: int, **fields: Any) -> list[dict[str, Any]]:
    """The residuals that the logit lens decodes at a position, each with its most likely tokens."""
    asked = {"method": "logit_lens", "prompt": PROMPT, "positions": [position], "top_k": 1, **fields}
    layers: list[dict[str, Any]] = service.answer("/attribute", **asked)["layers"]
    return layers


def deciding_of(layers: list[dict[str, Any]]) -> int:
    """The first residual from which on the final prediction is the most likely token."""
    return 1 + max((at for at, layer in enumerate(layers) if layer["final"][0]["rank"] > 0), default=-1)


def test_the_first_picture_does_not_wait_for_the_logit_lens(page: "Page", base: str, held: list["Route"]) -> None:
    page.route("**/attribute", lambda route: held.append(route))
    page.goto(url_of(base, "network", prompt=PROMPT))
    said = page.locator("network-view .answer")
    said.filter(has_text="the network expects").wait_for()
    assert page.evaluate("document.querySelector('network-canvas').scene.lens") is None
    assert "decides" not in said.inner_text()
    wait_for(page, lambda: held != [], "the lens is asked")
    held[0].continue_()
    said.filter(has_text="decides").wait_for()
    assert page.evaluate("document.querySelector('network-canvas').scene.lens") is not None


def test_of_many_layers_as_many_labels_as_fit_are_drawn_with_the_deciding_and_the_last(page: "Page", base: str) -> None:
    texts_of(page, base)
    found = page.evaluate("""async () => {
      const { drawLens } = await import("/page/network/lens_labels.js");
      const { scene } = document.querySelector("network-canvas");
      const blocks = Array.from({ length: 40 }, (_, layer) => ({ layer, first: layer, last: layer }));
      const layout = {
        ...{ detail: 0, lane: 30, length: 1100, rowSize: 30, rowStart: (row) => 30 * row },
        ...{ startOf: (item) => 25 * item, line: { items: Array(42), blocks } },
      };
      const guesses = Array.from({ length: 41 }, (_, at) => ({
        top: [{ id: at, text: `t${at}`, probability: 0.5 }], isFinal: at > 20,
      }));
      window.texts = [];
      drawLens({ ...scene, layout, lens: { guesses, before: null }, front: Infinity });
      return window.texts.map(({ text }) => text).filter((text) => /^t/.test(text));
    }""")
    assert {"t21", "t40"} <= set(found)
    assert 10 < len(found) < 25


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"at": "L9"}, "no block or stage “L9”"),
        ({"at": "blocks.0.attn.nothing"}, "no block or stage"),
        ({"position": 99}, "position: 99 is out of range"),
        ({"at": "embed", "cell": 256}, "cell: 256 is out of range"),
        ({"head": 8}, "head: “8” is not one of the heads 0 to 7"),
    ],
)
def test_a_wrong_address_is_an_error(page: "Page", base: str, state: dict[str, str | int], message: str) -> None:
    page.goto(url_of(base, "network", prompt=PROMPT, **state))
    assert wait_until_settled(page) == "error"
    assert message in page.locator("#error").inner_text()


# The last column of the table: the most likely next tokens.
NEXT_IN_TABLE = """async () => {
  const { tableOf } = await import("/page/network/table.js");
  const { line, pass } = document.querySelector("network-canvas").scene;
  return tableOf({ line, pass, plain: null }, pass, "").rows.map((row) => row.at(-1));
}"""


def test_only_rows_in_sight_of_a_long_prompt_are_read(page: "Page", bundled: Running, base: str) -> None:
    """Of 400 tokens, one pass gives the numbers of those that are drawn; others are read when they are chosen."""
    bodies: list[dict[str, Any]] = []

    def note_body(request: "Request") -> None:
        if "/forward" in request.url:
            bodies.append(json.loads(request.post_data or ""))

    page.on("request", note_body)
    prompt = "the cat sat on " * 99
    predictions = bundled.answer("/forward", prompt=prompt, stages=["loss"])["predictions"]
    for requests, position in enumerate((200, 100), 1):
        open_view(page, base, "network", prompt=prompt, position=position)
        assert len(bodies) == requests
        assert position in bodies[-1]["positions"]
        assert len(bodies[-1]["positions"]) < 80
        said = page.locator("network-view .answer").inner_text()
        assert quoted_share(predictions[position]["top"][0]) in said
    named = page.evaluate(NEXT_IN_TABLE)
    assert percent(predictions[100]["top"][0]["probability"]) in named[100]
    assert named[300] == ""  # it was not in sight


def test_the_mark_under_the_pointer_leaves_the_picture_as_it_was(page: "Page", base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT)
    page.emulate_media(reduced_motion="reduce")
    canvas = page.locator("network-canvas canvas")
    drawn = "canvas => new Promise(done => requestAnimationFrame(() => done(canvas.toDataURL())))"
    page.reload()
    wait_until_ready(page)
    page.wait_for_timeout(500)
    before = canvas.evaluate(drawn)
    canvas.hover(position={"x": 500, "y": 100})
    pointed = canvas.evaluate(drawn)
    page.locator("h1").hover()
    assert pointed != before
    assert canvas.evaluate(drawn) == before


CHOSEN_CELL = """async () => {
  const { headPlaces } = await import("/page/network/strips.js");
  const { layout, line, chosen } = document.querySelector("network-canvas").scene;
  const item = line.items[chosen.item];
  const places = headPlaces(item, layout.startOf(chosen.item), layout.widthOf(chosen.item));
  const { begin, size } = places[Math.floor(chosen.column / item.columns)];
  const left = begin + (size * (chosen.column % item.columns)) / item.columns;
  return { left, right: left + size / item.columns, length: layout.length };
}"""


@pytest.mark.parametrize(
    ("stage", "cell"), [("blocks.3.attn_out", 0), ("blocks.3.attn_out", 95), ("embed", 255), ("blocks.1.attn.q", 201)]
)
def test_a_chosen_number_is_in_sight(page: "Page", base: str, stage: str, cell: int) -> None:
    page.emulate_media(reduced_motion="reduce")
    open_view(page, base, "network", prompt=PROMPT, at=stage, cell=cell)
    page.wait_for_timeout(200)
    found = page.evaluate(CHOSEN_CELL)
    assert 0 <= found["left"] < found["right"] <= found["length"]
    assert found["right"] - found["left"] > 30  # wide enough to be read


def test_a_click_on_a_name_follows_the_token_and_one_on_attention_only_zooms(page: "Page", base: str) -> None:
    page.emulate_media(reduced_motion="reduce")
    open_view(page, base, "network", prompt=PROMPT)
    canvas = page.locator("network-canvas canvas")
    gutter, across, band = page.evaluate("""() => {
      const canvas = document.querySelector("network-canvas");
      const { layout, line } = canvas.scene;
      const [along, heading] = canvas.place(0, 0);
      const bands = line.items.findIndex(({ kind }) => kind === "bands");
      return [-along, layout.rowStart(1) + layout.rowSize / 2 - heading, layout.startOf(bands) + 20];
    }""")
    canvas.click(position={"x": gutter - 20, "y": across})
    wait_for(page, lambda: "position=1" in page.url, "the second token is followed")
    wait_until_ready(page)
    assert "at=" not in page.url
    across = page.evaluate("document.querySelector('network-canvas').scene.layout.rowStart(3)") + 60
    canvas.click(position={"x": gutter + band, "y": across})
    wait_for(page, lambda: "at=L0" in page.url, "the picture zooms")
    assert "position=1" in page.url


def test_the_followed_token_is_in_sight_when_the_heading_takes_room(page: "Page", base: str) -> None:
    page.emulate_media(reduced_motion="reduce")
    prompt = PROMPT + " dark night and he saw a long red boat on the water"
    open_view(page, base, "network", prompt=prompt, at="blocks.2.attn.pattern")
    bottom, breadth = page.evaluate("""() => {
      const { layout, row } = document.querySelector("network-canvas").scene;
      return [layout.rowStart(row) + layout.rowSize, layout.breadth];
    }""")
    assert bottom <= breadth + 0.5


# Note what is written on a canvas, with its colour, and how opaque its pictures are.
NOTE_TEXTS = """() => {
  const { drawImage, fillText } = CanvasRenderingContext2D.prototype;
  [window.texts, window.alphas] = [[], []];
  CanvasRenderingContext2D.prototype.drawImage = function (...all) {
    window.alphas.push(this.globalAlpha);
    return drawImage.apply(this, all);
  };
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
    window.texts.push({ text, ink: this.fillStyle });
    return fillText.call(this, text, x, y, ...rest);
  };
}"""


def texts_of(page: "Page", base: str, prompt: str = PROMPT, **state: str | int) -> list[dict[str, Any]]:
    """The texts in the picture of the network, as it is drawn last."""
    page.emulate_media(reduced_motion="reduce")
    open_view(page, base, "network", prompt=prompt, **state)
    page.evaluate(NOTE_TEXTS)
    page.evaluate("""() => {
      document.querySelector("network-canvas").redraw();
      return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    }""")
    found: list[dict[str, Any]] = page.evaluate("window.texts")
    return found


def test_each_stage_of_a_layer_is_labelled_in_words(page: "Page", base: str) -> None:
    texts = [each["text"] for each in texts_of(page, base, at="L2")]
    assert {"Norm", "Queries", "Keys", "Values", "Scores", "Masked", "Pattern", "Attention", "Output"} <= set(texts)
    assert {"Rot. queries", "Rot. keys"} <= set(texts)
    assert not [text for text in texts if re.search(r"ln\d|[a-z]_[a-z]|mlp|attn", text)]
    page.goto("about:blank")
    overview = [each["text"] for each in texts_of(page, base)]
    assert {f"L{layer}" for layer in range(6)} <= set(overview)
    ends = ["Tokens", "Attention", "Feed-forward", "Stream", "Next token"]
    assert [overview.count(name) for name in ends] == [1] * 5  # the first layer names them for all
    assert not {"0", "1"} & set(overview)
    page.evaluate("window.texts = []")
    page.evaluate("""() => {
      const canvas = document.querySelector("network-canvas");
      canvas.move(({ layout }) => layout.zoomAt(1.6, layout.length));
      return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    }""")
    zoomed = [each["text"] for each in page.evaluate("window.texts")]
    assert "L0" not in zoomed
    assert min(zoomed.count("Attention"), zoomed.count("Feed-forward")) > 1  # not only in the first layer in sight


def test_from_afar_the_layer_under_the_pointer_has_names(page: "Page", base: str) -> None:
    texts_of(page, base)
    box = page.locator("network-canvas canvas").bounding_box()
    assert box is not None
    page.evaluate("window.texts = []")
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    page.locator("network-view .under-pointer").filter(has_text="L").wait_for()
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    texts = [each["text"] for each in page.evaluate("window.texts")]
    assert texts.count("Attention") == texts.count("Feed-forward") == texts.count("Stream") > 0
    assert "L0" not in texts  # the rest is not painted again


def test_the_wheel_scrolls_the_page_and_zooms_with_ctrl(page: "Page", base: str) -> None:
    page.set_viewport_size({"width": 1280, "height": 500})
    open_view(page, base, "network", prompt=PROMPT)
    page.locator("network-canvas canvas").hover(position={"x": 500, "y": 100})
    hint = page.locator(".wheel-hint")
    assert hint.is_hidden()
    page.mouse.wheel(0, 120)
    hint.wait_for()
    wait_for(page, lambda: page.evaluate("scrollY") > 0, "the page scrolls")
    zoom = "document.querySelector('network-canvas').scene.layout.zoom"
    assert page.evaluate(zoom) == 1
    page.keyboard.down("Control")
    page.mouse.wheel(0, -120)
    wait_for(page, lambda: page.evaluate(zoom) > 1, "the picture zooms")
    hint.wait_for(state="hidden", timeout=1000)  # it has been understood
    page.keyboard.up("Control")
    page.mouse.wheel(0, -50)
    page.wait_for_timeout(200)
    assert hint.is_hidden()  # it was said once


def test_numbers_that_can_be_read_have_their_index_above_them(page: "Page", base: str) -> None:
    texts = [each["text"] for each in texts_of(page, base, at="blocks.2.mlp.post", cell=300)]
    assert {"299", "300", "301"} <= set(texts)
    page.goto("about:blank")
    texts = [each["text"] for each in texts_of(page, base, at="blocks.2.mlp.post")]
    assert not {"299", "300", "301"} & set(texts)


def test_controls_of_a_zoomed_network_are_hidden_from_afar(page: "Page", base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT)
    bands, zoom, lessons = (
        page.get_by_label("Bands show"),
        page.get_by_role("navigation", name="Zoom"),
        page.get_by_role("button", name="Follow a token"),
    )
    assert (bands.is_visible(), zoom.is_visible(), lessons.is_visible()) == (False, False, True)
    page.locator("network-canvas canvas").press("Enter")
    page.wait_for_url("**at=L0**")
    wait_until_ready(page)
    assert (bands.is_visible(), zoom.is_visible(), lessons.is_visible()) == (True, True, False)


@pytest.mark.parametrize("stage", ["scores", "pattern"])
def test_heads_and_keys_are_named_above_scores_and_patterns(
    page: "Page", bundled: Running, base: str, stage: str
) -> None:
    texts = [each["text"] for each in texts_of(page, base, at=f"blocks.2.attn.{stage}")]
    assert {f"H{head}" for head in range(8)} <= set(texts)
    tokens = [each["text"] for each in bundled.answer("/forward", prompt=PROMPT, stages=["loss"])["tokens"]]
    for token in tokens:
        assert texts.count(token.replace(" ", "\u2423")) >= 8, (token, texts)


INKS = r"""async (stage) => {
  const { colour } = await import("/page/draw/colours.js");
  const { pass } = document.querySelector("network-canvas").scene;
  const range = pass.range(stage);
  return window.texts.flatMap(({ text, ink }) => {
    const value = Number(text.replace("\u2212", "-"));
    if (!/^\u2212?\d/.test(text) || !text.includes(".")) return [];
    return [{ ink, under: colour((value - range.low) / (range.high - range.low), "diverging") }];
  });
}"""


def contrast(one: list[int], other: list[int]) -> float:
    def luminance(colour: list[int]) -> float:
        parts = [value / 255 for value in colour]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_numbers_in_cells_can_be_read_on_their_colours(page: "Page", base: str, dark: bool) -> None:
    page.emulate_media(color_scheme="dark" if dark else "light")
    texts_of(page, base, at="blocks.3.attn_out", cell=20)
    found = page.evaluate(INKS, "blocks.3.attn_out")
    assert len(found) > 40
    assert set(page.evaluate("window.alphas")) == {1}
    for each in found:
        ink = [int(each["ink"][at : at + 2], 16) for at in (1, 3, 5)]
        assert contrast(ink, each["under"]) >= 4.5


def test_keys_that_the_mask_hides_are_grey(page: "Page", base: str) -> None:
    """Of scores, the pixels of later keys are translucent grey, and the others have colours."""
    page.emulate_media(reduced_motion="reduce")
    open_view(page, base, "network", prompt=PROMPT, at="blocks.2.attn.scores")
    found = page.evaluate("""() => {
      const { strips, line, pass } = document.querySelector("network-canvas").scene;
      const item = line.items.find(({ name }) => name === "blocks.2.attn.scores");
      const count = pass.tokens.length;
      const { canvas } = strips.get(item, [0, count], [0, count], 1e4);
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      const middleOf = (row) => 16 * row + 6; // of the 16 pixels of a row
      const at = (row, key) => data[4 * (middleOf(row) * canvas.width + key) + 3];
      return pass.tokens.map((_, row) => pass.tokens.map((_, key) => at(row, key)));
    }""")
    for row, alphas in enumerate(found):
        assert [alpha < 255 for alpha in alphas] == [key > row for key in range(len(alphas))]


def test_the_legend_has_the_range_of_the_stage(page: "Page", base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT, at="blocks.2.attn.pattern")
    legend = page.locator("network-view .network-legend")
    assert re.match(r"0\s+1\s+the followed token\s+masked", legend.inner_text())
    assert "Escape goes back" in legend.inner_text()
    assert "beyond" not in legend.inner_text()  # no share is larger than 1
    page.get_by_role("button", name="Network", exact=True).click()
    wait_until_ready(page)
    assert re.match(r"\u2212\s+0\s+\+", legend.inner_text())
    assert "to zoom in" in legend.inner_text()
    open_view(page, base, "network", prompt=PROMPT, at="blocks.2.attn.scores")
    assert "(beyond: the same colours)" in legend.inner_text()


def test_all_terms_of_a_sum_can_be_shown(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT, at="blocks.2.attn.q", cell=3)
    rows = page.locator("cell-arithmetic tbody tr")
    assert rows.count() == 10
    page.get_by_role("button", name="Show all 256 terms").click()
    assert rows.count() == 256
    products = [read_number(row) for row in page.locator("cell-arithmetic tbody td:nth-child(4)").all_inner_texts()]
    assert [abs(each) for each in products] == sorted((abs(each) for each in products), reverse=True)
    values = bundled.answer("/forward", prompt=PROMPT, stages=["blocks.2.attn.q"], detail="values")["stages"][0]
    assert sum(products) == pytest.approx(values["values"][0][-1][0][3], abs=0.02)
    page.get_by_role("button", name="Show the 10 largest terms").click()
    assert rows.count() == 10


def test_the_divisor_of_a_norm_shows_the_largest_squares(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT, at="blocks.2.ln1.scale", cell=0)
    (stage,) = bundled.answer("/forward", prompt=PROMPT, stages=["blocks.2.resid_pre"], detail="values")["stages"]
    vector = stage["values"][0][-1]
    order = sorted(range(len(vector)), key=lambda index: -abs(vector[index]))[:10]
    for row, index in zip(page.locator("cell-arithmetic tbody tr").all(), order, strict=True):
        assert int(row.locator("th").inner_text()) == index
        assert read_number(row.locator("td").nth(1).inner_text()) == pytest.approx(vector[index] ** 2, rel=1e-3)
    assert "\u2713" in page.locator("cell-arithmetic").inner_text()


def test_escape_goes_up_from_the_panel_but_not_from_a_field(page: "Page", base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT, at="blocks.2.attn.q", cell=3)
    trail = page.locator(".trail li")
    page.locator("#prompt").focus()
    page.keyboard.press("Escape")
    wait_until_ready(page)
    assert trail.count() == 4
    page.locator("cell-arithmetic tbody button").first.focus()
    page.keyboard.press("Escape")
    trail.nth(3).wait_for(state="detached")
    page.locator("network-view .answer").click()
    page.keyboard.press("Escape")
    trail.nth(2).wait_for(state="detached")


def test_tab_leaves_the_picture(page: "Page", base: str) -> None:
    open_view(page, base, "network", prompt=PROMPT)
    page.locator("network-canvas canvas").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.localName") != "canvas"
