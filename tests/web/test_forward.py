"""The view "Forward pass": each stage with its name, formula, summary and values, as the service computes them."""

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from model.tracing.stages import stages_of
from model.worked_examples import WORKED_EXAMPLES, worked_example
from tests.service.running import Running
from tests.tiny import CONFIGS
from tests.web.browsing import (
    DESKTOP,
    Findings,
    open_table,
    open_view,
    url_of,
    wait_for,
    wait_until_ready,
    wait_until_settled,
)
from tests.web.reading import SIGNIFICANT, percent, quoted, read_number, shown

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Request, Route

PROMPT = "The captain was in the"
DESCRIBE = """async ([names, config, example]) => {
  const files = ["stages.js", "articles.js", "views/block_map.js", "terms_list.js"];
  const [{ describe }, { ARTICLES }, { partsOf, captionsOf }, { TERMS }] =
    await Promise.all(files.map((file) => import(`/page/${file}`)));
  const architecture = config ?? ARTICLES[example].architecture;
  const blocks = names.filter((name) => name.startsWith("blocks.0."));
  return {
    entries: names.map((name) => describe(name, architecture)),
    terms: Object.keys(TERMS),
    parts: partsOf(blocks, architecture).map((part) => ({ ...part, captions: captionsOf(part, architecture) })),
  };
}"""


def card(page: "Page", stage: str) -> "Locator":
    return page.locator(f'stage-card[data-stage="{stage}"]')


def button_of(page: "Page", stage: str) -> "Locator":
    return card(page, stage).locator(".stage-open")


def body_of(page: "Page", stage: str) -> "Locator":
    return page.get_by_role("group", name=re.compile(rf": {re.escape(stage)}$"))


def toggle(page: "Page", stage: str) -> None:
    button_of(page, stage).click()
    wait_until_ready(page)


def read_cells(body: "Locator") -> list[list[str]]:
    """The texts of the table behind a heat map, without the headings of the rows."""
    return [row.locator("td").all_inner_texts() for row in open_table(body.locator("details.data-table")).all()]


def check_matrix(cells: list[list[str]], expected: list[list[float | None]]) -> None:
    assert len(cells) == len(expected)
    for row, numbers in zip(cells, expected, strict=True):
        for text, number in zip(row, numbers, strict=False):  # the table shows the first columns
            if number is None:
                assert text == "masked"
            else:
                assert read_number(text) == pytest.approx(number, rel=SIGNIFICANT, abs=1e-9)


class TestNames:
    def check(self, page: "Page", names: list[str], config: dict[str, Any] | None, example: str | None) -> None:
        found = page.evaluate(DESCRIBE, [names, config, example])
        for entry in found["entries"]:
            assert entry["label"] != entry["part"]
            assert entry["term"] in found["terms"]
            assert entry["formula"]
            assert not re.search(r"undefined|NaN|null", entry["formula"] + entry["label"])
        blocks = [name for name in names if name.startswith("blocks.0.")]
        sections = [section for part in found["parts"] for section in part["sections"]]
        assert [stage["name"] for section in sections for stage in section["stages"]] == blocks
        for part in found["parts"]:
            assert all(section["title"] for section in part["sections"]) or part["branch"] == "stream"

    def test_every_stage_of_every_architecture_has_a_name_a_formula_and_an_explanation(
        self, page: "Page", base: str
    ) -> None:
        open_view(page, base, "status")
        for config in CONFIGS.values():
            names = [stage.name for stage in stages_of(config, adapters=True)]
            self.check(page, names, asdict(config), None)

    def test_every_stage_of_the_worked_examples_has_a_name_a_formula_and_an_explanation(
        self, page: "Page", base: str
    ) -> None:
        open_view(page, base, "status")
        for name in WORKED_EXAMPLES:
            self.check(page, [stage.name for stage in worked_example(name).stages], None, name)

    def test_formulas_follow_the_architecture(self, page: "Page", base: str) -> None:
        open_view(page, base, "status")

        def formula(config: str, stage: str) -> str:
            found = page.evaluate(DESCRIBE, [[f"blocks.1.{stage}"], asdict(CONFIGS[config]), None])
            return str(found["entries"][0]["formula"])

        assert formula("llama", "attn.scores") == "rotated query · rotated key ÷ √6"
        assert formula("gpt2", "attn.q") == "normalized input × W_q + bias"  # noqa: RUF001
        assert formula("gemma2", "attn.scores") == "rotated query · rotated key × 0.3, then capped: 2.5 × tanh(… ÷ 2.5)"  # noqa: RUF001
        assert formula("mistral", "attn.attn_scores").endswith("or 5 or more tokens before it")
        assert formula("qwen2", "attn.attn_scores").endswith("comes after the query")  # layer 1 has no window
        assert formula("gpt_neox", "resid_post") == "stream that entered + attention output + feed-forward output"
        assert formula("2017 block", "resid_pre") == "the normalized stream of layer 0"


class TestSearch:
    def go(self, page: "Page", query: str) -> None:
        field = page.get_by_label("Go to stage")
        field.fill(query)
        field.press("Enter")

    def wait_for(self, page: "Page", stage: str) -> None:
        page.wait_for_url(re.compile(rf"stage=[^&]*{re.escape(stage)}(&|$|%)"))
        wait_until_ready(page)
        button = button_of(page, stage)
        assert button.evaluate("each => each === document.activeElement")
        assert button.get_attribute("aria-expanded") == "true"
        box = button.bounding_box()
        assert box is not None
        assert 0 <= box["y"] < DESKTOP["height"]

    def test_a_stage_is_found_by_its_words_and_opened_with_the_keyboard(self, page: "Page", base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        for query, stage in (
            ("blocks.5.attn.z", "blocks.5.attn.z"),
            ("layer 4 pattern", "blocks.4.attn.pattern"),
            ("pattern", "blocks.0.attn.pattern"),  # the first one in a layer that is open
            ("MLP layer 3 output", "blocks.3.mlp_out"),
            ("unembedding", "logits"),  # a word of the explanation of logits
        ):
            self.go(page, query)
            self.wait_for(page, stage)
        page.reload()
        wait_until_ready(page)
        assert button_of(page, "blocks.4.attn.pattern").get_attribute("aria-expanded") == "true"

    def test_it_says_how_many_stages_fit_or_that_none_does(self, page: "Page", base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        self.go(page, "pattern")
        page.get_by_text("“pattern” fits 6 stages. This is blocks.0.attn.pattern.").wait_for()
        self.wait_for(page, "blocks.0.attn.pattern")  # which takes the keyboard from the field
        self.go(page, "nonsense")
        page.get_by_text("No stage has the name “nonsense”.").wait_for()

    def test_all_stages_are_in_the_list_of_suggestions(self, page: "Page", bundled: Running, base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        names = page.locator("#stage-names option").evaluate_all("all => all.map((each) => each.value)")
        assert names == [stage["name"] for stage in bundled.get("/model").json()["stages"]]


class TestMap:
    def test_it_shows_every_stage_in_the_order_of_computation_with_its_summary(
        self, page: "Page", bundled: Running, base: str
    ) -> None:
        open_view(page, base, "forward", prompt=PROMPT, layer="1")
        names = page.locator("stage-card .stage-name").all_text_contents()
        assert names == [stage["name"] for stage in bundled.get("/model").json()["stages"]]
        for stage in bundled.answer("/forward", prompt=PROMPT, stages=["blocks.1.*", "logits"])["stages"]:
            texts = card(page, stage["name"]).locator(".figures").inner_text().split(" · ")
            for text, key in zip(texts, ("min", "max", "mean", "std", "l2"), strict=False):
                assert read_number(text) == pytest.approx(stage["summary"][key], rel=SIGNIFICANT, abs=1e-9)
        assert card(page, "blocks.1.attn.q").locator(".shape").inner_text() == "5 tokens × 8 heads × 32 numbers"  # noqa: RUF001

    def test_figures_may_be_those_of_one_token(self, page: "Page", bundled: Running, base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        page.get_by_label("Statistics of").select_option("2")
        wait_until_ready(page)
        names = ["embed", "blocks.0.attn.pattern", "logits"]
        for stage in bundled.answer("/forward", prompt=PROMPT, stages=names, positions=[2])["stages"]:
            texts = card(page, stage["name"]).locator(".figures").inner_text().split(" · ")
            assert read_number(texts[1]) == pytest.approx(stage["summary"]["max"], rel=SIGNIFICANT)
        page.reload()
        wait_until_ready(page)
        assert page.get_by_label("Statistics of").input_value() == "2"

    @pytest.mark.parametrize("position", [None, 0])
    def test_each_layer_states_the_length_of_the_stream_after_it(
        self, page: "Page", bundled: Running, base: str, position: int | None
    ) -> None:
        chosen = {} if position is None else {"position": position}
        open_view(page, base, "forward", prompt=PROMPT, **chosen)
        positions = None if position is None else [position]
        stages = bundled.answer("/forward", prompt=PROMPT, stages=["*.resid_post"], positions=positions)["stages"]
        said = page.locator(".stream-length").all_inner_texts()
        assert [read_number(text.split(": ")[1]) for text in said] == pytest.approx(
            [stage["summary"]["l2"] for stage in stages], rel=SIGNIFICANT
        )

    def test_it_states_the_prediction(self, page: "Page", bundled: Running, base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        first, second = bundled.answer("/forward", prompt=PROMPT, stages=["loss"], top_k=2)["predictions"][-1]["top"]
        said = page.locator("forward-view .answer").first.inner_text()
        assert f"{quoted(first['text'])} is most likely ({percent(first['probability'])})" in said
        assert quoted(second["text"]) in said

    def test_layers_open_and_close_with_the_keyboard(self, page: "Page", base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        assert card(page, "blocks.0.attn.q").is_visible()
        button = page.get_by_role("button", name="Layer 2")
        button.focus()
        button.press("Enter")
        wait_until_ready(page)
        assert card(page, "blocks.2.attn.q").is_visible()
        assert card(page, "blocks.0.attn.q").is_visible()
        assert button.evaluate("button => button === document.activeElement")
        button.press("Enter")
        wait_until_ready(page)
        assert card(page, "blocks.2.attn.q").is_hidden()

    def test_opening_a_stage_moves_nothing_above_it(self, page: "Page", base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        button = button_of(page, "blocks.0.attn.v")
        button.scroll_into_view_if_needed()
        place = "button => { const { x, y } = button.getBoundingClientRect(); return [x, Math.round(y + scrollY)]; }"
        before = button.evaluate(place)
        toggle(page, "blocks.0.attn.v")
        assert button.evaluate(place) == before
        toggle(page, "blocks.0.attn.v")
        assert button.evaluate(place) == before

    def test_the_numbers_of_an_opened_stage_come_into_sight(self, page: "Page", base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        assert page.evaluate("scrollY") == 0
        button_of(page, "logits").evaluate("button => button.click()")
        wait_until_ready(page)
        body = page.get_by_role("group", name="Logits: logits")
        page.wait_for_timeout(100)
        top = body.evaluate("body => body.getBoundingClientRect().top")
        assert 0 <= top < DESKTOP["height"] - 100

    def test_a_branch_leaves_the_residual_stream_and_comes_back(self, page: "Page", base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        layer = page.locator(".layer[data-layer='0']")
        assert layer.locator(".branch").evaluate_all("all => all.map((each) => each.ariaLabel)") == [
            "Attention",
            "Feed-forward network",
        ]
        on_stream = layer.locator(".on-stream stage-card").evaluate_all("all => all.map((each) => each.dataset.stage)")
        assert on_stream == ["blocks.0.resid_pre", "blocks.0.resid_mid", "blocks.0.resid_post"]


class TestPictures:
    def read(self, page: "Page", stage: str, columns: int, rows: int) -> list[list[list[int]]]:
        """The colours (red, green, blue, opacity) in the middle of the cells of a picture of equal columns and rows."""
        canvas = card(page, stage).locator("canvas[aria-label]")
        canvas.wait_for()
        cells: list[list[list[int]]] = canvas.evaluate(
            """(canvas, [columns, rows]) => {
              const place = (index, count, size) => Math.floor(((index + 0.5) * size) / count);
              const { width, height } = canvas;
              const copy = Object.assign(document.createElement("canvas"), { width, height });
              copy.getContext("2d", { willReadFrequently: true }).drawImage(canvas, 0, 0);
              const { data } = copy.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
              return Array.from({ length: rows }, (_, row) => Array.from({ length: columns }, (_, column) => {
                const y = place(row, rows, canvas.height);
                const at = 4 * (y * canvas.width + place(column, columns, canvas.width));
                return [...data.slice(at, at + 4)];
              }));
            }""",
            [columns, rows],
        )
        return cells

    def test_the_colours_are_the_numbers_of_the_service(self, page: "Page", bundled: Running, base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        (answer,) = bundled.answer("/forward", prompt=PROMPT, stages=["embed"], detail="values")["stages"]
        rows = answer["values"][0]
        cells = self.read(page, "embed", len(rows[0]), len(rows))
        largest = max(abs(value) for row in rows for value in row)
        pairs = [pair for row, colours in zip(rows, cells, strict=True) for pair in zip(row, colours, strict=True)]
        strong = [(value, red < blue) for value, (red, _, blue, _) in pairs if abs(value) > 0.1 * largest]
        assert len(strong) > len(rows) * 50
        assert [value > 0 for value, _ in strong] == [is_blue for _, is_blue in strong]

    def test_the_colours_follow_the_theme(self, page: "Page", base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        light = self.read(page, "embed", 256, 5)
        page.get_by_role("button", name="Dark theme").click()
        assert self.read(page, "embed", 256, 5) != light

    def test_the_patterns_of_two_heads_are_triangles_side_by_side(self, page: "Page", base: str) -> None:
        open_view(page, base, "forward", model="ai-rocks")
        count = len(WORKED_EXAMPLES["ai-rocks"].prompt_ids)
        cells = self.read(page, "blocks.0.attn.pattern", 2 * count, count)
        assert [[opacity > 0 for *_, opacity in row] for row in cells] == [
            2 * [key <= query for key in range(count)] for query in range(count)
        ]

    def test_a_bar_of_one_number_for_each_token_is_as_long_as_its_share_of_the_largest(
        self, page: "Page", bundled: Running, base: str
    ) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        card(page, "loss").scroll_into_view_if_needed()
        losses = bundled.answer("/forward", prompt=PROMPT)["loss"]["per_token"]
        columns = 100
        drawn = [sum(opacity > 0 for *_, opacity in row) for row in self.read(page, "loss", columns, len(losses))]
        largest = max(loss for loss in losses if loss is not None)
        for length, loss in zip(drawn, losses, strict=True):
            if loss is not None:
                assert abs(length - columns * loss / largest) <= 2

    def test_a_chosen_token_stands_out(self, page: "Page", base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT, position=3)
        cells = self.read(page, "embed", 256, 5)
        opacities = [{opacity for *_, opacity in row} for row in cells]
        assert opacities[3] == {255}
        assert all(max(row) < 255 for index, row in enumerate(opacities) if index != 3)

    def test_only_the_stages_in_sight_are_read_in_few_requests(self, page: "Page", base: str) -> None:
        page.set_viewport_size({"width": 1280, "height": 400})
        bodies: list[str] = []

        def note(request: "Request") -> None:
            if request.headers.get("accept") == "application/x-safetensors":
                bodies.append(request.post_data or "")

        page.on("request", note)
        open_view(page, base, "forward", prompt=PROMPT)
        card(page, "embed").locator("canvas[aria-label]").wait_for()
        assert not any("mlp_out" in body for body in bodies)
        button_of(page, "blocks.0.mlp_out").scroll_into_view_if_needed()
        card(page, "blocks.0.mlp_out").locator("canvas[aria-label]").wait_for()
        assert any('"blocks.0.mlp_out"' in body for body in bodies)
        assert not any("blocks.1." in body or "blocks.*" in body for body in bodies)
        assert len(bodies) <= 6

    def test_a_long_prompt_has_some_of_its_tokens_as_rows(self, page: "Page", base: str) -> None:
        open_view(page, base, "forward", prompt=" ".join([PROMPT] * 40), position=101)
        assert {opacity for *_, opacity in self.read(page, "embed", 256, 51)[25]} != {255}
        with page.expect_request(lambda request: '"blocks.1.attn.q"' in (request.post_data or "")) as info:
            page.get_by_role("button", name="Layer 1").click()
        positions = json.loads(info.value.post_data or "")["positions"]
        assert len(positions) <= 61
        assert 101 in positions

    def test_a_click_on_a_picture_opens_its_stage(self, page: "Page", base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT)
        card(page, "embed").locator("canvas[aria-label]").click()
        wait_until_ready(page)
        assert body_of(page, "embed").is_visible()

    @pytest.mark.parametrize("position", [None, 1])
    def test_the_cards_of_the_predictions_name_the_most_likely_next_tokens(
        self, page: "Page", bundled: Running, base: str, position: int | None
    ) -> None:
        chosen = {} if position is None else {"position": position}
        open_view(page, base, "forward", prompt=PROMPT, **chosen)
        predictions = bundled.answer("/forward", prompt=PROMPT, stages=["loss"], top_k=4)["predictions"]
        top = predictions[-1 if position is None else position]["top"]
        said = card(page, "probabilities").locator("li").all_inner_texts()
        assert [text.split("\n") for text in said] == [
            [shown(each["text"]), percent(each["probability"])] for each in top
        ]
        logits = [text.split("\n")[1] for text in card(page, "logits").locator("li").all_inner_texts()]
        assert [read_number(text) for text in logits] == pytest.approx([each["logit"] for each in top], rel=SIGNIFICANT)


class TestValues:
    @pytest.mark.parametrize("stage", ["blocks.1.attn.q", "blocks.1.attn.k", "blocks.1.attn.attn_scores"])
    def test_the_values_of_a_head_are_those_of_the_service(
        self, page: "Page", bundled: Running, base: str, stage: str
    ) -> None:
        open_view(page, base, "forward", prompt=PROMPT, stage=stage, head=5)
        (answer,) = bundled.answer("/forward", prompt=PROMPT, stages=[stage], heads=[5], detail="values")["stages"]
        rows = answer["values"][0][0] if "query" in answer["dims"] else [row[0] for row in answer["values"][0]]
        check_matrix(read_cells(body_of(page, stage)), rows)

    def test_the_head_can_be_changed_and_is_in_the_address(self, page: "Page", bundled: Running, base: str) -> None:
        stage = "blocks.0.attn.pattern"
        open_view(page, base, "forward", prompt=PROMPT)
        toggle(page, stage)
        body_of(page, stage).get_by_label("Head").select_option("3")
        wait_until_ready(page)
        (answer,) = bundled.answer("/forward", prompt=PROMPT, stages=[stage], heads=[3], detail="values")["stages"]
        check_matrix(read_cells(body_of(page, stage)), answer["values"][0][0])
        page.reload()
        wait_until_ready(page)
        assert body_of(page, stage).get_by_label("Head").input_value() == "3"
        page.go_back()
        wait_until_ready(page)
        assert body_of(page, stage).get_by_label("Head").input_value() == "0"
        page.go_back()
        wait_until_ready(page)
        assert body_of(page, stage).count() == 0

    def test_a_stage_without_heads_has_tokens_as_rows(self, page: "Page", bundled: Running, base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT, stage="embed,ln_final.scale")
        answer = bundled.answer("/forward", prompt=PROMPT, stages=["embed", "ln_final.scale"], detail="values")
        for stage in answer["stages"]:
            check_matrix(read_cells(body_of(page, stage["name"])), stage["values"][0])

    def test_another_prompt_changes_the_open_stages(self, page: "Page", bundled: Running, base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT, stage="blocks.0.attn.z")
        page.get_by_role("textbox", name="Prompt").fill("A letter")
        page.get_by_role("button", name="Run").click()
        wait_until_ready(page)
        stage = bundled.answer("/forward", prompt="A letter", stages=["blocks.0.attn.z"], heads=[0], detail="values")
        rows = [row[0] for row in stage["stages"][0]["values"][0]]
        check_matrix(read_cells(body_of(page, "blocks.0.attn.z")), rows)

    def test_logits_show_the_most_likely_next_tokens_of_each_position(
        self, page: "Page", bundled: Running, base: str
    ) -> None:
        open_view(page, base, "forward", prompt=PROMPT, stage="probabilities")
        page.locator("token-strip [role=option]").nth(1).click()
        wait_until_ready(page)
        expected = bundled.answer("/forward", prompt=PROMPT, stages=["loss"])["predictions"][1]["top"]
        rows = page.locator("next-tokens tbody tr").all()
        assert len(rows) == len(expected) == 10
        for row, token in zip(rows, expected, strict=True):
            assert row.locator("th").inner_text() == shown(token["text"])
            texts = row.locator("td").all_inner_texts()
            assert read_number(texts[-1]) == pytest.approx(100 * token["probability"], rel=0.01)
            assert read_number(texts[-2]) == pytest.approx(token["logit"], rel=SIGNIFICANT)
        page.reload()
        wait_until_ready(page)
        assert "position 1" in page.locator("next-tokens .answer").inner_text()

    def test_the_loss_of_each_position_is_a_table(self, page: "Page", bundled: Running, base: str) -> None:
        open_view(page, base, "forward", prompt=PROMPT, stage="loss")
        cells = [row.locator("td").last.inner_text() for row in body_of(page, "loss").locator("tbody tr").all()]
        per_token = bundled.answer("/forward", prompt=PROMPT, stages=["loss"])["loss"]["per_token"]
        assert cells[-1] == "–"  # noqa: RUF001
        assert [read_number(text) for text in cells[:-1]] == pytest.approx(per_token[:-1], rel=SIGNIFICANT)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"layer": 9}, "layer 9 does not exist"),
        ({"layer": -1}, "matches no stage"),
        ({"stage": "blocks.0.attn.nothing"}, "matches no stage"),
        ({"stage": "blocks.0.attn.q", "head": 8}, "8 is out of range"),
        ({"stage": "logits", "position": -1}, "position: -1 is out of range"),
        ({"prompt": ""}, "prompt: is empty"),
    ],
)
def test_a_wrong_address_is_an_error(
    page: "Page", base: str, findings: Findings, state: dict[str, str | int], message: str
) -> None:
    page.goto(url_of(base, "forward", **{"prompt": PROMPT, **state}))
    assert wait_until_settled(page) == "error"
    assert message in page.locator("#error").inner_text()
    findings.clear()  # the browser logs answers with an error status


@pytest.mark.parametrize("name", WORKED_EXAMPLES)
def test_a_worked_example_has_all_of_its_stages(page: "Page", bundled: Running, base: str, name: str) -> None:
    open_view(page, base, "forward", model=name, stage="blocks.0.attn.pattern")
    assert page.locator("stage-card").count() == len(worked_example(name).stages)
    prompt = " ".join(WORKED_EXAMPLES[name].vocabulary[each] for each in WORKED_EXAMPLES[name].prompt_ids)
    answer = bundled.answer("/forward", model=name, prompt=prompt, stages=["*.pattern"], heads=[0], detail="values")
    check_matrix(read_cells(body_of(page, "blocks.0.attn.pattern")), answer["stages"][0]["values"][0][0])


def test_the_export_has_the_open_stages(page: "Page", base: str) -> None:
    open_view(page, base, "forward", prompt=PROMPT, stage="blocks.0.attn.pattern")
    page.get_by_role("button", name="PNG: blocks.0.attn.pattern").wait_for()
    page.get_by_role("button", name="Copy as curl").click()
    code = page.locator("export-bar pre")
    code.wait_for()
    assert '"blocks.0.attn.pattern"' in code.inner_text()


def test_another_prompt_or_model_drops_what_it_does_not_have(page: "Page", base: str, held: list["Route"]) -> None:
    """A token that was selected, and layers and stages that were open, may not exist any more."""
    open_view(page, base, "forward", prompt=PROMPT, layer="0,3", stage="logits,blocks.2.attn.q", head=6, position=4)
    page.get_by_role("textbox", name="Prompt").fill("A letter")
    page.get_by_role("button", name="Run").click()
    wait_until_ready(page)
    assert "position 1)" in page.locator("next-tokens .answer").inner_text()
    page.route("**/forward", lambda route: held.append(route), times=1)
    page.get_by_label("Model").select_option("a-tokens-journey")
    wait_for(page, lambda: bool(held), "the request for the pass of the other model")
    page.get_by_role("button", name="Run").click()  # before that pass has ended
    wait_until_ready(page)
    assert page.locator("stage-card").count() == len(worked_example("a-tokens-journey").stages)
    assert card(page, "blocks.0.attn.q").is_visible()
