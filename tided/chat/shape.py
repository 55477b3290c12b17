"""What an answer must be: which tools it may or must call, and whether its text is JSON."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tided.chat.messages import Tool

Mode = Literal["auto", "none", "required"]


class ToolChoice(msgspec.Struct, frozen=True):
    """`names`: the tools that may be called; None: all."""

    mode: Mode = "auto"
    names: tuple[str, ...] | None = None


class Format(msgspec.Struct, frozen=True):
    """The text is a JSON value of this schema. `shown`: the prompt tells the schema. `param`: the field that asks."""

    schema: dict[str, Any]
    shown: bool
    param: str


class AnswerShape(msgspec.Struct, frozen=True):
    """`single`: one call at most."""

    choice: ToolChoice = ToolChoice()
    format: Format | None = None
    single: bool = False

    def bound(self, tools: Sequence[Tool]) -> bool:
        """Whether the answer is held to a grammar, with these tools shown."""
        allowed = self.callable(tools)
        chosen = self.choice.names is not None or any(tool.strict for tool in allowed)
        return self.format is not None or self.choice.mode == "required" or (bool(allowed) and chosen)

    def callable(self, tools: Sequence[Tool]) -> list[Tool]:
        """Those of the tools shown that may be called."""
        return [tool for tool in tools if self.choice.names is None or tool.name in self.choice.names]

    def shown_tools(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        """What the prompt shows: no tool where none may be called, one alone where that one must be."""
        if self.choice.mode == "none":
            return ()
        named = self.choice.names or ()
        if self.choice.mode == "required" and len(named) == 1:
            return tuple(tool for tool in tools if tool.name in named)
        return tools

    @property
    def shown_schema(self) -> dict[str, Any] | None:
        return self.format.schema if self.format is not None and self.format.shown else None


FREE = AnswerShape()
