"""The bundled checkpoint: `transformers` loads the same network from its directory, and its model card is correct."""

import json
import re

import pytest
import torch
import transformers

from model.checkpoints.load import BUNDLED, Checkpoint, load_checkpoint
from model.training.train import Recipe
from tests.conftest import source_tree

CARD = (BUNDLED / "README.md").read_text(encoding="utf-8")
LOG = [json.loads(line) for line in (BUNDLED / "training.jsonl").read_text().splitlines()]
PROMPTS = ("It was a dark night, and the captain", "the cat sat on", "Emma")  # as in the README


@pytest.fixture(scope="module")
def bundled() -> Checkpoint:
    return load_checkpoint(str(BUNDLED), dtype="float32")


def encode(checkpoint: Checkpoint, text: str) -> list[int]:
    assert checkpoint.tokenizer is not None
    return checkpoint.tokenizer.encode(text)


def test_transformers_loads_the_same_network_and_tokenizer(bundled: Checkpoint) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    for text in (*PROMPTS, "Two\n\n  lines,\tand a caf\u00e9 \u2603."):
        ids = encode(bundled, text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
        with torch.inference_mode():
            batch = torch.tensor([ids])
            torch.testing.assert_close(bundled.model(batch), theirs(batch).logits, atol=1e-4, rtol=1e-4)
    assert theirs.generation_config.temperature == bundled.generation.sampling["temperature"] == 0.8


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_does_not_loop(bundled: Checkpoint, prompt: str) -> None:
    """Among 60 tokens, no run of up to 20 tokens occurs three times in a row."""
    assert bundled.tokenizer is not None
    ids = encode(bundled, prompt)
    with torch.inference_mode():
        for _ in range(60):
            ids.append(int(bundled.model(torch.tensor([ids]))[0, -1].argmax()))
    generated = ids[-60:]
    for size in range(1, 21):
        for start in range(60 - 3 * size + 1):
            repeated = generated[start : start + size] * 3
            assert generated[start : start + 3 * size] != repeated, bundled.tokenizer.decode(generated)


def test_the_training_log_is_of_the_default_recipe_and_complete() -> None:
    run, *evaluations, result = LOG
    assert Recipe(**run["recipe"]) == Recipe()
    assert evaluations[-1]["step"] == Recipe().steps
    assert evaluations[-1]["validation_loss"] < evaluations[0]["validation_loss"]
    assert set(result) == {"held_out"}


def test_the_figures_of_the_model_card_agree_with_the_log_and_the_weights(bundled: Checkpoint) -> None:
    run, *evaluations, result = LOG
    last = evaluations[-1]
    assert run["parameters"] == bundled.parameters.total
    for figure in (
        f"{run['parameters']:,} parameters",
        f"{run['training_tokens']:,} tokens to learn from",
        f"{run['held_out_bytes']:,} bytes",
        f"{last['minutes']:.0f} minutes",
        f"{last['step']:,} steps",
        f"{last['tokens'] / 1e6:.1f} million tokens",
        f"{last['training_loss']} nats",
        f"{last['validation_loss']} nats",
        f"**{result['held_out']['bits_per_byte']}** bits | {result['held_out']['perplexity']:.1f} |",
    ):
        assert figure in CARD, figure
    readme = (source_tree() / "README.md").read_text(encoding="utf-8")
    ngram = re.search(r"Kneser-Ney smoothing \| ([\d.]+) bits", CARD)
    assert ngram is not None
    assert f"{result['held_out']['bits_per_byte']:.2f} bits a byte" in readme
    assert f"a 5-gram model of the same tokens {float(ngram[1]):.2f}" in readme
