"""Chat format of DeepSeek-V4.1 for training: messages -> segments with a loss weight.

Only the encoder makes special tokens; text that merely spells one stays text.
"""

from __future__ import annotations

import json
from typing import Any

from minis.dialogue import Dialogue, Segment, Writer

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
NOISE, IMAGE = "<｜dspark_noise｜>", "<｜deepseek_image｜>"
FIRST_SPECIALS = [BOS, EOS, PAD]
TOP_SPECIALS = [
    NOISE,
    IMAGE,
    SYSTEM,
    USER,
    ASSISTANT,
    THINK,
    END_THINK,
    "<｜latest_reminder｜>",
    DSML,
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
]
_TOOLS_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

"""  # noqa: E501
_TOOLS_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"


def _call_block(out: Writer, calls: list[dict[str, Any]]) -> None:
    mark = (DSML,)
    out.marked(f"\n\n<{DSML} calls>\n", mark, 1.0)
    for call in calls:
        f = call["function"]
        out.marked(f'<{DSML} invoke name="', mark, 1.0)
        out.text(f'{f["name"]}">\n', 1.0)
        arguments = json.loads(f["arguments"])
        for key, value in arguments.items():
            is_text = isinstance(value, str)
            out.marked(f'<{DSML} parameter name="', mark, 1.0)
            out.text(f'{key}" string="{"true" if is_text else "false"}">', 1.0)
            out.text(value if is_text else json.dumps(value, ensure_ascii=False), 1.0)
            out.marked(f"</{DSML} parameter>\n", mark, 1.0)
        if not arguments:
            out.text("\n", 1.0)
        out.marked(f"</{DSML} invoke>\n", mark, 1.0)
    out.marked(f"</{DSML} calls>", mark, 1.0)


def render(d: Dialogue, generate: bool = False) -> list[Segment]:
    """`generate` appends the header of the assistant turn that the model shall write."""
    out = Writer()
    out.special(BOS, 0.0)
    messages = list(d.messages)
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
    if system or d.thinking or d.tools:
        out.special(SYSTEM)
        if d.thinking:
            out.text(
                f"Reasoning Effort: {d.effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
            )
        out.text(system)
        if d.tools:
            out.marked("\n\n" + _TOOLS_HEAD, (DSML, THINK, END_THINK))
            out.text("\n".join(json.dumps(t["function"], ensure_ascii=False) for t in d.tools) + _TOOLS_TAIL)
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    in_user = False
    for i, m in enumerate(messages):
        if m["role"] in ("user", "tool"):
            text = m["content"] if m["role"] == "user" else f"<tool_result>{m['content']}</tool_result>"
            if in_user:
                out.text("\n\n" + text)
            else:
                out.special(USER)
                out.text(text)
            in_user = True
            continue
        in_user = False
        out.special(ASSISTANT)
        if d.thinking and (d.tools or i > last_user):
            out.special(THINK)
            out.text(m.get("reasoning_content") or "", 1.0)
            out.special(END_THINK, 1.0)
        else:
            out.special(END_THINK)
        out.text(m.get("content") or "", 1.0)
        if m.get("tool_calls"):
            _call_block(out, m["tool_calls"])
        out.special(EOS, 1.0)
    if generate:
        out.special(ASSISTANT)
        out.special(THINK if d.thinking else END_THINK)
    return out.segments
