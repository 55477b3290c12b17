"""What readers of tool calls have in common: a text that grows, a state, and a step of each state, which takes what it
knows off the text."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import msgspec

from tided.chat.arguments import Arguments
from tided.chat.deltas import Delta

State = TypeVar("State", bound=str)


class FinishedCall(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str


class CallsReading(Generic[State]):
    """`steps`: whether there is another one to do. `last`: the state behind all calls."""

    def __init__(self, steps: Mapping[State, Callable[[], bool]], first: State, last: State) -> None:
        self._steps, self._state, self._last = steps, first, last
        self._buffer = ""
        self._out: list[Delta] = []
        self._calls: list[tuple[str, str, Arguments]] = []

    @property
    def done(self) -> bool:
        return self._state == self._last

    @property
    def calls(self) -> list[FinishedCall]:
        return [FinishedCall(call_id, name, arguments.text) for call_id, name, arguments in self._calls]

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        while self._steps[self._state]():
            pass
        out, self._out = self._out, []
        return out
