"""Prompts for models that were trained to fill in the middle of a text (Bavarian et al. 2022)."""

from collections.abc import Sequence

from model.text.tokenizer import Tokenizer

# The tokens before the prefix, before the suffix and before the middle, as families of models name them.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek-Coder)
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)

# The tokens before the name of a repository, and before each of its files.
REPOSITORY_MARKS = (
    ("<|repo_name|>", "<|file_sep|>"),  # Qwen2.5-Coder
    ("<repo_name>", "<file_sep>"),  # StarCoder2
    ("<reponame>", "<filename>"),  # StarCoder, Granite
)
REPOSITORY, FILE = "myproject", "filename"  # names that llama-server writes, as a request has none


def middle_prompt(tokenizer: Tokenizer, prefix: Sequence[int], suffix: Sequence[int]) -> list[int] | None:
    """The token ids after which the model writes the text between a prefix and a suffix. None without such tokens."""
    for marks in MARKS:
        before_prefix, before_suffix, before_middle = map(tokenizer.id_of, marks)
        if before_prefix is not None and before_suffix is not None and before_middle is not None:
            return [before_prefix, *prefix, before_suffix, *suffix, before_middle]
    return None


def other_files(tokenizer: Tokenizer, files: Sequence[tuple[str, str]], max_tokens: int) -> list[int]:
    """The token ids of other files, given as names and texts, before the prompt of `middle_prompt`.

    They are those of a repository, if the model has tokens for one, and otherwise the texts with blank lines between.
    Raises `TooManyTokens` for a file that is clearly too long for `max_tokens`.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    for names in REPOSITORY_MARKS:
        before_name, before_file = map(tokenizer.id_of, names)
        if before_name is not None and before_file is not None:
            ids = [before_name, *encode(f"{REPOSITORY}\n")]
            for name, text in files:
                ids += [before_file, *encode(f"{name}\n{text}\n")]
            return [*ids, before_file, *encode(f"{FILE}\n")]
    return [token_id for _, text in files for token_id in encode(f"{text}\n\n")]
