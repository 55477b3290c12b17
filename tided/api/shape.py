"""OpenAI's `tool_choice` and `response_format`, as the shape of an answer."""

from collections.abc import Sequence
from typing import Any

from tided.api.messages import MAX_TOOLS
from tided.chat.fields import Fields, refuse
from tided.chat.messages import Tool
from tided.chat.shape import Format, Mode, ToolChoice

_MODES: tuple[Mode, ...] = ("auto", "none", "required")


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
    nested = given.get("json_schema") is not None or (given.get("schema") is None and given.get("name") is None)
    inner = given.fields("json_schema") if nested else given
    inner.boolean("strict")
    if inner.get("schema") is None:
        refuse(inner.param("schema"), "expected a JSON schema")
    return Format(dict(inner.fields("schema").values), shown=True, param=inner.param("schema"))
