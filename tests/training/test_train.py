"""Training saves the best weights, logs every evaluation, and continues a stopped run with the same result."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoints.load import load_checkpoint
from model.config import ModelConfig
from model.network.transformer import Transformer
from model.text.corpus import Corpus, train_tokenizer
from model.text.tokenizer import Tokenizer
from model.training import train
from model.training.export import save_checkpoint

TEXT = "The cat sat on the mat, and the dog sat on the cat.\r\n" * 200
TINY = train.Recipe(
    steps=40, vocab_size=300, d_model=32, layers=1, heads=4, kv_heads=2, context=32, batch=4, evaluations=20
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


def read_log(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "training.jsonl").read_text().splitlines()]


def test_a_saved_network_loads_with_the_same_config_and_weights(tmp_path: Path) -> None:
    model = Transformer(ModelConfig(vocab_size=300, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_mlp=48))
    model.initialize(torch.Generator().manual_seed(0))
    save_checkpoint(model, Tokenizer(train_tokenizer([TEXT], 300)), tmp_path)
    loaded = load_checkpoint(str(tmp_path))
    assert loaded.model.config == model.config
    for (name, ours), theirs in zip(model.named_parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(ours.bfloat16(), theirs), name


def test_a_network_that_is_not_a_plain_llama_is_not_saved(tmp_path: Path) -> None:
    model = Transformer(ModelConfig(vocab_size=300, d_model=32, num_layers=1, num_heads=4, d_mlp=48, activation="relu"))
    with pytest.raises(ValueError, match="can be saved"):
        save_checkpoint(model, Tokenizer(train_tokenizer([TEXT], 300)), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_lowers_the_held_out_loss_and_keeps_the_best_weights(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (
        "--steps 40 --vocab-size 300 --d-model 32 --layers 1 --heads 4 --kv-heads 2 --context 32 --batch 4 "
        "--evaluations 20 --device cpu"
    )
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["train", str(source), "--out", str(out), *options.split()])
    train.main()
    about, *log, outcome = read_log(out)
    assert train.Recipe(**about["recipe"]) == TINY
    assert [entry["step"] for entry in log] == list(range(2, 41, 2))
    assert log[-1]["validation_loss"] < log[0]["validation_loss"] - 1
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "training.pt").exists()

    assert outcome["held_out"]["bits_per_byte"] == pytest.approx(min(entry["bits_per_byte"] for entry in log), abs=0.1)
    checkpoint = load_checkpoint(str(out), dtype="float32")
    assert checkpoint.tokenizer is not None
    texts = Corpus.read([source], TINY.held_out).held_out
    ids = torch.tensor([0, *checkpoint.tokenizer.encode(texts[0])])
    best = min(entry["validation_loss"] for entry in log)
    assert train.validate(checkpoint.model, ids, TINY.context) == pytest.approx(best, abs=0.02)


@pytest.mark.slow
def test_a_stopped_and_continued_run_equals_an_uninterrupted_run(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str) -> None:
        train.train([source], tmp_path / name, TINY, device="cpu", compiled=False)

    run("whole")
    num_samples = 0

    def generate_until_stopped(*arguments: Any) -> str:
        nonlocal num_samples
        num_samples += 1
        if num_samples > 2 * 11:  # two samples per evaluation
            raise KeyboardInterrupt
        return ""

    with monkeypatch.context() as patch:
        patch.setattr(train, "generate_sample", generate_until_stopped)
        with pytest.raises(KeyboardInterrupt):
            run("stopped")
    assert len(read_log(tmp_path / "stopped")) == 1 + 11
    with pytest.raises(ValueError, match="another run"):
        train.train([source], tmp_path / "stopped", replace(TINY, peak=1e-3), device="cpu", compiled=False)
    run("stopped")
    logs = [read_log(tmp_path / name) for name in ("whole", "stopped")]
    for whole, stopped in zip(*logs, strict=True):
        assert {**whole, "minutes": 0} == {**stopped, "minutes": 0}
    weights = [load_checkpoint(str(tmp_path / name)).model.state_dict() for name in ("whole", "stopped")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_learning_rate_rises_to_its_peak_then_falls_to_a_tenth_of_it() -> None:
    recipe = train.Recipe(steps=1000, peak=1.0)
    rates = [recipe.learning_rate(step) for step in range(1, 1001)]
    peak = rates.index(max(rates))
    assert rates[peak] == pytest.approx(1.0, abs=1e-3)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_dropout_acts_in_training_mode_only() -> None:
    model = Transformer(TINY.config())
    model.initialize(torch.Generator().manual_seed(0))
    ids = torch.arange(20)[None]
    plain = model(ids)
    train.add_dropout(model, 0.5)
    assert not torch.equal(model(ids), plain)
    model.eval()
    assert torch.equal(model(ids), plain)
    model.train()
    assert not torch.equal(model(ids), plain)


@pytest.mark.slow
def test_weights_are_saved_only_at_a_new_lowest_held_out_loss(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([4.0, 2.0, 3.0, *[5.0] * 17])
    saved_losses: list[float] = []
    latest = 0.0

    def save_and_note(*arguments: Any) -> None:
        saved_losses.append(latest)
        save_checkpoint(*arguments)

    def next_loss(*_: Any) -> float:
        nonlocal latest
        latest = next(losses)
        return latest

    monkeypatch.setattr(train, "save_checkpoint", save_and_note)
    monkeypatch.setattr(train, "validate", next_loss)
    train.train([source], tmp_path / "out", TINY, device="cpu", compiled=False)
    assert saved_losses == [4.0, 2.0]


def test_a_loss_of_nan_ends_the_run_with_an_error_and_saves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "validate", lambda *_: math.nan)
    with pytest.raises(ValueError, match="use a lower peak learning rate, --peak"):
        train.train([source], tmp_path / "out", TINY, device="cpu", compiled=False)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_a_finished_checkpoint_and_the_state_of_another_run_are_not_overwritten(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    train.train([source], out, TINY, device="cpu", compiled=False)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="already holds a checkpoint"):
        train.train([source], out, TINY, device="cpu", compiled=False)
    assert (out / "model.safetensors").read_bytes() == before

    run = train.Run(Corpus.read([source], 0.1), tmp_path / "other", TINY, "cpu")
    run.out.mkdir()
    run.save_state()
    source.write_bytes(TEXT.replace("cat", "cow").encode())
    with pytest.raises(ValueError, match="another run"):
        train.Run(Corpus.read([source], 0.1), run.out, TINY, "cpu").resume()


@pytest.mark.parametrize(
    "wrong",
    ["--steps 0", "--vocab-size 256", "--context 1", "--batch 0", "--peak 0", "--held-out 1", "--evaluations 0"],
)
def test_a_recipe_value_out_of_range_is_refused_by_its_name(
    wrong: str, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train", str(source), "--out", str(tmp_path / "out"), *wrong.split()])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == 1
    assert wrong.split()[0].removeprefix("--") in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_text_shorter_than_the_context_is_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train", str(source), "--out", str(tmp_path / "out"), "--context", "100000"])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == 1
    assert "too little text" in capsys.readouterr().err
