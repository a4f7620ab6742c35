"""One sequence as the scheduler sees it: its tokens, how many of them are computed, and the blocks that hold them."""

import hashlib
import sys
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from model.engine.prompt_lookup import PromptLookup


class ExtraCost(NamedTuple):
    """What edits and traces add to a step: seconds, `usual` if the step is replayed, as most are, and `most` if not."""

    usual: float
    most: float


class SequenceState:
    """The tokens of a prompt and those generated after it. `num_computed` of them are in `blocks`.

    `order` is the order of arrival: a smaller number came earlier. A sequence with a `prefix_leader` starts when the
    leader's prompt is computed, so that it can share the leader's blocks, or when the leader has ended. Without
    `shares_prefix` a sequence neither uses computed blocks of others nor offers its own. At most `max_cached` tokens
    are taken from others. The sequence never has more than `max_length` tokens. Sequences with different values of
    `cache_salt` never share blocks. A `paused` sequence takes part in no step. `lookup` drafts the tokens that may
    follow; without it nothing is drafted. `adapter` is the name of the adapter that computes the sequence. Sequences of
    one `owner` share the places that one gets; by default, each sequence is its own owner.
    `digest_edits` gives a digest of the edits that change the positions from one up to another; None: none do.
    `extra_cost` estimates what edits and traces add to the time of a step, from the position of the first new token and
    the number of new tokens; None: nothing.
    """

    __slots__ = (
        "_digest_edits",
        "_hashes",
        "_root",
        "adapter",
        "blocks",
        "extra_cost",
        "has_ended",
        "last_step",
        "lookup",
        "max_cached",
        "max_length",
        "num_cached",
        "num_computed",
        "num_prompt",
        "order",
        "owner",
        "paused",
        "prefix_leader",
        "shares_prefix",
        "tokens",
    )

    def __init__(
        self,
        order: int,
        prompt: Sequence[int],
        *,
        shares_prefix: bool = True,
        max_cached: int = sys.maxsize,
        prefix_leader: "SequenceState | None" = None,
        cache_salt: str | None = None,
        max_length: int = sys.maxsize,
        adapter: str | None = None,
        digest_edits: Callable[[int, int], bytes | None] | None = None,
        extra_cost: Callable[[int, int], ExtraCost] | None = None,
        owner: Hashable | None = None,
    ) -> None:
        self.order = order
        self.owner: Hashable = order if owner is None else owner
        self.adapter = adapter
        self.tokens = array("q", prompt)
        self.num_prompt = len(prompt)
        self.num_computed = 0
        self.num_cached: int | None = None  # prompt tokens that others had computed; None until the sequence first runs
        self.blocks: list[int] = []
        self.shares_prefix = shares_prefix
        self.max_cached = max_cached
        self.max_length = max_length
        self.prefix_leader = prefix_leader
        self.extra_cost = extra_cost
        self.last_step = 0  # in which it was computed, if it has an `extra_cost`
        self.paused = False
        self.has_ended = False
        self.lookup: PromptLookup | None = None
        self._digest_edits = digest_edits
        self._hashes: list[bytes] = []
        self._root = b"" if cache_salt is None else salt_hash(cache_salt)  # the hash before the first block

    @property
    def num_missing(self) -> int:
        """Tokens that are not computed yet; 1 for a decoding sequence."""
        return len(self.tokens) - self.num_computed

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Hash of the salt, and of all tokens and edits up to the end of a full block.

        Equal hashes mean equal keys and values.
        """
        while len(self._hashes) <= index:
            start = len(self._hashes) * block_size
            before = self._hashes[-1] if self._hashes else self._root
            content = self.tokens[start : start + block_size].tobytes()
            digest = hashlib.sha256(before + content).digest()
            edits = None if self._digest_edits is None else self._digest_edits(start, start + block_size)
            if edits is not None:  # by another hash function, so that no tokens have the hash of an edited block
                digest = hashlib.blake2b(digest + edits, digest_size=32, person=b"edits").digest()
            self._hashes.append(digest)
        return self._hashes[index]


def salt_hash(cache_salt: str) -> bytes:
    """The hash from which the block hashes of a salted sequence start.

    It uses another hash function than the block hashes. With the same function, somebody could choose a salt that has
    the hash of another sequence's block, and would then receive the blocks that follow that block.
    """
    return hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"cache_salt").digest()
