"""Published checkpoints generate the same greedy ids as in other programs."""

import json
from collections.abc import Sequence

import pytest
import torch

from model.checkpoints.load import load_checkpoint
from model.network.transformer import Transformer
from tests.conftest import shared


def greedy(model: Transformer, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Generate with a cache: the prompt in one pass, then one token per pass."""
    cache = model.new_cache(len(prompt_ids) + num_tokens)
    ids = list(prompt_ids)
    new = torch.tensor([ids])
    for _ in range(num_tokens):
        ids.append(int(model(new, cache, rows=[new.shape[1] - 1])[0, 0].argmax()))
        new = torch.tensor([ids[-1:]])
    return ids


def test_stories260k_generates_the_text_of_its_reference_program() -> None:
    directory = shared("checkpoints/stories260K")
    expected = json.loads((directory / "greedy_ids.json").read_text())
    checkpoint = load_checkpoint(str(directory))
    assert expected["prompt_ids"] == [1]
    assert greedy(checkpoint.model, [1], 200) == expected["greedy_ids"][:201]
    assert checkpoint.name == "stories260K"
    assert checkpoint.generation.eos_token_ids == (2,)
    assert checkpoint.tokenizer is not None
    text = checkpoint.tokenizer.decode(expected["greedy_ids"][:201])
    assert text.startswith("Once upon a time, there was a little girl named Lily.")


def test_stories260k_predicts_in_one_pass_the_tokens_that_it_generates_with_a_cache() -> None:
    directory = shared("checkpoints/stories260K")
    ids = json.loads((directory / "greedy_ids.json").read_text())["greedy_ids"][:201]
    model = load_checkpoint(str(directory)).model
    assert model(torch.tensor([ids[:-1]])).argmax(-1)[0].tolist() == ids[1:]


@pytest.mark.parametrize("index", [0, 1])
def test_tiny_random_gpt2_continues_as_published(index: int) -> None:
    directory = shared("checkpoints/tiny-random-gpt2")
    published = json.loads((directory / "expected.json").read_text())["greedy"]
    assert len(published) == 2
    prompt, continuation = published[index]["prompt"], published[index]["continuation"]
    checkpoint = load_checkpoint(str(directory))
    assert greedy(checkpoint.model, prompt, len(continuation)) == prompt + continuation
    assert checkpoint.tokenizer is None
    assert checkpoint.generation.eos_token_ids == (98,)
