"""Reads DeepSeek-V4.1's output while it is written: reasoning, content, tool calls.

    reasoning -</think>-> content -<｜DSML｜-> calls -</｜DSML｜ calls>-> done
    reasoning -<｜DSML｜-> calls               content -a stop string-> done

What any format's parser does is in `answer_parse`."""

import re
from collections.abc import Sequence
from typing import Literal

from tided.chat.answer_parse import AnswerParser
from tided.chat.deltas import Delta
from tided.chat.markers import BY_TOKEN, INVOKE, Markers, Patterns, spelled
from tided.chat.messages import Start, Tool
from tided.chat.parse_calls import CallsReader


class OutputParser(AnswerParser):
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
        self._tools = {tool.name: tool for tool in tools or ()}
        self._with_tools = tools is not None
        self._patterns = Patterns(markers)
        super().__init__(CallsReader(self._patterns, self._tools, max_calls), spelled, start, leading, stops)
        self._before_orphan: Literal["reasoning", "content"] = "content"
        self._final = False

    def finish(self, reason: Literal["stop", "length"]) -> list[Delta]:
        self._final = True
        return super().finish(reason)

    def _step(self) -> bool:
        return self._orphan_step() if self.state == "orphan" else super()._step()

    @property
    def _around(self) -> str:
        return self._before_orphan if self.state == "orphan" else self.state

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
        self._before_orphan = "reasoning" if self.state == "reasoning" else "content"
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
            self.state = "done" if self.done else self._before_orphan
        return True


def _without_newlines(text: str, end: int) -> int:
    """`end` moved before the newlines that stand there."""
    return len(text[:end].rstrip("\n"))
