"""Published GGUF models that several processes compute: SmolLM2 (9 heads on 3) and Gemma 3 (4 heads on 1)."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.published_models import gemma3_gguf, smollm2_gguf
from tests.service.running import LOADING_SECONDS, Running, running
from tests.service.torchrun import launch, torchrun

pytestmark = pytest.mark.slow
PROMPTS = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "When Mary and John went to the store, John gave a drink to",
    "the cat sat on the mat " * 20,
)
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
EXACT: dict[str, Any] = {"dtype": "float32", "quantize": "none"}
OPTIONS = ("--dtype", "float32", "--quantize", "none", "--cache-bytes", str(64 << 20))


def logits_of(client: httpx.Client, prompt: str) -> torch.Tensor:
    """The logits at the last position, over the whole vocabulary."""
    answer = client.post("/logits", json={"prompt": prompt})
    assert answer.status_code == 200, answer.text
    return torch.tensor(answer.json()["positions"][0]["logits"])


def assert_same_logits(one: httpx.Client, several: httpx.Client) -> None:
    for prompt in PROMPTS:
        expected = logits_of(one, prompt)
        # Relative to the largest logit, because each is a sum whose terms are as large as that.
        error = (logits_of(several, prompt) - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, prompt


@pytest.fixture(scope="module")
def smollm2_alone() -> Iterator[Running]:
    with running(model=str(smollm2_gguf()), kernels="torch", cache_bytes=64 << 20, **EXACT) as service:
        yield service


@pytest.fixture(scope="module")
def smollm2_of_three() -> Iterator[httpx.Client]:
    with torchrun(str(smollm2_gguf()), 3, *OPTIONS) as client:
        yield client


def test_three_processes_give_the_logits_of_one(smollm2_alone: Running, smollm2_of_three: httpx.Client) -> None:
    assert_same_logits(smollm2_alone.client, smollm2_of_three)


def test_three_processes_chat_and_stream(smollm2_of_three: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{smollm2_of_three.base_url}/v1", api_key="none") as sdk:
        ask: dict[str, Any] = {
            "model": "SmolLM2-135M-Instruct.Q4_1",
            "messages": CAPITAL,
            "temperature": 0,
            "max_tokens": 20,
        }
        whole = sdk.chat.completions.create(**ask)
        pieces = [chunk.choices[0].delta.content or "" for chunk in sdk.chat.completions.create(**ask, stream=True)]
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 2


def test_three_processes_show_whole_stages(smollm2_alone: Running, smollm2_of_three: httpx.Client) -> None:
    body = {"prompt": PROMPTS[0], "stages": ["blocks.29.attn.pattern", "blocks.7.attn.k", "blocks.12.mlp.post"]}
    shapes = []
    for client in (smollm2_alone.client, smollm2_of_three):
        stages = client.post("/forward", json=body | {"detail": "values"}).json()["stages"]
        shapes.append([stage["shape"] for stage in stages])
        values = [torch.tensor(stage["values"]) for stage in stages]
        if client is smollm2_alone.client:
            expected = values
    assert shapes[0] == shapes[1] == [[1, 5, 3, 64], [1, 5, 1536], [1, 9, 5, 5]]
    for found, of_one in zip(values, expected, strict=True):
        assert (found - of_one).abs().max() / of_one.abs().max() < 1e-4  # after up to 29 blocks of rounding


def test_two_processes_give_the_logits_of_one_for_gemma() -> None:
    with (
        running(model=str(gemma3_gguf()), kernels="torch", cache_bytes=64 << 20, **EXACT) as one,
        torchrun(str(gemma3_gguf()), 2, *OPTIONS) as two,
    ):
        assert_same_logits(one.client, two)


def test_two_processes_cannot_divide_nine_heads_and_the_service_says_which_numbers_can() -> None:
    launcher = launch(str(smollm2_gguf()), 2, "--port", "0")
    _, log = launcher.communicate(timeout=LOADING_SECONDS)
    assert launcher.returncode != 0
    assert "cannot serve" in log
    assert "2 ranks cannot divide 9 (num_heads) equally; take one of 1, 3 ranks" in log
