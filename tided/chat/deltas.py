"""What a parser of model output yields: an answer in pieces, in order."""

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
