"""Read the tokenizer of a checkpoint directory, with the tokens that only its other files add.

`tokenizer.json` has all tokens in most checkpoints. Some fine-tuned ones name new tokens only in
`tokenizer_config.json` (`added_tokens_decoder`) or in `added_tokens.json`, the older form. transformers adds them, too.
"""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model.checkpoints.chat_templates import CONFIG, read_special_tokens, read_tokenizer_config
from model.errors import CheckpointError, join_names, printable_name, short_repr
from model.files import is_present, read_json
from model.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LEGACY = "added_tokens.json"
# Tokenizers in other forms, which transformers can convert.
OTHER_FORMS = ("tokenizer.model", "vocab.json", "merges.txt", "spiece.model", "tekken.json", "tiktoken.model")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MAX_ADDED_TOKENS = 1 << 16


def read_tokenizer(directory: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None if it has no `tokenizer.json`.

    As in transformers, a token is special if any file says so, or if the configuration names it, as "eos_token". Its
    other flags are those of `added_tokens_decoder`, if it is there.

    An id that another token has is named in a warning. Raises `CheckpointError` for an id that cannot be given.
    """
    if not is_present(directory / "tokenizer.json"):
        others = [name for name in OTHER_FORMS if is_present(directory / name)]
        if others:
            logger.warning(
                "%s: has no tokenizer.json, so only token ids can be used; %s: not read. Where you trust the files, "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes a tokenizer.json",
                directory,
                join_names(others),
            )
        return None
    tokenizer = Tokenizer.from_directory(directory)
    named = read_special_tokens(directory)
    known = tokenizer.added_tokens
    all_listed = list(_listed_tokens(directory, set(named.values())))
    added = [token for token in all_listed if token["content"] not in known]
    listed = {token["content"] for token in added}
    special = {*named.values(), *(token["content"] for token in all_listed if token["special"])}
    has_flags = "added_tokens_decoder" in read_tokenizer_config(directory)
    stated = {token["content"]: {flag: token[flag] for flag in FLAGS} for token in all_listed if has_flags}
    changed = {}
    for content, token in known.items():
        flags = {flag: getattr(token, flag) for flag in FLAGS}
        wanted = flags | stated.get(content, {})
        wanted["special"] = token.special or content in special
        if wanted != flags:
            changed[content] = wanted
    for content in dict.fromkeys([*named.values(), *_additional_tokens(directory)]):
        token_id = tokenizer.id_of(content)
        if token_id is not None and content not in known and content not in listed:
            added.append({"id": token_id, "content": content, **dict.fromkeys(FLAGS, False), "special": True})
    if added or changed:
        tokenizer = _with_tokens(tokenizer, added, changed, directory)
    missing = [f"{name} {printable_name(text)}" for name, text in named.items() if tokenizer.id_of(text) is None]
    missing += [printable_name(text) for text in _additional_tokens(directory) if tokenizer.id_of(text) is None]
    if missing:
        logger.warning("%s: names tokens that do not exist: %s", directory / CONFIG, join_names(missing))
    return tokenizer


def _listed_tokens(directory: Path, special: set[str]) -> Iterator[dict[str, Any]]:
    """The added tokens of the other files, in the form of `tokenizer.json`."""
    path = directory / CONFIG
    listed = read_tokenizer_config(directory).get("added_tokens_decoder")
    if listed is None and is_present(directory / LEGACY):
        path = directory / LEGACY
        texts = read_json(path)
        listed = {
            str(token_id): {"content": text, "special": text in special, "normalized": text not in special}
            for text, token_id in texts.items()
        }
    if listed is None:
        return
    if not isinstance(listed, dict) or len(listed) > MAX_ADDED_TOKENS:
        raise CheckpointError(f"{path}: the added tokens are not an object of at most {MAX_ADDED_TOKENS} tokens")
    for key, token in listed.items():
        content = token.get("content") if isinstance(token, dict) else None
        if not key.isdecimal() or len(key) > 9 or not isinstance(content, str) or not content:
            raise CheckpointError(f"{path}: {short_repr(key)}: {short_repr(token)} is not an added token with its id")
        # Without the key, a special token is not searched for in the normalized text.
        defaults = {"normalized": not token.get("special", False)}
        flags = {flag: bool(token.get(flag, defaults.get(flag, False))) for flag in FLAGS}
        yield {"id": int(key), "content": content, **flags}


def _additional_tokens(directory: Path) -> list[str]:
    config = read_tokenizer_config(directory)
    listed = [config.get(key) for key in ("additional_special_tokens", "extra_special_tokens")]
    tokens = [token for each in listed if isinstance(each, list) for token in each]
    contents = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    return [content for content in contents if isinstance(content, str)]


def _with_tokens(
    tokenizer: Tokenizer, added: list[dict[str, Any]], changed: Mapping[str, dict[str, bool]], directory: Path
) -> Tokenizer:
    """The same tokenizer with more added tokens, which keep their ids, and with `changed` flags by text."""
    state = tokenizer.state()
    text_of = _texts_by_id(state)
    for token in list(added):
        name, token_id = printable_name(token["content"]), tokenizer.id_of(token["content"])
        other = text_of.setdefault(token["id"], token["content"])
        if token_id is not None:
            token["id"] = token_id
        elif other != token["content"]:
            logger.warning("%s: the id %d of the added token %s is that of another one", directory, token["id"], name)
            added.remove(token)
    for token in state["added_tokens"]:
        token.update(changed.get(token["content"], {}))
    state["added_tokens"] = sorted([*state["added_tokens"], *added], key=lambda token: int(token["id"]))
    vocabulary = state["model"].get("vocab")
    if isinstance(vocabulary, dict):  # so that the library does not number the tokens anew
        vocabulary |= {token["content"]: token["id"] for token in state["added_tokens"]}
    complete = Tokenizer.from_state(state)
    for token in added:
        if complete.id_of(token["content"]) != token["id"]:
            raise CheckpointError(
                f"{directory}: the added token {printable_name(token['content'])} cannot have the id {token['id']}, "
                "because there are no tokens with the ids before it"
            )
    return complete


def _texts_by_id(state: Mapping[str, Any]) -> dict[int, str]:
    vocabulary = state["model"].get("vocab", {})
    pairs = (
        vocabulary.items() if isinstance(vocabulary, dict) else ((text, i) for i, (text, _) in enumerate(vocabulary))
    )
    texts = {int(token_id): str(text) for text, token_id in pairs}
    return texts | {int(token["id"]): str(token["content"]) for token in state["added_tokens"]}
