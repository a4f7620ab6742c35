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


def middle_prompt(tokenizer: Tokenizer, prefix: Sequence[int], suffix: Sequence[int]) -> list[int] | None:
    """The token ids after which the model writes the text between a prefix and a suffix. None without such tokens."""
    for marks in MARKS:
        before_prefix, before_suffix, before_middle = map(tokenizer.id_of, marks)
        if before_prefix is not None and before_suffix is not None and before_middle is not None:
            return [before_prefix, *prefix, before_suffix, *suffix, before_middle]
    return None
