"""Reads GLM-5.3's output while it is written: reasoning, content, tool calls.

    reasoning -</think>-> content -<tool_call>-> calls -> done       reasoning -<tool_call>-> calls
    reasoning, content -<|user|>, <|observation|>, <|endoftext|>-> done       content -a stop string-> done

The text may arrive in any pieces: an end that may still become a marker is held back.
"""

import re
from collections.abc import Sequence
from typing import Literal

from tided.chat.deltas import Content, Delta, Reasoning, merged
from tided.chat.glm53_calls import Glm53Calls
from tided.chat.glm53_markers import Tags
from tided.chat.markers import partial
from tided.chat.messages import Start, Tool
from tided.chat.parse_calls import FinishedCall
from tided.chat.stops import StopStrings

State = Literal["reasoning", "content", "calls", "done"]
FinishReason = Literal["stop", "length", "tool_calls"]


class Glm53Parser:
    """As `tided.chat.parse.OutputParser`. `tools` None: the request has none, and markup stays text."""

    def __init__(
        self,
        *,
        start: Start,
        leading: bool = True,
        stops: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
        by_token: bool = True,
        max_calls: int | None = None,
    ) -> None:
        self.state: State = start
        self.finish_reason: FinishReason = "stop"
        self._leading = leading
        self._stops = StopStrings(stops)
        self._tags = Tags(by_token=by_token)
        tags = self._tags
        self._markers = (tags.end_think, *tags.stops, *(tags.tags if tools is not None else ()))
        self._pattern = re.compile("|".join(map(re.escape, self._markers)))
        self._reader = Glm53Calls(tags, {tool.name: tool for tool in tools or ()}, max_calls)
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
        if self.state == "calls":
            self._out += self._reader.feed(self._buffer)
            self._buffer = ""
            self.state = "done" if self._reader.done else "calls"
            return False
        if self.state == "done":
            self._buffer = ""
            return False
        return self._text_step()

    def _text_step(self) -> bool:
        found = self._pattern.search(self._buffer)
        if found is None:
            self._emit(len(self._buffer) - self._held())
            return False
        marker = found.group()
        layout = marker == self._tags.call or (marker == self._tags.end_think and self.state == "reasoning")
        end = len(self._buffer[: found.start()].rstrip("\n")) if layout else found.start()
        rest = self._buffer[found.end() :]
        newlines = self._buffer[end : found.start()]
        self._emit(end)
        if not self.done and self.state == "content" and newlines and self._stops.would_match(newlines):
            self._buffer = newlines
            self._emit(len(newlines))
        if self.done:
            return True
        self._buffer = rest
        self._enter(marker)
        return True

    def _held(self) -> int:
        """How much of the buffer's end may still become a marker, or be newlines that belong to one."""
        keep = partial(self._buffer, self._markers)
        before = self._buffer[: len(self._buffer) - keep]
        return keep + len(before) - len(before.rstrip("\n"))

    def _enter(self, marker: str) -> None:
        """A marker of calls outside of one (an end without its begin) is swallowed."""
        if marker == self._tags.end_think and self.state == "reasoning":
            self.state, self._leading = "content", True
        elif marker == self._tags.call:
            self._content(self._stops.flush())
            self.state = "calls"
        elif marker in self._tags.stops:
            self._content(self._stops.flush())
            self.state = "done"

    def _emit(self, end: int) -> None:
        """Passes on the buffer up to `end`. Newlines before the first text are layout."""
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._leading:
            text = text.lstrip("\n")
            self._leading = not text
        text = self._tags.spelled(text)
        if self.state == "reasoning":
            self._out += [Reasoning(text)] if text else []
            return
        self._content(self._stops.feed(text))
        if self.stop_string is not None:
            self.state, self._buffer = "done", ""

    def _content(self, text: str) -> None:
        self._out += [Content(text)] if text else []
