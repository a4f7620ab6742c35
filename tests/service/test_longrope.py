"""With LongRoPE, every route has the same numbers for the same tokens, on both sides of the trained length."""

from pathlib import Path
from typing import Any

import pytest

from tests.service.checkpoints import write_checkpoint
from tests.service.running import Running, Start

TRAINED = 24
SCALING = {
    "rope_type": "longrope",
    "original_max_position_embeddings": TRAINED,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}


@pytest.fixture
def service(tmp_path: Path, start: Start) -> Running:
    sizes: dict[str, Any] = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    directory = write_checkpoint(tmp_path / "model", max_position_embeddings=96, rope_scaling=SCALING, **sizes)
    return start(model=str(directory), device="cpu")


def test_logits_forward_and_a_chat_without_a_limit_agree(service: Running) -> None:
    body = {"messages": [{"role": "user", "content": "the cat sat on"}], "temperature": 0, "ignore_eos": True}
    fields = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    answer = service.answer("/v1/chat/completions", **body, **fields)
    prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert len(prompt) < TRAINED
    assert len(prompt) + len(ids) == 96  # as many as the context has
    limited = service.answer("/v1/chat/completions", **body, **fields, max_tokens=3)
    assert limited["choices"][0]["token_ids"] == ids[:3]
    found = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    for length in (len(prompt), TRAINED - 1, TRAINED, TRAINED + 1, 60):
        tokens = [*prompt, *ids][:length]
        (row,) = service.answer("/logits", prompt=tokens, logprobs=True)["positions"]
        (stage,) = service.answer("/forward", prompt=tokens, stages=["logits"], detail="values")["stages"]
        assert stage["values"][0][-1] == row["logits"]  # bitwise
        chosen = ids[length - len(prompt)]
        assert found[length - len(prompt)] == pytest.approx(row["logprobs"][chosen], abs=1e-6)
