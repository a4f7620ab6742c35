"""How often drafted tokens are right. This module must not import torch (tests/test_layout.py)."""

# Applied to the count of wrong tokens whenever the acceptance is too low for a draft, so that drafting is tried again.
WRONG_DECAY = 0.98
MIN_RIGHT = 0.02  # lower bound of the count of right tokens


class Acceptance:
    """Counts right and wrong drafted tokens. Tokens after the first wrong one count as neither."""

    def __init__(self, probability: float, history_weight: float) -> None:
        """`probability` is assumed before anything is counted; `history_weight` is that of all earlier drafts when a
        new one is counted."""
        self._num_right, self._num_wrong = 2 * probability, 2 * (1 - probability)
        self._history_weight = history_weight

    @property
    def probability(self) -> float:
        """Of a drafted token, if all before it are right."""
        return self._num_right / (self._num_right + self._num_wrong)

    def observe(self, num_drafted: int, num_right: int) -> None:
        """Count a draft: the network chose the first `num_right` of its tokens."""
        self._num_right = max(self._history_weight * self._num_right + num_right, MIN_RIGHT)
        self._num_wrong = self._history_weight * self._num_wrong + (num_right < num_drafted)

    def forget_wrong(self) -> None:
        """Note that the probability was too low for a draft."""
        self._num_wrong *= WRONG_DECAY
