"""Rules on which tokens a request may choose: only some, no stop token too early, and no sequences of bad words."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """The rules of a request.

    - `allowed`: no other token may be chosen; empty: every token may.
    - `min_tokens`: none of the `stop_token_ids` may be chosen before the output has this many tokens.
    - `banned`: sequences of tokens. The last token of one may not follow the others.
    """

    allowed: Sequence[int] = ()
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    banned: Sequence[tuple[int, ...]] = ()

    def __bool__(self) -> bool:
        return bool(self.allowed or self.min_tokens or self.banned)

    @cached_property
    def _allowed(self) -> Tensor:
        return torch.tensor(self.allowed)

    def excluded(self, tokens: Sequence[int], num_generated: int) -> list[int]:
        """The tokens that may not follow `tokens`, the last `num_generated` of which are the output.

        Those that are not `allowed` are not listed.
        """
        found = [ids[-1] for ids in self.banned if len(ids) == 1 or tuple(tokens[1 - len(ids) :]) == ids[:-1]]
        return [*found, *self.stop_token_ids] if num_generated < self.min_tokens else found

    def apply(self, logits: Tensor, tokens: Sequence[int], num_generated: int) -> Tensor:
        """Set the logits (V,) of tokens that may not follow to minus infinity."""
        if self.allowed:
            allowed = self._allowed.to(logits.device)
            logits = torch.full_like(logits, -torch.inf).index_copy(0, allowed, logits[allowed])
        excluded = torch.tensor(self.excluded(tokens, num_generated), dtype=torch.int64, device=logits.device)
        return logits.index_fill(0, excluded, -torch.inf)
