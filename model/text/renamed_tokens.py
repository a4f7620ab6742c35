"""Rename the special tokens of a tokenizer, so that no text of a client is read as one of them."""

from collections.abc import Iterable, Mapping
from typing import Any

from model.text.tokenizer import Tokenizer, flatten


def rename_tokens(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """The same tokenizer with the same ids, except that the tokens in `names` (old text -> new text) have other texts.

    The old texts are encoded like any other text. Merges that made such a token from parts of a text are dropped.
    """
    state = tokenizer.state()
    for token in state["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = state["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
    else:  # Unigram: pairs of token and score
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_tokens_of(merge))]
    renamed = Tokenizer.from_state(state)
    for old, new in names.items():
        assert renamed.id_of(new) == tokenizer.id_of(old), "a renamed token must keep its id"
    return renamed


def _tokens_of(merge: Any) -> tuple[str, str, str]:
    """The two tokens that a merge of a BPE vocabulary joins, and the token that it makes."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def only_literal_matches(tokenizer: Tokenizer, contents: Iterable[str]) -> bool:
    """Whether the tokenizer finds the tokens `contents` only where a text contains exactly their texts.

    A normalizer may turn other text into the text of a token, such as letters of full width into ASCII.
    """
    state = tokenizer.state()
    contents = set(contents)
    for step in flatten(state["normalizer"], "normalizers"):
        added = step.get("prepend") if step["type"] == "Prepend" else step.get("content")
        if step["type"] not in ("Prepend", "Replace") or not added or any(added in content for content in contents):
            break
    else:
        return True
    vocabulary = state["model"]["vocab"]
    is_known = vocabulary.keys() if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
    is_normalized = any(token["normalized"] for token in state["added_tokens"] if token["content"] in contents)
    return not is_normalized and contents.isdisjoint(is_known)
