"""Constrain the text of a sequence: which tokens its grammar allows next, as bitmasks.

A `Constraint` is compiled once for a request (grammar/), and all continuations of the request share it. Each
continuation has a `GrammarState`, which depends only on the tokens that the continuation has generated.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from model.errors import InvalidField
from model.text.json_keys import WHOLE_TEXT, JsonPlace, KeyFilter, LookAhead
from model.text.thinking import Thoughts

WORD_BITS = 32
MAX_PLACES_AHEAD = 16  # each takes about 0.1 ms
Words = NDArray[np.int32]


class Constraint:
    """A compiled grammar over a vocabulary of `vocab_size` tokens. `field` is its field in the request.

    With a `key_filter`, no object in the JSON of the text has a key twice. `begin` says where the JSON is.

    Raises `InvalidField` if the grammar is invalid, or allows nothing but the empty text.
    """

    def __init__(
        self,
        field: str,
        matcher: LLMatcher,
        vocab_size: int,
        key_filter: KeyFilter | None = None,
        begin: JsonPlace = WHOLE_TEXT,
    ) -> None:
        self.field = field
        self.key_filter = key_filter
        self.begin = begin
        self.look_ahead: LookAhead | None = None
        """For a grammar that allows only some keys in an object without naming them, so that they may be used up."""
        self.not_enforced: Mapping[str, str] = {}
        """The fields of functions whose arguments may be any JSON object, because their schemas are not enforced, and
        why. Nothing else of the client is in the reasons, so that they can be logged.
        """
        self.thoughts: Thoughts | None = None
        """The beginning of a text that thinks before the constraint applies; None if it applies at once."""
        self.vocab_size = vocab_size
        self._matcher = matcher
        # The first mask is computed here, in the thread of the caller, because it takes longer than later ones.
        words = np.zeros(num_words(vocab_size), dtype=np.int32)
        if not matcher.is_error():
            fill(matcher, words)
        if matcher.is_error():
            raise InvalidField(field, reason_of(matcher))
        if not allows_tokens(words, vocab_size):
            raise InvalidField(field, "allows nothing but the empty text")

    def after_thinking(self, thoughts: Thoughts) -> "Constraint":
        """The same constraint on the answer alone, for a text that thinks before it, or may do so."""
        changed = copy(self)
        changed.thoughts = thoughts
        return changed

    def new_matcher(self) -> LLMatcher:
        """A matcher at the beginning of the text. It shares nothing with others."""
        return self._matcher.deep_copy()


class GrammarState:
    """How far one sequence has come in its grammar.

    The `stop_token_ids` are allowed exactly where the text is complete, and no other rule of the grammar concerns them.
    """

    def __init__(self, constraint: Constraint, stop_token_ids: Collection[int] = ()) -> None:
        self.constraint = constraint
        self.is_complete = False
        """Whether no token can follow. The sequence then ends, also without a stop token."""
        self._matcher = constraint.new_matcher()
        self._tokens: list[int] = []
        self._keys = constraint.key_filter
        self._place = constraint.begin
        self._thoughts = constraint.thoughts  # None in the answer
        self._stop_ids = [token_id for token_id in stop_token_ids if token_id < constraint.vocab_size]

    def append(self, token_id: int) -> None:
        """Add a generated token. The mask must have allowed it, and it must not be a stop token."""
        thoughts = self._thoughts
        if thoughts is not None:
            self._thoughts = thoughts.after(token_id)
            if thoughts.takes(token_id):
                return
        self._tokens.append(token_id)
        if not self._matcher.consume_token(token_id):
            raise self._error()
        if self._keys is not None:
            place = self._place.after(self._keys.tokens[token_id])
            if place is None:
                raise self._error("an object has a key twice")
            self._place = place
        if self._matcher.is_stopped():
            self.is_complete = True
        elif self._matcher.is_accepting():
            words = np.zeros(num_words(self.constraint.vocab_size), dtype=np.int32)
            fill(self._matcher, words)  # kept by the matcher, so that the next step does not compute it again
            self.is_complete = not self._matcher.is_error() and not allows_tokens(words, self.constraint.vocab_size)

    def fork(self) -> "GrammarState":
        """A copy that has come as far. Tokens that are added to it are not added here."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        other._tokens = list(self._tokens)
        return other

    def try_append(self, token_id: int) -> bool:
        """Add a token that the mask allowed, if the text goes on behind it. Returns whether another one can follow."""
        if token_id in self._stop_ids:
            return False
        try:
            self.append(token_id)
        except InvalidField:
            return False
        return not self.is_complete

    def allowed_part(self, draft: list[int]) -> list[int]:
        """Cut a draft before the first token that the grammar does not allow, as far as this is known without masks."""
        if self._thoughts is not None:
            return draft
        count = self._matcher.validate_tokens(draft)
        if self._matcher.is_error():  # the draft may be wrong, so the sequence may never meet this error
            self._restart()
        return draft[: max(count, 0)]

    def fill_masks(self, words: Words, draft: Sequence[int]) -> InvalidField | None:
        """Write the mask after the newest token, and one after each drafted token: words (1 + D, W).

        If a drafted token is not allowed, the masks after it are not written, because no token is chosen with them.
        Returns the error if the mask after the newest token fails. If a mask after a drafted token fails, it allows
        nothing.
        """
        num_ahead = 0
        place: JsonPlace | None = self._place
        thoughts = self._thoughts
        for row in range(1 + len(draft)):
            if thoughts is not None and thoughts.is_open:
                words[row] = -1
                for token_id in self._stop_ids:  # they would end the text before the answer
                    set_bit(words[row], token_id, False)
                thoughts = thoughts.after(draft[row]) if row < len(draft) else None
                continue
            fill(self._matcher, words[row])
            if self._matcher.is_error():
                error = self._error()
                if row == 0:
                    return error
                words[row] = 0  # a sequence that reaches this state meets the error in its next step
                self._restart()
                return None
            if not self._mark_stop_ids(words[row]) and row == 0:
                return self._error("every token that can follow is in stop_token_ids, but the text is not complete")
            if thoughts is not None and thoughts.begin_id is not None:
                set_bit(words[row], thoughts.begin_id, True)
                if row < len(draft) and thoughts.takes(draft[row]):
                    thoughts = thoughts.after(draft[row])
                    continue
            thoughts = None
            if self._keys is not None and place is not None:
                self._keys.remove(place, words[row])
                if self.constraint.look_ahead is not None:
                    remove_dead_ends(self._matcher, self._keys, self.constraint.look_ahead, place, words[row])
                if row == 0 and not words[row].any():
                    return self._error("the object already has each key that can follow")
                place = place.after(self._keys.tokens[draft[row]]) if row < len(draft) else None
                if place is None:
                    break
            if row == len(draft) or not self._matcher.try_consume_tokens([draft[row]]):
                break
            num_ahead += 1
        if num_ahead and not self._matcher.rollback(num_ahead):
            self._restart()
        return None

    def _mark_stop_ids(self, words: Words) -> bool:
        """Allow the stop tokens if the text is complete, otherwise exclude them. Returns whether any token is left."""
        is_accepting = has_bit(words, self.constraint.vocab_size)
        removed = False
        for token_id in self._stop_ids:
            removed |= not is_accepting and has_bit(words, token_id)
            set_bit(words, token_id, is_accepting)
        return not removed or bool(words.any())

    def _restart(self) -> None:
        """Compute the state again from the generated tokens, after an error in a draft."""
        self._matcher = self.constraint.new_matcher()
        self._matcher.consume_tokens(self._tokens)

    def _error(self, reason: str | None = None) -> InvalidField:
        reason = reason or reason_of(self._matcher)
        return InvalidField(self.constraint.field, f"after {len(self._tokens)} tokens: {reason}")


def remove_dead_ends(
    matcher: LLMatcher, keys: KeyFilter, look_ahead: LookAhead, place: JsonPlace, words: Words
) -> None:
    """Remove the tokens from a mask after which an object must have another key, but has each one that can follow.

    A few places ahead are computed. Tokens that lead to more of them are removed, too, if others are left.
    """
    found: dict[JsonPlace, bool] = {}

    def is_dead_end(matcher: LLMatcher, place: JsonPlace, token_id: int) -> bool:
        after = place.after(keys.tokens[token_id])
        if after is None or after in found or len(found) == MAX_PLACES_AHEAD:
            return after is None or found.get(after, True)
        found[after] = True  # white space leads back to the same place
        matcher, words = matcher.deep_copy(), np.zeros(num_words(len(keys.tokens) - 1), dtype=np.int32)
        if matcher.consume_token(token_id):
            fill(matcher, words)
        keys.remove(after, words)
        near = look_ahead.near_old_keys(after, words)
        for each in near:
            set_bit(words, each, False)
        is_dead = not words.any() and all(is_dead_end(matcher, after, each) for each in near)
        found[after] = is_dead and not matcher.is_error()  # a sequence that reaches this state meets the error there
        return found[after]

    before = words.copy()
    for token_id in look_ahead.near_old_keys(place, words):
        if is_dead_end(matcher, place, token_id):
            set_bit(words, token_id, False)
    if not look_ahead.goes_on(words):
        words[:] = before


@dataclass(frozen=True)
class TokenMasks:
    """The tokens that are allowed in each row of logits (R, V), as bit masks.

    Bit i % 32 of word i // 32 says whether token i is allowed: words (R, W) int32. All bits are
    set in rows without a constraint, and in the rows of a sequence whose mask failed. `failures` maps the first row of
    such a sequence to the error.
    """

    words: Tensor
    failures: Mapping[int, Exception]


def token_masks(rows: Sequence[tuple[GrammarState | None, Sequence[int]]], vocab_size: int) -> TokenMasks | None:
    """The masks of some sequences, each given as its state and its draft. None if no sequence has a constraint.

    A sequence has one row, and one more for each drafted token.
    """
    if all(state is None for state, _ in rows):
        return None
    num_rows = sum(1 + len(draft) for _, draft in rows)
    words = np.full((num_rows, num_words(vocab_size)), -1, dtype=np.int32)
    failures: dict[int, Exception] = {}
    first = 0
    for state, draft in rows:
        end = first + 1 + len(draft)
        if state is not None:
            error = state.fill_masks(words[first:end], draft)
            if error is not None:
                failures[first] = error
                words[first:end] = -1
        first = end
    return TokenMasks(torch.from_numpy(words), failures)


def num_words(vocab_size: int) -> int:
    """The number of words of a mask, which has one bit for each token and one for the end of the text."""
    return vocab_size // WORD_BITS + 1


def fill(matcher: LLMatcher, words: Words) -> None:
    """Write the mask of the matcher's state: words (W). It is not valid if the matcher has an error afterwards."""
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


def has_bit(words: Words, index: int) -> bool:
    return bool(int(words[index // WORD_BITS]) >> index % WORD_BITS & 1)


def set_bit(words: Words, index: int, value: bool) -> None:
    bits, bit = words.view(np.uint32), np.uint32(1 << index % WORD_BITS)
    bits[index // WORD_BITS] = bits[index // WORD_BITS] | bit if value else bits[index // WORD_BITS] & ~bit


def allows_tokens(words: Words, vocab_size: int) -> bool:
    """Whether a mask allows anything but the end of the text."""
    end, bit = divmod(vocab_size, WORD_BITS)
    return bool(words[:end].any()) or bool(int(words[end]) & (1 << bit) - 1)


def reason_of(matcher: LLMatcher) -> str:
    return shorten_reason(matcher.get_error())


def shorten_reason(text: str) -> str:
    """Prepare an error message of llguidance for the client: remove internal details, and limit the length."""
    if "NoExtension" in text:
        return "no token of the vocabulary continues the text as the grammar demands"
    if text.startswith("panic") or not text:
        return "the grammar cannot be used"
    text = " ".join(text.partition("<non-verbose/>")[0].partition("\n<")[0].split())
    text = text.replace("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf")
    return text if len(text) <= 300 else f"{text[:300]}..."
