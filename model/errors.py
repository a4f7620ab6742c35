"""Exceptions that a caller is expected to handle, and how their messages show values of any size."""

import math
import reprlib
from collections.abc import Iterable, Sequence

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxdict = 12


class InvalidField(ValueError):
    """A field of a configuration or a request has an invalid value.

    `field` is the name of the field, and `reason` says what is wrong with the value.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ContextOverflow(InvalidField):
    """A prompt, or a prompt with the new tokens that are asked for, is longer than the context or the cache.

    `field` is the one to change. `limit` is the number of tokens that fit. `num_prompt` and `max_tokens` were asked
    for, the prompt with at least `num_prompt` tokens if it `is_partly_counted`. `hint` says more about the limit. Many
    programs look for the beginning of the reason, and then shorten the conversation.
    """

    def __init__(
        self,
        field: str,
        limit: int,
        num_prompt: int,
        max_tokens: int = 0,
        *,
        is_partly_counted: bool = False,
        hint: str = "",
    ) -> None:
        number = f"at least {num_prompt}" if is_partly_counted else f"{num_prompt}"
        noun = "messages" if field == "messages" else "prompt"
        reason = f"this model's maximum context length is {limit} tokens. However, "
        if max_tokens and num_prompt < limit:
            total = num_prompt + max_tokens
            reason += (
                f"you requested {total} tokens ({num_prompt} in the prompt, {max_tokens} in the completion). "
                f"Please reduce the length of the {noun} or completion; at most {limit - num_prompt} fit"
            )
        else:
            reason += f"your {noun} resulted in {number} tokens. Please reduce the length of the {noun}"
            reason += "" if num_prompt != limit else "; the completion needs at least one token"
        super().__init__(field, f"{reason}; {hint}" if hint else reason)
        self.limit, self.num_prompt = limit, num_prompt
        self.max_tokens = max_tokens if num_prompt < limit else 0


class CheckpointError(ValueError):
    """A file of a checkpoint is missing, unreadable or does not fit the network. The message names what is wrong.

    A `config.json` with an invalid or unsupported value, or a `tokenizer.json` that the tokenizers library cannot use,
    raises a plain `ValueError` instead.
    """


def short_repr(value: object) -> str:
    """A value from a file for an error message: its `repr`, with long strings and containers shortened.

    Integers have up to 40 digits; of larger ones only the number of bits is stated.
    """
    if type(value) is int and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print more than 4,300 digits
    return _SHORT.repr(value)


def shortened(value: object) -> str:
    """A value from a request for an error message.

    It is shorter than `short_repr`, because it is part of a response: at most the first 40 characters, and integers of
    more than 30 digits as a power of ten.
    """
    if isinstance(value, int) and abs(value) >= 10**30:  # Python refuses to print more than 4,300 digits
        return f"about {'-' if value < 0 else ''}10^{math.log10(abs(value)):.0f}"
    text = str(value) if isinstance(value, (int, float)) else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def printable_name(name: str) -> str:
    """A name from a file for an error message: without unprintable characters such as line ends, and not too long."""
    return name if name.isprintable() and len(name) <= 200 else short_repr(name)


def join_names(names: Iterable[str], limit: int = 5) -> str:
    """The first `limit` names from a file for an error message, and the number of the others."""
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(printable_name, names[:limit])) + rest


def join_words(words: Sequence[str], last: str) -> str:
    """A list in a sentence: "a, b or c"."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)
