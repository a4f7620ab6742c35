"""Every view opens with every kind of model: bundled, GPT-2, experts, worked examples, and without a tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from model.worked_examples import WORKED_EXAMPLES
from tests.service.checkpoints import NUM_TOKENS, write_tokenizer
from tests.service.running import Running, running
from tests.tiny import write_reference
from tests.web.browsing import open_view, url_of, wait_until_settled
from tests.web.views import VIEWS

if TYPE_CHECKING:
    from playwright.sync_api import Page

CONTEXT = 160
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": NUM_TOKENS, "n_positions": CONTEXT},
    "mixtral": {"vocab_size": NUM_TOKENS, "max_position_embeddings": CONTEXT},
    "gemma2": {"vocab_size": NUM_TOKENS, "max_position_embeddings": CONTEXT},
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
