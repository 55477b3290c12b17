"""Reads GLM-5.3's output while it is written: reasoning, content, tool calls.

    reasoning -</think>-> content -<tool_call>-> calls -> done       reasoning -<tool_call>-> calls
    reasoning, content -<|user|>, <|observation|>, <|endoftext|>-> done       content -a stop string-> done

What any format's parser does is in `answer_parse`."""

import re
from collections.abc import Sequence

from tided.chat.answer_parse import AnswerParser
from tided.chat.glm53_calls import Glm53Calls
from tided.chat.glm53_markers import Tags
from tided.chat.markers import partial
from tided.chat.messages import Start, Tool


class Glm53Parser(AnswerParser):
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
        tags = self._tags = Tags(by_token=by_token)
        self._markers = (tags.end_think, *tags.stops, *(tags.tags if tools is not None else ()))
        self._pattern = re.compile("|".join(map(re.escape, self._markers)))
        reader = Glm53Calls(tags, {tool.name: tool for tool in tools or ()}, max_calls)
        super().__init__(reader, tags.spelled, start, leading, stops)

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
            self._open_calls()
        elif marker in self._tags.stops:
            self._content(self._stops.flush())
            self.state = "done"
