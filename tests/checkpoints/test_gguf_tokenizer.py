"""A tokenizer from a GGUF file gives the same token ids as the tokenizer that the file was made from."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from model.checkpoints.gguf_files.header import read_header
from model.checkpoints.gguf_files.pre_tokenizers import PRE_TOKENIZATIONS
from model.checkpoints.gguf_files.tokenizer import build_tokenizer
from model.checkpoints.gguf_files.vocabulary import SPACE, Vocabulary, read_vocabulary
from model.errors import CheckpointError
from model.text.tokenizer import Tokenizer
from tests.conftest import shared
from tests.published_models import gemma3_gguf, smollm2_gguf

ODD_LINES = (
    *("", " ", "  two", "   three  spaces", "\t\ttab\n\n\nnl", "a\r\nb", "x" + " " * 40 + "y", " " * 70, "A" * 300),
    *("日本語 テスト 12345 ٣٤٥ ½", "é e\u0301 ﬁ", "👨‍👩‍👧‍👦 \u200b\ufeff x", "\x00\x01", "a\u2581b"),
    *("don't DON'T I'LL 1,234.50", "<0x0A>", "[multimodal] <unused7>", "snake_case(x)==1;//"),
    *("<|im_start|>user\nhi<|im_end|>\n", "<start_of_turn>user\nhi<end_of_turn>\n<bos>", "<s> a </s>  b<unk>"),
    *("<|user|>\n hi <|end|>\n<|assistant|>  x", "a<|endoftext|> b", "<|placeholder1|> \n z"),
)


def corpus_lines() -> Iterable[str]:
    for path in sorted(shared("corpora").rglob("*.txt")):
        yield from path.read_bytes().decode("utf-8", "replace").split("\n")[200:334]


def differing(ours: Tokenizer, theirs: Any) -> list[str]:
    lines = [*corpus_lines(), *ODD_LINES]
    assert len(lines) > 2000
    return [line for line in lines if ours.encode(line) != theirs(line)]


def vocabulary_of(state: dict[str, Any], **keys: Any) -> Vocabulary:
    """The vocabulary that llama.cpp's converter writes for a `tokenizer.json`."""
    added = {token["id"]: token for token in state["added_tokens"]}
    ids = state["model"]["vocab"] | {token["content"]: token_id for token_id, token in added.items()}
    tokens = sorted(ids, key=lambda token: ids[token])
    types = [1] * len(tokens)
    for token_id, token in added.items():
        types[token_id] = 3 if token["special"] else 4
    metadata = {"tokenizer.ggml.tokens": tokens, **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}
    return Vocabulary(Path("x.gguf"), metadata, tokens, types, [])


def with_scores(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary with the types and scores that Llama's SentencePiece model gives the tokens.

    Bytes have no score, the others are in the order of their scores, and runs of spaces are the last.
    """
    types, scores = list(vocabulary.types), [0.0] * len(vocabulary.tokens)
    for token_id, token in enumerate(vocabulary.tokens):
        if types[token_id] == 1 and token.startswith("<0x"):
            types[token_id] = 6
        elif types[token_id] == 1:
            scores[token_id] = -float(token_id) if token.strip(SPACE) or token == SPACE else -1e9
    return Vocabulary(vocabulary.file, vocabulary.metadata, vocabulary.tokens, types, scores)


def test_gpt2_gets_the_ids_of_its_tokenizer_json() -> None:
    state = json.loads(shared("tokenizers/gpt2/tokenizer.json").read_text())
    vocabulary = vocabulary_of(
        state,
        model="gpt2",
        pre="gpt-2",
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]],
        bos_token_id=50256,
    )
    original = Backend.from_str(json.dumps(state))
    assert differing(build_tokenizer(vocabulary, "gpt2"), lambda line: original.encode(line).ids) == []


@pytest.mark.parametrize(
    ("directory", "architecture"), [("tokenizers/phi3", "phi3"), ("checkpoints/stories260K", "llama")]
)
def test_a_sentencepiece_vocabulary_gets_the_ids_of_its_tokenizer_json(directory: str, architecture: str) -> None:
    path = shared(f"{directory}/tokenizer.json")
    vocabulary = with_scores(
        vocabulary_of(json.loads(path.read_text()), model="llama", pre="default", bos_token_id=1, unknown_token_id=0)
    )
    ours, original = build_tokenizer(vocabulary, architecture), Backend.from_file(str(path))
    assert differing(ours, lambda line: original.encode(line).ids) == []
    for line in ODD_LINES:
        ids = ours.encode(line)
        assert ours.decode(ids) == original.decode(ids)


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "expected"), [(False, False, ""), (True, False, "b"), (True, True, "be")]
)
def test_the_keys_say_which_tokens_are_added_to_a_text(add_bos: bool, add_eos: bool, expected: str) -> None:
    vocabulary = small_vocabulary(add_bos_token=add_bos, add_eos_token=add_eos)
    ids = build_tokenizer(vocabulary, "llama").encode("a")
    assert ids == [1] * ("b" in expected) + [3, 4] + [2] * ("e" in expected)


def small_vocabulary(**keys: Any) -> Vocabulary:
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a"]
    metadata = {"model": "llama", "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | keys
    named = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return Vocabulary(Path("x.gguf"), named, tokens, [2, 3, 3, 1, 1], [0.0, 0.0, 0.0, -1.0, -2.0])


def test_a_vocabulary_without_a_space_prefix_gets_none() -> None:
    tokenizer = build_tokenizer(small_vocabulary(add_space_prefix=False), "llama")
    assert tokenizer.encode("a a", add_special_tokens=False) == [4, 3, 4]
    assert tokenizer.decode([3, 4]) == " a"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model is 'bert', which is not implemented; known: gpt2, llama, t5"),
        ({"model": "gpt2"}, r"tokenizer\.ggml\.pre, which says how texts are split, is missing; known: default, gpt-2"),
        ({"model": "gpt2", "pre": "new"}, r"tokenizer\.ggml\.pre, .* is 'new', which is not implemented"),
        ({"model": "gpt2", "pre": "gpt-2"}, r"tokenizer\.ggml\.merges is missing"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["ab"]}, r"merges has 'ab', not two tokens"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["x y"]}, r"the vocabulary cannot be used"),
        ({"bos_token_id": 5}, r"tokenizer\.ggml\.bos_token_id is 5, not the id of a token"),
        ({"bos_token_id": None}, r"texts get the token tokenizer\.ggml\.bos_token_id \(add_bos_token\)"),
        ({"add_bos_token": 1}, r"tokenizer\.ggml\.add_bos_token is 1, neither true nor false"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_tokenizer(small_vocabulary(**keys), "llama")


def test_tokens_end_an_answer_by_key_or_as_special_tokens_with_a_known_text() -> None:
    tokens = ["<eos>", "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "x"]
    metadata = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eom_token_id": 4}
    vocabulary = Vocabulary(Path("x.gguf"), metadata, tokens, [3, 3, 4, 1, 1], [])
    assert vocabulary.end_ids() == (0, 4, 1, 2)  # a normal token is text


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("llama-bpe", "it's 12345 \n\nok", ["it", "'s", " ", "123", "45", " \n\n", "ok"]),
        ("qwen2", "it's 123", ["it", "'s", " ", "1", "2", "3"]),
        ("smollm", "  1. a", ["  ", "1", ".", " a"]),
        ("gpt-2", "  1. a", [" ", " 1", ".", " a"]),
        ("tekken", "HTMLParser 12", ["HTMLParser", " ", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("default", "a=b 1234567", ["a", "=", "b", " ", "123", "456", "7"]),
    ],
)
def test_texts_are_split_as_the_original_tokenizer_does(name: str, text: str, pieces: list[str]) -> None:
    split = PRE_TOKENIZATIONS[name].pre_tokenizer().pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in split] == pieces


def test_the_patterns_are_those_of_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    both = PRE_TOKENIZATIONS.keys() & mapping.GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert len(both) > 8
    for name in both:
        assert PRE_TOKENIZATIONS[name].patterns == (mapping.GGUF_PRE_TOKENIZER_SPLITS[name],), name


@pytest.mark.slow
@pytest.mark.parametrize("model", [smollm2_gguf, gemma3_gguf])
def test_published_files_get_the_ids_of_transformers(model: Any) -> None:
    transformers = pytest.importorskip("transformers")
    path = model()
    header = read_header(path)
    ours = build_tokenizer(read_vocabulary(path, header.metadata), header.metadata["general.architecture"])
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if model is smollm2_gguf:
        # transformers drops the first step of SmolLM2's tokenizer.json when it reads a GGUF file.
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    assert differing(ours, theirs.encode) == []
    for line in ODD_LINES:
        ids = ours.encode(line, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == line or SPACE in line


def stored(tokens: list[str], types: list[int], **keys: Any) -> Vocabulary:
    """The vocabulary of a file with these tokens."""
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {"model": "llama", **keys}.items()}
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(types)}
    return read_vocabulary(Path("x.gguf"), metadata | {"tokenizer.ggml.scores": -np.arange(float(len(tokens)))})


GEMMA_TEMPLATE = "{{ bos_token }}<start_of_turn>{{ role }}\n{{ content }}<end_of_turn>\n<tool_call><b> user </b>"


@pytest.mark.parametrize("written", [1, 4, 5])
def test_tokens_that_a_template_or_the_list_of_ends_names_are_control_tokens(written: int) -> None:
    """Google's QAT files of Gemma 3 give the tokens around turns the type of text."""
    tokens = ["<unk>", "<bos>", "<start_of_turn>", "<end_of_turn>", "user", "<tool_call>", "<eot>", *"<star_ofun>d"]
    tokens = list(dict.fromkeys(tokens))
    types = [2, 1, written, written, 1, written, 5, *[1] * (len(tokens) - 7)]
    plain = stored(tokens, types, bos_token_id=1, eot_token_id=6)
    assert list(plain.types[:7]) == [2, 3, written, 3, 1, written, 3]
    metadata = {**plain.metadata, "tokenizer.chat_template": GEMMA_TEMPLATE}
    vocabulary = read_vocabulary(Path("x.gguf"), metadata)
    assert list(vocabulary.types[:7]) == [2, 3, 3, 3, 1, 4, 3]
    assert vocabulary.end_ids() == (6, 3)
    tokenizer = build_tokenizer(vocabulary, "gemma3")
    assert tokenizer.encode("<start_of_turn><end_of_turn>", add_special_tokens=False) == [2, 3]
    assert tokenizer.decode([2, 4, 5, 3]) == "user<tool_call>"


def test_special_ids_outside_of_the_vocabulary_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    vocabulary = stored(["<unk>", "<s>", "</s>"], [2, 3, 3], eos_token_id=2, bos_token_id=1, padding_token_id=3)
    assert caplog.messages == [
        "x.gguf: tokenizer.ggml.padding_token_id is 3, but there are only 3 tokens, so it has no effect"
    ]
    assert vocabulary.special_tokens() == {"bos_token": "<s>", "eos_token": "</s>"}
    assert build_tokenizer(vocabulary, "llama").encode("") == [1]
