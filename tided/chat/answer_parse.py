"""Reading a model's output while it is written, whatever its format: reasoning, content, calls, done.

The text may arrive in any pieces: an end that may still become a marker is held back. A format says where its markers
are (`AnswerParser._text_step`), how its calls are read (`CallsReader`) and how its text is spelled."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from tided.chat.calls_reading import FinishedCall
from tided.chat.deltas import Content, Delta, Reasoning, merged
from tided.chat.messages import Start
from tided.chat.stops import StopStrings

FinishReason = Literal["stop", "length", "tool_calls"]


class CallsReader(Protocol):
    """Text of a block of calls, in any cutting, to pieces of an answer."""

    @property
    def done(self) -> bool: ...
    @property
    def calls(self) -> list[FinishedCall]: ...
    def feed(self, text: str) -> list[Delta]: ...
    def finish(self, reason: Literal["stop", "length"]) -> tuple[list[Delta], bool]:
        """The last pieces, and whether the last call stays cut."""
        ...


class AnswerParser(ABC):
    """`state`: `reasoning`, `content`, `calls`, `done`, or one of the format's own. `leading`: newlines before the
    first text are layout. `spelled`: text as it is to be shown."""

    def __init__(
        self, reader: CallsReader, spelled: Callable[[str], str], start: Start, leading: bool, stops: Sequence[str]
    ) -> None:
        self.state: str = start
        self.finish_reason: FinishReason = "stop"
        self._reader, self._spelled, self._leading = reader, spelled, leading
        self._stops = StopStrings(stops)
        self._buffer = ""
        self._out: list[Delta] = []

    @property
    def done(self) -> bool:
        """Nothing that still comes can add to the answer."""
        return self.state == "done"

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    @property
    def calls(self) -> list[FinishedCall]:
        return self._reader.calls

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        while self._step():
            pass
        out, self._out = self._out, []
        return list(merged(out))

    def finish(self, reason: Literal["stop", "length"]) -> list[Delta]:
        """The last pieces. `reason`: why the engine ended; `finish_reason` then says how the answer did."""
        out, cut = self.feed(""), False
        if self.state == "calls":
            last, cut = self._reader.finish(reason)
            self._out += last
        elif not self.done:
            self._emit(len(self._buffer))
            self._content(self._stops.flush())
        self.finish_reason = self._reason(reason, cut)
        return list(merged(out + self._out))

    def _reason(self, reason: Literal["stop", "length"], cut: bool) -> FinishReason:
        if self.stop_string is not None:
            return "stop"
        if cut or (reason == "length" and not self.done):
            return "length"
        return "tool_calls" if self.calls else "stop"

    def _step(self) -> bool:
        """Whether there may be another."""
        if self.state == "calls":
            self._out += self._reader.feed(self._buffer)
            self._buffer = ""
            self.state = "done" if self._reader.done else "calls"
            return False
        if self.state == "done":
            self._buffer = ""
            return False
        return self._text_step()

    @abstractmethod
    def _text_step(self) -> bool:
        """Of reasoning or content: passes on what is known to be text, up to a marker and over it."""

    @property
    def _around(self) -> str:
        """`reasoning` or `content`: what text is now."""
        return self.state

    def _emit(self, end: int) -> None:
        """Passes on the buffer up to `end`. Newlines before the first text are layout."""
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._leading:
            text = text.lstrip("\n")
            self._leading = not text
        text = self._spelled(text)
        if self._around == "reasoning":
            self._out += [Reasoning(text)] if text else []
            return
        self._content(self._stops.feed(text))
        if self.stop_string is not None:
            self.state, self._buffer = "done", ""

    def _content(self, text: str) -> None:
        self._out += [Content(text)] if text else []

    def _open_calls(self) -> None:
        self._content(self._stops.flush())
        self.state = "calls"
