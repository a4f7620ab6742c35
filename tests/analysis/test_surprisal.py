"""Surprisal is -log2 p by the logits of transformers, and words and sentences add up to the whole text."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forwardscope.local import LocalModel
from model.analysis import perplexity
from model.analysis.surprisal import Surprisal, TextSurprisal, sentences
from model.checkpoints.load import load_checkpoint
from model.errors import InvalidField
from tests.service.checkpoints import CONTEXT, write_tokenizer
from tests.tiny import write_reference

TEXT = 'The cat sat on "the mat." Did it?\r\n\r\n Dögs ran…  and ran ☃ there!'


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with a byte-level tokenizer."""
    from transformers import GPT2Config

    path = tmp_path_factory.mktemp("gpt2")
    write_reference(GPT2Config(vocab_size=300, n_embd=24, n_layer=2, n_head=4, n_positions=CONTEXT), path)
    write_tokenizer(path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<eos>"}))
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> LocalModel:
    return LocalModel(load_checkpoint(str(directory)))


def bits_of(parts: tuple[Surprisal, ...]) -> list[float]:
    return [math.nan if each.bits is None else each.bits for each in parts]


@pytest.mark.parametrize("bos", [False, True])
def test_the_surprisal_of_tokens_and_words_is_that_of_transformers(
    model: LocalModel, directory: Path, bos: bool
) -> None:
    """The definition of minicons: -log2 softmax of the token's logit; that of a word is the sum over its tokens."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([*([0] if bos else []), *model.to_tokens(TEXT)])
    assert len(ids) < CONTEXT
    reference = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        logprobs = reference(ids[None]).logits[0, :-1].double().log_softmax(-1)
    expected = -logprobs.gather(1, ids[1:, None])[:, 0] / math.log(2)
    found = model.score_text(TEXT, bos=bos)
    assert (found.tokens[0].bits is None) is not bos
    scored = found.tokens if bos else found.tokens[1:]
    assert bits_of(scored) == pytest.approx(expected.tolist(), rel=1e-4)
    last = [each for each in found.tokens if each.begin >= TEXT.index(" there!")]
    assert found.words[-1].text == "there!"
    assert found.words[-1].bits == pytest.approx(sum(bits_of(tuple(last))))


def test_words_and_sentences_are_parts_of_the_text(model: LocalModel) -> None:
    found = model.score_text(TEXT, bos=True)
    assert [each.text for each in found.words] == TEXT.split()
    ends = ['The cat sat on "the mat."', "Did it?", "Dögs ran…", "and ran ☃ there!"]
    assert [each.text for each in found.sentences] == ends
    for parts in (found.tokens, found.words, found.sentences):
        assert all(each.text == TEXT[each.begin : each.end] for each in parts)


@given(st.text(alphabet="ab .!?\n\"'é☃", min_size=1, max_size=60))
def test_sentences_have_all_that_is_not_white_space(text: str) -> None:
    found = sentences(text)
    assert "".join("".join(text[begin:end].split()) for begin, end in found) == "".join(text.split())
    assert all(text[begin:end] == text[begin:end].strip() != "" for begin, end in found)


@pytest.mark.parametrize("text", [TEXT, " \n", "  a", "a \n ", TEXT * 9])
def test_tokens_words_and_sentences_have_the_same_sum(model: LocalModel, text: str) -> None:
    found: TextSurprisal = model.score_text(text, bos=True)
    total = sum(bits_of(found.tokens))
    for parts in (found.words, found.sentences):
        assert not text.strip() or sum(bits_of(parts)) == pytest.approx(total)


def test_a_word_with_an_unknown_token_has_no_surprisal(model: LocalModel) -> None:
    found = model.score_text(TEXT)
    assert [each.bits is None for each in found.words] == [True] + [False] * (len(found.words) - 1)
    assert [each.bits is None for each in found.sentences] == [True, False, False, False]


def test_a_stride_sets_how_many_tokens_precede_in_a_long_text(model: LocalModel) -> None:
    """With a stride of 1, every token has a full context: that of a pass over the tokens right before it."""
    text = TEXT * 4
    ids, found = model.to_tokens(text), model.score_text(text, stride=1)
    for index in (1, CONTEXT - 1, CONTEXT, CONTEXT + 7, len(ids) - 1):
        before = ids[max(0, index + 1 - CONTEXT) : index]
        loss = model.run(before, "logits", targets=[None] * (len(before) - 1) + [ids[index]]).loss.mean
        assert loss is not None
        assert found.tokens[index].bits == pytest.approx(loss / math.log(2), rel=1e-4)
    assert bits_of(found.tokens[1:]) != pytest.approx(bits_of(model.score_text(text).tokens[1:]), rel=1e-4)


def test_a_wrong_argument_is_named(model: LocalModel) -> None:
    for stride in (0, CONTEXT):
        with pytest.raises(InvalidField, match=f"stride: {stride} must be from 1 to {CONTEXT - 1}"):
            model.score_text(TEXT, stride=stride)
    with pytest.raises(InvalidField, match="text: has no tokens"):
        model.score_text("")


def test_a_token_that_begins_every_text_is_there_once(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the tokenizer adds tokens at the end."""
    expected = model.score_text(TEXT, bos=True)
    tokenizer = model.checkpoint.tokenizer
    assert tokenizer is not None
    encode, spans = type(tokenizer).encode, type(tokenizer).encode_with_spans

    def encode_with(self: Any, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        ids = encode(self, text, add_special_tokens=add_special_tokens, **options)
        return [0, *ids, 1] if add_special_tokens else ids

    def spans_with(self: Any, text: str, **options: Any) -> Any:
        ids, marked = spans(self, text, **options)
        return [0, *ids, 1], [None, *marked, None]

    monkeypatch.setattr(type(tokenizer), "encode", encode_with)
    monkeypatch.setattr(type(tokenizer), "encode_with_spans", spans_with)
    assert bits_of(model.score_text(TEXT, bos=True).tokens) == pytest.approx(bits_of(expected.tokens), rel=1e-4)


def test_the_command_prints_each_word_and_the_same_figures_as_without_words(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: LocalModel,
) -> None:
    source = tmp_path / "text"
    source.write_text("the cat sat on the mat\n")
    figures = []
    for options in ([], ["--words"]):
        monkeypatch.setattr("sys.argv", ["perplexity", str(source), "--model", str(directory), *options])
        perplexity.main()
        *lines, last = map(json.loads, capsys.readouterr().out.splitlines())
        figures.append(last)
    assert figures[0] == figures[1]
    words = model.score_text(source.read_text()).words
    assert [(line["text"], line["begin"], line["end"]) for line in lines] == [
        (word.text, word.begin, word.end) for word in words
    ]
    assert lines[0]["bits"] is None
    assert lines[3]["bits"] == pytest.approx(words[3].bits)
