"""Perplexity: every token is scored exactly once, and the scores are those of one pass over the text."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.analysis import perplexity
from model.analysis.token_losses import windows
from model.config import ModelConfig
from model.network.transformer import Transformer
from model.text.corpus import train_tokenizer
from model.text.tokenizer import Tokenizer
from model.training.export import save_checkpoint

TEXT = "The cat sat on the mat, and the dog sat on the cat.\n" * 20


@given(st.integers(0, 300), st.integers(2, 64), st.integers(1, 64))
def test_windows_score_every_token_but_the_first_once_and_have_enough_context(
    num_tokens: int, length: int, stride: int
) -> None:
    stride = min(stride, length - 1)
    scored: list[int] = []
    for start, first, end in windows(num_tokens, length, stride):
        assert 0 <= start < first < end <= min(start + length, num_tokens)
        assert start == 0 or first - start >= length - stride
        scored += range(first, end)
    assert scored == list(range(1, num_tokens))


@pytest.mark.parametrize("stride", [0, 5])
def test_a_stride_of_zero_or_longer_than_the_window_is_refused(stride: int) -> None:
    with pytest.raises(ValueError, match="does not fit windows"):
        list(windows(10, 4, stride))


def network(context: int) -> Transformer:
    model = Transformer(
        ModelConfig(vocab_size=300, d_model=32, num_layers=1, num_heads=4, d_mlp=48, max_positions=context)
    )
    model.initialize(torch.Generator().manual_seed(0), std=0.2)
    return model


def test_bytes_are_counted_and_not_characters() -> None:
    model, tokenizer = network(512), Tokenizer(train_tokenizer([TEXT], 300))
    text = "The cät sät on the mät, 日本語."
    score = perplexity.score_texts(model, tokenizer, [text])
    assert score.num_bytes == len(text.encode()) - len(b"The") > len(text)


def test_the_score_of_a_text_that_fits_in_the_context_is_that_of_one_pass() -> None:
    model, tokenizer = network(512), Tokenizer(train_tokenizer([TEXT], 300))
    text = TEXT[:300]
    ids = torch.tensor(tokenizer.encode(text))
    score = perplexity.score_texts(model, tokenizer, [text, text])
    with torch.no_grad():
        logprobs = model(ids[None])[0, :-1].log_softmax(-1)
    nats = -float(logprobs.gather(1, ids[1:, None]).sum())
    num_first_bytes = len(tokenizer.decode(ids[:1].tolist()))
    assert score.nats == pytest.approx(2 * nats, rel=1e-5)
    assert (score.num_tokens, score.num_bytes) == (2 * (len(ids) - 1), 2 * (len(text) - num_first_bytes))
    assert score.bits_per_byte == pytest.approx(2 * nats / math.log(2) / score.num_bytes, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-5)


def test_the_command_scores_the_end_of_each_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(network(64), Tokenizer(train_tokenizer([TEXT], 300)), tmp_path)
    source = tmp_path / "text"
    source.write_text(TEXT)
    monkeypatch.setattr("sys.argv", ["perplexity", str(source), "--model", str(tmp_path), "--held-out", "0.25"])
    perplexity.main()
    figures = json.loads(capsys.readouterr().out)
    assert 0.2 * len(TEXT) < figures["bytes"] < 0.26 * len(TEXT)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["nats_per_token"]), rel=1e-3)
