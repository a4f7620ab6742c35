"""POST /logits answers with the network's own numbers for the requested rows and tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from forwardscope.results.passes import Logits
from service.answers.passes import SAFETENSORS_MEDIA_TYPE
from tests.service.checkpoints import VOCAB_SIZE
from tests.service.running import Running, validate
from tests.service.test_forward import ROUNDING, from_safetensors

PROMPT = [257, 69, 270, 273, 264]


@pytest.fixture
def direct(tiny: Running) -> Tensor:
    """Logits (T, V) of a pass without the service."""
    with torch.inference_mode():
        logits: Tensor = tiny.checkpoint.model(torch.tensor([PROMPT]))[0]
    return logits


@pytest.mark.parametrize(
    ("positions", "rows"),
    [({}, [4]), ({"positions": "last"}, [4]), ({"positions": "all"}, [0, 1, 2, 3, 4]), ({"positions": [3, 0]}, [3, 0])],
)
def test_the_logits_of_each_row_are_those_of_the_network(
    tiny: Running, direct: Tensor, positions: dict[str, Any], rows: list[int]
) -> None:
    answer = tiny.answer("/logits", prompt=PROMPT, logprobs=True, **positions)
    validate(Logits, answer)
    assert [row["position"] for row in answer["positions"]] == rows
    for row in answer["positions"]:
        logits = direct[row["position"]]
        assert row["logits"] == pytest.approx(logits.tolist(), abs=ROUNDING)
        assert row["logprobs"] == pytest.approx(logits.log_softmax(0).tolist(), abs=ROUNDING)
        assert "ids" not in row


def test_the_most_likely_tokens_come_first_with_their_texts(tiny: Running, direct: Tensor) -> None:
    answer = tiny.answer("/logits", prompt=PROMPT, positions="all", top_k=7, logprobs=True)
    validate(Logits, answer)
    for row, logits in zip(answer["positions"], direct, strict=True):
        top = logits.topk(7)
        assert row["ids"] == top.indices.tolist()
        assert row["logits"] == pytest.approx(top.values.tolist(), abs=ROUNDING)
        assert row["logprobs"] == pytest.approx(logits.log_softmax(0)[top.indices].tolist(), abs=ROUNDING)
        texts = [tiny.answer("/forward", prompt=[i], stages=["embed"])["tokens"][0]["text"] for i in row["ids"][:2]]
        assert row["texts"][:2] == texts


def test_logprobs_are_sent_only_on_request(tiny: Running) -> None:
    (row,) = tiny.answer("/logits", prompt=PROMPT)["positions"]
    assert set(row) == {"position", "logits"}
    assert len(row["logits"]) == VOCAB_SIZE


@pytest.mark.parametrize("top_k", [None, 3])
def test_a_safetensors_answer_has_the_same_numbers_as_json(tiny: Running, top_k: int | None) -> None:
    body = {"prompt": PROMPT, "positions": [4, 2], "logprobs": True, "top_k": top_k}
    answer = tiny.answer("/logits", **body)
    tensors, rest = from_safetensors(tiny.post("/logits", body, headers={"Accept": SAFETENSORS_MEDIA_TYPE}).content)
    for name in ("logits", "logprobs", *(["ids"] if top_k else [])):
        found = tensors.pop(name)
        assert torch.equal(found, torch.tensor([row[name] for row in answer["positions"]], dtype=found.dtype))
    assert tensors == {}
    assert rest["tokens"] == answer["tokens"]
    assert rest["positions"] == [{"position": 4}, {"position": 2}]


def test_logits_are_the_same_as_those_of_forward(tiny: Running) -> None:
    (stage,) = tiny.answer("/forward", prompt=PROMPT, stages=["logits"], detail="values")["stages"]
    rows = tiny.answer("/logits", prompt=PROMPT, positions="all")["positions"]
    for row, expected in zip(rows, stage["values"][0], strict=True):
        assert row["logits"] == pytest.approx(expected, abs=ROUNDING)
