"""The tokens that only `tokenizer_config.json` or `added_tokens.json` adds have the ids and flags of transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from model.checkpoints.added_tokens import read_tokenizer
from model.checkpoints.chat_templates import read_chat_template
from model.errors import CheckpointError
from model.text.tokenizer import Tokenizer

PIECES = ("<unk>", "<s>", "</s>", *"abcdehilmnorst_<>|/ []")
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
TEXTS = (
    "ab<|im_end|> c",
    "<think> hi </think>",
    "a  <pad>  b",
    "<tool>ab",
    "</s>a<|im_start|>ab",
    "ab <s>  cd </s> ab",
    "ab<pad>cd<|im_end|>",
)


def write(directory: Path, config: dict[str, Any], legacy: dict[str, int] | None = None, **files: Any) -> None:
    """Write a `tokenizer.json` without the tokens of the other files, and these files."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(directory / "tokenizer.json"))
    contents = {"tokenizer_config.json": config, "added_tokens.json": legacy, **files}
    for name, content in contents.items():
        if content is not None:
            (directory / name).write_text(json.dumps(content))


def read(directory: Path) -> Tokenizer:
    tokenizer = read_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


NEXT = len(PIECES)
DECODER = {
    str(NEXT): {"content": "<|im_start|>", **FLAGS},
    str(NEXT + 1): {"content": "<|im_end|>", **FLAGS, "rstrip": True},
    str(NEXT + 2): {"content": "<think>", **FLAGS, "special": False},
    str(NEXT + 3): {"content": "</think>", **FLAGS, "special": False, "lstrip": True},
    str(NEXT + 4): {"content": "<pad>", **FLAGS, "normalized": True},
    "1": {"content": "<s>", **FLAGS},
}
LEGACY = {"<|im_start|>": NEXT, "<|im_end|>": NEXT + 1, "<think>": NEXT + 2, "<pad>": NEXT + 3}
CASES: dict[str, tuple[dict[str, Any], dict[str, int] | None]] = {
    "added_tokens_decoder": ({"added_tokens_decoder": DECODER, "eos_token": "<|im_end|>", "bos_token": "<s>"}, None),
    "both files": ({"added_tokens_decoder": DECODER, "eos_token": "<|im_end|>"}, {"<other>": NEXT}),
    "other flags than in tokenizer.json": (
        {
            "added_tokens_decoder": DECODER
            | {"1": {"content": "<s>", **FLAGS, "lstrip": True, "rstrip": True}}
            | {"2": {"content": "</s>", **FLAGS, "rstrip": True}}
        },
        None,
    ),
    "added_tokens.json": ({"eos_token": "<|im_end|>", "pad_token": "<pad>"}, LEGACY),
    "flags that are missing": (
        {
            "added_tokens_decoder": {
                str(NEXT): {"content": "<|im_end|>", "special": True},
                str(NEXT + 1): {"content": "<tool>"},
            }
        },
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ids_and_decoded_texts_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, legacy = CASES[case]
    write(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", **config}, legacy)
    reference, tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path), read(tmp_path)
    flags = {str(token): token.special for token in reference.added_tokens_decoder.values()}
    assert {text: token.special for text, token in tokenizer.added_tokens.items()} == flags
    assert len(flags) > 3
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_ids_may_leave_gaps(tmp_path: Path) -> None:
    """transformers would number these tokens anew, so that they would have the embeddings of other tokens."""
    decoder = {str(NEXT + gap): {"content": text, **FLAGS} for gap, text in ((5, "<|im_end|>"), (9, "<pad>"))}
    write(tmp_path, {"added_tokens_decoder": decoder})
    tokenizer = read(tmp_path)
    assert tokenizer.encode("a<|im_end|><pad></s>", add_special_tokens=False) == [3, NEXT + 5, NEXT + 9, 2]
    assert tokenizer.decode([3, NEXT + 5, 4]) == "ab"
    assert tokenizer.vocab_size == NEXT + 10


def test_a_named_token_of_the_vocabulary_is_special(tmp_path: Path) -> None:
    write(tmp_path, {"eos_token": {"content": "|"}, "additional_special_tokens": ["_"]})
    tokenizer = read(tmp_path)
    assert tokenizer.added_tokens["|"]
    assert tokenizer.added_tokens["_"]
    assert tokenizer.decode(tokenizer.encode("a|_b", add_special_tokens=False)) == "ab"


@pytest.mark.parametrize(
    "config", [{"eos_token": "<|im_end|>"}, {"added_tokens_decoder": {str(NEXT): {"content": "<|im_end|>", **FLAGS}}}]
)
def test_a_token_is_special_if_any_file_says_so_as_in_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", **config})
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({"id": NEXT, "content": "<|im_end|>", **FLAGS, "special": False})
    path.write_text(json.dumps(content))
    reference, tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path), read(tmp_path)
    assert tokenizer.added_tokens["<|im_end|>"]
    ids = tokenizer.encode("ab<|im_end|>", add_special_tokens=False)
    assert ids[-1] == NEXT
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == "ab"


def test_tokens_that_do_not_exist_are_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = "<|im_start|>{{ messages[0].content }}<end_of_turn></s>"
    named = {"eos_token": "<|im_end|>", "bos_token": "<s>", "extra_special_tokens": ["<tool>", "</s>"]}
    write(tmp_path, {**named, "chat_template": template})
    tokenizer = read(tmp_path)
    assert caplog.messages == [
        f"{tmp_path}/tokenizer_config.json: names tokens that do not exist: eos_token <|im_end|>, <tool>"
    ]
    caplog.clear()
    found = read_chat_template(tmp_path, tokenizer)
    assert found is not None
    assert caplog.messages == [
        f"{tmp_path}/tokenizer_config.json: the chat template writes tokens that do not exist, so they are text: "
        "<end_of_turn>, <|im_start|>"
    ]
    assert found.render([{"role": "user", "content": "ab"}]) == "<|im_start|>ab<end_of_turn></s>"


def test_an_id_of_another_token_is_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"added_tokens_decoder": {"3": {"content": "<pad>", **FLAGS}}})
    assert read(tmp_path).id_of("<pad>") is None
    assert caplog.messages == [f"{tmp_path}: the id 3 of the added token <pad> is that of another one"]


@pytest.mark.parametrize("decoder", [[], {"x": {"content": "a"}}, {"30": "<pad>"}, {"30": {"content": 1}}, {"-1": {}}])
def test_a_damaged_list_is_refused(decoder: Any, tmp_path: Path) -> None:
    write(tmp_path, {"added_tokens_decoder": decoder})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .*added token"):
        read(tmp_path)


def test_a_tokenizer_in_another_form_is_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_tokenizer(tmp_path) is None
    assert not caplog.messages
    (tmp_path / "tokenizer.model").touch()
    assert read_tokenizer(tmp_path) is None
    assert re.search(r"no tokenizer\.json, .* tokenizer\.model: not read.*save_pretrained", caplog.text)
