"""What a prompt is made from, and what it is: a conversation in, segments out.

Every API parses its own request shape into a `Conversation`; every model format renders a `Conversation` to a `Prompt`.
"""

from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool", "latest_reminder"]
Start = Literal["reasoning", "content", "calls"]


class Image(msgspec.Struct, frozen=True):
    """An image in a message. The prompt holds one placeholder for it; `url` is opaque here. `param`: its place in the
    request."""

    url: str
    param: str = "messages"


Part = str | Image


class ToolCall(msgspec.Struct, frozen=True):
    """A call of an earlier turn. `arguments` is the text the client sent, usually a JSON object."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True):
    """One message. `call_id` and `calls` tie tool results to calls; `task` is a quick-task token's name."""

    role: Role
    parts: tuple[Part, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    task: str | None = None

    @property
    def text(self) -> str:
        return "\n\n".join(part for part in self.parts if isinstance(part, str))


class Tool(msgspec.Struct, frozen=True):
    """A function the model may call. `shown` is the object that the prompt shows, keys in the client's order. `strict`:
    its arguments are held to the schema."""

    name: str
    shown: dict[str, Any]
    strict: bool = False

    @property
    def parameter_names(self) -> frozenset[str]:
        parameters = self.shown.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        return frozenset(properties) if isinstance(properties, dict) else frozenset()


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a prompt. `effort` (1..100) counts in thinking mode only. `clear_thinking`: reasoning
    before the last question is left out, where the format keeps it otherwise (GLM-5.3)."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool = True
    effort: int = 75
    schema: dict[str, Any] | None = None
    must_call: bool = False
    continue_final: bool = False
    open_turn: bool = True
    clear_thinking: bool = False


class Segment(msgspec.Struct, frozen=True):
    """A run of a prompt. Special: one special token by its spelling. Otherwise plain text, whatever it spells."""

    text: str
    special: bool = False


class Prompt(msgspec.Struct, frozen=True):
    """A rendered prompt. `start`: the state in which the model's output begins; `leading`: nothing of that state is
    in the prompt yet, so newlines at the start of the output are layout and not text. `notes`: what the format could
    not do as it was asked, for the answer's statistics. `images`: in the order of their placeholders."""

    segments: tuple[Segment, ...]
    start: Start
    leading: bool = True
    notes: tuple[str, ...] = ()
    images: tuple[Image, ...] = ()

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)
