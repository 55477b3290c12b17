"""Reads GLM-5.3's tool calls while they are written.

    name -<arg_key>-> key -</arg_key>-> gap -<arg_value>-> value -</arg_value>-> args -<arg_key>-> key
    name, args -</tool_call>-> between -<tool_call>-> name

The format has no types: a value's type comes from the tool's schema. Lenient where the meaning is clear: tags that are
missing, newlines around names and tags.
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Literal

from tided.chat.arguments import Arguments
from tided.chat.calls_reading import CallsReading
from tided.chat.deltas import CallArguments, CallStarted, Delta
from tided.chat.glm53_markers import Tags
from tided.chat.markers import partial
from tided.chat.messages import Tool
from tided.chat.schema_types import ONLY_STRING, parameter_types, typed_json

_State = Literal["between", "name", "key", "gap", "value", "args", "done"]


class Glm53Calls(CallsReading[_State]):
    """Begins behind the first `<tool_call>`. `max_calls`: the answer ends after that many."""

    def __init__(self, tags: Tags, tools: Mapping[str, Tool], max_calls: int | None) -> None:
        self._tags, self._tools, self._max_calls = tags, tools, max_calls
        self._name = self._key = ""
        steps: dict[_State, Callable[[], bool]] = {
            "between": self._between_step,
            "name": self._name_step,
            "key": self._key_step,
            "gap": self._gap_step,
            "value": self._value_step,
            "args": self._args_step,
            "done": self._done_step,
        }
        super().__init__(steps, "name", "done")

    def finish(self, reason: Literal["stop", "length"]) -> tuple[list[Delta], bool]:
        """The last pieces, and whether the last call stays cut. A name that nothing followed is a call only at a
        natural end."""
        out, keep = self.feed(""), partial(self._buffer, self._tags.all)
        rest = self._buffer[: len(self._buffer) - keep]
        if self._state == "name" and reason == "stop" and rest.strip():
            self._start(rest)
            self._state = "args"
        if self._state == "args" and reason == "stop":
            self._close()
        cut = self._state in ("name", "key", "gap", "value", "args")
        if self._state in ("key", "gap"):
            key = self._key if self._state == "gap" else self._tags.spelled(rest).strip()
            self._send(self._arguments.cut(key, None))
        elif self._state == "value" and not self._streams:
            self._send(self._arguments.cut(self._key, self._tags.spelled(rest)))
        elif self._state == "value":
            self._send(self._arguments.string(self._tags.spelled(rest)))
        return out + self._out, cut

    def _between_step(self) -> bool:
        """Behind a call: another one, or nothing that counts."""
        rest = self._buffer.lstrip()
        if rest.startswith(self._tags.call):
            self._buffer, self._state = rest[len(self._tags.call) :], "name"
            return True
        if rest and not self._tags.call.startswith(rest):
            self._state = "done"
            return True
        return False

    def _name_step(self) -> bool:
        found = self._tags.after_name.search(self._buffer)
        if found is None:
            return False
        text, tag = self._buffer[: found.start()], found.group()
        self._buffer = self._buffer[found.end() :]
        if tag == self._tags.end_call and not text.strip():
            self._state = "between"  # a call of nothing is none
        elif tag in (self._tags.end_key, self._tags.value):
            self._start_without_key_tag(text, tag)
        else:
            self._start(text)
            self._state = "key" if tag == self._tags.key else "args"
            self._buffer = self._buffer if tag == self._tags.key else tag + self._buffer
        return True

    def _start_without_key_tag(self, text: str, tag: str) -> None:
        """`<tool_call>NAMEKEY</arg_key>`: the longest known name that it begins with."""
        text = self._tags.spelled(text).strip()
        names = [name for name in self._tools if text.startswith(name)]
        name = max(names, key=len) if names else text.split(maxsplit=1)[0] if text else ""
        self._start(name)
        self._key = text[len(name) :].strip()
        self._state = "gap" if tag == self._tags.end_key else "value"
        if self._state == "value":
            self._open_value()

    def _start(self, name: str) -> None:
        self._name = self._tags.spelled(name).strip()
        call_id = f"call_{secrets.token_urlsafe(18)}"
        self._out.append(CallStarted(len(self._calls), call_id, self._name))
        self._calls.append((call_id, self._name, Arguments(None)))

    def _args_step(self) -> bool:
        """Between arguments. What stands there and is no tag is layout."""
        found = self._tags.in_args.search(self._buffer)
        if found is None:
            keep = partial(self._buffer, self._tags.all)
            self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._buffer = self._buffer[found.end() :]
        if found.group() == self._tags.key:
            self._state = "key"
            return True
        if found.group() == self._tags.call:  # the end of the call before it is missing
            self._buffer = self._tags.call + self._buffer
        self._close()
        return True

    def _key_step(self) -> bool:
        found = self._tags.after_key.search(self._buffer)
        if found is None:
            return False
        self._key = self._tags.spelled(self._buffer[: found.start()]).strip()
        self._buffer = self._buffer[found.end() :]
        self._state = "gap"
        if found.group() != self._tags.end_key:
            self._buffer = found.group() + self._buffer
        return True

    def _gap_step(self) -> bool:
        """Behind a key: `<arg_value>`, or the value itself where the tag is missing."""
        rest = self._buffer.lstrip()
        if not rest or (rest != self._tags.value and self._tags.value.startswith(rest)):
            return False
        self._state = "value"
        if rest.startswith(self._tags.value):
            self._buffer = rest[len(self._tags.value) :]
        self._open_value()
        return True

    def _open_value(self) -> None:
        if self._streams:
            self._send(self._arguments.open_string(self._key))

    def _value_step(self) -> bool:
        """Only the exact closing tag ends a value: it may be text that holds any other tag."""
        end = self._buffer.find(self._tags.end_value)
        if end < 0:
            if self._streams:
                keep = partial(self._buffer, (self._tags.end_value,))
                text = self._buffer[: len(self._buffer) - keep]
                self._buffer = self._buffer[len(text) :]
                self._send(self._arguments.string(self._tags.spelled(text)))
            return False
        raw = self._tags.spelled(self._buffer[:end])
        self._buffer = self._buffer[end + len(self._tags.end_value) :]
        if self._streams:
            self._send(self._arguments.string(raw) + self._arguments.close_string(self._key))
        else:
            self._send(self._arguments.value(self._key, typed_json(raw, self._types)))
        self._state = "args"
        return True

    def _done_step(self) -> bool:
        self._buffer = ""
        return False

    @property
    def _arguments(self) -> Arguments:
        return self._calls[-1][2]

    @property
    def _types(self) -> frozenset[str] | None:
        tool = self._tools.get(self._name)
        parameters = tool.shown.get("parameters") if tool is not None else None
        return parameter_types(parameters, self._key) if isinstance(parameters, dict) else None

    @property
    def _streams(self) -> bool:
        """Whether the open value goes out as it comes: certainly a string, for the first time."""
        return self._types == ONLY_STRING and self._key not in self._arguments

    def _close(self) -> None:
        self._send(self._arguments.close())
        self._state = "done" if self._max_calls is not None and len(self._calls) >= self._max_calls else "between"

    def _send(self, text: str) -> None:
        self._out += [CallArguments(len(self._calls) - 1, text)] if text else []
