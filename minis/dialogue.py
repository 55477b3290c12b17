"""Conversations as training data, and documents as segments with a loss weight: what all chat formats share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PROMPT_WEIGHT = 0.15

Message = dict[str, Any]


@dataclass
class Dialogue:
    """One conversation as a client would send it, ending with an assistant message when it is training data."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    effort: int = 75


@dataclass
class Segment:
    text: str
    special: bool
    weight: float


class Writer:
    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def special(self, token: str, weight: float = PROMPT_WEIGHT) -> None:
        self.segments.append(Segment(token, True, weight))

    def text(self, text: str, weight: float = PROMPT_WEIGHT) -> None:
        if not text:
            return
        last = self.segments[-1] if self.segments else None
        if last is not None and not last.special and last.weight == weight:
            last.text += text
        else:
            self.segments.append(Segment(text, False, weight))

    def marked(self, text: str, tokens: tuple[str, ...], weight: float = PROMPT_WEIGHT) -> None:
        """Text of the encoder itself, in which `tokens` are special."""
        while text:
            hits = [(text.find(t), t) for t in tokens if t in text]
            if not hits:
                self.text(text, weight)
                return
            at, token = min(hits)
            self.text(text[:at], weight)
            self.special(token, weight)
            text = text[at + len(token) :]


def opened(opening: tuple[str, ...], text: str) -> list[Segment]:
    """A document of natural text: every token counts."""
    return [*(Segment(token, True, 0.0) for token in opening), Segment(text, False, 1.0)]
