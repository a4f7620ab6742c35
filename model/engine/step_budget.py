"""How many prompt tokens a step may compute, and which drafts pay off, learned from measured step times.

This module must not import torch (tests/test_layout.py).
"""

import math

from model.errors import InvalidField

STEP_HISTORY_WEIGHT = 0.95  # weight of all earlier steps when a new one is measured
MIN_TOKENS = 16  # prompt tokens per step, however slow steps are: a prompt must make progress
MAX_TOKENS = 1 << 20  # upper bound of `max_prompt_tokens`
# While as many prompts are computed as sequences decode, a step takes at most about MAX_SECONDS, so that no sequence
# waits long for its next token. It has at least EFFICIENT_TOKENS, because smaller steps cost more for each token; but
# it has fewer, as after a long context, if so many would take longer than LONGEST_SECONDS. If no sequence decodes, only
# a request that arrives meanwhile waits, for at most about MAX_SECONDS_ALONE.
MAX_SECONDS, EFFICIENT_TOKENS, LONGEST_SECONDS = 0.06, 48, 0.09
MAX_SECONDS_ALONE, EFFICIENT_TOKENS_ALONE = 0.25, 64
SHORT_SECONDS = 0.03  # what a shorter step counts as: with a `max_stretch` of 2, nobody notices the longer one
# The time of a step while an owner with several sequences decodes beside another one: in seconds, and over the time of
# a step with one sequence of each owner. The number of sequences in it is one of a few, because the first step with
# another number is recorded, which takes longer.
MAX_SHARED_SECONDS, SHARED_STRETCH = 0.04, 1.3
SHARED_SEQUENCES = 64, 32, 16, 8, 4
# Results of `min_acceptance`: before enough steps are measured, and its lower bound.
DEFAULT_MIN_ACCEPTANCE, LOWEST_MIN_ACCEPTANCE = 0.1, 0.03
FIRST_NETWORK_DRAFT = 2  # tokens that a draft network drafts before its passes are measured


class LinearFit:
    """Fits the time of a step of x tokens as a + b * x, in seconds, to the steps so far. Older steps count less."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # weighted sums over the steps
        self._slope = 0.0
        self.num_observed = 0

    def observe(self, num_tokens: float, seconds: float) -> None:
        """Add a step of `num_tokens` tokens that took `seconds`."""
        self.num_observed += 1
        terms = (1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            STEP_HISTORY_WEIGHT * total + term for total, term in zip(sums, terms, strict=True)
        )

    def marginal_seconds(self) -> float | None:
        """Estimate the time of one more token. None if the steps so far do not determine it."""
        variance = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / variance if variance > 1e-6 * self._xx else 0.0
        slope = self._slope = slope if slope > 0 else self._slope  # steps of equal size do not determine a slope
        return slope or None

    def seconds(self, num_tokens: int) -> float:
        """Estimate the time of a step of `num_tokens`. Steps must have been observed."""
        slope = self.marginal_seconds() or 0.0
        return (self._y - slope * self._x) / self._weight + slope * num_tokens

    def marginal_cost(self, num_tokens: int) -> float | None:
        """Estimate the cost of one more token in a step of `num_tokens`, as a fraction of the time of that step.

        None if the steps so far do not determine it.
        """
        slope = self.marginal_seconds()
        if slope is None:
            return None
        seconds = self.seconds(num_tokens)
        return slope / seconds if seconds > 0 else math.inf


class StepBudget:
    """Keeps a step with prompts within `max_stretch` times its time without them, counted as at least SHORT_SECONDS.

    With `target_seconds`, every step in which sequences decode takes about this time instead while there are prompts.
    """

    def __init__(self, max_stretch: float, target_seconds: float | None = None) -> None:
        if not max_stretch > 1:
            reason = f"{max_stretch} must be above 1: a step with prompts takes longer than the same step without them"
            raise InvalidField("max_stretch", reason)
        if target_seconds is not None and not target_seconds > 0:
            raise InvalidField("target_itl_seconds", f"{target_seconds} must be above 0")
        self._max_stretch, self._target_seconds = max_stretch, target_seconds
        self._all_steps, self._replayed_steps = LinearFit(), LinearFit()
        self._draft_steps = LinearFit()  # by sequences
        self._limit = MIN_TOKENS
        self._largest = 0.0  # tokens of the largest step; earlier ones count less
        self._last_prompt = EFFICIENT_TOKENS_ALONE, MAX_SECONDS_ALONE  # tokens and seconds of the last larger step

    def observe(self, num_tokens: int, seconds: float, *, replayed: bool = False) -> None:
        """Add a measured step.

        Steps of decoding sequences are replayed if possible, so `min_acceptance` uses only the times of replayed steps.
        """
        self._largest = max(num_tokens, STEP_HISTORY_WEIGHT * self._largest)
        self._all_steps.observe(num_tokens, seconds)
        if num_tokens >= MIN_TOKENS and not replayed:
            self._last_prompt = num_tokens, max(seconds, 1e-9)
        if replayed:
            self._replayed_steps.observe(num_tokens, seconds)

    def max_prompt_tokens(self, num_decoding: int, num_prompts: int) -> int:
        """The prompt tokens that the next step may compute.

        Beside decoding sequences with a target, as many as reach it; without one, beside more decoding sequences than
        prompts, as many as `max_stretch` allows; but at most twice what the last such call returned. Otherwise as many
        as fit into the time of a step.
        """
        target = self._target_seconds if num_decoding else None
        if num_decoding <= num_prompts and target is None:
            return self._fitting_tokens(num_decoding)
        slope, limit = self._all_steps.marginal_seconds(), 2.0 * self._limit
        if slope is not None:
            seconds = max(self._all_steps.seconds(num_decoding), 0.0)
            longest = self._max_stretch * max(seconds, SHORT_SECONDS) if target is None else target
            limit = min(limit, (longest - seconds) / slope)
        self._limit = int(min(max(limit, MIN_TOKENS), MAX_TOKENS))
        return self._limit

    def _fitting_tokens(self, num_decoding: int) -> int:
        tokens, seconds = self._last_prompt
        if not num_decoding:
            return int(min(max(MAX_SECONDS_ALONE * tokens / seconds, EFFICIENT_TOKENS_ALONE), MAX_TOKENS))
        slope = self._all_steps.marginal_seconds()
        if slope is None:
            return EFFICIENT_TOKENS
        room = min((MAX_SECONDS - self._all_steps.seconds(num_decoding)) / slope, 2 * self._largest)
        return int(min(max(room, EFFICIENT_TOKENS), max(LONGEST_SECONDS * tokens / seconds, MIN_TOKENS), MAX_TOKENS))

    def max_sequences(self, num_owners: int) -> int:
        """The number of sequences that may decode in a step that so many owners share."""
        slope = self._all_steps.marginal_seconds()
        if slope is None:
            return SHARED_SEQUENCES[1]
        longest = min(MAX_SHARED_SECONDS, SHARED_STRETCH * self._all_steps.seconds(num_owners))
        known = [each for each in SHARED_SEQUENCES if each <= 2 * self._largest]
        fitting = (each for each in known if self._all_steps.seconds(each) <= longest)
        return next(fitting, SHARED_SEQUENCES[-1])

    def observe_drafting(self, num_sequences: float, seconds: float) -> None:
        """Add measured passes of a draft network: their mean number of sequences, and the mean seconds of one."""
        self._draft_steps.observe(num_sequences, seconds)

    def network_draft(self, num_decoding: int, num_drafting: int, acceptance: float, most: int) -> int:
        """The number of tokens, at most `most`, that a draft network should draft for each of `num_drafting` sequences
        among `num_decoding`, so that most tokens are accepted in a second.

        A drafted token is right with the probability `acceptance`, if all before it are.
        """
        if not self._draft_steps.num_observed or not self._replayed_steps.num_observed:
            return min(FIRST_NETWORK_DRAFT, most)
        draft_seconds = self._draft_steps.seconds(num_drafting)
        best, highest = 0, 0.0
        for length in range(most + 1):
            seconds = length * draft_seconds + self._replayed_steps.seconds(num_decoding + length * num_drafting)
            rate = (num_decoding + num_drafting * sum(acceptance**i for i in range(1, length + 1))) / seconds
            if rate > highest:
                best, highest = length, rate
        return best

    def catch_up_seconds(self, num_tokens: int) -> float:
        """The time that a draft network may take for tokens of prompts, beside a step of `num_tokens` without prompts.

        With it, the step takes as long as a step with prompts may take.
        """
        seconds = self.replayed_seconds(num_tokens, default=0.0)
        longest = self._max_stretch * max(seconds, SHORT_SECONDS)
        return max((longest if self._target_seconds is None else self._target_seconds) - seconds, 0.0)

    def replayed_seconds(self, num_tokens: int, default: float) -> float:
        """Estimate the time of a replayed step of `num_tokens`; `default` if none was replayed."""
        return self._replayed_steps.seconds(num_tokens) if self._replayed_steps.num_observed else default

    def min_acceptance(self, num_decoding: int) -> float:
        """The lowest probability of acceptance at which a drafted token is worth its time.

        One drafted token takes the fraction `cost` of the time of a step. In that time, steps without drafts would give
        `num_decoding * cost` tokens, so it must be accepted with at least this probability.
        """
        cost = self._replayed_steps.marginal_cost(num_decoding)
        if cost is None:
            return DEFAULT_MIN_ACCEPTANCE
        return min(max(num_decoding * cost, LOWEST_MIN_ACCEPTANCE), 1.0)
