"""The view "Weights": its maps have the numbers of GET /weights."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.service.running import Running
from tests.web.browsing import open_table, open_view, url_of, wait_until_ready, wait_until_settled
from tests.web.reading import SIGNIFICANT, read_number

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROMPT = "Emma was sitting in"
SHOWN = """() => {
  const { values, rows, columns, rowLabels } = document.querySelector("weights-view heat-map").data;
  return { values: [...values], rows, columns, rowLabels };
}"""


def flat(values: Any) -> list[float]:
    return [number for each in values for number in flat(each)] if isinstance(values, list) else [values]


def shown_matrix(page: "Page") -> tuple[list[list[float]], dict[str, Any]]:
    shown = page.evaluate(SHOWN)
    rows, columns = shown["rows"], shown["columns"]
    return [shown["values"][row * columns : (row + 1) * columns] for row in range(rows)], shown


def weight(service: Running, name: str, **part: Any) -> Any:
    answer = service.client.get(f"/weights/{name}", params=part)
    answer.raise_for_status()
    return answer.json()["values"]


def test_a_head_of_a_matrix_is_shown_on_its_side(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.3.attn.W_Q", head=5)
    (expected,) = weight(bundled, "blocks.3.attn.W_Q", head=5)
    matrix, _ = shown_matrix(page)
    assert matrix == [list(column) for column in zip(*expected, strict=True)]
    assert page.get_by_text("In the picture, a row is one d_head, and a column one d_model.").is_visible()
    (cells, *_) = open_table(page.locator("weights-view heat-map details")).all()
    for text, number in zip(cells.locator("td").all_inner_texts(), matrix[0], strict=False):
        assert read_number(text) == pytest.approx(number, rel=SIGNIFICANT, abs=1e-9)


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


def test_a_large_matrix_is_shown_in_parts(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.0.mlp.W_out")
    page.get_by_role("combobox", name="Rows").select_option("512 to 671")
    wait_until_ready(page)
    expected = weight(bundled, "blocks.0.mlp.W_out", d_mlp="512:672")
    assert flat(shown_matrix(page)[0]) == flat(expected)
    page.get_by_role("combobox", name="Layer").select_option("4")
    wait_until_ready(page)
    assert "weight=blocks.4.mlp.W_out" in page.url
    assert flat(shown_matrix(page)[0]) == flat(weight(bundled, "blocks.4.mlp.W_out", d_mlp="0:256"))


def test_a_weight_leads_to_its_product_in_the_network(page: "Page", base: str) -> None:
    open_view(page, base, "weights", prompt=PROMPT, weight="blocks.2.attn.W_V")
    page.get_by_role("button", name="Show the product in the network").click()
    page.locator("network-view .trail").wait_for()
    wait_until_ready(page)
    assert "at=blocks.2.attn.v" in page.url


def test_a_wrong_address_is_an_error(page: "Page", base: str) -> None:
    for state, message in (
        ({"weight": "blocks.9.attn.W_Q"}, "there is no weight “blocks.9.attn.W_Q”"),
        ({"weight": "blocks.0.attn.W_Q", "head": 8}, "head: “8” is not one of the heads 0 to 7"),
        ({"row": 256}, "row: “256” is not one of the rows 0 to 255"),
    ):
        page.goto(url_of(base, "weights", prompt=PROMPT, **state))
        assert wait_until_settled(page) == "error"
        assert message in page.locator("#error").inner_text()
