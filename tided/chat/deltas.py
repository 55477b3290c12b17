"""What a parser of model output yields: an answer in pieces, in order."""

from collections.abc import Iterator, Sequence

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class Content(msgspec.Struct, frozen=True):
    text: str


class CallStarted(msgspec.Struct, frozen=True):
    """A tool call; `index` counts 0, 1, 2. Its arguments follow."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of a call's JSON arguments."""

    index: int
    text: str


Delta = Reasoning | Content | CallStarted | CallArguments


def merged(deltas: Sequence[Delta]) -> Iterator[Delta]:
    """Neighbours of one kind as one."""
    pending: Delta | None = None
    for delta in deltas:
        match pending, delta:
            case Reasoning(a), Reasoning(b):
                pending = Reasoning(a + b)
            case Content(a), Content(b):
                pending = Content(a + b)
            case CallArguments(i, a), CallArguments(j, b) if i == j:
                pending = CallArguments(i, a + b)
            case _:
                if pending is not None:
                    yield pending
                pending = delta
    if pending is not None:
        yield pending
