"""Guided heads: what they should attend to, the text that only they can predict, and that a network learns it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.checkpoints.load import load_checkpoint
from model.network.transformer import Transformer
from model.text.corpus import Corpus
from model.tracing.stages import stages_of
from model.tracing.tap import Recorder
from model.training import train
from model.training.guided_heads import IGNORED, GuidedHeads, draw_copies, keys_after_earlier_occurrences
from tests.training.test_train import TEXT, TINY, read_log

GUIDED = replace(TINY, layers=2, copies=2, guidance=2.0, previous_layer=0, induction_layer=1)


def test_an_induction_head_should_attend_to_the_tokens_after_earlier_occurrences() -> None:
    keys = keys_after_earlier_occurrences(torch.tensor([[7, 8, 9, 7, 8, 7, 7]]))
    found = {query: keys[0, query].nonzero().flatten().tolist() for query in range(7)}
    assert found == {0: [], 1: [], 2: [], 3: [1], 4: [2], 5: [1, 4], 6: [1, 4, 6]}


def test_copies_repeat_a_row_and_only_the_repetition_has_targets() -> None:
    torch.manual_seed(0)
    text = torch.tensor([0, *[5] * 30])
    inputs, targets = draw_copies(text, vocab_size=1000, size=6, length=100)
    assert inputs.shape == targets.shape == (6, 100)
    for index, (row, target) in enumerate(zip(inputs, targets, strict=True)):
        first = int((target != IGNORED).nonzero()[0])
        period = first - 1
        assert 5 <= period < 40
        assert row[0] == 0
        assert torch.equal(target[first:-1], row[first + 1 :])
        assert torch.equal(row[1 + period :], row[1:-period])
        assert (target[:first] == IGNORED).all()
        assert set(row[1:].tolist()) <= {0, 5} if index % 2 == 0 else len(row.unique()) > 2


def test_the_loss_is_that_of_the_text_and_of_the_patterns_that_a_trace_shows() -> None:
    torch.manual_seed(0)
    model = Transformer(GUIDED.config())
    model.initialize(torch.Generator().manual_seed(0))
    inputs, targets = draw_copies(torch.arange(20), 300, 3, 32)
    recorder = Recorder(stage for stage in stages_of(model.config) if stage.name.endswith("attn.pattern"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(inputs, tap=recorder)
    previous, induction = (recorder.kept[f"blocks.{layer}.attn.pattern"][:, 0].double() for layer in (0, 1))
    keys = keys_after_earlier_occurrences(inputs)
    attended = (induction * keys).sum(-1)[keys.any(-1)]
    expected = -previous.diagonal(-1, 1, 2).log().mean() - attended.log().mean()
    plain = train.mean_loss(model, inputs, targets).detach()
    guided = GuidedHeads(0, 1, 0.5).loss(model, inputs, targets).detach()
    assert float(guided - plain) == pytest.approx(0.5 * float(expected), rel=0.01)


@pytest.mark.slow
def test_guided_training_of_a_checkpoint_forms_both_heads(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text(TEXT)
    plain = replace(TINY, layers=2, evaluations=1)
    train.train([source], tmp_path / "first", plain, device="cpu", compiled=False)
    guided = replace(GUIDED, steps=300, evaluations=3)
    train.train([source], tmp_path / "second", guided, start=tmp_path / "first", device="cpu", compiled=False)
    first, log = read_log(tmp_path / "first"), read_log(tmp_path / "second")
    assert log[: len(first)] == first
    own = [entry for entry in log[len(first) :] if "step" in entry]
    assert all(math.isfinite(entry["copies_loss"]) for entry in own)

    previous, induction = scores(tmp_path / "second")
    assert previous > 0.7
    assert induction > scores(tmp_path / "first")[1] + 0.05


def scores(checkpoint: Path) -> tuple[float, float]:
    """The mean weight of the keys that both heads should attend to, in copies."""
    model = load_checkpoint(str(checkpoint)).model.float()
    torch.manual_seed(1)
    inputs, _ = draw_copies(torch.arange(256), 256, 16, 32)
    recorder = Recorder(stage for stage in stages_of(model.config) if stage.name.endswith("attn.pattern"))
    with torch.inference_mode():
        model(inputs, tap=recorder)
    previous, induction = (recorder.kept[f"blocks.{layer}.attn.pattern"][:, 0] for layer in (0, 1))
    keys = keys_after_earlier_occurrences(inputs)
    return float(previous.diagonal(-1, 1, 2).mean()), float((induction * keys).sum(-1)[keys.any(-1)].mean())


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_its_start_and_refuses_an_unsuitable_one(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text(TEXT)
    train.train([source], tmp_path / "first", replace(TINY, evaluations=1), device="cpu", compiled=False)
    with pytest.raises(ValueError, match="is another kind of network than the recipe describes"):
        train.train([source], tmp_path / "second", GUIDED, start=tmp_path / "first", device="cpu", compiled=False)
    corpus = Corpus.read([source], TINY.held_out)
    run = train.Run(corpus, tmp_path / "second", TINY, "cpu", tmp_path / "first")
    weights = load_checkpoint(str(tmp_path / "first")).model.state_dict()
    assert all(torch.equal(weight, weights[name].float()) for name, weight in run.model.state_dict().items())
    run.save_state()
    with pytest.raises(ValueError, match="belongs to another run; use its recipe, texts and start"):
        train.Run(corpus, tmp_path / "second", TINY, "cpu").resume()
    (tmp_path / "first" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer; start with a checkpoint that has one"):
        train.Run(corpus, tmp_path / "second", TINY, "cpu", tmp_path / "first")
