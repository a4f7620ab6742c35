"""Read the chat templates of a checkpoint from the files in which transformers saves them."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.errors import CheckpointError, join_names
from model.files import is_present, read_json, read_regular_file
from model.text.chat_template import MAX_SOURCE_CHARACTERS, ChatTemplate, InvalidTemplate
from model.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CONFIG = "tokenizer_config.json"
_CONTROL = re.compile(r"<\|[^\s<>{}'\"]{1,60}\|>|<(?:start|end)_of_\w{1,20}>")  # tokens by their form
MAX_TEMPLATES = 100
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_chat_template(
    directory: Path, tokenizer: Tokenizer | None, override: Path | None = None
) -> ChatTemplate | None:
    """The chat templates of a checkpoint, or None if it has none.

    They are `chat_template.jinja` and `additional_chat_templates/*.jinja`, or else `chat_template` in
    `tokenizer_config.json`. The template in the file `override` replaces all of them. Raises a `CheckpointError` that
    names the file.
    """
    if tokenizer is None or override is not None:
        return make_chat_template({}, tokenizer, read_special_tokens(directory), override)
    sources = {name: (path, _read_text(path)) for name, path in _template_files(directory).items()}
    if not sources:
        path = directory / CONFIG
        templates = _templates_of(read_tokenizer_config(directory).get("chat_template"), path)
        sources = {name: (path, source) for name, source in templates.items()}
    return make_chat_template(sources, tokenizer, read_special_tokens(directory), override)


def make_chat_template(
    sources: Mapping[str, tuple[Path, str]],
    tokenizer: Tokenizer | None,
    special_tokens: Mapping[str, str],
    override: Path | None = None,
) -> ChatTemplate | None:
    """The chat templates of a checkpoint: name -> the file that holds it, and its source. None if there are none.

    The template in the file `override` replaces all of them. An empty template is none. Raises a `CheckpointError` that
    names the file.
    """
    if tokenizer is None:
        if override is not None:
            raise CheckpointError(f"{override}: a chat template needs a tokenizer, which the checkpoint lacks")
        return None
    if override is not None:
        sources = {"default": (override, _read_text(override))}
        if not sources["default"][1].strip():
            raise CheckpointError(f"{override}: the chat template is empty")
    for file in {file for file, source in sources.values() if not source.strip()}:
        logger.warning("%s: a chat template is empty, so it is left out", file)
    sources = {name: (file, source) for name, (file, source) in sources.items() if source.strip()}
    if not sources:
        return None
    for file, source in sources.values():
        absent = sorted({text for text in _CONTROL.findall(source) if tokenizer.id_of(text) is None})
        if absent:
            logger.warning(
                "%s: the chat template writes tokens that do not exist, so they are text: %s", file, join_names(absent)
            )
    try:
        return ChatTemplate({name: source for name, (_, source) in sources.items()}, tokenizer, special_tokens)
    except InvalidTemplate as error:
        raise CheckpointError(f"{sources[error.name][0]}: {error}") from error


def _template_files(directory: Path) -> dict[str, Path]:
    """The template files by name. If there are any, the templates in `tokenizer_config.json` have no effect."""
    default = directory / "chat_template.jinja"
    files = {"default": default} if is_present(default) else {}
    others = directory / "additional_chat_templates"
    if is_present(others):  # `glob` would leave out a directory that cannot be read
        files |= {path.stem: path for path in sorted(others.iterdir()) if path.suffix == ".jinja"}
    if len(files) > MAX_TEMPLATES:
        raise CheckpointError(f"{directory}: has more than {MAX_TEMPLATES} chat templates, the limit")
    return files


def _templates_of(value: Any, path: Path) -> dict[str, str]:
    """The templates by name, from `value` in `tokenizer_config.json`: None, a text, an object, or a list of objects."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        value = [{"name": name, "template": template} for name, template in value.items()]
    if not isinstance(value, list) or len(value) > MAX_TEMPLATES:
        raise CheckpointError(f"{path}: chat_template must be a text or a list of templates, at most {MAX_TEMPLATES}")
    sources = {}
    for each in value:
        if not isinstance(each, dict) or not all(isinstance(each.get(key), str) for key in ("name", "template")):
            raise CheckpointError(f"{path}: each item of chat_template must have a name and a template")
        sources[each["name"]] = each["template"]
    return sources


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """The content of `tokenizer_config.json`; empty if there is no such file."""
    path = directory / CONFIG
    return read_json(path) if is_present(path) else {}


def read_special_tokens(directory: Path) -> dict[str, str]:
    """The texts of the special tokens that a checkpoint names, such as `bos_token`."""
    config = read_tokenizer_config(directory)
    path = directory / "special_tokens_map.json"
    is_legacy = "added_tokens_decoder" not in config and is_present(path)
    named = {**config, **(read_json(path) if is_legacy else {})}
    tokens = {}
    for key in SPECIAL_TOKENS:
        token = named.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[key] = content
    return tokens


def _read_text(path: Path) -> str:
    content = read_regular_file(path, max_bytes=4 * MAX_SOURCE_CHARACTERS)
    try:
        return content.decode("utf-8").replace("\r\n", "\n")  # as when a file is opened in text mode
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not a text in UTF-8") from error
