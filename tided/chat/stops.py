"""Stop strings in streamed text."""

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that completes first, over any cutting of the text.

    The longest end of the text that may still become a stop string is held back until it cannot.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certainly no part of a stop string. After a match: nothing more."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text, self._held = self._held + text, ""
        if found := self._first_match(text):
            start, self.matched = found
            return text[:start]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def would_match(self, text: str) -> bool:
        """Whether `text`, were it fed, would complete a stop string."""
        return self.matched is None and self._first_match(self._held + text) is not None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """(start, stop) of the match that ends first; of several that end there, the longest."""
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(ends)[1:] if ends else None

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = min(len(text), self._longest - 1)
        return next((n for n in range(longest, 0, -1) if self._begins(text[-n:])), 0)

    def _begins(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)
