"""Taps of a batch: each tap sees the rows of its own sequence, and every returned tensor is checked exactly once."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from model.tracing import tap as taps
from model.tracing.stages import Stage
from model.tracing.tap import BatchTap, Chain, Probe, Recorder, SequenceTap
from tests.editor import Editor

STAGE = "blocks.0.mlp_out"


def batch_of(*taps_of_sequences: taps.Tap) -> BatchTap:
    """The tap of a batch in which sequence `i` has the tokens 2 i and 2 i + 1, and row i of the logits."""
    sequences = {
        index: SequenceTap(tap, slice(2 * index, 2 * index + 2), slice(index, index + 1))
        for index, tap in enumerate(taps_of_sequences)
    }
    return BatchTap(sequences, frozenset({"logits"}))


def test_each_returned_tensor_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: Counter[str] = Counter()
    call_tap = taps.call_tap

    def counted(tap: taps.Tap, name: str, tensor: Tensor) -> Tensor:
        checked[name] += 1
        return call_tap(tap, name, tensor)

    monkeypatch.setattr(taps, "call_tap", counted)
    edited = Chain(Editor({STAGE: torch.neg}), Recorder([Stage(STAGE, ("batch", "position"))]))
    probe = Probe(batch_of(edited)).at("blocks").at("0")
    assert probe("mlp_out", torch.ones(1, 2)).tolist() == [[-1, -1]]
    assert checked == {STAGE: 1}
    assert Probe(edited)(STAGE, torch.ones(1, 2)).tolist() == [[-1, -1]]
    assert checked == {STAGE: 2}


def test_a_tap_sees_and_changes_only_the_rows_of_its_own_sequence() -> None:
    recorder = Recorder([Stage("logits", ("batch", "position")), Stage(STAGE, ("batch", "position"))])
    probe = Probe(batch_of(Editor({STAGE: lambda x: x + 10}), recorder))
    tensor = torch.arange(4.0)[None]
    assert probe(STAGE, tensor).tolist() == [[10, 11, 2, 3]]
    assert tensor.tolist() == [[0, 1, 2, 3]]
    probe("logits", torch.tensor([[5.0, 6.0]]))
    assert {name: value.tolist() for name, value in recorder.kept.items()} == {STAGE: [[2, 3]], "logits": [[6]]}


@pytest.mark.parametrize("wrong", [lambda x: x[:, :1], lambda x: x.double(), lambda x: None])
def test_a_tap_that_returns_a_wrong_tensor_affects_only_its_own_sequence(wrong: taps.Tap) -> None:
    batch = batch_of(Editor({STAGE: wrong}), Editor({STAGE: torch.neg}))  # type: ignore[dict-item]
    result = Probe(batch)(STAGE, torch.ones(1, 4))
    assert result.tolist() == [[1, 1, -1, -1]]
    assert isinstance(batch.sequences[0].error, ValueError)
    assert STAGE in str(batch.sequences[0].error)
    assert batch.sequences[1].error is None
    assert not batch.sequences[0].wants(STAGE)


def test_the_probe_of_one_sequence_keeps_the_prefix_of_stage_names() -> None:
    recorder = Recorder([Stage("blocks.0.attn.scores", ("batch", "head", "query", "key"))])
    probe = Probe(batch_of(recorder)).at("blocks").at("0").at("attn")
    [(index, tap, own)] = probe.sequences()
    assert (index, tap.tap) == (0, recorder)
    own("scores", torch.ones(1, 1, 2, 2))
    assert list(recorder.kept) == ["blocks.0.attn.scores"]


def test_guarded_keeps_the_exception_and_counts_the_time() -> None:
    tap = SequenceTap(Recorder([]), slice(0, 1), slice(0, 1))
    with tap.guarded():
        raise MemoryError("too little memory")
    assert isinstance(tap.error, MemoryError)
    assert tap.seconds > 0
