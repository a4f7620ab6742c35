"""What a token more costs a step, learned from how long the steps were: so how many tokens of prompts one may take
while others stream, and which guesses are worth their time. No torch here."""

import math

MEMORY = 0.95  # of all steps before, when a new one is measured
MIN_TOKENS = 16  # a step, however slow they are: a prompt must get on
MAX_TOKENS = 1 << 20
UNKNOWN_WORTH, LEAST_WORTH = 0.1, 0.03  # of guesses


class Line:
    """A step of x tokens takes a + b x seconds: a line through the steps so far, the older ones counting less."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # sums over the steps
        self._slope = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took this long."""
        terms = (1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            MEMORY * total + term for total, term in zip(sums, terms, strict=True)
        )

    def price(self, num_tokens: int) -> float | None:
        """What a token more takes, over the time of a step of so many; None where the steps so far do not say."""
        spread = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 1e-6 * self._xx else 0.0
        slope = self._slope = slope if slope > 0 else self._slope  # steps that are all alike say nothing of it
        if slope == 0:
            return None
        seconds = (self._y - slope * self._x) / self._weight + slope * num_tokens
        return slope / seconds if seconds > 0 else math.inf


class Pace:
    """Keeps steps within `max_stretch` times what they would take without prompts."""

    def __init__(self, max_stretch: float) -> None:
        if not max_stretch > 1:
            raise ValueError(f"max_stretch: {max_stretch} must be above 1, or no prompt enters beside a stream")
        self._max_stretch = max_stretch
        self._all, self._replayed = Line(), Line()
        self._limit = MIN_TOKENS

    def observe(self, num_tokens: int, seconds: float, *, replayed: bool = False) -> None:
        """A step of so many tokens took this long; one that was replayed says what others of streams alone will."""
        self._all.observe(num_tokens, seconds)
        if replayed:
            self._replayed.observe(num_tokens, seconds)

    def limit(self, num_streams: int) -> int:
        """Tokens of prompts in the next step; at most twice as many as in the step before."""
        price, bearable = self._all.price(num_streams), 2.0 * self._limit
        if price is not None:
            bearable = min(bearable, (self._max_stretch - 1) / price)
        self._limit = int(min(max(bearable, MIN_TOKENS), MAX_TOKENS))
        return self._limit

    def worth(self, num_streams: int) -> float:
        """How likely to be right a guess must be. Below, a step that gives each stream a token, without the guess,
        gives more tokens a second."""
        price = self._replayed.price(num_streams)
        return UNKNOWN_WORTH if price is None else min(max(num_streams * price, LEAST_WORTH), 1.0)
