"""One sequence as the scheduler sees it: its tokens, how many of them are computed, and the blocks that hold them."""

import hashlib
import sys
from array import array
from collections.abc import Sequence as Tokens

from model.engine.drafts import Drafter


class Sequence:
    """The tokens of a prompt and what was generated after it. `num_computed` of them are in `blocks`.

    `order` is its age: a smaller one came earlier. A sequence with a `leader` starts when the leader's prompt is
    computed, to share its blocks. Without `shares_prefix` it neither takes computed blocks of others nor offers any.
    At most `max_cached` tokens are taken from others. Sequences with different values of `cache_salt` never share
    blocks. One that `is_held` is in no step. A `drafter` guesses what follows its tokens; during a step, `draft` are
    those guesses that the step computes with them.
    """

    __slots__ = (
        "_hashes",
        "_root",
        "blocks",
        "draft",
        "drafter",
        "is_held",
        "leader",
        "max_cached",
        "num_cached",
        "num_computed",
        "num_prompt",
        "order",
        "shares_prefix",
        "tokens",
    )

    def __init__(
        self,
        order: int,
        prompt: Tokens[int],
        *,
        shares_prefix: bool = True,
        max_cached: int = sys.maxsize,
        leader: "Sequence | None" = None,
        cache_salt: str | None = None,
    ) -> None:
        self.order = order
        self.tokens = array("q", prompt)
        self.num_prompt = len(prompt)
        self.num_computed = 0
        self.num_cached: int | None = None  # tokens of the prompt that others had computed; None until it first runs
        self.blocks: list[int] = []
        self.shares_prefix = shares_prefix
        self.max_cached = max_cached
        self.leader = leader
        self.is_held = False
        self.drafter: Drafter | None = None
        self.draft: list[int] = []
        self._hashes: list[bytes] = []
        self._root = b"" if cache_salt is None else salt_hash(cache_salt)

    @property
    def num_missing(self) -> int:
        """Tokens that are not computed yet; 1 for a sequence that streams."""
        return len(self.tokens) - self.num_computed

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Hash of the salt and of all tokens up to the end of a full block: equal hashes, equal keys and values."""
        while len(self._hashes) <= index:
            start = len(self._hashes) * block_size
            before = self._hashes[-1] if self._hashes else self._root
            content = self.tokens[start : start + block_size].tobytes()
            self._hashes.append(hashlib.sha256(before + content).digest())
        return self._hashes[index]


def salt_hash(cache_salt: str) -> bytes:
    """The hash from which the block hashes of a salted sequence start.

    It is computed by another function than the block hashes. With the same function, somebody could choose a salt that
    has the hash of another sequence's block, and then be given the blocks that follow it.
    """
    return hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"cache_salt").digest()
