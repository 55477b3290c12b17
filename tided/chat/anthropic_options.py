"""What an Anthropic Messages request asks of the model: tools, calls, a format, thinking."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

from tided.chat.families import Family
from tided.chat.fields import Fields, refuse
from tided.chat.messages import Tool
from tided.chat.shape import AnswerShape, Format, ToolChoice

log = logging.getLogger("tided.chat")

MAX_TOOLS = 512

EFFORTS = ("low", "medium", "high", "xhigh", "max")
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
# A name stands unescaped between quotes in the model's call tags, which open with U+FF5C.
_UNWRITABLE = re.compile(r'["｜\x00-\x1f\x7f]')


def parse_tools(body: Fields) -> tuple[Tool, ...]:
    """The client's own tools; those that Anthropic's servers run are left out."""
    given = body.array("tools", MAX_TOOLS) or []
    tools = [tool for index, value in enumerate(given) if (tool := _tool(value, f"tools[{index}]"))]
    if doubled := [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]:
        refuse("tools", f"the name {doubled[0]} is used twice")
    return tuple(tools)


def parse_shape(body: Fields, tools: Sequence[Tool]) -> AnswerShape:
    single = body.fields("tool_choice").boolean("disable_parallel_tool_use") or False
    return AnswerShape(choice=_choice(body, tools), format=_format(body), single=single)


def _choice(body: Fields, tools: Sequence[Tool]) -> ToolChoice:
    choice = body.fields("tool_choice")
    kind = choice.get("type")
    if kind not in (None, "auto", "any", "tool", "none"):
        choice.wrong("type", "auto, any, tool or none")
    if kind == "any" and not tools:
        refuse(choice.param("type"), "any, but there are no tools that this server can offer")
    if kind == "tool":
        name = choice.string("name")
        if name is None or name not in {tool.name for tool in tools}:
            choice.wrong("name", "the name of one of the tools that this server can offer")
        return ToolChoice("required", (name,))
    return ToolChoice("required" if kind == "any" else "none" if kind == "none" else "auto")


def _format(body: Fields) -> Format | None:
    """`output_config.format`; `output_format` is how it was called first, and counts where the other is missing."""
    given = [_one_format(of, name) for of, name in ((body.fields("output_config"), "format"), (body, "output_format"))]
    return given[0] or given[1]


def _one_format(of: Fields, name: str) -> Format | None:
    if of.get(name) is None:
        return None
    given = of.fields(name)
    if given.get("type") != "json_schema":
        given.wrong("type", "json_schema")
    if given.get("schema") is None:
        refuse(given.param("schema"), "expected a JSON schema")
    return Format(dict(given.fields("schema").values), shown=True, param=given.param("schema"))


def _tool(value: Any, path: str) -> Tool | None:
    if not isinstance(value, dict):
        refuse(path, "expected a tool")
    fields = Fields(value, f"{path}.")
    kind = fields.string("type")
    if kind not in (None, "custom"):
        log.debug("tool %s runs on Anthropic's servers and is left out", path)
        return None
    name = fields.string("name")
    if name is None or not TOOL_NAME.fullmatch(name):
        fields.wrong("name", "1 to 128 letters, digits or any of _ . : / -")
    description, schema = fields.string("description"), fields.fields("input_schema")
    for parameter in schema.fields("properties").values:
        if _UNWRITABLE.search(parameter):
            refuse(schema.param("properties"), "a parameter's name holds a quote, a control character or U+FF5C")
    shown: dict[str, Any] = {"name": name}
    shown |= {"description": description} if description is not None else {}
    shown |= {"parameters": dict(schema.values)}
    shown |= {"defer_loading": True} if fields.boolean("defer_loading") else {}
    return Tool(name=name, shown=shown, strict=fields.boolean("strict") or False)


def parse_thinking(body: Fields, default: bool, family: Family) -> tuple[bool, int]:
    """(thinking, effort 1..100). A budget is no hard limit here, and an effort from it would change the prompt."""
    fields, output = body.fields("thinking"), body.fields("output_config")
    fields.integer("budget_tokens", 1)
    kind = fields.get("type")
    if kind not in (None, "enabled", "adaptive", "disabled"):
        fields.wrong("type", "enabled, adaptive or disabled")
    effort = output.get("effort")
    if effort is not None and effort not in EFFORTS:
        _unknown_effort(output)
    on = kind != "disabled" if kind is not None else default or effort is not None
    return on, family.default_effort if effort is None else family.efforts[effort]


def _unknown_effort(output: Fields) -> NoReturn:
    output.wrong("effort", f"one of {', '.join(EFFORTS)}")
