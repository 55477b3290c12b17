"""Joins text and special tokens to the segments of a prompt."""

from collections.abc import Iterable

from tided.chat.messages import Segment
from tided.chat.text import well_formed


class SegmentWriter:
    """Collects a prompt. Neighbouring text becomes one segment, tokenised as one."""

    def __init__(self) -> None:
        self._done: list[Segment] = []
        self._text: list[str] = []

    def text(self, text: str) -> None:
        if text:
            self._text.append(text)

    def special(self, spelling: str) -> None:
        self._close()
        self._done.append(Segment(spelling, special=True))

    def extend(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            (self.special if segment.special else self.text)(segment.text)

    def segments(self) -> tuple[Segment, ...]:
        self._close()
        return tuple(self._done)

    def _close(self) -> None:
        if self._text:
            self._done.append(Segment(well_formed("".join(self._text))))
            self._text.clear()
