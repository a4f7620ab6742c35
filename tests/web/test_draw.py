"""Drawing: colours, the heat map and its keyboard, tables of numbers, and texts of numbers."""

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.web.browsing import open_table, open_view

if TYPE_CHECKING:
    from playwright.sync_api import Page

HEAT_MAP = """
async (data) => {
  await import('/page/draw/heat_map.js');
  const map = document.createElement('heat-map');
  map.id = 'tested';
  map.data = {...data, values: data.values.map((value) => value ?? NaN)};
  document.querySelector('#view').append(map);
}
"""
DATA = {
    "values": [1.0, -2.0, None, 0.5, 0.0, 4.0],
    "rowLabels": ["first", "second"],
    "columnLabels": ["a", "b", "c"],
    "rowName": "query",
    "columnName": "key",
    "valueName": "score",
}


@pytest.fixture
def drawing(page: "Page", base: str) -> "Page":
    open_view(page, base, "generate", max_tokens=1)
    return page


def call(page: "Page", module: str, expression: str) -> Any:
    return page.evaluate(f"import('/page/{module}').then((m) => {expression})")


def test_the_value_of_a_cell_is_shown_for_pointer_and_keyboard(drawing: "Page") -> None:
    drawing.evaluate(HEAT_MAP, DATA)
    canvas, shown = drawing.locator("#tested canvas"), drawing.locator("#tested .under-pointer")
    canvas.focus()
    for key, expected in (
        ("ArrowRight", "query first, key a: score 1.000"),
        ("ArrowRight", "query first, key b: score −2.000"),  # noqa: RUF001
        ("End", "query first, key c: score masked"),
        ("ArrowDown", "query second, key c: score 4.000"),
        ("ArrowDown", "query second, key c: score 4.000"),
    ):
        drawing.keyboard.press(key)
        assert shown.inner_text() == expected
    assert "2 rows (query) and 3 columns (key)" in str(canvas.get_attribute("aria-label"))


def test_a_heat_map_has_a_table_and_a_legend_with_its_masked_cells(drawing: "Page") -> None:
    drawing.evaluate(HEAT_MAP, DATA)
    legend = drawing.locator("#tested .legend").inner_text()
    assert "−4.000" in legend  # noqa: RUF001
    assert "masked" in legend
    rows = open_table(drawing.locator("#tested details")).all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["first", "1.000", "−2.000", "masked"],  # noqa: RUF001
        ["second", "0.5000", "0", "4.000"],
    ]


@pytest.mark.parametrize("label", ["WWWWWWWWWWWWWW", ""])
def test_the_labels_of_columns_are_inside_the_picture(drawing: "Page", label: str) -> None:
    count = 6 if label else 253
    labels = [f"{column} {label}".strip() for column in range(count)]
    data = DATA | {"values": [1.0] * 6 * count, "rowLabels": labels[:6]}
    data["columnLabels"] = labels
    drawing.evaluate(HEAT_MAP, data)
    edges = drawing.locator("#tested canvas").evaluate(
        """(canvas) => { const context = canvas.getContext("2d");
        const { data } = context.getImageData(canvas.width - 30, 0, 30, canvas.height);
        return [data.some((value, index) => value > 0 && index % 120 >= 116), data.some((value) => value > 0)]; }"""
    )
    assert edges == [False, True]
    assert drawing.locator("#tested .scroll").evaluate("box => box.scrollWidth <= box.clientWidth")


def test_the_cell_under_the_pointer_has_a_frame_and_its_value_beside_it(drawing: "Page") -> None:
    drawing.evaluate(HEAT_MAP, DATA)
    box = drawing.locator("#tested canvas").bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] - 12, box["y"] + box["height"] - 10
    drawing.mouse.move(x, y)
    tip = drawing.locator("#tested .cell-tip")
    assert tip.inner_text() == "query second, key c: score 4.000"
    for part, distance in ((tip, 60), (drawing.locator("#tested .row-frame:visible"), 2)):
        place = part.bounding_box()
        assert place is not None
        assert place["x"] <= x <= place["x"] + place["width"]
        assert place["y"] - distance <= y <= place["y"] + place["height"] + distance
    drawing.mouse.move(0, 0)
    assert tip.is_hidden()


def test_a_clicked_cell_keeps_its_value_when_the_pointer_leaves(drawing: "Page") -> None:
    drawing.evaluate(HEAT_MAP, DATA)
    canvas, shown = drawing.locator("#tested canvas"), drawing.locator("#tested .under-pointer")
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": box["width"] - 12, "y": box["height"] - 10})
    drawing.mouse.move(0, 0)
    assert shown.inner_text() == "query second, key c: score 4.000"


def test_large_tables_have_pages(drawing: "Page") -> None:
    rows, columns = 120, 45
    data = DATA | {
        "values": [float(index) for index in range(rows * columns)],
        "rowLabels": [f"r{row}" for row in range(rows)],
        "columnLabels": [f"c{column}" for column in range(columns)],
    }
    drawing.evaluate(HEAT_MAP, data)
    open_table(drawing.locator("#tested details"))
    table = drawing.locator("#tested")
    assert table.get_by_text("rows 0 to 49 of 120").is_visible()
    table.get_by_role("button", name="Later rows").click()
    table.get_by_role("button", name="Later columns").click()
    assert table.locator("tbody tr").first.inner_text().split("\t")[:2] == ["r50", f"{50 * columns + 20:.1f}"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_grow_stronger_with_the_size_and_texts_on_them_can_be_read(drawing: "Page", theme: str) -> None:
    drawing.evaluate("theme => { document.documentElement.style.colorScheme = theme }", theme)
    colours = call(drawing, "draw/colours.js", "Array.from({length: 101}, (_, i) => m.colour(i / 100))")
    lights = [luminance(colour) for colour in colours]
    assert lights == sorted(lights, reverse=theme == "light")
    for colour_map in ("sequential", "diverging"):
        pairs = call(
            drawing,
            "draw/colours.js",
            f"Array.from({{length: 1001}}, (_, i) => m.colour(i / 1000, '{colour_map}')).map((c) => [c, m.textOn(c)])",
        )
        for colour, text in pairs:
            light, other = luminance(colour), 1.0 if text == "#fff" else 0.0
            assert (max(light, other) + 0.05) / (min(light, other) + 0.05) >= 4.5


def luminance(colour: list[int]) -> float:
    """The relative luminance of WCAG 2."""
    parts = [value / 255 for value in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_numbers_and_tokens_as_texts(drawing: "Page") -> None:
    cases = [
        ("m.number(0.00001234)", "1.234e−5"),  # noqa: RUF001
        ("m.number(-1234.56)", "−1234.6"),  # noqa: RUF001
        ("m.number(Infinity)", "∞"),
        ("m.number(null)", "–"),  # noqa: RUF001
        ("m.percent(0.5)", "50.0\u00a0%"),
        ("m.percent(0.01234)", "1.23\u00a0%"),
        ("m.percent(0.00001)", "<\u00a00.01\u00a0%"),
        ("m.percent(0)", "0\u00a0%"),
        ("m.count(5131520)", "5,131,520"),
        ("m.shown({id: 7, text: null})", "#7"),
        ("m.shown({id: 7, text: ' a\\n'})", "␣a↵"),
        ("m.shown({id: 7, text: '\\u00a0'})", "U+00A0"),
        ("m.shown({id: 7, text: 'a\\u200bb\\u0007 '})", "a[U+200B]b[U+0007]␣"),
        ("m.shown({id: 7, text: '\\u{1f468}\\u200d\\u{1f469}'})", "\U0001f468\u200d\U0001f469"),
        ("m.quoted({id: 7, text: '\\u3000'})", "“U+3000”"),
        ("m.quoted({id: 7, text: ' a'})", "“\u00a0a”"),
        ("m.quoted({id: 7, text: null})", "token 7"),
    ]
    found = call(drawing, "format.js", f"[{', '.join(expression for expression, _ in cases)}]")
    assert dict(zip((expression for expression, _ in cases), found, strict=True)) == dict(cases)


def test_numbers_in_base64_are_read_in_every_dtype(drawing: "Page") -> None:
    texts = {"float32": "AADAPwAAAMA=", "bfloat16": "wD8AwA==", "float16": "AD4AwA==", "uint8": "AgM="}
    read = call(
        drawing,
        "api.js",
        f"Object.entries({json.dumps(texts)}).map(([dtype, text]) => Array.from(m.decode(text, dtype)))",
    )
    assert read == [[1.5, -2.0], [1.5, -2.0], [1.5, -2.0], [2, 3]]
