"""What the next step computes. One rule: computed tokens catch up with tokens, under a budget; nothing is a phase. A
draft is computed ahead, and forgotten as far as it was wrong.

Streams come first, a token each; prompts share what is left of the budget, the oldest first, and where streams wait
for the step they take no more than its pace allows. When the blocks run out, the youngest sequence gives its own back
and is computed again later. No torch here.
"""

from bisect import insort

from model.engine.blocks import BlockPool
from model.engine.drafts import MAX_DRAFT
from model.engine.pace import Pace
from model.engine.sequence import Sequence


class Share:
    """The part of one step that is one sequence's: `num_new` tokens that it has from `start` on, and its draft.

    `num_choosing`: of its last tokens, those after which a token is chosen: the newest one, and each of the draft. None
    where tokens are missing after it.
    """

    __slots__ = ("new_tokens", "num_choosing", "num_new", "sequence", "start")

    def __init__(self, sequence: Sequence, num_new: int) -> None:
        self.sequence = sequence
        self.start = sequence.num_computed
        end, draft = self.start + num_new, sequence.draft
        is_last = end == len(sequence.tokens)
        self.new_tokens = sequence.tokens[self.start : end].tolist() + (draft if is_last else [])
        self.num_new = len(self.new_tokens)
        self.num_choosing = 1 + len(draft) if is_last else 0

    @property
    def is_last(self) -> bool:
        """No token is missing after it: the next one can be chosen."""
        return self.num_choosing > 0

    @property
    def is_stream(self) -> bool:
        """Only the newest token was missing."""
        return self.num_choosing == self.num_new


class Scheduler:
    """Sequences that wait, in order of arrival, and those that run. Nothing that was added is dropped."""

    def __init__(self, pool: BlockPool, *, max_sequences: int, max_tokens: int, max_stretch: float) -> None:
        if max_sequences < 1:
            raise ValueError(f"max_sequences: {max_sequences} must be at least 1")
        if max_tokens < max_sequences:
            raise ValueError(f"max_tokens: {max_tokens} a step is below the {max_sequences} sequences that may run")
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.fresh_blocks: list[int] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens looked up, as vLLM counts
        self.num_prefix_hits = 0
        self.num_drafted = 0
        self.num_drafted_right = 0
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._pace = Pace(max_stretch)

    def add(self, sequence: Sequence) -> None:
        if self._blocks_for(len(sequence.tokens)) > self.pool.num_blocks:
            raise ValueError(f"{len(sequence.tokens)} tokens do not fit into {self.pool.num_blocks} blocks")
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It has ended, or was given up: its blocks are free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self, *, drafts: bool = False) -> list[Share]:
        """The next step's shares, streams first; blocks for all of their tokens are the sequences' own. With `drafts`,
        where streams are few and alone, their drafters add to them.

        `fresh_blocks` are those of them that hold what another sequence left, and will be read before they are full.
        """
        self.fresh_blocks = []
        for sequence in [s for s in self.running if s.is_held]:
            self._preempt(sequence)  # it keeps nobody from running
        streams = [s for s in self.running if s.num_missing == 1]
        shares = [Share(sequence, 1) for sequence in streams if self._make_room(sequence)]
        budget = self._max_tokens - len(shares)
        prompts = [s for s in self.running if s.num_missing > 1]
        num_entering = min(len(self.waiting), self._max_sequences - len(self.running))
        if 0 < len(prompts) + num_entering < len(shares):  # else fewer are held up than get on
            budget = min(budget, self._pace.limit(len(shares)))
        for sequence in prompts:
            budget -= self._share(sequence, budget, shares)
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) == self._max_sequences:
                break
            if not (sequence.is_held or self._is_led(sequence)):
                if not self._admit(sequence):
                    break  # those behind it do not overtake it
                budget -= self._share(sequence, budget, shares)
        if drafts and all(share.is_stream for share in shares):
            return self._with_drafts(shares)
        return shares

    def complete(self, shares: list[Share], seconds: float | None, *, replayed: bool = False) -> None:
        """The step was computed, or `replayed`, and took this long; None where others like it will not.

        The tokens that it gave are the sequences' own by now: of a draft that differs from them nothing is kept.
        """
        for share in shares:
            sequence = share.sequence
            before = sequence.num_computed
            sequence.num_computed = min(share.start + share.num_new, len(sequence.tokens) - 1)
            if sequence.draft and sequence.drafter is not None:
                num_right = sequence.num_computed - before - 1
                sequence.drafter.observe(len(sequence.draft), num_right)
                self.num_drafted += len(sequence.draft)
                self.num_drafted_right += num_right
                sequence.draft = []
                num_blocks = self._blocks_for(len(sequence.tokens))
                self.pool.release(sequence.blocks[num_blocks:])
                del sequence.blocks[num_blocks:]
            if sequence.shares_prefix:
                size = self.pool.block_size
                for index in range(before // size, sequence.num_computed // size):
                    self.pool.register(sequence.blocks[index], sequence.block_hash(index, size))
        if seconds is not None:
            self._pace.observe(sum(share.num_new for share in shares), seconds, replayed=replayed)

    def forget(self, shares: list[Share]) -> None:
        """The step failed: nobody is to find what the blocks of its sequences hold."""
        for share in shares:
            self.pool.forget(share.sequence.blocks)

    def _with_drafts(self, streams: list[Share]) -> list[Share]:
        """A draft for each that has one, as long as there is room for it in the step and in the cache."""
        room, worth = min(MAX_DRAFT + 1, self._max_tokens) - len(streams), self._pace.worth(len(streams))
        shares = []
        for index, share in enumerate(streams):
            sequence, fair = share.sequence, -(-room // (len(streams) - index))
            if sequence.drafter is not None and fair > 0:
                sequence.draft = sequence.drafter.draft(sequence.tokens, fair, worth)
                num_tokens = len(sequence.tokens) + len(sequence.draft)
                num_more = self._blocks_for(num_tokens) - len(sequence.blocks)
                if num_more > self.pool.num_free:
                    sequence.draft = []
                else:
                    self._extend(sequence, num_more)
            room -= len(sequence.draft)
            shares.append(Share(sequence, 1) if sequence.draft else share)
        return shares

    def _share(self, sequence: Sequence, budget: int, shares: list[Share]) -> int:
        num_new = min(sequence.num_missing, budget)
        if num_new <= 0:
            return 0
        shares.append(Share(sequence, num_new))
        return num_new

    def _is_led(self, sequence: Sequence) -> bool:
        """Whether its leader, which computes the same prompt, has still to finish that."""
        leader = sequence.leader
        if leader is None or leader.num_computed >= leader.num_prompt:
            return False
        return leader in self.running or leader in self.waiting

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the blocks of all its tokens, those of computed prefixes first."""
        size = self.pool.block_size
        found: list[int] = []
        if sequence.shares_prefix:  # of the last token the logits are needed: it is always computed
            num_full = min(len(sequence.tokens) - 1, sequence.max_cached) // size
            found = self.pool.find(sequence.block_hash(index, size) for index in range(num_full))
        num_more = self._blocks_for(len(sequence.tokens)) - len(found)
        # One block is left for each that runs, else the next step preempts what this one admits.
        if self.pool.num_free - self.pool.num_free_among(found) < num_more + len(self.running):
            return False
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=lambda s: s.order)
        self.pool.share(found)
        sequence.blocks = found
        sequence.num_computed = len(found) * size
        self._extend(sequence, num_more)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            self.num_prefix_queries += sequence.num_prompt
            self.num_prefix_hits += sequence.num_computed
        return True

    def _make_room(self, sequence: Sequence) -> bool:
        """A block for the next token of a stream, from the youngest sequences where none is free."""
        while sequence.blocks:  # none: it was preempted itself
            num_more = self._blocks_for(len(sequence.tokens)) - len(sequence.blocks)
            if num_more <= self.pool.num_free:
                self._extend(sequence, num_more)
                return True
            self._preempt(self.running[-1])
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        insort(self.waiting, sequence, key=lambda s: s.order)
        self.num_preemptions += 1

    def _extend(self, sequence: Sequence, num_more: int) -> None:
        for _ in range(num_more):
            sequence.blocks.append(self.pool.allocate(sequence.blocks[-1] if sequence.blocks else None))
        if num_more:
            self.fresh_blocks.append(sequence.blocks[-1])

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def check_integrity(self) -> None:
        """The pool is exact; who runs has blocks for what is computed, who waits has none; both are in order."""
        self.pool.check_integrity([sequence.blocks for sequence in self.running])
        assert len(self.running) <= self._max_sequences
        for queue in (self.running, self.waiting):
            assert [s.order for s in queue] == sorted({s.order for s in queue}), "out of order, or there twice"
        assert not set(self.running) & set(self.waiting)
        for sequence in self.running:
            assert 0 <= sequence.num_computed <= len(sequence.tokens)
            most = self._blocks_for(len(sequence.tokens) + len(sequence.draft))
            assert self._blocks_for(sequence.num_computed) <= len(sequence.blocks) <= most
        for sequence in self.waiting:
            assert not sequence.blocks
            assert sequence.num_computed == 0
