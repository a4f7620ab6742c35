"""Every view opens with every kind of model: bundled, GPT-2, experts, worked examples, and without a tokenizer."""

import json
import math
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from model.worked_examples import WORKED_EXAMPLES
from tests.service.checkpoints import NUM_TOKENS, write_tokenizer
from tests.service.running import PATIENCE_SECONDS, Running, running
from tests.tiny import write_reference
from tests.web.browsing import open_table, open_view, url_of, wait_until_ready, wait_until_settled
from tests.web.reading import SIGNIFICANT, percent, read_number
from tests.web.views import VIEWS

if TYPE_CHECKING:
    from playwright.sync_api import Page

Ask = Callable[..., dict[str, Any]]  # a path and fields of a body: the answer
CONTEXT = 160
EDIT: dict[str, Any] = {"stage": "blocks.1.attn.z", "op": "zero", "heads": [0]}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": NUM_TOKENS, "n_positions": CONTEXT},
    "mixtral": {"vocab_size": NUM_TOKENS, "max_position_embeddings": CONTEXT},
    "gemma2": {"vocab_size": NUM_TOKENS, "max_position_embeddings": CONTEXT},
}


def post(base: str, path: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def page_is_of_ids(base: str) -> bool:
    """Whether the served model has no tokenizer."""
    with urllib.request.urlopen(f"{base}/model", timeout=PATIENCE_SECONDS) as response:
        return not json.load(response)["capabilities"]["tokenizer"]


def check_forward(page: "Page", ask: Ask) -> None:
    stages = ask("/forward", stages=["*"])["stages"]
    assert page.locator("stage-card .stage-name").all_text_contents() == [stage["name"] for stage in stages]
    for stage in stages:
        if stage["name"].startswith("blocks.") and not stage["name"].startswith("blocks.0."):
            continue  # only the first layer is open
        texts = page.locator(f'stage-card[data-stage="{stage["name"]}"] .figures').inner_text().split(" · ")
        for text, key in zip(texts, ("min", "max", "mean", "std", "l2"), strict=False):
            assert read_number(text) == pytest.approx(stage["summary"][key], rel=SIGNIFICANT, abs=1e-9)


def check_attention(page: "Page", ask: Ask) -> None:
    best = max(ask("/patterns")["maps"], key=lambda each: each["means"]["previous"])
    said = page.locator("attention-ranking .answer").inner_text()
    assert percent(best["means"]["previous"]) in said


def check_lens(page: "Page", ask: Ask) -> None:
    positions = list(range(page.locator("cell-grid thead th").count() - 1))
    layers = ask("/attribute", method="logit_lens", positions=positions, top_k=1)["layers"]
    rows = page.locator("cell-grid tbody tr").all()
    for row, layer in zip(rows, layers, strict=True):
        texts = [text.split("\n")[1] for text in row.locator("td").all_inner_texts()]
        assert texts == [percent(each["top"][0]["probability"]) for each in layer["positions"]]


def check_loss(page: "Page", ask: Ask) -> None:
    loss = ask("/forward", stages=["loss"])["loss"]
    said = [str(each.get_attribute("data-said")) for each in page.locator("token-strip [role=option]").all()]
    assert [read_number(text) for text in said[1:]] == pytest.approx(loss["per_token"][:-1], abs=6e-3)


def check_steps(page: "Page", ask: Ask) -> None:
    trace = {"stages": ["embed"], "detail": "none", "top_k": 5}
    answer = ask("/generate", max_tokens=8, temperature=0, echo=True, logprobs=0, trace=trace)
    assert page.locator("tr[data-step]").count() == len(answer["trace"])
    (top, *_) = answer["trace"][0]["predictions"][-1]["top"]
    assert page.locator(".step-predictions tbody td").last.is_visible()
    assert percent(top["probability"]) in page.locator(".step-predictions tbody").inner_text()


def check_generate(page: "Page", ask: Ask) -> None:
    answer = ask("/generate", max_tokens=24, temperature=0, logprobs=1)
    said = [str(each.get_attribute("data-said")) for each in page.locator("token-strip [role=option]").all()]
    assert said == [percent(math.exp(each["logprob"])) for each in answer["logprobs"]]


def check_edits(page: "Page", ask: Ask) -> None:
    answer = ask("/forward", stages=["logits"], detail="none", top_k=1, edits=[EDIT], baseline=True, positions=[-1])
    said = page.locator("edit-comparison .answer").inner_text()
    for run in (answer, answer["baseline"]):
        assert percent(run["predictions"][0]["top"][0]["probability"]) in said
    for heading, edits in (("Without the edits", []), ("With the edits", [EDIT])):
        options = page.locator(f"text-continuation[heading='{heading}'] [role=option]").all()
        answer = ask("/generate", max_tokens=40, temperature=0, logprobs=1, edits=edits)
        expected = [percent(math.exp(each["logprob"])) for each in answer["logprobs"]]
        assert [each.get_attribute("data-said") for each in options] == expected
    check_sweep(page, ask)


def check_sweep(page: "Page", ask: Ask) -> None:
    """Try every patch from another prompt."""
    bodies: list[str] = []
    page.on("request", lambda request: bodies.append(request.post_data or ""))
    field = page.locator("patch-sweep [name=other]")
    prompt = field.input_value()  # the form offers the prompt itself
    field.fill("[3, 2, 4, 1, 5]" if prompt.startswith("[") else prompt.replace("b", "d"))
    page.get_by_role("button", name="Try every patch").click()
    page.locator("patch-sweep .answer").wait_for()
    wait_until_ready(page)
    (body,) = (json.loads(text) for text in bodies if '"patching"' in text)
    answer = ask("/attribute", **{name: value for name, value in body.items() if name != "stream"})
    plain, goal = answer["corrupted_value"], answer["clean_value"]
    rows = open_table(page.locator("patch-sweep .data-table")).all()
    for row, stage in zip(rows, answer["stages"], strict=True):
        found = [read_number(text) for text in row.locator("td").all_inner_texts()]
        expected = [(value - plain) / (goal - plain) for value in stage["values"]]
        assert found == pytest.approx(expected, rel=SIGNIFICANT, abs=1e-5)


CHECKS: dict[str, Callable[["Page", Ask], None]] = {
    "forward": check_forward,
    "attention": check_attention,
    "lens": check_lens,
    "loss": check_loss,
    "steps": check_steps,
    "generate": check_generate,
    "edits": check_edits,
}


def write_family(directory: Path, family: str) -> None:
    """Write a tiny checkpoint of a family, with random weights and a tokenizer of bytes."""
    from tests.parity.reference import config_of  # skips where transformers is missing

    write_reference(config_of(family, FAMILIES[family]), directory)
    write_tokenizer(directory / "tokenizer.json")


@pytest.fixture(scope="module", params=[*FAMILIES, "without a tokenizer"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service with a tiny checkpoint."""
    directory = tmp_path_factory.mktemp("family")
    write_family(directory, request.param if request.param in FAMILIES else "gpt2")
    if request.param not in FAMILIES:
        (directory / "tokenizer.json").unlink()
    with running(model=str(directory)) as service:
        yield str(service.client.base_url).rstrip("/")


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_with_the_bundled_model(page: "Page", base: str, view: str) -> None:
    open_view(page, base, view)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_with_every_family(page: "Page", family: str, view: str) -> None:
    open_view(page, family, view)


@pytest.mark.parametrize("view", CHECKS)
def test_the_numbers_of_every_family_are_those_of_the_service(page: "Page", family: str, view: str) -> None:
    prompt = "[3, 1, 4, 1, 5]" if page_is_of_ids(family) else "a bc"
    sent = [3, 1, 4, 1, 5] if page_is_of_ids(family) else prompt
    open_view(page, family, view, prompt=prompt, **({"edits": json.dumps([EDIT])} if view == "edits" else {}))
    CHECKS[view](page, lambda path, **body: post(family, path, **({"prompt": sent} | body)))


@pytest.mark.parametrize("name", WORKED_EXAMPLES)
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_shows_a_worked_example_or_says_why_it_cannot(page: "Page", base: str, view: str, name: str) -> None:
    words = WORKED_EXAMPLES[name].vocabulary
    prompt = " ".join(words[token_id] for token_id in WORKED_EXAMPLES[name].prompt_ids)
    page.goto(url_of(base, view, model=name, prompt=prompt))
    kind = "({showsWorkedExamples, usesPrompt}) => showsWorkedExamples || !usesPrompt"
    settled = wait_until_settled(page)
    if page.evaluate(f"({kind})(customElements.get('{view}-view'))"):
        assert settled == "ready", page.locator("#error").inner_text()
    else:
        assert "worked example" in page.locator("#error").inner_text()


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_or_says_what_is_missing_without_a_checkpoint(page: "Page", empty: Running, view: str) -> None:
    page.goto(url_of(str(empty.client.base_url), view))
    if wait_until_settled(page) == "error":
        assert "This service" in page.locator("#error").inner_text()
