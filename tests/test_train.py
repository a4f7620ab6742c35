"""The trainer: what it saves is the network that it trained, and its log says how that went."""

import json
from pathlib import Path

import pytest
import torch

from model import train
from model.checkpoint import load_checkpoint
from model.config import ModelConfig
from model.transformer import Transformer

TEXT = "The cat sat on the mat, and the dog sat on the cat.\r\n" * 200


def test_a_saved_network_loads_as_it_was(tmp_path: Path) -> None:
    model = Transformer(ModelConfig(vocab_size=300, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_mlp=48))
    model.initialize(torch.Generator().manual_seed(0))
    train.save(model, train.train_tokenizer([TEXT], 300), tmp_path)
    loaded = load_checkpoint(str(tmp_path))
    assert loaded.model.config == model.config
    for (name, ours), theirs in zip(model.named_parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(ours.bfloat16(), theirs), name


def test_training_lowers_the_loss_on_text_it_has_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "text.txt"
    source.write_bytes(TEXT.encode())
    options = "--vocab-size 300 --d-model 32 --layers 1 --heads 2 --context 64 --train-length 16 --batch 4 --steps 40"
    monkeypatch.setattr("sys.argv", ["train", str(source), "--out", str(tmp_path / "out"), *options.split()])
    train.main()
    log = [json.loads(line) for line in (tmp_path / "out" / "training.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == list(range(2, 41, 2))
    assert log[-1]["validation_loss"] < log[0]["validation_loss"] - 1
    tokenizer = load_checkpoint(str(tmp_path / "out")).tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_a_text_that_is_not_utf8_is_read_as_latin1_with_newlines(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes("caf\u00e9\r\nau lait".encode("latin-1"))
    assert train.read_text(tmp_path / "latin") == "caf\u00e9\nau lait"
