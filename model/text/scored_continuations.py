"""Tokenize a prompt with texts that may follow it, so that all of them begin with the same tokens."""

from collections.abc import Sequence

from model.errors import InvalidField
from model.text.tokenizer import Tokenizer

MAX_TOKENIZED_BYTES = 1 << 24  # the prompt counts once for each continuation; takes about 10 seconds


def encode_continuations(
    tokenizer: Tokenizer,
    prompt: str,
    prompt_ids: list[int],
    continuations: Sequence[str],
    max_tokens: int | None = None,
) -> list[list[int]]:
    """The token ids of texts that follow a prompt.

    Each has the tokens that follow those of the prompt when both are tokenized as one text. Raises
    `InvalidField` for one that is empty, or that shares its first token with the end of the prompt, and `TooManyTokens`
    if the prompt and a continuation have more than `max_tokens`.
    """
    num_bytes = len(prompt.encode()) * len(continuations)
    if num_bytes > MAX_TOKENIZED_BYTES:
        reason = (
            f"tokenizing the prompt with each of {len(continuations)} texts would read {num_bytes} bytes, the limit is "
            f"{MAX_TOKENIZED_BYTES}; send fewer, or lists of token ids"
        )
        raise InvalidField("continuations", reason)
    found = []
    for index, text in enumerate(continuations):
        whole = tokenizer.encode(prompt + text, max_tokens=max_tokens)
        if not text or whole[: len(prompt_ids)] != prompt_ids:
            reason = (
                "its beginning and the end of the prompt are one token; move the last word or space of the prompt to "
                "the beginning of each continuation, or send token ids"
            )
            raise InvalidField(f"continuations.{index}", reason if text else "is empty; send at least one token")
        found.append(whole[len(prompt_ids) :])
    return found
