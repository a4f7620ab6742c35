"""The view "Weights": its maps have the numbers of GET /weights, and its products those of POST /forward."""

import re
import struct
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from model.worked_examples import WORKED_EXAMPLES
from tests.service.running import Running, running
from tests.web.browsing import open_table, open_view, url_of, wait_until_ready, wait_until_settled
from tests.web.conftest import OpenPage
from tests.web.reading import SIGNIFICANT, quoted, read_number
from tests.web.test_families import FAMILIES, write_family

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROMPT = "Emma was sitting in"
PICTURE = "weights-view :is(heat-map, matrix-product):not([hidden])"
SHOWN = f"""() => {{
  const {{ values, rows, columns, rowLabels }} = document.querySelector("{PICTURE}").data;
  return {{ values: [...values], rows, columns, rowLabels }};
}}"""
PRODUCT = """() => {
  const { input, output, bias, values, rows, columns, chosen, isPart } = document.querySelector("matrix-product").data;
  const [numbers, results, shifts] = [input, output, bias ?? []].map((each) => [...each]);
  return { input: numbers, output: results, bias: shifts, values: [...values], rows, columns, chosen, isPart };
}"""
CHECKED = "\N{CHECK MARK}"
TIMES = "\N{MULTIPLICATION SIGN}"
ROUNDING = 2**-8  # of bfloat16, relative
MATRIX = re.compile(r"^blocks\.0\.(attn\.W_[QKVO]|mlp\.W_(gate|in|out))$")
STAGES = {  # the product with each matrix; of two, the one that the network has
    "attn.W_Q": ["attn.q"],
    "attn.W_K": ["attn.k"],
    "attn.W_V": ["attn.v"],
    "attn.W_O": ["attn_out"],
    "mlp.W_gate": ["mlp.router_logits", "mlp.pre"],
    "mlp.W_in": ["mlp.pre_linear", "mlp.pre"],
    "mlp.W_out": ["mlp_out"],
}
NORMS = {"attn.W_O": "ln1_post", "mlp.W_out": "ln2_post"}


def transposed(values: list[list[float]]) -> list[list[float]]:
    return [list(column) for column in zip(*values, strict=True)]


def shown_matrix(page: "Page") -> tuple[list[list[float]], dict[str, Any]]:
    shown = page.evaluate(SHOWN)
    rows, columns = shown["rows"], shown["columns"]
    return [shown["values"][row * columns : (row + 1) * columns] for row in range(rows)], shown


def weight(service: Running, name: str, **part: Any) -> Any:
    answer = service.client.get(f"/weights/{name}", params=part)
    answer.raise_for_status()
    return answer.json()["values"]


def state_of(page: "Page") -> dict[str, str]:
    return {name: value for name, (value,) in parse_qs(urlsplit(page.url).fragment).items()}


def stage_rows(service: Running, position: int, **body: Any) -> dict[str, Any]:
    """Every stage that the service shows at a position: name → all numbers of it, one head after the other."""
    answer = service.answer("/forward", **{"prompt": PROMPT, "stages": ["*"], "detail": "values"} | body)
    rows = {}
    for stage in answer["stages"]:
        if "values" not in stage or "key" in stage["dims"] or stage["name"] == "loss":
            continue
        values = np.array(stage["values"], dtype=float)
        at = stage["dims"].index("position") if "position" in stage["dims"] else None
        rows[stage["name"]] = (values if at is None else values.take(position, axis=at)).ravel()
    return rows


def check_product(page: "Page", rows: dict[str, Any], name: str, head: int, rounding: float) -> None:
    """The strips have the numbers of the stages; each row adds up to its result, and the page says that it agrees."""
    shown = page.evaluate(PRODUCT)
    values = np.array(shown["values"]).reshape(shown["rows"], shown["columns"])
    sums = values @ np.array(shown["input"]) + np.array(shown["bias"] or 0)
    sizes = np.abs(values) @ np.abs(np.array(shown["input"])) + np.abs(np.array(shown["bias"] or 0))
    layer, part = "blocks.0.", name.removeprefix("blocks.0.")
    results = next(rows[layer + stage] for stage in STAGES[part] if layer + stage in rows)
    norm = layer + NORMS.get(part, "none")
    if f"{norm}.scale" in rows:  # the product is what the norm divides
        results = rows[f"{norm}.normalized"] * rows[f"{norm}.scale"]
    count = shown["rows"]
    own = (
        results[head * count : (head + 1) * count] if part in ("attn.W_Q", "attn.W_K", "attn.W_V") else results[:count]
    )
    assert shown["output"] == pytest.approx(list(own), rel=1e-6, abs=1e-9)
    if part == "attn.W_O":
        size = shown["columns"]
        assert shown["input"] == pytest.approx(list(rows[layer + "attn.z"][head * size : (head + 1) * size]), rel=1e-6)
    if not shown["isPart"]:
        assert np.all(np.abs(sums - own) <= 2 * rounding * np.abs(own) + 1e-6 * sizes + rounding * sizes * 0.1)
    said = page.locator("weights-view cell-arithmetic").inner_text()
    assert CHECKED in said, said
    assert read_number(page.locator("weights-view cell-arithmetic output").inner_text()) == pytest.approx(
        own[shown["chosen"]], rel=SIGNIFICANT
    )


def matrices(service: Running, **model: str) -> list[tuple[str, int]]:
    """The matrices of the first layer that a token is multiplied by, and the last head of each."""
    infos = service.client.get("/weights", params=model).json()["weights"]
    found = [each for each in infos if MATRIX.match(each["name"])]
    return [(each["name"], each["shape"][0] - 1 if len(each["shape"]) > 2 else 0) for each in found]


@pytest.fixture(scope="module", params=[*FAMILIES, "int8", "int4"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with a tiny checkpoint, or with the bundled model quantized."""
    if request.param not in FAMILIES:
        with running(model="bundled", quantize=request.param) as quantized:
            yield quantized
        return
    directory = tmp_path_factory.mktemp("family")
    write_family(directory, request.param)
    with running(model=str(directory)) as family:
        yield family


def check_products(page: "Page", service: Running, position: int, rounding: float, **state: Any) -> None:
    rows = stage_rows(service, position, **state)
    model = {"model": state["model"]} if "model" in state else {}
    found = matrices(service, **model)
    assert len(found) > 4
    for name, head in found:
        address = str(service.client.base_url)
        open_view(page, address, "weights", **{"prompt": PROMPT} | state, weight=name, head=head, position=position)
        check_product(page, rows, name, head, rounding)


def test_products_have_the_numbers_of_the_stages(page: "Page", bundled: Running) -> None:
    check_products(page, bundled, 2, ROUNDING)


def test_products_of_every_family_and_of_quantized_weights_add_up(page: "Page", service: Running) -> None:
    """With biases, norms after the product, experts, and weights of which the service computes with fewer bits."""
    dtype = service.client.get("/model").json()["dtype"]
    is_quantized = service.client.get("/model").json()["quantization"] != "none"
    check_products(page, service, 1, 0.05 if is_quantized else ROUNDING if dtype == "bfloat16" else 1e-5, prompt="a bc")


@pytest.mark.parametrize("name", WORKED_EXAMPLES)
def test_products_of_worked_examples_add_up(page: "Page", bundled: Running, name: str) -> None:
    example = WORKED_EXAMPLES[name]
    prompt = " ".join(example.vocabulary[token_id] for token_id in example.prompt_ids)
    open_view(page, str(bundled.client.base_url), "weights", model=name, prompt=prompt)
    assert page.locator("matrix-product canvas").first.is_visible()
    assert CHECKED in page.locator("weights-view cell-arithmetic").inner_text()


def test_the_product_with_the_unembedding_is_the_logits(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="unembed.W_U", position=1)
    logits = stage_rows(bundled, 1)["logits"]
    tokens = bundled.answer("/tokenize", text=PROMPT)["tokens"]
    shown = page.evaluate(PRODUCT)
    assert shown["output"] == pytest.approx([logits[token["id"]] for token in tokens])
    assert shown["chosen"] == int(np.argmax(shown["output"]))
    assert CHECKED in page.locator("weights-view cell-arithmetic").inner_text()


def test_the_sentence_names_the_token_the_layer_and_the_head(page: "Page", base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.3.attn.W_Q", head=5, position=0)
    said = page.locator("weights-view .answer").inner_text()
    assert re.fullmatch(f"“Em.*” {TIMES} W_Q = its query in L3 H5: what it looks for.", said), said
    page.locator("token-strip [role=option]").last.click()
    wait_until_ready(page)
    assert page.locator("weights-view .answer").inner_text().startswith(f"{quoted(' in')} {TIMES} W_Q")


def test_a_token_and_a_number_are_chosen_with_the_keyboard(page: "Page", base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, cell=3)
    page.locator("matrix-product canvas").first.focus()
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    said = page.locator("matrix-product .under-pointer").inner_text()
    shown = page.evaluate(PRODUCT)
    input_, weight_, product, result = numbers_of(said)
    assert input_ == pytest.approx(shown["input"][1], rel=SIGNIFICANT)
    assert weight_ == pytest.approx(shown["values"][5 * shown["columns"] + 1], rel=SIGNIFICANT)
    assert product == pytest.approx(input_ * weight_, rel=3 * SIGNIFICANT)
    assert result == pytest.approx(shown["output"][5], rel=SIGNIFICANT)
    page.keyboard.press("Enter")
    wait_until_ready(page)
    assert (state_of(page)["cell"], page.evaluate(PRODUCT)["chosen"]) == ("5", 5)
    page.locator("token-strip [role=listbox]").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    wait_until_ready(page)
    assert state_of(page)["position"] == "0"
    assert page.evaluate("document.activeElement.getAttribute('role')") == "listbox"


def numbers_of(said: str) -> list[float]:
    """The four numbers of a product, and of the result of its row."""
    found = re.fullmatch(rf"\w+ \d+: (\S+) {TIMES} (\S+) = (\S+); \w+ \d+: \w+ (\S+)", said)
    assert found is not None, said
    return [read_number(each) for each in found.groups()]


def test_a_click_on_a_row_explains_its_result(page: "Page", base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.1.mlp.W_in")
    shown = page.evaluate(PRODUCT)
    canvas = page.locator("matrix-product canvas").first
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
    wait_until_ready(page)
    cell = int(state_of(page)["cell"])
    assert abs(cell - shown["rows"] / 2) < shown["rows"] / 8
    title = page.locator("weights-view cell-arithmetic h3").inner_text()
    assert f"d_mlp {cell} = " in title
    assert read_number(title.split("=")[1]) == pytest.approx(shown["output"][cell], rel=SIGNIFICANT)


def test_the_largest_results_are_listed_and_lead_to_their_page(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.1.mlp.W_in", position=2)
    results = stage_rows(bundled, 2)["blocks.1.mlp.pre_linear"]
    best = [int(index) for index in np.argsort(-np.abs(results), kind="stable")[:5]]
    buttons = page.locator("weights-view .bars button")
    assert [int(text) for text in buttons.all_inner_texts()] == best
    for index, cell in enumerate(best):
        buttons.nth(index).click()
        wait_until_ready(page)
        shown = page.evaluate(PRODUCT)
        assert shown["output"][shown["chosen"]] == pytest.approx(results[cell])
        assert CHECKED in page.locator("weights-view cell-arithmetic").inner_text()


def test_the_inputs_in_sight_are_said_to_be_a_part_of_the_sum(page: "Page", base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.0.mlp.W_out", row=512)
    shown = page.evaluate(PRODUCT)
    terms = np.array(shown["input"]) * np.array(shown["values"]).reshape(shown["rows"], -1)[shown["chosen"]]
    said = page.locator("matrix-product .under-pointer").inner_text()
    assert shown["isPart"]
    found = re.search(r"the 160 inputs here, of 672, add (\S+?)\. ", said)
    assert found is not None, said
    assert read_number(found[1]) == pytest.approx(float(terms.sum()), rel=2 * SIGNIFICANT)
    assert "672 products" in page.locator("weights-view cell-arithmetic").inner_text()


def test_another_prompt_keeps_the_weight_and_forgets_the_token(page: "Page", base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.2.attn.W_K", position=1, cell=4)
    page.get_by_label("Prompt").fill("A")
    page.get_by_role("button", name="Run").click()
    page.locator("token-strip [role=option]").nth(1).wait_for(state="detached")
    wait_until_ready(page)
    state = state_of(page)
    assert state["weight"] == "blocks.2.attn.W_K"
    assert "position" not in state
    assert "cell" not in state


def test_a_number_of_a_product_in_the_network_has_a_picture(page: "Page", bundled: Running, base: str) -> None:
    """Each stripe is an input, its weight and their product, of the largest of some products."""
    open_view(page, base, "network", prompt=PROMPT, at="blocks.2.attn.q", position=2, cell=40)
    inputs = stage_rows(bundled, 2)["blocks.2.ln1.out"]
    weights = np.array(weight(bundled, "blocks.2.attn.W_Q", head=1, d_head=8)).ravel()
    shown = page.evaluate(PRODUCT)
    best = [4 * index + int(np.argmax(np.abs((inputs * weights)[4 * index : 4 * index + 4]))) for index in range(64)]
    assert shown["input"] == pytest.approx([inputs[index] for index in best])
    assert shown["values"] == pytest.approx([weights[index] for index in best])
    box = page.locator("cell-arithmetic matrix-product").bounding_box()
    assert box is not None
    assert box["height"] < 190
    link = page.get_by_role("link", name="W_Q of L2 H1 as a whole").get_attribute("href")
    state = parse_qs(str(link).partition("#")[2])
    assert (state["position"], state["head"], state["cell"]) == (["2"], ["1"], ["8"])


def test_the_picture_of_a_product_moves_once_unless_motion_is_reduced(page: "Page", base: str) -> None:
    name = "getComputedStyle(document.querySelector('cell-arithmetic matrix-product canvas')).animationName"
    open_view(page, base, "network", prompt=PROMPT, at="blocks.2.attn.q", position=2, cell=40)
    assert page.evaluate(name) == "none"
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(name) == "compute"


def test_the_saved_picture_has_the_result_beside_the_matrix(page: "Page", base: str, tmp_path: Path) -> None:
    open_view(page, base, "weights", prompt=PROMPT)
    widths = page.evaluate("[...document.querySelectorAll('matrix-product canvas')].map(({ width }) => width)")
    assert all(widths)
    assert len(widths) == 2
    for kind in ("PNG", "SVG"):
        with page.expect_download() as started:
            page.get_by_role("button", name=f"{kind}: weights").click()
        started.value.save_as(tmp_path / kind)
    (width,) = struct.unpack(">I", (tmp_path / "PNG").read_bytes()[16:20])
    assert width == sum(widths)
    assert float(ElementTree.fromstring((tmp_path / "SVG").read_text()).attrib["width"]) == width


def test_a_product_fits_on_a_phone(open_page: OpenPage, base: str) -> None:
    page = open_page(phone=True)
    open_view(page, base, "weights", prompt=PROMPT)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    scroll = page.locator("matrix-product .scroll").first
    assert scroll.evaluate("(each) => each.scrollWidth > each.clientWidth")  # the input scrolls with the matrix
    box = page.locator("matrix-product canvas[aria-hidden]").bounding_box()  # the result stays in sight
    assert box is not None
    assert box["x"] + box["width"] <= 380


def test_a_head_of_a_matrix_is_shown_on_its_side(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.3.attn.W_Q", head=5)
    (expected,) = weight(bundled, "blocks.3.attn.W_Q", head=5)
    matrix, _ = shown_matrix(page)
    assert matrix == transposed(expected)
    assert page.get_by_text("In the picture, a row is one d_head, and a column one d_model.").is_visible()
    (inputs, cells, *_) = open_table(page.locator("weights-view matrix-product details")).all()
    shown = page.evaluate(PRODUCT)
    for row, numbers in ((inputs, shown["input"]), (cells, matrix[0])):
        for text, number in zip(row.locator("td").all_inner_texts()[1:], numbers, strict=False):
            assert read_number(text) == pytest.approx(number, rel=SIGNIFICANT, abs=1e-9)
    assert read_number(cells.locator("td").first.inner_text()) == pytest.approx(shown["output"][0], rel=SIGNIFICANT)


@pytest.mark.parametrize("name", ["embed.W_E", "unembed.W_U"])
def test_of_the_vocabulary_the_tokens_of_the_prompt_are_shown(
    page: "Page", bundled: Running, base: str, name: str
) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight=name)
    tokens = bundled.answer("/tokenize", text=PROMPT)["tokens"]
    matrix, shown = shown_matrix(page)
    assert shown["rowLabels"] == [token["text"].replace(" ", "␣") for token in tokens]
    rows = weight(bundled, "embed.W_E", d_vocab=",".join(str(token["id"]) for token in tokens))
    assert matrix == rows  # the head is tied to the embedding


def test_the_row_of_the_chosen_token_is_framed(page: "Page", base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="embed.W_E", position=2)
    assert page.get_by_text("The framed row is the vector of").is_visible()
    tops = []
    for position in (1, 2):
        page.locator("token-strip [role=option]").nth(position).click()
        wait_until_ready(page)
        box = page.locator("heat-map .row-frame:not([hidden])").bounding_box()
        assert box is not None
        tops.append(box["y"])
    assert tops[0] < tops[1]


def test_a_gain_asks_for_no_token(page: "Page", base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.1.ln2.w")
    assert page.locator("weights-view token-strip").is_hidden()
    page.get_by_role("combobox", name="Weight").select_option("blocks.1.mlp.W_in")
    wait_until_ready(page)
    assert page.locator("weights-view token-strip").is_visible()


def test_a_large_matrix_is_shown_in_parts(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.0.mlp.W_out")
    page.get_by_role("combobox", name="Inputs").select_option("512 to 671")
    wait_until_ready(page)
    expected = weight(bundled, "blocks.0.mlp.W_out", d_mlp="512:672")
    assert shown_matrix(page)[0] == transposed(expected)
    page.get_by_role("combobox", name="Layer").select_option("4")
    wait_until_ready(page)
    assert "weight=blocks.4.mlp.W_out" in page.url
    assert shown_matrix(page)[0] == transposed(weight(bundled, "blocks.4.mlp.W_out", d_mlp="0:256"))


def test_a_weight_leads_to_its_product_in_the_network(page: "Page", base: str) -> None:
    """The token, the head and the number stay chosen."""
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.2.attn.W_V", head=1, position=2, cell=5)
    said = page.locator("weights-view cell-arithmetic output").inner_text()
    page.get_by_role("button", name="Show the product in the network").click()
    page.locator("network-view .trail").wait_for()
    wait_until_ready(page)
    state = state_of(page)
    assert (state["at"], state["position"], state["cell"]) == ("blocks.2.attn.v", "2", "37")  # of 32 in each head
    assert state["head"] == "4"  # the first of the four heads that read these values
    assert page.locator("network-view cell-arithmetic output").inner_text() == said
    page.get_by_role("link", name="W_V of L2 H1 as a whole").click()
    page.locator("weights-view matrix-product").wait_for()
    wait_until_ready(page)
    assert page.evaluate(PRODUCT)["chosen"] == 5
    assert page.locator("weights-view cell-arithmetic output").inner_text() == said
    assert page.locator("token-strip [aria-selected=true]").get_attribute("data-index") == "2"


def test_a_wrong_address_is_an_error(page: "Page", base: str) -> None:
    for state, message in (
        ({"weight": "blocks.9.attn.W_Q"}, "there is no weight “blocks.9.attn.W_Q”"),
        ({"weight": "blocks.0.attn.W_Q", "head": 8}, "head: “8” is not one of the heads 0 to 7"),
        ({"row": 256}, "row: “256” is not one of the rows 0 to 255"),
        ({"cell": 32}, "cell: “32” is not one of the cells 0 to 31"),
        ({"position": 9}, "position: 9 is out of range"),
    ):
        page.goto(url_of(base, "weights", prompt=PROMPT, **state))
        assert wait_until_settled(page) == "error"
        assert message in page.locator("#error").inner_text()
