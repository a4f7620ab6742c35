"""A sequence as the scheduler sees it: its tokens, the number of computed tokens, and the blocks that hold them."""

import hashlib
import sys
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import NamedTuple

from model.engine.prefix_store import PrefixLoad
from model.engine.prompt_lookup import PromptLookup


class ExtraCost(NamedTuple):
    """The seconds that edits and traces add to a step: `usual` if it is replayed, as most are, and `most` if not."""

    usual: float
    most: float


@dataclass(eq=False, slots=True)
class SequenceState:
    """The tokens of a prompt and those generated after it. `blocks` hold the first `num_computed` of them.

    Without `owner`, a sequence is its own owner.
    """

    order: int  # of arrival: a smaller number came earlier
    prompt: InitVar[Sequence[int]]
    _: KW_ONLY
    shares_prefix: bool = True  # whether it uses computed blocks of others, and offers its own
    max_cached: int = sys.maxsize  # the most tokens whose blocks are taken from others
    # The prompt of `prefix_leader` is computed first, and its blocks are shared.
    prefix_leader: "SequenceState | None" = None
    cache_salt: str | None = None  # sequences with different salts never share blocks
    short_length: int = sys.maxsize  # a sequence with more tokens has other keys: rotary frequencies for long texts
    adapter: str | None = None  # the name of the adapter that computes the sequence
    digest_edits: Callable[[int, int], bytes | None] | None = None  # of edits from one position up to another, if any
    extra_cost: Callable[[int, int], ExtraCost] | None = None  # of a step, by its first position and new tokens
    owner: Hashable = None  # places are shared between owners, and not between sequences

    tokens: "array[int]" = field(init=False)
    num_prompt: int = field(init=False)
    num_computed: int = field(init=False, default=0)
    num_draft_computed: int = field(init=False, default=0)  # the same in the draft network's own cache, if it has one
    num_cached: int | None = field(init=False, default=None)  # prompt tokens taken from others; None before it runs
    blocks: list[int] = field(init=False, default_factory=list)
    last_step: int = field(init=False, default=0)  # in which it was computed
    was_replayed: bool = field(init=False, default=False)  # whether that step was replayed, or recorded to be replayed
    paused: bool = field(init=False, default=False)  # takes part in no step
    has_ended: bool = field(init=False, default=False)
    load: PrefixLoad | None = field(init=False, default=None)  # of stored blocks, before anything is computed
    lookup: PromptLookup | None = field(init=False, default=None)  # drafts the tokens that may follow, if any may be
    _hashes: list[bytes] = field(init=False, default_factory=list)  # of full blocks
    _root: bytes = field(init=False, default=b"")  # the hash before the first block
    _is_long: bool = field(init=False, default=False)  # whether the computed tokens have the keys of a long text

    def __post_init__(self, prompt: Sequence[int]) -> None:
        self.tokens = array("q", prompt)
        self.num_prompt = len(prompt)
        self.owner = self.order if self.owner is None else self.owner
        self.begin_anew()

    @property
    def length(self) -> int:
        """The number of its tokens, on which its rotary frequencies may depend."""
        return len(self.tokens)

    @property
    def has_outgrown(self) -> bool:
        """Whether its tokens have become too many for the keys that were computed: they must be computed again."""
        return not self._is_long and len(self.tokens) > self.short_length

    def begin_anew(self) -> None:
        """Forget that tokens were computed: all will be computed as the tokens of a sequence of this length."""
        self.num_computed = self.num_draft_computed = 0
        self._is_long = len(self.tokens) > self.short_length
        self._hashes = []
        salt = repr((self.cache_salt, "long")) if self._is_long else self.cache_salt
        self._root = b"" if salt is None else salt_hash(salt)

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
            edits = None if self.digest_edits is None else self.digest_edits(start, start + block_size)
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
