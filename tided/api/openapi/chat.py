"""What chat completions take. Names and limits are those that the parsers read by; a test holds every one to them."""

from typing import get_args

from tided.api.chat_request import (
    MAX_BIASES,
    MAX_LOOP_BREAK,
    MAX_N,
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
)
from tided.api.messages import MAX_CALLS, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ROLES, TEXT_PARTS, TOOL_NAME
from tided.api.openapi.terms import (
    ANY_OBJECT,
    NULL,
    TRUTH,
    Schema,
    always,
    array,
    asked,
    either,
    integer,
    nullable,
    number,
    one,
    ref,
    said,
    text,
)
from tided.chat.families import DEEPSEEK_V41
from tided.chat.fields import INT64_MAX
from tided.engine.types import Fidelity

STOP = text(0, MAX_STOP_CHARACTERS)
LOOP_BREAK: Schema = {"not": always(1)} | said(
    "Times in a row that a cycle may come before the answer is ended; 0: it may go on.", integer(0, MAX_LOOP_BREAK)
)
CACHE_SALT = said("Prompts of another one are not found in the prompt cache.", text(0, MAX_SALT_CHARACTERS))
TOOL_NAMES = text(pattern=f"^{TOOL_NAME.pattern}$")

SAMPLING: dict[str, Schema] = {
    "temperature": said("0 draws the likeliest token.", number(0, 2)),
    "top_p": number(0, 1, low_open=True),
    "top_k": said("-1 and 0 are off.", integer(-1)),
    "min_p": number(0, 1),
    "seed": said(
        "Repeats an answer while the resident experts stay the same; always with fidelity exact.",
        integer(-INT64_MAX - 1),
    ),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": said("1 is off.", number(0, 2, low_open=True)),
    "logit_bias": said(
        "By token id; -100 bans.",
        ANY_OBJECT
        | {
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": nullable(number(-100, 100)),
        },
    ),
}
ANSWER: dict[str, Schema] = {
    "model": said("Any name is answered by the model served.", text()),
    "max_completion_tokens": said("Counts before max_tokens.", integer(1)),
    "max_tokens": integer(1),
    "min_tokens": integer(0),
    "stop": either(STOP, array(STOP, MAX_STOPS)),
    "stop_token_ids": array(nullable(integer(0)), MAX_STOP_IDS),
    "ignore_eos": TRUTH,
    "n": said("Answer k has the seed `seed + k`.", integer(1, MAX_N)),
    "stream": TRUTH,
    "stream_options": asked({}, {"include_usage": TRUTH, "continuous_usage_stats": TRUTH}),
    "fidelity": said("What becomes of a pick whose expert is not resident.", one(*get_args(Fidelity))),
    "loop_break": LOOP_BREAK,
    "include_stop_str_in_output": said("true: the stop string that ended the answer is part of it.", TRUTH),
    "cache_salt": CACHE_SALT,
    "x_engine_stats": said("false leaves the engine's figures out.", TRUTH),
}
EFFORT = either(one("none", *DEEPSEEK_V41.efforts), integer(1, 100), text(pattern="^0{0,2}[1-9]$|^0?[1-9][0-9]$|^100$"))
THINKING: dict[str, Schema] = {
    "reasoning_effort": EFFORT,
    "reasoning": asked({}, {"effort": EFFORT, "enabled": TRUTH, "exclude": said("Thought, but not sent.", TRUTH)}),
    "enable_thinking": TRUTH,
    "thinking": asked({}, {"type": one("enabled", "disabled")}),
    "chat_template_kwargs": said(
        "Others are ignored.",
        asked({}, {"thinking": TRUTH, "enable_thinking": TRUTH, "reasoning_effort": EFFORT, "clear_thinking": TRUTH}),
    ),
}

_PARTS = [asked({"type": always(kind), name: text()}) for kind, name in TEXT_PARTS.items()]
IMAGE_URL = either(text(1), asked({"url": text(1)}))
SEEN_NOWHERE = "Refused where the served model sees none."
_IMAGE = said(SEEN_NOWHERE, asked({"type": always("image_url"), "image_url": IMAGE_URL}))
_CALL = asked(
    {"function": asked({"name": text(1)}, {"arguments": said("JSON.", either(text(), ANY_OBJECT))})}, {"id": text()}
)
SEES = ("user", "tool")
BLIND = tuple(role for role in ROLES if role not in SEES)
_TURN: dict[str, Schema] = {
    "content": either(text(), array(either(*_PARTS), MAX_PARTS)),
    "tool_call_id": text(),
    "prefix": said("Of the last: go on.", TRUTH),
}
_SEEN: dict[str, Schema] = {"content": either(text(), array(either(*_PARTS, _IMAGE), MAX_PARTS))}
_ANSWERED: dict[str, Schema] = {
    "reasoning_content": text(),
    "reasoning": text(),
    "thinking": text(),
    "tool_calls": array(_CALL, MAX_CALLS),
}
_FUNCTION = asked(
    {"name": TOOL_NAMES}, {"description": text(), "parameters": asked({}, {"properties": ANY_OBJECT}), "strict": TRUTH}
)
_OTHER_TYPE: Schema = {"type": "string", "not": always("function")}

_NAMED = either(asked({"function": asked({"name": text(1)})}), asked({"name": text(1)}, {"function": NULL}))
_ALLOWED = asked({"tools": array(ANY_OBJECT | _NAMED, MAX_TOOLS, least=1)}, {"mode": one("auto", "required")})
TOOL_CHOICE = either(
    one("none", "auto", "required"),
    {"allOf": [asked({"type": always("function")}), _NAMED]},
    {
        "allOf": [
            asked({"type": always("allowed_tools")}),
            either(asked({"allowed_tools": _ALLOWED}), {"allOf": [asked({}, {"allowed_tools": NULL}), _ALLOWED]}),
        ]
    },
)

_SCHEMA = asked({"schema": ANY_OBJECT}, {"strict": TRUTH})
FORMAT = either(
    asked({}, {"type": one("text", "json_object")}),
    {
        "allOf": [
            asked({"type": always("json_schema")}),
            either(asked({"json_schema": _SCHEMA}), {"allOf": [asked({}, {"json_schema": NULL}), _SCHEMA]}),
        ]
    },
)

SCHEMAS: dict[str, Schema] = {
    "ChatMessage": either(
        asked({"role": always("assistant")}, _TURN | _ANSWERED),
        asked({"role": one(*SEES)}, _TURN | _SEEN),
        asked({"role": one(*(role for role in BLIND if role != "assistant"))}, _TURN),
    ),
    "ChatTool": said(
        "Tools of other types are left out where there are functions beside them.",
        either(asked({"function": _FUNCTION}, {"type": always("function")}), asked({"type": _OTHER_TYPE})),
    ),
    "ChatRequest": asked(
        {"messages": array(ref("ChatMessage"), MAX_MESSAGES, least=1)},
        ANSWER
        | SAMPLING
        | THINKING
        | {
            "tools": array(ref("ChatTool"), MAX_TOOLS),
            "tool_choice": TOOL_CHOICE,
            "parallel_tool_calls": TRUTH,
            "response_format": FORMAT,
            "logprobs": TRUTH,
            "top_logprobs": said("Needs logprobs.", integer(0, MAX_TOP_LOGPROBS)),
            "logprobs_include_reasoning": TRUTH,
            "include_reasoning": TRUTH,
            "separate_reasoning": said("false: inside the content.", TRUTH),
            "continue_final_message": TRUTH,
            "add_generation_prompt": TRUTH,
            "modalities": array({"not": always("audio")}, 16),
            "audio": NULL,
            "functions": NULL,
            "function_call": NULL,
        },
    ),
}  # fmt: skip
