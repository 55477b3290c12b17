"""What an answer must be: which tools it may or must call, and whether its text is JSON."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tided.api.messages import MAX_TOOLS
from tided.chat.deepseek_v41_grammar import AnswerGrammar
from tided.chat.deepseek_v41_tools import DSML, END_THINK
from tided.chat.fields import Fields, refuse
from tided.chat.grammar import Grammar, Grammars
from tided.chat.messages import Conversation, Start, Tool
from tided.chat.tokenizer import Tokenizer
from tided.engine.types import Guide

Mode = Literal["auto", "none", "required"]
_MODES: tuple[Mode, ...] = ("auto", "none", "required")


class ToolChoice(msgspec.Struct, frozen=True):
    """`names`: the tools that may be called; None: all."""

    mode: Mode = "auto"
    names: tuple[str, ...] | None = None


class Format(msgspec.Struct, frozen=True):
    """The text is a JSON value of this schema. `shown`: the prompt tells the schema."""

    schema: dict[str, Any]
    shown: bool
    param: str


class AnswerShape(msgspec.Struct, frozen=True):
    """`single`: one call at most."""

    choice: ToolChoice = ToolChoice()
    format: Format | None = None
    single: bool = False

    @property
    def bound(self) -> bool:
        """Whether a grammar follows from the request alone, whatever its tools say."""
        return self.format is not None or self.choice.mode == "required"

    @property
    def shown_schema(self) -> dict[str, Any] | None:
        return self.format.schema if self.format is not None and self.format.shown else None


FREE = AnswerShape()


def parse_choice(body: Fields, tools: Sequence[Tool]) -> ToolChoice:
    """OpenAI's `tool_choice`: a word, a function, or allowed tools, nested as in chat completions or flat."""
    given = body.get("tool_choice")
    if given is None:
        return ToolChoice()
    choice = _word(body, given) if isinstance(given, str) else _object(body.fields("tool_choice"))
    if choice.mode == "required" and not tools:
        refuse("tool_choice", "required, but there are no tools")
    declared = {tool.name for tool in tools}
    if missing := [name for name in choice.names or () if name not in declared]:
        refuse("tool_choice", f"there is no tool {missing[0][:128]}")
    return choice


def _word(body: Fields, given: str) -> ToolChoice:
    if given not in _MODES:
        body.wrong("tool_choice", "none, auto, required or an object")
    return ToolChoice(given)


def _object(choice: Fields) -> ToolChoice:
    kind = choice.get("type")
    if kind == "function":
        return ToolChoice("required", (_name(choice),))
    if kind != "allowed_tools":
        choice.wrong("type", "function or allowed_tools")
    allowed = choice.fields("allowed_tools") if choice.get("allowed_tools") is not None else choice
    if allowed.get("mode") not in (None, "auto", "required"):
        allowed.wrong("mode", "auto or required")
    listed = allowed.array("tools", MAX_TOOLS)
    if not listed:
        refuse(allowed.param("tools"), "expected an array of at least one tool")
    names = [_name(_entry(value, f"{allowed.param('tools')}[{at}]")) for at, value in enumerate(listed)]
    return ToolChoice("required" if allowed.get("mode") == "required" else "auto", tuple(dict.fromkeys(names)))


def _entry(value: Any, path: str) -> Fields:
    if not isinstance(value, dict):
        refuse(path, "expected an object")
    return Fields(value, f"{path}.")


def _name(entry: Fields) -> str:
    function = entry.fields("function") if entry.get("function") is not None else entry
    name = function.string("name")
    if not name:
        refuse(function.param("name"), "expected the name of a function")
    return name


def parse_format(body: Fields, name: str = "response_format") -> Format | None:
    """OpenAI's `response_format`, or `text.format` of Responses, where the schema stands beside its name."""
    given = body.fields(name)
    kind = given.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return Format({"type": "object"}, shown=False, param=given.param("type"))
    if kind != "json_schema":
        given.wrong("type", "text, json_object or json_schema")
    inner = given.fields("json_schema") if given.get("json_schema") is not None else given
    inner.boolean("strict")
    if inner.get("schema") is None:
        refuse(inner.param("schema"), "expected a JSON schema")
    return Format(dict(inner.fields("schema").values), shown=True, param=inner.param("schema"))


class Guides:
    """Opens a guide for each answer; `None` grammar: the answer is free."""

    def __init__(self, grammar: Grammar | None, after: int | None, banned: tuple[int, ...]) -> None:
        self.grammar, self._after, self._banned = grammar, after, banned

    def open(self) -> Guide | None:
        return None if self.grammar is None else self.grammar.open(self._after, self._banned)


FREE_GUIDES = Guides(None, None, ())


def guides_for(
    shape: AnswerShape, conversation: Conversation, start: Start, tokenizer: Tokenizer, grammars: Grammars
) -> Guides:
    """What this answer must keep to. Raises RequestError for what cannot be enforced. Runs in a thread."""
    text, param = _grammar(shape, conversation, start, AnswerGrammar(tokenizer, grammars.error))
    if text is None:
        return FREE_GUIDES
    ids = tokenizer.special_ids
    after = ids[END_THINK] if start == "reasoning" else None
    return Guides(grammars.compile(text, param), after, (ids[DSML],))


def _grammar(
    shape: AnswerShape, conversation: Conversation, start: Start, grammar: AnswerGrammar
) -> tuple[str | None, str]:
    """(the grammar's text, the field that asks for it)."""
    names = shape.choice.names
    tools = [tool for tool in conversation.tools if names is None or tool.name in names]
    if shape.choice.mode == "required":
        return grammar.calls(tools, start, forced=True, single=shape.single), "tools"
    if shape.format is not None:
        return grammar.json(shape.format.schema, tools), shape.format.param
    if tools and (names is not None or any(tool.strict for tool in tools)):
        return grammar.calls(tools, start, forced=False, single=shape.single), "tools"
    return None, ""
