"""Drafts change no answer over HTTP, whether they come from the text or from a copy of the network, and are counted."""

from typing import Any

import pytest
import torch

from model.engine.step_budget import StepBudget
from service.settings import Settings
from tests.ops.cpu.common import cpu_backend
from tests.service.running import running

BODY = {"prompt": "to be or not to be or not to be or", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
def test_drafts_change_no_answer_and_no_token_count_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_backend(torch.float32)  # skips on machines without our kernels, where nothing is drafted
    monkeypatch.setattr(
        StepBudget, "min_acceptance", lambda self, num_decoding: 0.05
    )  # so that drafts pay off on a busy machine too
    answers, drafts = [], []
    options: tuple[dict[str, Any], ...] = {}, {"draft": "int4"}, {"speculate": False}
    for each in options:
        with running(model="bundled", dtype="float32", **each) as service:
            answer = service.answer("/generate", **BODY)
            events = service.stream(**BODY)
            ids = [event["token"]["id"] for event in events if event.get("token")]
            assert ids == answer["tokens"]
            counted = [
                service.metric(name) for name in ("generation_tokens_total", "inter_token_latency_seconds_count")
            ]
            answers.append((answer["text"], ids, answer["usage"]["completion_tokens"], counted))
            drafts.append([service.metric(f"spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted")])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][2:] == (60, [120, 118])
    assert 0 < drafts[0][1] <= drafts[0][0]
    assert drafts[0][0] < drafts[1][0]
    assert drafts[1][1] > 0
    assert drafts[2] == [0, 0]


def test_a_copy_that_could_not_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="--speculate false forbids"):
        Settings(draft="int4", speculate=False)
    with pytest.raises(ValueError, match="draft"):
        Settings(draft="int4", tensor_parallel=2)
