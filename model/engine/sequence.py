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
    At most `max_cached` tokens are taken from others. One that `is_held` is in no step. A `drafter` guesses what
    follows its tokens; during a step, `draft` are those guesses that the step computes with them.
    """

    __slots__ = (
        "_hashes",
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

    @property
    def num_missing(self) -> int:
        """Tokens that are not computed yet; 1 for a sequence that streams."""
        return len(self.tokens) - self.num_computed

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Of the tokens up to the end of a full block: equal hashes, equal keys and values."""
        while len(self._hashes) <= index:
            start = len(self._hashes) * block_size
            before = self._hashes[-1] if self._hashes else b""
            content = self.tokens[start : start + block_size].tobytes()
            self._hashes.append(hashlib.sha256(before + content).digest())
        return self._hashes[index]
