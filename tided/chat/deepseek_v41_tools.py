"""DeepSeek-V4.1's tools: the section that declares them and the block that calls them.

Tags are written `<｜DSML｜ name …>`: `｜DSML｜` is one special token, everything around it is ordinary text.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from tided.chat.arguments import sent_arguments
from tided.chat.messages import Segment, Tool, ToolCall
from tided.chat.segments import SegmentWriter

DSML = "｜DSML｜"
THINK, END_THINK = "<think>", "</think>"

_SECTION = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_SECTION_END = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
_SHOWN = ("name", "description", "parameters")


def tools_section(tools: Sequence[Tool]) -> list[Segment]:
    """The section's own text holds special tokens; the tools' JSON never does, whatever it spells."""
    pieces = re.split(f"({DSML}|{THINK}|{END_THINK})", _SECTION)
    fixed = [Segment(piece, special=index % 2 == 1) for index, piece in enumerate(pieces) if piece]
    return [*fixed, Segment("\n".join(_tool_json(tool) for tool in tools)), Segment(_SECTION_END)]


def write_calls(out: SegmentWriter, calls: Sequence[ToolCall]) -> None:
    """A finished call block, as the model writes it: after a blank line, also when there is no content."""
    open_calls(out)
    for call in calls:
        _tag(out, f' invoke name="{call.name}">\n')
        for index, (name, value) in enumerate(sent_arguments(call.arguments).items()):
            out.text("\n" if index else "")
            _write_parameter(out, name, value)
        out.text("\n")
        _tag(out, " invoke>\n", closing=True)
    _tag(out, " calls>", closing=True)


def open_calls(out: SegmentWriter) -> None:
    out.text("\n\n")
    _tag(out, " calls>\n")


def _write_parameter(out: SegmentWriter, name: str, value: Any) -> None:
    is_string = isinstance(value, str)
    _tag(out, f' parameter name="{name}" string="{"true" if is_string else "false"}">')
    out.text(value if is_string else json.dumps(value, ensure_ascii=False))
    _tag(out, " parameter>", closing=True)


def _tag(out: SegmentWriter, rest: str, *, closing: bool = False) -> None:
    out.text("</" if closing else "<")
    out.special(DSML)
    out.text(rest)


def _tool_json(tool: Tool) -> str:
    shown = {key: value for key, value in tool.shown.items() if key in _SHOWN and value is not None}
    return json.dumps(shown, ensure_ascii=False)
