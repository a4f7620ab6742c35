"""Guesses through HTTP: the same events and counts, and Prometheus says how many were right."""

import pytest
import torch

from model.engine.pace import Pace
from tests.kernels.common import native_operations
from tests.service.running import running

BODY = {"prompt": "to be or not to be or not to be or", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def test_answers_and_counts_are_the_same_and_the_guesses_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    native_operations(torch.float32)  # without kernels nothing is guessed: skips there
    monkeypatch.setattr(Pace, "worth", lambda self, num_streams: 0.05)  # however busy the machine is
    found, guesses = [], []
    for speculate in (True, False):
        with running(model="bundled", dtype="float32", speculate=speculate) as service:
            answer = service.answer("/generate", **BODY)
            events = service.stream(**BODY)
            ids = [event["token"]["id"] for event in events if event.get("token")]
            assert ids == answer["tokens"]
            counted = [
                service.metric(name) for name in ("generation_tokens_total", "inter_token_latency_seconds_count")
            ]
            found.append((answer["text"], ids, answer["usage"]["completion_tokens"], counted))
            guesses.append([service.metric(f"spec_decode_num_{what}_tokens_total") for what in ("draft", "accepted")])
    assert found[0] == found[1]
    assert found[0][2:] == (60, [120, 118])
    assert 0 < guesses[0][1] <= guesses[0][0]
    assert guesses[1] == [0, 0]
