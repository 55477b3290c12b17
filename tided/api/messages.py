"""The messages and tools of an OpenAI request as a conversation's parts."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tided.chat.fields import Fields, refuse
from tided.chat.messages import Image, Message, Part, Role, Tool, ToolCall

MAX_MESSAGES, MAX_PARTS, MAX_CALLS, MAX_TOOLS = 10_000, 10_000, 1_000, 512

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "latest_reminder": "latest_reminder",
}
TEXT_PARTS = {"text": "text", "input_text": "text", "refusal": "refusal"}
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
# A name stands unescaped between quotes in the model's call tags, which open with U+FF5C.
_UNWRITABLE = re.compile(r'["｜\x00-\x1f\x7f]')


def parse_messages(body: Fields) -> tuple[Message, ...]:
    given = body.array("messages", MAX_MESSAGES)
    if not given:
        refuse("messages", "expected an array of at least one message")
    return tuple(_message(value, f"messages[{index}]") for index, value in enumerate(given))


def parse_tools(body: Fields) -> tuple[Tool, ...]:
    """The function tools. Tools of other types are left out unless there are no others."""
    given = body.array("tools", MAX_TOOLS) or []
    functions = [entry for index, value in enumerate(given) if (entry := _function(value, f"tools[{index}]"))]
    if given and not functions:
        refuse("tools", "only tools of type function are supported")
    tools = tuple(_tool(entry) for entry in functions)
    if doubled := [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]:
        refuse("tools", f"the name {doubled[0]} is used twice")
    return tools


def images_of(messages: Sequence[Message]) -> Iterator[Image]:
    return (part for message in messages for part in message.parts if isinstance(part, Image))


def _message(value: Any, path: str) -> Message:
    if not isinstance(value, dict):
        refuse(path, "expected an object")
    fields = Fields(value, f"{path}.")
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        fields.wrong("role", f"one of {', '.join(ROLES)}")
    fields.boolean("prefix")  # of the last one it counts
    return Message(
        role=ROLES[role],
        parts=_parts(fields),
        reasoning=_reasoning(fields) if role == "assistant" else "",
        calls=_calls(fields) if role == "assistant" else (),
        call_id=fields.string("tool_call_id"),
    )


def _reasoning(fields: Fields) -> str:
    texts = [fields.string(name) for name in ("reasoning_content", "reasoning", "thinking")]
    return next((text for text in texts if text is not None), "")


def _parts(fields: Fields) -> tuple[Part, ...]:
    content = fields.get("content")
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list):
        fields.wrong("content", "a string or an array of parts")
    parts = fields.array("content", MAX_PARTS) or []
    return tuple(_part(part, f"{fields.param('content')}[{index}]") for index, part in enumerate(parts))


def _part(value: Any, path: str) -> Part:
    if not isinstance(value, dict):
        refuse(path, "expected an object")
    fields = Fields(value, f"{path}.")
    kind = fields.get("type")
    if kind == "image_url":
        image = value.get("image_url")
        url = image if isinstance(image, str) else fields.fields("image_url").string("url")
        if not url:
            refuse(fields.param("image_url"), "expected the URL of an image")
        return Image(url, path)
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        fields.wrong("type", "text, input_text, refusal or image_url")
    text = fields.string(TEXT_PARTS[kind])
    if text is None:
        refuse(fields.param(TEXT_PARTS[kind]), "expected a string")
    return text


def _calls(fields: Fields) -> tuple[ToolCall, ...]:
    given = fields.array("tool_calls", MAX_CALLS) or []
    return tuple(_call(value, f"{fields.param('tool_calls')}[{index}]") for index, value in enumerate(given))


def _call(value: Any, path: str) -> ToolCall:
    if not isinstance(value, dict):
        refuse(path, "expected an object")
    fields = Fields(value, f"{path}.")
    function = fields.fields("function")
    name = function.string("name")
    if not name:
        refuse(function.param("name"), "expected the name of a function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif arguments is not None and not isinstance(arguments, str):
        function.wrong("arguments", "a string of JSON or an object")
    return ToolCall(id=fields.string("id") or "", name=name, arguments="{}" if arguments is None else arguments)


def _function(value: Any, path: str) -> Fields | None:
    if not isinstance(value, dict):
        refuse(path, "expected an object with type and function")
    tool = Fields(value, f"{path}.")
    if tool.string("type") not in (None, "function"):
        return None
    if tool.get("function") is None:
        refuse(tool.param("function"), "expected an object")
    return tool.fields("function")


def _tool(function: Fields) -> Tool:
    name = function.string("name")
    if name is None or not TOOL_NAME.fullmatch(name):
        function.wrong("name", "1 to 128 letters, digits or any of _ . : / -")
    function.string("description")
    properties = function.fields("parameters").fields("properties").values
    for parameter in properties:
        if _UNWRITABLE.search(parameter):
            refuse(function.param("parameters"), "a parameter's name holds a quote, a control character or U+FF5C")
    return Tool(name=name, shown=dict(function.values), strict=function.boolean("strict") or False)
