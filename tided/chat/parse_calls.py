"""Reads a block of tool calls while it is written: from its opening tag to its closing one.

    calls -invoke name="-> name -"-> args -parameter name="-> param-name -" string="…">-> param-value
                           args <-</｜DSML｜ parameter>- param-value      args -</｜DSML｜ invoke>-> calls

Lenient where the meaning is clear: missing closing tags, V4's tags, parameters without `string=`.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Literal

from tided.chat.arguments import Arguments, as_json
from tided.chat.calls_reading import CallsReading
from tided.chat.deltas import CallArguments, CallStarted, Delta
from tided.chat.markers import Patterns, closing_tag, partial, spelled
from tided.chat.messages import Tool

_State = Literal["calls", "name", "args", "param-name", "param-value", "done"]
# Longer than any tag: what may still become one when the rest of the layout is dropped.
_LAYOUT_TAIL = 64


class CallsReader(CallsReading[_State]):
    """`max_calls`: the block ends after that many. `tools`: the declared ones, for unwrapping arguments."""

    def __init__(self, patterns: Patterns, tools: Mapping[str, Tool], max_calls: int | None) -> None:
        self._patterns, self._tools, self._max_calls = patterns, tools, max_calls
        self._final = False
        self._parameter: tuple[str, str | None] = ("", None)
        steps: dict[_State, Callable[[], bool]] = {
            "calls": self._calls_step,
            "name": self._name_step,
            "args": self._args_step,
            "param-name": self._param_name_step,
            "param-value": self._param_value_step,
            "done": self._done_step,
        }
        super().__init__(steps, "calls", "done")

    def finish(self, reason: Literal["stop", "length"]) -> tuple[list[Delta], bool]:
        """The last pieces, and whether the arguments of the last call stay cut."""
        self._final = True
        out = self.feed("")
        if self._state == "args" and reason == "stop":
            self._close_call()
        cut = self._state in ("name", "args", "param-name", "param-value")
        self._send_what_is_known()
        return out + self._out, cut

    def _calls_step(self) -> bool:
        found = self._patterns.calls.search(self._buffer)
        if found is None:
            self._buffer = self._buffer[-_LAYOUT_TAIL:]
            return False
        self._buffer = self._buffer[found.end() :]
        self._state = "name" if found.lastgroup == "invoke" else "done"
        return True

    def _name_step(self) -> bool:
        name, quote, rest = self._buffer.partition('"')
        if not quote:
            return False
        self._buffer, name = rest, spelled(name)
        call_id = f"call_{secrets.token_urlsafe(18)}"
        tool = self._tools.get(name)
        self._out.append(CallStarted(len(self._calls), call_id, name))
        self._calls.append((call_id, name, Arguments(None if tool is None else tool.parameter_names)))
        self._state = "args"
        return True

    def _args_step(self) -> bool:
        found = self._patterns.args.search(self._buffer)
        if found is None:
            self._buffer = self._buffer[-_LAYOUT_TAIL:]
            return False
        if found.lastgroup == "parameter":
            self._buffer = self._buffer[found.end() :]
            self._state = "param-name"
            return True
        return self._end_of_args(found.lastgroup == "invoke", found.start(), found.end())

    def _end_of_args(self, next_invoke: bool, start: int, end: int) -> bool:
        tag = "" if next_invoke else closing_tag(self._buffer[end:], self._final)
        if tag is None:
            return False
        if tag.endswith("parameter>"):
            self._buffer = self._buffer[end + len(tag) :]
            return True
        # The next invoke, or the end of the block, is for the next state to see.
        self._buffer = self._buffer[start if next_invoke or tag.endswith("calls>") else end + len(tag) :]
        self._close_call()
        return True

    def _param_name_step(self) -> bool:
        found = self._patterns.parameter_flag.search(self._buffer)
        if found is None:
            return False
        self._parameter = (spelled(self._buffer[: found.start()]), found.group(1))
        self._buffer = self._buffer[found.end() :]
        self._state = "param-value"
        if self._streams:
            self._send(self._call.open_string(self._parameter[0]))
        return True

    def _param_value_step(self) -> bool:
        close = self._patterns.close
        end = self._buffer.find(close)
        tag = closing_tag(self._buffer[end + len(close) :], self._final) if end >= 0 else None
        if tag is None:
            self._stream_value(end if end >= 0 else len(self._buffer) - partial(self._buffer, (close,)))
            return False
        self._close_value(spelled(self._buffer[:end]))
        # A parameter that ends with its call or block: that tag is for the next state to see.
        ends_more = bool(tag) and not tag.endswith("parameter>")
        self._buffer = self._buffer[end if ends_more else end + len(close) + len(tag) :]
        self._state = "args"
        return True

    def _done_step(self) -> bool:
        self._buffer = ""
        return False

    @property
    def _call(self) -> Arguments:
        return self._calls[-1][2]

    @property
    def _streams(self) -> bool:
        """Whether the open parameter's value goes out as it comes: a string, for the first time."""
        name, kind = self._parameter
        return kind == "true" and name not in self._call

    def _stream_value(self, end: int) -> None:
        if self._streams:
            text, self._buffer = self._buffer[:end], self._buffer[end:]
            self._send(self._call.string(spelled(text)))

    def _close_value(self, raw: str) -> None:
        name, kind = self._parameter
        if self._streams:
            self._send(self._call.string(raw) + self._call.close_string(name))
        else:
            value = json.dumps(raw, ensure_ascii=False) if kind == "true" else as_json(raw, kind)
            self._send(self._call.value(name, value))

    def _close_call(self) -> None:
        self._send(self._call.close())
        self._state = "done" if self._max_calls is not None and len(self._calls) >= self._max_calls else "calls"

    def _send_what_is_known(self) -> None:
        """Of a parameter that was cut: its name, or its value as far as it came. Beginnings of tags are dropped."""
        if self._state == "param-name":
            keep = partial(self._buffer, ('" string="', '">'))
            self._send(self._call.cut(spelled(self._buffer[: len(self._buffer) - keep]), None))
        elif self._state == "param-value" and not self._streams:
            keep = partial(self._buffer, (self._patterns.close,))
            self._send(self._call.cut(self._parameter[0], spelled(self._buffer[: len(self._buffer) - keep])))

    def _send(self, text: str) -> None:
        self._out += [CallArguments(len(self._calls) - 1, text)] if text else []
