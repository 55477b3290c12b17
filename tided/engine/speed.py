"""How fast answers grow now, from the moments at which their tokens arrive: one figure over all lanes."""

import math

RECENT_S = 5.0  # what is so old weighs 1/e of what is new


class DecodeSpeed:
    """Tokens and seconds of the time in which at least one answer grew, both aged alike. A prompt that is computed
    while no answer grows does not count, one that holds up an answer does. Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._last_s: float | None = None  # None: no answer grows

    def note(self, tokens: int, growing: bool, now_s: float) -> None:
        """`tokens` arrived; `growing` says whether an answer that has begun is not done yet."""
        if self._last_s is not None:  # else these are the first ones, and the time before them was a prompt's
            elapsed_s = now_s - self._last_s
            weight = math.exp(-elapsed_s / RECENT_S)
            self._tokens = self._tokens * weight + tokens
            self._seconds = self._seconds * weight + elapsed_s
        self._last_s = now_s if growing else None

    def tok_s(self, now_s: float) -> float | None:
        """None where no answer grows, or none has a second token yet. Falls while no token arrives."""
        if self._last_s is None or not self._tokens:
            return None
        elapsed_s = now_s - self._last_s
        weight = math.exp(-elapsed_s / RECENT_S)
        return self._tokens * weight / (self._seconds * weight + elapsed_s)
