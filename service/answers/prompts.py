"""Prompts and tokens of requests: checked, tokenized, and described in answers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from forwardscope.local_results import describe_tokens
from forwardscope.results.stages import PositionedToken
from model.checkpoints.load import Checkpoint
from model.errors import ContextOverflow, InvalidField, shortened
from model.text.tokenizer import TooManyTokens
from model.tracing.selection import check_heads
from model.tracing.stages import Stage
from service.answers.call import ModelCall
from service.http.disconnects import unless_disconnected
from service.http.errors import invalid, invalid_field
from service.worker import SHORT_TEXT

Prompt = str | list[int]


def as_list(prompt: Prompt | list[str] | list[list[int]]) -> tuple[list[Prompt], bool]:
    """The prompts of a request that takes one prompt or a list of them, and whether it has sent a list."""
    if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
        return [prompt], False  # type: ignore[list-item]  # all items are of one type
    return [*prompt], True


def param_of(name: str, index: int, is_list: bool) -> str:
    """The place of a prompt, or of a field for each prompt, in the request."""
    return f"{name}.{index}" if is_list else name


async def prompt_ids(
    call: ModelCall, prompt: Prompt, param: str = "prompt", *, add_special_tokens: bool = True
) -> list[int]:
    """The token ids of a prompt. Raises 400 if it is empty, longer than the context, or has an unknown token.

    `param` is the place of the prompt in the request, for errors.
    """
    tokenizer, limit = call.checkpoint.tokenizer, call.checkpoint.model.config.max_positions
    if isinstance(prompt, list):
        check_prompt_ids(prompt, call.checkpoint, param)
        return prompt
    if tokenizer is None:
        raise invalid(param, "this checkpoint has no tokenizer.json; send a list of token ids", "no_tokenizer")
    with refusing_overflow(call.checkpoint, param):
        tokenizer.check_bytes(prompt, limit)
    encode = partial(tokenizer.encode, prompt, add_special_tokens=add_special_tokens, max_tokens=limit)
    return await tokenize(call, encode, len(prompt.encode()), param)


async def tokenize(call: ModelCall, encode: Callable[[], list[int]], num_bytes: int, param: str) -> list[int]:
    """Run `encode`, which tokenizes `num_bytes` bytes, outside of the event loop, and check its token ids.

    Raises 400 if they are none, or more than the context has room for.
    """
    worker = call.state.worker
    worker.check_room(0)  # refuse before the work of tokenizing, not after it
    job = worker.run_text(encode, num_bytes)
    with refusing_overflow(call.checkpoint, param):
        ids = await (job if num_bytes <= SHORT_TEXT else unless_disconnected(call.request, job))
    check_prompt_ids(ids, call.checkpoint, param)
    return ids


@contextmanager
def refusing_overflow(checkpoint: Checkpoint, param: str) -> Iterator[None]:
    """Raise 400 for a text that has more tokens than the context, found before all of it is tokenized."""
    try:
        yield
    except TooManyTokens as error:
        limit = checkpoint.model.config.max_positions
        raise invalid_field(ContextOverflow(param, limit, error.num_tokens, is_partly_counted=True)) from None


def check_prompt_ids(ids: Sequence[int], checkpoint: Checkpoint, param: str) -> None:
    """Raise 400 if a prompt is empty, longer than the context, or has an unknown token."""
    config = checkpoint.model.config
    if not ids:
        raise invalid(param, "is empty; send at least one token", "empty")
    if len(ids) > config.max_positions:
        raise invalid_field(ContextOverflow(param, config.max_positions, len(ids)))
    check_ids(ids, config.vocab_size, param)


def check_ids(ids: Sequence[int | None], vocab_size: int, param: str) -> None:
    """Raise 400 for the first id outside the vocabulary."""
    for index, token_id in enumerate(ids):
        if token_id is not None and not 0 <= token_id < vocab_size:
            reason = f"{shortened(token_id)} is not a token id; the vocabulary has {vocab_size} tokens"
            raise invalid(f"{param}.{index}", reason, "token_id")


def check_indices(indices: Sequence[int] | None, size: int, param: str, items: str) -> None:
    """Raise 400 if an index into `size` items is too large or repeated. `items` names them in the message.

    The schemas refuse negative indices.
    """
    for place, index in enumerate(indices or ()):
        if index >= size:
            reason = f"{shortened(index)} is out of range; there are {size} {items}"
            raise invalid(f"{param}.{place}", reason, "out_of_range")
    if indices is not None and len(set(indices)) != len(indices):
        raise invalid(param, "has the same index twice", "duplicate")


def check_selected_heads(
    heads: Sequence[int] | None, num_heads: int, stages: Sequence[Stage], param: str = "heads"
) -> None:
    """Raise 400 for selected heads that do not exist, or that none of the selected stages has."""
    check_indices(heads, num_heads, param, "heads")
    try:
        check_heads(heads, stages)
    except InvalidField as error:
        raise invalid_field(error, param) from None


def find_positions(
    positions: Sequence[int], num_prompt: int, param: str, *, size: int | None = None, items: str = "tokens"
) -> list[int]:
    """The positions of a request, counted from the start.

    Negative positions count from the end of the prompt. There are `size` positions, by default those of the prompt;
    `items` names them in error messages. Raises 400 for a position that is out of range or occurs twice.
    """
    size = num_prompt if size is None else size
    found = [position + num_prompt if position < 0 else position for position in positions]
    for place, (position, given) in enumerate(zip(found, positions, strict=True)):
        if not 0 <= position < size:
            first = f"; a negative position is at least {-num_prompt}" if given < 0 else ""
            reason = f"{shortened(given)} is out of range; there are {size} {items}{first}"
            raise invalid(f"{param}.{place}", reason, "out_of_range")
    if len(set(found)) != len(found):
        raise invalid(param, "has the same position twice", "duplicate")
    return found


def token_answers(ids: Sequence[int], checkpoint: Checkpoint, start: int = 0) -> Sequence[PositionedToken]:
    """Tokens with their texts and positions; the first is at position `start`."""
    return describe_tokens(ids, checkpoint.text_of, start)


def longest_token_bytes(checkpoint: Checkpoint) -> int:
    """The length of the longest token string in `tokenizer.json`, in UTF-8 bytes; 0 without a tokenizer.

    Byte-level vocabularies write some bytes as characters of two bytes, so the text of a token can be shorter.
    """
    return 0 if checkpoint.tokenizer is None else checkpoint.tokenizer.longest_token_bytes
