"""What Anthropic's routes take."""

from typing import get_args

from tided.api.chat_request import MAX_STOPS
from tided.api.openapi.chat import CACHE_SALT, LOOP_BREAK, SAMPLING, STOP
from tided.api.openapi.terms import (
    ANY_OBJECT,
    TRUTH,
    Schema,
    always,
    array,
    asked,
    either,
    integer,
    one,
    ref,
    said,
    text,
)
from tided.chat.anthropic import MAX_BLOCKS, MAX_MESSAGES
from tided.chat.anthropic_options import EFFORTS, MAX_TOOLS, TOOL_NAME
from tided.engine.types import Fidelity

_READ = ("text", "image", "document", "search_result", "thinking", "tool_use", "tool_result")
_TEXT = asked({"type": always("text"), "text": text()})
_IMAGE = said(
    "Refused where the served model sees none.",
    asked(
        {
            "type": always("image"),
            "source": either(
                asked({"type": always("base64"), "media_type": text(), "data": text()}),
                asked({"type": always("url"), "url": text()}),
            ),
        }
    ),
)
_DOCUMENT = asked({"type": always("document"), "source": asked({"type": always("text"), "data": text()})})
_FOUND = asked({"type": always("search_result"), "content": array(_TEXT, MAX_BLOCKS)})
_OTHER = said("Of any other type: left out.", asked({"type": {"type": "string", "not": one(*_READ)}}))
_SAID = (_TEXT, _DOCUMENT, _FOUND, _OTHER)
_USER = either(
    *_SAID,
    _IMAGE,
    asked(
        {"type": always("tool_result"), "tool_use_id": text()},
        {"content": either(text(), array(either(*_SAID, _IMAGE), MAX_BLOCKS))},
    ),
)
_ASSISTANT = either(
    *_SAID,
    asked({"type": always("thinking"), "thinking": text()}),
    asked({"type": always("tool_use"), "id": text(), "name": text(1)}, {"input": ANY_OBJECT}),
)


def _turn(role: str, block: Schema) -> Schema:
    return asked({"role": always(role), "content": either(text(), array(block, MAX_BLOCKS))})


_SINGLE = {"disable_parallel_tool_use": TRUTH}
_FORMAT = asked({"type": always("json_schema"), "schema": ANY_OBJECT})
_PROMPT: dict[str, Schema] = {
    "model": said("Any name is answered by the model served, and repeated in the reply.", text()),
    "system": either(text(), array(either(*_SAID), MAX_BLOCKS)),
    "tools": array(ref("Tool"), MAX_TOOLS),
    "tool_choice": either(
        asked({}, {"type": one("auto", "any", "none"), **_SINGLE}),
        asked({"type": always("tool"), "name": text()}, _SINGLE),
    ),
    "thinking": asked({}, {"type": one("enabled", "adaptive", "disabled"), "budget_tokens": integer(1)}),
    "output_config": asked({}, {"effort": one(*EFFORTS), "format": _FORMAT}),
    "output_format": said("Counts where output_config has no format.", _FORMAT),
    "mcp_servers": array({}, 0),
}
_MESSAGES = array(ref("Message"), MAX_MESSAGES, least=1)

SCHEMAS: dict[str, Schema] = {
    "Message": either(_turn("user", _USER), _turn("assistant", _ASSISTANT), _turn("system", either(*_SAID))),
    "Tool": either(
        asked(
            {"name": text(pattern=f"^{TOOL_NAME.pattern}$")},
            {
                "type": always("custom"),
                "description": text(),
                "input_schema": asked({}, {"properties": ANY_OBJECT}),
                "strict": TRUTH,
                "defer_loading": TRUTH,
            },
        ),
        said("Run by Anthropic's servers: left out.", asked({"type": {"type": "string", "not": always("custom")}})),
    ),
    "MessageRequest": asked(
        {"max_tokens": said("Lowered to the room left.", integer(1)), "messages": _MESSAGES},
        _PROMPT
        | SAMPLING
        | {
            "stop_sequences": array(STOP, MAX_STOPS),
            "stream": TRUTH,
            "fidelity": one(*get_args(Fidelity)),
            "loop_break": LOOP_BREAK,
            "cache_salt": CACHE_SALT,
        },
    ),
    "CountRequest": asked({"messages": _MESSAGES}, _PROMPT),
}
