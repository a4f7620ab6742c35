"""The view "Worked examples": printed and computed numbers, as POST /forward gives them."""

from typing import TYPE_CHECKING, Any

import pytest

from model.worked_examples import WORKED_EXAMPLES
from tests.service.running import Running
from tests.web.browsing import open_view, url_of, wait_until_ready, wait_until_settled
from tests.web.reading import SIGNIFICANT, read_number

if TYPE_CHECKING:
    from playwright.sync_api import Page

# "A token's journey" prints 0.26 among its probabilities, too, computed from rounded numbers. "AI rocks" prints 0.3734
# for this token at the last position, so its result 0.3362, which stands in the first row, does not follow.
UNEQUAL_RESULTS = {
    ("a-tokens-journey", "prediction_probability"): "↳ passed on",
    ("ai-rocks", "prediction_probability"): "✗ differs",
}
every_example = pytest.mark.parametrize("name", WORKED_EXAMPLES)


def answer_of(service: Running, name: str) -> dict[str, Any]:
    example = WORKED_EXAMPLES[name]
    prompt = " ".join(example.vocabulary[each] for each in example.prompt_ids)
    return service.answer("/forward", model=name, prompt=prompt, detail="values")


def printed_stages(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [stage for stage in answer["stages"] if stage.get("published")]


def rows_of(values: Any, depth: int) -> list[list[float | None]]:
    return [values] if depth == 1 else [row for part in values for row in rows_of(part, depth - 1)]


def verdict_of(published: dict[str, Any]) -> str:
    if published["agrees"]:
        return "✓ agrees"
    is_passed_on = published["from_previous"] is not None and published["from_previous"]["agrees"]
    return "↳ passed on" if is_passed_on else "✗ differs"


@every_example
def test_results_and_agreement_are_those_of_the_service(page: "Page", bundled: Running, base: str, name: str) -> None:
    open_view(page, base, "worked", example=name)
    answer = answer_of(bundled, name)
    rows = page.get_by_role("table", name="Results").locator("tbody tr").all()
    for row, result in zip(rows, answer["worked_example"]["results"], strict=True):
        verdict = "✓ agrees" if result["agrees"] else UNEQUAL_RESULTS[name, result["name"]]
        assert row.locator("td").all_inner_texts() == [result["published"], result["computed"], verdict]
    items = page.locator(".printed > [data-stage]").all()
    for item, stage in zip(items, printed_stages(answer), strict=True):
        assert item.get_attribute("data-stage") == stage["name"]
        assert item.locator(".verdict").inner_text() == verdict_of(stage["published"])


@every_example
def test_an_open_stage_has_the_printed_numbers_beside_the_computed_ones(
    page: "Page", bundled: Running, base: str, name: str
) -> None:
    stages = printed_stages(answer_of(bundled, name))
    open_view(page, base, "worked", example=name, stage=",".join(stage["name"] for stage in stages))
    for stage in stages:
        published, depth = stage["published"], len(stage["shape"])
        pairs = zip(rows_of(published["values"], depth), rows_of(stage["values"], depth), strict=True)
        expected = [(printed, computed) for printed, computed in pairs if any(each is not None for each in printed)]
        lines = page.locator(f'[data-stage="{stage["name"]}"] tbody tr').all()
        cells = [line.locator("td").all_inner_texts() for line in lines]
        assert len(cells) == 3 * len(expected)
        differences = []
        for index, (printed, computed) in enumerate(expected):
            for column, (theirs, ours) in enumerate(zip(printed, computed, strict=True)):
                texts = [cells[3 * index + line][column] for line in range(3)]
                if theirs is None:
                    assert (texts[0], texts[2]) == ("–", "–")  # noqa: RUF001
                    continue
                assert read_number(texts[0]) == theirs
                if ours is not None:
                    ours = ours**2 if published["squared"] else ours
                    assert read_number(texts[1]) == pytest.approx(ours, rel=SIGNIFICANT, abs=1e-12)
                    differences.append(abs(read_number(texts[2])))
        assert max(differences) == pytest.approx(published["max_difference"], rel=6e-3, abs=1e-12)


@every_example
def test_every_slip_is_listed(page: "Page", bundled: Running, base: str, name: str) -> None:
    open_view(page, base, "worked", example=name)
    slips = answer_of(bundled, name)["worked_example"]["slips"]
    section = page.get_by_role("region", name="Numbers that look wrong", exact=True)
    groups = [
        (group.locator("code").inner_text(), group.locator("tr").all()[1:]) for group in section.locator("tbody").all()
    ]
    rows = [(stage, row) for stage, rows in groups for row in rows]
    for (stage, row), slip in zip(rows, slips, strict=True):
        texts = row.locator("td").all_inner_texts()
        assert stage == slip["stage"]
        assert read_number(texts[0]) == float(slip["printed"])
        assert read_number(texts[1]) == pytest.approx(slip["from_printed"], rel=SIGNIFICANT)
    numbers = "numbers look" if len(slips) > 1 else "number looks"
    said = f"{len(slips)} {numbers} wrong"
    button = page.locator(f"worked-view button[data-name={name}]").inner_text()
    if slips:
        assert button.endswith(f"({said})")
        page.get_by_role("button", name="Show them" if len(slips) > 1 else "Show it").click()
        assert section.evaluate("section => section === document.activeElement")
        assert page.get_by_role("region", name="About the article").inner_text().startswith(said)
    else:
        assert button.endswith("(none look wrong)")
        assert "None:" in section.inner_text()


@every_example
def test_it_links_the_article_and_says_how_the_network_differs(page: "Page", base: str, name: str) -> None:
    open_view(page, base, "worked", example=name)
    about = page.get_by_role("region", name="About the article")
    assert str(about.locator("h3 a").get_attribute("href")).startswith("https://")
    assert about.locator("li").count() >= 2


def test_a_legend_explains_the_four_signs(page: "Page", base: str) -> None:
    open_view(page, base, "worked")
    signs = page.locator("worked-view .legend .verdict").all_inner_texts()
    assert signs == ["✓ agrees", "↳ passed on", "✗ differs", "⚠ looks wrong"]


def test_a_slip_is_marked_in_its_stage(page: "Page", base: str) -> None:
    open_view(page, base, "worked", example="a-tokens-journey", stage="blocks.0.attn_out")
    assert page.locator("td.slip").all_inner_texts() == ["0.19 ⚠"]


def test_examples_and_stages_are_chosen_with_the_keyboard_and_kept_in_the_address(page: "Page", base: str) -> None:
    open_view(page, base, "worked")
    assert page.locator("#input").is_hidden()
    page.get_by_role("button", name="zhubert.com").press("Enter")
    wait_until_ready(page)
    button = page.locator('[data-stage="loss"]').get_by_role("button")
    button.press("Enter")
    wait_until_ready(page)
    page.locator('[data-stage="loss"] table').wait_for()
    assert page.locator('[data-stage="loss"] button').evaluate("button => button === document.activeElement")
    page.reload()
    wait_until_ready(page)
    assert page.locator('[data-stage="loss"] table td').first.inner_text() == "1.90326"
    page.go_back()
    wait_until_ready(page)
    assert page.locator("table.comparison").count() == 0
    page.go_back()
    wait_until_ready(page)
    assert page.get_by_role("button", name="psychometrics.ai").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize(
    ("state", "message"),
    [({"example": "nothing"}, "there is no worked example “nothing”"), ({"stage": "logit"}, "prints no stage “logit”")],
)
def test_a_wrong_address_is_an_error(page: "Page", base: str, state: dict[str, str | int], message: str) -> None:
    page.goto(url_of(base, "worked", **state))
    assert wait_until_settled(page) == "error"
    assert message in page.locator("#error").inner_text()
