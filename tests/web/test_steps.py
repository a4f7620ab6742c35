"""The view "Step by step": the positions that each step computes, as the trace of POST /generate says."""

from typing import TYPE_CHECKING, Any

import pytest

from tests.service.running import Running, Start
from tests.web.browsing import Findings, open_table, open_view, url_of, wait_until_ready, wait_until_settled
from tests.web.reading import percent, read_number, shown

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROMPT = "The captain was in the"


def generate(service: Running, **changes: Any) -> dict[str, Any]:
    trace = {"stages": ["embed"], "detail": "none", "top_k": 5}
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "echo": True, "logprobs": 0, "trace": trace}
    return service.answer("/generate", **{**body, **changes})


def roles(page: "Page", step: int) -> list[str]:
    return [str(cell.get_attribute("class")) for cell in page.locator(f'tr[data-step="{step}"] td').all()]


def figure(page: "Page", name: str) -> str:
    text: str = page.locator(f"dt:text-is('{name}') + dd").inner_text()
    return text


def shown_step(page: "Page") -> int:
    return int(str(page.locator("tr.current").get_attribute("data-step")))


def test_the_picture_has_a_row_for_each_step_and_a_column_for_each_token(
    page: "Page", bundled: Running, base: str
) -> None:
    open_view(page, base, "steps", prompt=PROMPT)
    answer = generate(bundled)
    headings = page.locator(".cache-steps thead .token").all_inner_texts()
    assert headings == [shown(token["text"]) for token in answer["logprobs"]]
    assert page.locator("tr[data-step]").count() == len(answer["trace"]) == 8
    for step, traced in enumerate(answer["trace"]):
        first, last = traced["positions"][0], traced["positions"][-1]
        rest = len(headings) - last - 2
        expected = ["read"] * first + ["computed"] * len(traced["positions"]) + ["chosen"] + ["none"] * rest
        assert roles(page, step) == expected


def test_the_figures_of_a_step(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "steps", prompt=PROMPT, step=3)
    model = bundled.get("/model").json()
    positions = [traced["positions"] for traced in generate(bundled)["trace"]][:4]
    (position,) = positions[-1]
    assert figure(page, "Computed") == f"1 of {position + 1} positions"
    assert figure(page, "Read from the cache") == f"{position} positions"
    computed, without = sum(map(len, positions)), sum(each[-1] + 1 for each in positions)
    assert figure(page, "So far").startswith(f"{computed} computed instead of {without}:")
    size = model["limits"]["cache_token_bytes"]
    assert f"{position + 1} positions × {size:,} bytes" in figure(page, "In the cache after it")  # noqa: RUF001
    config = model["config"]
    assert size == 2 * config["num_layers"] * config["num_kv_heads"] * config["d_head"] * 2  # bfloat16
    assert figure(page, "Bytes of one token").endswith(f"2 bytes (bfloat16) = {size:,}")
    group = config["num_heads"] // config["num_kv_heads"]
    shared = f" (each for {group} query heads)" if group > 1 else ""
    assert f"{config['num_kv_heads']} key-value heads{shared} " in figure(page, "Bytes of one token")


def test_it_says_what_is_computed_and_predicted(page: "Page", bundled: Running, base: str) -> None:
    answer = generate(bundled)
    open_view(page, base, "steps", prompt=PROMPT)
    said = page.locator("steps-view .answer")
    assert "(prefill) computes the whole prompt at once, positions 0 to 4" in said.inner_text()
    page.get_by_role("button", name="Next").click()
    wait_until_ready(page)
    assert "(decode) computes only position 5" in said.inner_text()
    top = answer["trace"][1]["predictions"][-1]["top"]
    rows = page.locator(".step-predictions tbody tr").all()
    for row, token in zip(rows, top, strict=True):
        assert row.locator("th").inner_text() == shown(token["text"])
        assert row.locator("td").last.inner_text() == percent(token["probability"])
    assert f"({percent(top[0]['probability'])})" in said.inner_text()


def test_the_table_of_steps_tells_positions_from_counts(page: "Page", bundled: Running, base: str) -> None:
    open_view(page, base, "steps", prompt=PROMPT)
    rows = open_table(page.locator("steps-view details.data-table")).all()
    computed = 0
    for row, traced in zip(rows, generate(bundled)["trace"], strict=True):
        positions = traced["positions"]
        computed += len(positions)
        texts = row.locator("td").all_inner_texts()[2:6]
        assert [int(text) for text in texts] == [len(positions), positions[-1] + 1, positions[0], computed]


def test_it_plays_to_the_end_and_can_be_paused(page: "Page", base: str) -> None:
    open_view(page, base, "steps", prompt=PROMPT, tokens=3)
    page.get_by_role("button", name="Play").click()
    page.locator("tr.current[data-step='1']").wait_for()
    page.get_by_role("button", name="Pause").click()
    assert shown_step(page) == 1
    page.get_by_role("button", name="Play").click()
    page.locator("tr.current[data-step='2']").wait_for()
    page.get_by_role("button", name="Play").wait_for()  # the last step ends it
    page.get_by_role("button", name="Play").click()  # from the beginning
    page.locator("tr.current[data-step='0']").wait_for()
    page.get_by_role("link", name="Loss").click()
    wait_until_ready(page)
    assert page.url.count("step=") == 0


def test_a_prompt_that_is_run_again_still_works(page: "Page", base: str) -> None:
    open_view(page, base, "steps", prompt=PROMPT)
    for _ in range(2):
        page.get_by_role("button", name="Run").click()
        wait_until_ready(page)
        page.get_by_role("button", name="Next").click()
        wait_until_ready(page)
    assert shown_step(page) == 2


def test_the_slider_and_the_number_of_tokens_are_in_the_address(page: "Page", base: str) -> None:
    open_view(page, base, "steps", prompt=PROMPT)
    page.get_by_label("Tokens to generate").fill("4")
    page.get_by_label("Tokens to generate").press("Enter")
    page.locator("tr[data-step='4']").wait_for(state="detached")
    wait_until_ready(page)
    slider = page.get_by_label("Step", exact=True)
    slider.press("End")
    wait_until_ready(page)
    assert shown_step(page) == 3
    page.reload()
    wait_until_ready(page)
    assert (shown_step(page), page.locator("tr[data-step]").count()) == (3, 4)
    page.go_back()
    wait_until_ready(page)
    assert (shown_step(page), page.locator("tr[data-step]").count()) == (0, 8)


def test_a_long_prompt_has_one_column_for_its_first_tokens(page: "Page", bundled: Running, base: str) -> None:
    prompt = "the sea and the night " * 10
    open_view(page, base, "steps", prompt=prompt, tokens=2)
    count = generate(bundled, prompt=prompt, max_tokens=2)["usage"]["prompt_tokens"]
    assert page.locator(".cache-steps thead .token").first.inner_text() == f"{count - 6} tokens"
    assert roles(page, 1) == ["read"] * 7 + ["computed", "chosen"]


def test_a_prompt_that_is_computed_in_parts_has_a_step_for_each_part(page: "Page", start: Start) -> None:
    service = start(model="bundled", max_num_seqs=2, max_step_tokens=16)
    prompt = "the sea and the night " * 5
    open_view(page, str(service.client.base_url), "steps", prompt=prompt, tokens=2)
    answer = generate(service, prompt=prompt, max_tokens=2)
    prefills = [each for each in answer["trace"] if each["positions"][0] < answer["usage"]["prompt_tokens"]]
    assert page.locator("tr[data-step] th", has_text="prefill").count() >= len(prefills) > 1
    assert "a part of the prompt" in page.locator("steps-view .answer").inner_text()


def test_a_cache_of_8_bits_has_its_own_size(page: "Page", start: Start) -> None:
    service = start(model="bundled", kv_cache_dtype="int8")
    open_view(page, str(service.client.base_url), "steps", prompt=PROMPT)
    size = service.get("/model").json()["limits"]["cache_token_bytes"]
    assert read_number(figure(page, "Bytes of one token").split("=")[1]) == size
    config = service.get("/model").json()["config"]
    count = 2 * config["num_layers"] * config["num_kv_heads"] * config["d_head"]
    bytes_of_number = figure(page, "Bytes of one token").split("numbers ")[1][1:]  # after the multiplication sign
    assert read_number(bytes_of_number) == pytest.approx(size / count, abs=6e-4)
    assert size / count < 2


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"step": 8}, "step: 8 is out of range"),
        ({"step": -1}, "step: -1 is out of range"),
        ({"tokens": 0}, "tokens: 0 generates nothing"),
        ({"tokens": 5000}, "maximum context length"),
        ({"tokens": "many"}, "tokens: “many” is not a whole number"),
        ({"prompt": ""}, "prompt: is empty"),
    ],
)
def test_a_wrong_address_is_an_error(
    page: "Page", base: str, findings: Findings, state: dict[str, str | int], message: str
) -> None:
    page.goto(url_of(base, "steps", **{"prompt": PROMPT, **state}))
    assert wait_until_settled(page) == "error"
    assert message in page.locator("#error").inner_text()
    findings.clear()  # the browser logs answers with an error status


def test_picture_and_figures_stand_side_by_side(page: "Page", base: str) -> None:
    page.set_viewport_size({"width": 1440, "height": 900})
    open_view(page, base, "steps")
    picture, figures = (page.locator(each).bounding_box() for each in (".cache-picture", ".cache-figures"))
    assert picture is not None
    assert figures is not None
    assert picture["x"] + picture["width"] < figures["x"]
    assert figures["y"] < picture["y"] + picture["height"]
    assert figures["x"] + figures["width"] <= 1440
