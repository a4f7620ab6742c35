"""The service answers from published GGUF files, with and without quantization."""

import pytest

from tests.published_models import gemma3_gguf, smollm2_gguf
from tests.service.running import Start

pytestmark = pytest.mark.slow
CAPITALS = "Berlin is the capital of Germany. Madrid is the capital of Spain. Rome is the capital of"


@pytest.mark.parametrize("quantize", ["stored", "none", "int8"])
def test_smollm2_answers_from_its_gguf_file(start: Start, quantize: str) -> None:
    service = start(model=str(smollm2_gguf()), quantize=quantize)
    answer = service.answer("/generate", prompt=CAPITALS, max_tokens=2, temperature=0)
    assert answer["text"] == " Italy."


def test_smollm2_chats_from_its_gguf_file(start: Start) -> None:
    """In float32: "The" is only 0.08 nats before "L", which products in bfloat16 can swap on some CPUs."""
    service = start(model=str(smollm2_gguf()), quantize="none", dtype="float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    chat = service.answer("/v1/chat/completions", messages=messages, temperature=0, max_tokens=20)
    (choice,) = chat["choices"]
    assert choice["finish_reason"] == "stop"  # by <|im_end|>
    assert choice["message"]["content"] == "The capital of France is Paris."


@pytest.mark.parametrize("quantize", ["stored", "none", "int8"])
def test_gemma3_answers_from_its_gguf_file(start: Start, quantize: str) -> None:
    service = start(model=str(gemma3_gguf()), quantize=quantize)
    answer = service.answer("/generate", prompt=CAPITALS, max_tokens=2, temperature=0)
    assert answer["text"] == " Italy."
