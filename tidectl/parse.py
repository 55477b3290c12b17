"""`tidectl parse`: what clients get of a text that a model wrote."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tidectl import stdin
from tided.api.messages import parse_tools
from tided.chat.calls_reading import FinishedCall
from tided.chat.deltas import Content, Delta, Reasoning
from tided.chat.families import FAMILIES, Parser
from tided.chat.fields import Fields, refuse
from tided.chat.messages import Start, Tool
from tided.chat.text import well_formed
from tided.errors import DataError, RequestError

_UNDERSTOOD = {"thinking", "backend_finish", "stop", "tools_enabled", "starts_inside_calls_block"}


def run(family: str, options: str, tools: Path | None, chunk: int | None) -> None:
    given = Fields(stdin.json_object(options, "--options"), "--options.")
    try:
        parser, reason = _parser(family, given, _tools(tools)), _reason(given)
    except RequestError as error:
        raise DataError(error.what) from error
    text = stdin.text()
    size = chunk or max(len(text), 1)
    deltas = [delta for at in range(0, len(text), size) for delta in parser.feed(text[at : at + size])]
    message = _message(deltas + parser.finish(reason), parser)
    sys.stdout.flush()
    sys.stdout.buffer.write(well_formed(json.dumps(message, ensure_ascii=False) + "\n").encode())
    sys.stdout.buffer.flush()


def _parser(family: str, options: Fields, tools: Sequence[Tool]) -> Parser:
    if unknown := set(options.values) - _UNDERSTOOD:
        refuse(options.param(min(unknown)), f"is unknown; known: {', '.join(sorted(_UNDERSTOOD))}")
    start: Start = "content" if options.boolean("thinking") is False else "reasoning"
    return FAMILIES[family].parser(
        start="calls" if options.boolean("starts_inside_calls_block") else start,
        stops=_stops(options),
        tools=None if options.boolean("tools_enabled") is False else tools,
        by_token=False,
    )


def _stops(options: Fields) -> list[str]:
    stops = options.array("stop", 1000) or []
    if not all(isinstance(stop, str) and stop for stop in stops):
        options.wrong("stop", "an array of strings that are not empty")
    return stops


def _reason(options: Fields) -> Literal["stop", "length"]:
    given = options.get("backend_finish")
    if given not in (None, "stop", "length"):
        options.wrong("backend_finish", "stop or length")
    return "length" if given == "length" else "stop"


def _tools(path: Path | None) -> tuple[Tool, ...]:
    if path is None:
        return ()
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path)) from error
    return parse_tools(Fields({"tools": stdin.json_value(source, str(path))}))


def _message(deltas: Sequence[Delta], parser: Parser) -> dict[str, Any]:
    return {
        "reasoning_content": "".join(delta.text for delta in deltas if isinstance(delta, Reasoning)),
        "content": "".join(delta.text for delta in deltas if isinstance(delta, Content)),
        "tool_calls": [_call(call) for call in parser.calls],
        "finish_reason": parser.finish_reason,
    }


def _call(call: FinishedCall) -> dict[str, Any]:
    """Arguments as a value; of a call that was cut, the text that had come."""
    try:
        return {"name": call.name, "arguments": json.loads(call.arguments)}
    except ValueError:
        return {"name": call.name, "arguments_partial": call.arguments}
