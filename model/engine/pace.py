"""How many prompt tokens a step may take while others stream: learned from how long the steps were. No torch here."""

MEMORY = 0.95  # of all steps before, when a new one is measured
MIN_TOKENS = 16  # a step, however slow they are: a prompt must get on
MAX_TOKENS = 1 << 20


class Pace:
    """Keeps steps within `max_stretch` times what they would take without prompts.

    A step of x tokens takes a + b x seconds: a line through the steps so far, the older ones counting less.
    """

    def __init__(self, max_stretch: float) -> None:
        if not max_stretch > 1:
            raise ValueError(f"max_stretch: {max_stretch} must be above 1, or no prompt enters beside a stream")
        self._max_stretch = max_stretch
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # sums over the steps
        self._slope = 0.0
        self._limit = MIN_TOKENS

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took this long."""
        terms = (1.0, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        sums = (self._weight, self._x, self._y, self._xx, self._xy)
        self._weight, self._x, self._y, self._xx, self._xy = (
            MEMORY * total + term for total, term in zip(sums, terms, strict=True)
        )

    def limit(self, num_streams: int) -> int:
        """Tokens of prompts in the next step; at most twice as many as in the step before."""
        spread = self._weight * self._xx - self._x * self._x
        slope = (self._weight * self._xy - self._x * self._y) / spread if spread > 1e-6 * self._xx else 0.0
        slope = self._slope = slope if slope > 0 else self._slope  # steps that are all alike say nothing of it
        bearable = 2.0 * self._limit
        if slope > 0:
            stream_seconds = (self._y - slope * self._x) / self._weight + slope * num_streams
            bearable = min(bearable, (self._max_stretch - 1) * stream_seconds / slope)
        self._limit = int(min(max(bearable, MIN_TOKENS), MAX_TOKENS))
        return self._limit
