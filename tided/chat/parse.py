"""Reads DeepSeek-V4.1's output while it is written: reasoning, content, tool calls.

    reasoning -</think>-> content -<｜DSML｜-> calls -</｜DSML｜ calls>-> done
    reasoning -<｜DSML｜-> calls               content -a stop string-> done

The text may arrive in any pieces: an end that may still become a marker is held back.
"""

import re
from collections.abc import Sequence
from typing import Literal

from tided.chat.deltas import Content, Delta, Reasoning, merged
from tided.chat.markers import BY_TOKEN, INVOKE, Markers, Patterns, spelled
from tided.chat.messages import Start, Tool
from tided.chat.parse_calls import CallsReader, FinishedCall
from tided.chat.stops import StopStrings

State = Literal["reasoning", "content", "orphan", "calls", "done"]
FinishReason = Literal["stop", "length", "tool_calls"]


class OutputParser:
    """`tools` None: the request has none, and markup stays text. `max_calls`: the answer ends after that many."""

    def __init__(
        self,
        *,
        start: Start,
        leading: bool = True,
        stops: Sequence[str] = (),
        tools: Sequence[Tool] | None = None,
        markers: Markers = BY_TOKEN,
        max_calls: int | None = None,
    ) -> None:
        self.state: State = start
        self.finish_reason: FinishReason = "stop"
        self._leading = leading
        self._stops = StopStrings(stops)
        self._tools = {tool.name: tool for tool in tools or ()}
        self._with_tools = tools is not None
        self._patterns = Patterns(markers)
        self._reader = CallsReader(self._patterns, self._tools, max_calls)
        self._buffer = ""
        self._around: Literal["reasoning", "content"] = "content"
        self._final = False
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
        self._final = True
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
        match self.state:
            case "reasoning" | "content":
                return self._text_step()
            case "orphan":
                return self._orphan_step()
            case "calls":
                self._out += self._reader.feed(self._buffer)
                self._buffer = ""
                self.state = "done" if self._reader.done else "calls"
                return False
            case "done":
                self._buffer = ""
                return False

    def _text_step(self) -> bool:
        found = self._patterns.find_in_text(self._buffer, self._with_tools)
        if found is None:
            newlines = self._with_tools or self.state == "reasoning"
            self._emit(len(self._buffer) - self._patterns.held(self._buffer, self._with_tools, newlines))
            return False
        if found.lastgroup == "open":
            return self._opening(found)
        thought = self.state == "reasoning" and found.lastgroup == "think"
        self._emit(_without_newlines(self._buffer, found.start()) if thought else found.start())
        if self.done:
            return True
        self._buffer = self._buffer[self._buffer.index(found.group()) + len(found.group()) :]
        if thought:
            self.state, self._leading = "content", True
        return True

    def _opening(self, found: re.Match[str]) -> bool:
        """`<｜DSML｜`: calls begin, and the newlines before it are layout; unless it's an invoke without a block."""
        rest = self._buffer[found.end() :]
        self._emit(start := _without_newlines(self._buffer, found.start()))
        if self.done:
            return True
        newlines = self._buffer[: found.start() - start]
        if self.state == "content" and self._stops.would_match(newlines):
            self._emit(len(newlines))
            return True
        if not self._final and not rest.startswith(INVOKE) and any(tag.startswith(rest) for tag in INVOKE):
            return False
        self._around = "reasoning" if self.state == "reasoning" else "content"
        if rest.startswith(INVOKE):
            self.state = "orphan"
        else:
            self._open_calls()
        return True

    def _orphan_step(self) -> bool:
        """An invoke without its block is a call once it has closed and names a declared tool, and text before that."""
        closed, opened = (p.search(self._buffer) for p in (self._patterns.close_invoke, self._patterns.invoke))
        if closed is None or opened is None:
            return False
        if spelled(self._buffer[opened.end() :].partition('"')[0]) in self._tools:
            self._open_calls()
        else:
            self._emit(closed.end())
            self.state = "done" if self.done else self._around
        return True

    def _open_calls(self) -> None:
        self._content(self._stops.flush())
        self.state = "calls"

    def _emit(self, end: int) -> None:
        """Passes on the buffer up to `end`. Newlines before the first text are layout."""
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._leading:
            text = text.lstrip("\n")
            self._leading = not text
        around = self._around if self.state == "orphan" else self.state
        if around == "reasoning":
            self._out += [Reasoning(spelled(text))] if text else []
            return
        self._content(self._stops.feed(spelled(text)))
        if self.stop_string is not None:
            self.state, self._buffer = "done", ""

    def _content(self, text: str) -> None:
        self._out += [Content(text)] if text else []


def _without_newlines(text: str, end: int) -> int:
    """`end` moved before the newlines that stand there."""
    return len(text[:end].rstrip("\n"))
