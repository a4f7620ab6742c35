"""A network from a GGUF file computes the same numbers as the network of `transformers`.

Tiny files are compared with the network that they were made from, and published files with the network that
`transformers` reads from the same file.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.checkpoints.load import Checkpoint, load_checkpoint
from model.network.transformer import Transformer
from tests.checkpoints.test_gguf_models import CASES, tiny_config
from tests.parity.reference import assert_same_numbers, transformers
from tests.published_models import gemma3, gemma3_gguf, smollm2, smollm2_gguf
from tests.tiny import write_reference
from tests.tiny_gguf import write_gguf


@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_residual_of_a_gguf_file_equal_transformers(case: str, tmp_path: Path) -> None:
    directory = tmp_path / "reference"
    directory.mkdir()
    reference = write_reference(tiny_config(*CASES[case]), directory)
    assert_same_numbers(reference, write_gguf(directory, tmp_path / "model.gguf"), num_tokens=33)


PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius because",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Les trois couleurs du drapeau",
    "Q: Why is the sky blue?\nA:",
)
NUM_TOKENS = 64
Published = tuple[Checkpoint, Any]


@pytest.fixture(scope="module", params=[(smollm2_gguf, smollm2), (gemma3_gguf, gemma3)], ids=["smollm2", "gemma3"])
def published(request: pytest.FixtureRequest) -> Published:
    """A published file in float32, loaded by us and by transformers."""
    file, directory = (path() for path in request.param)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return load_checkpoint(str(file), dtype="float32"), reference.eval()


def prompts_of(checkpoint: Checkpoint) -> list[Tensor]:
    assert checkpoint.tokenizer is not None
    return [torch.tensor([checkpoint.tokenizer.encode(prompt)]) for prompt in PROMPTS]


def greedy(model: Transformer, ids: Tensor) -> Tensor:
    """The tokens that follow the prompt `ids` (1, T), each the most probable one."""
    cache = model.new_cache(ids.shape[1] + NUM_TOKENS)
    found, new = [], ids
    for _ in range(NUM_TOKENS):
        new = model(new, cache)[:, -1].argmax(-1, keepdim=True)
        found.append(new)
    return torch.cat(found, dim=1)


@pytest.mark.slow
@torch.inference_mode()
def test_the_logits_of_a_published_file_equal_transformers(published: Published) -> None:
    checkpoint, reference = published
    for ids in prompts_of(checkpoint):
        expected = reference(ids, use_cache=False).logits
        error = (checkpoint.model(ids) - expected).abs().max()
        assert error < 1e-4 * (expected.max() - expected.min())


@pytest.mark.slow
@torch.inference_mode()
def test_the_greedy_tokens_of_a_published_file_equal_transformers(published: Published) -> None:
    checkpoint, reference = published
    for ids in prompts_of(checkpoint):
        options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None}
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert expected.shape[1] == ids.shape[1] + NUM_TOKENS
        assert greedy(checkpoint.model, ids).equal(expected[:, ids.shape[1] :])
