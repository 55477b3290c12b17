"""What is answered. Objects hold the names that are told here and no others, but for the engine's figures."""

from tided.api.openapi.terms import (
    ANY_NUMBER,
    ANY_OBJECT,
    COUNT,
    NULL,
    TRUTH,
    Schema,
    always,
    array,
    either,
    nullable,
    one,
    ref,
    said,
    text,
    told,
)

_LINE = text(1)
_DETAILS = {"prompt_tokens_details": told({"cached_tokens": COUNT, "image_tokens": COUNT})}
_REASONED = told({"reasoning_tokens": COUNT})
_USAGE = told(
    dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT)
    | _DETAILS
    | {"completion_tokens_details": _REASONED, "prompt_cache_hit_tokens": COUNT, "prompt_cache_miss_tokens": COUNT}
)
_FIGURES = {"x_engine_stats": said("What the answer cost.", ANY_OBJECT)}

_BYTES = array({"type": "integer", "minimum": 0, "maximum": 255})
_TOKEN: dict[str, Schema] = {"token": text(), "logprob": ANY_NUMBER, "bytes": _BYTES}
_LOGPROB_LIST = array(told(_TOKEN | {"top_logprobs": array(told(_TOKEN))}))
_LOGPROBS = nullable(told({"content": _LOGPROB_LIST, "refusal": NULL}))
_CALL = told({"id": text(), "type": always("function"), "function": told({"name": text(), "arguments": text()})})
_CALL_DELTA = told(
    {"index": COUNT, "function": told({"arguments": text()}, {"name": text()})},
    {"id": text(), "type": always("function")},
)
_ENDED = one("stop", "length", "tool_calls")
_MATCHED = {"stop_reason": said("The stop string that ended it.", nullable(text()))}
_ENVELOPE: dict[str, Schema] = {"id": text(), "created": COUNT, "model": text(), "system_fingerprint": text()}

_CHAT: dict[str, Schema] = {
    "Usage": _USAGE,
    "ChatReply": told(
        _ENVELOPE
        | {
            "object": always("chat.completion"),
            "choices": array(
                told(
                    {
                        "index": COUNT,
                        "message": told(
                            {"role": always("assistant"), "content": nullable(text()), "refusal": NULL},
                            {"reasoning_content": text(1), "tool_calls": array(_CALL, least=1)},
                        ),
                        "logprobs": _LOGPROBS,
                        "finish_reason": _ENDED,
                    }
                    | _MATCHED,
                    {"x_reasoning_logprobs": _LOGPROB_LIST},
                ),
                least=1,
            ),
            "usage": ref("Usage"),
        },
        _FIGURES,
    ),
    "ChatChunk": either(
        told(
            _ENVELOPE
            | {
                "object": always("chat.completion.chunk"),
                "choices": array(
                    told(
                        {
                            "index": COUNT,
                            "delta": told(
                                {},
                                {
                                    "role": always("assistant"),
                                    "content": text(),
                                    "reasoning_content": text(1),
                                    "tool_calls": array(_CALL_DELTA, 1, least=1),
                                },
                            ),
                            "logprobs": _LOGPROBS,
                            "finish_reason": nullable(_ENDED),
                        },
                        _MATCHED | {"x_reasoning_logprobs": _LOGPROB_LIST},
                    ),
                    1,
                ),
            },
            _FIGURES | {"usage": nullable(ref("Usage"))},
        ),
        ref("Error"),
    ),
}

_OLD_LOGPROBS = nullable(
    told(
        {
            "tokens": array(text()),
            "token_logprobs": said("Of a prompt's first token null.", array(nullable(ANY_NUMBER))),
            "top_logprobs": array(nullable({"type": "object", "additionalProperties": ANY_NUMBER})),
            "text_offset": array(COUNT),
        }
    )
)


_RANKED = nullable(
    {
        "type": "object",
        "additionalProperties": told({"logprob": ANY_NUMBER, "rank": COUNT, "decoded_token": text()}),
    }
)
_BY_ID = {"prompt_logprobs": said("By token id; of a prompt's first token null.", array(_RANKED))}


def _completed(ended: Schema, more: dict[str, Schema]) -> Schema:
    return told({"index": COUNT, "text": text(), "logprobs": _OLD_LOGPROBS, "finish_reason": ended}, more)


_COMPLETION = _ENVELOPE | {"object": always("text_completion")}
_COMPLETIONS: dict[str, Schema] = {
    "CompletionReply": told(
        _COMPLETION | {"choices": array(_completed(_ENDED, _MATCHED | _BY_ID), least=1), "usage": ref("Usage")},
        _FIGURES,
    ),
    "CompletionChunk": either(
        told(
            _COMPLETION | {"choices": array(_completed(nullable(_ENDED), _MATCHED | _BY_ID), 1)},
            _FIGURES | {"usage": nullable(ref("Usage"))},
        ),
        ref("Error"),
    ),
}

_ITEM_STATUS = one("in_progress", "completed", "incomplete")
_PART = either(
    told({"type": always("reasoning_text"), "text": text()}),
    told({"type": always("output_text"), "text": text(), "annotations": array({}, 0), "logprobs": array({}, 0)}),
)
_ITEM = {"id": text(), "status": _ITEM_STATUS}
_OUTPUT = either(
    told(_ITEM | {"type": always("reasoning"), "summary": array({}, 0), "content": array(_PART, 1)}),
    told(_ITEM | {"type": always("message"), "role": always("assistant"), "content": array(_PART, 1)}),
    told(_ITEM | {"type": always("function_call"), "call_id": text(), "name": text(), "arguments": text()}),
)
_RESPONSE_USAGE = told(
    {
        "input_tokens": COUNT,
        "input_tokens_details": told({"cached_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": _REASONED,
        "total_tokens": COUNT,
    }
)
_RESPONSES: dict[str, Schema] = {
    "ResponseReply": told(
        {
            "id": text(),
            "object": always("response"),
            "created_at": COUNT,
            "status": one("in_progress", "completed", "incomplete", "failed"),
            "error": nullable(told({"code": text(), "message": _LINE})),
            "incomplete_details": nullable(told({"reason": always("max_output_tokens")})),
            "model": text(),
            "output": array(_OUTPUT),
            "instructions": nullable(text()),
            "max_output_tokens": nullable(COUNT),
            "parallel_tool_calls": TRUTH,
            "previous_response_id": NULL,
            "reasoning": told({"effort": {}, "summary": NULL}),
            "store": always(False),
            "temperature": ANY_NUMBER,
            "text": told({"format": ANY_OBJECT}),
            "tool_choice": {},
            "tools": array(ANY_OBJECT),
            "top_p": ANY_NUMBER,
            "truncation": always("disabled"),
            "metadata": ANY_OBJECT,
            "usage": nullable(_RESPONSE_USAGE),
        },
        _FIGURES,
    ),
    "ResponseEvent": said(
        "Numbered from 0; the whole response with the first two and the last.",
        {
            "type": "object",
            "properties": {
                "type": text(pattern=r"^response\."),
                "sequence_number": COUNT,
                "response": ref("ResponseReply"),
                "output_index": COUNT,
                "item": _OUTPUT,
                "item_id": text(),
                "content_index": COUNT,
                "part": _PART,
                "delta": text(1),
                "text": text(),
                "name": text(),
                "arguments": text(),
                "logprobs": array({}, 0),
            },
            "required": ["type", "sequence_number"],
            "additionalProperties": False,
        },
    ),
}

_ANTHROPIC_USAGE = told(
    {
        "input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "cache_creation_input_tokens": COUNT,
        "output_tokens": COUNT,
        "service_tier": always("standard"),
    }
)
_BLOCK = either(
    told({"type": always("thinking"), "thinking": text(), "signature": text()}),
    told({"type": always("text"), "text": text()}),
    told({"type": always("tool_use"), "id": text(), "name": text(), "input": ANY_OBJECT}),
)
_STOP = {
    "stop_reason": nullable(one("end_turn", "max_tokens", "stop_sequence", "tool_use")),
    "stop_sequence": nullable(text()),
}
_DELTA = either(
    told({"type": always("thinking_delta"), "thinking": text(1)}),
    told({"type": always("signature_delta"), "signature": text(1)}),
    told({"type": always("text_delta"), "text": text(1)}),
    told({"type": always("input_json_delta"), "partial_json": text()}),
)
_STARTED, _AT = ref("MessageReply"), {"index": COUNT}
_ANTHROPIC: dict[str, Schema] = {
    "MessageReply": told(
        {
            "id": text(),
            "type": always("message"),
            "role": always("assistant"),
            "model": text(),
            "content": array(_BLOCK),
            "usage": _ANTHROPIC_USAGE,
        }
        | _STOP,
        _FIGURES,
    ),
    "MessageEvent": either(
        told({"type": always("message_start"), "message": _STARTED}),
        told({"type": always("ping")}),
        told({"type": always("content_block_start"), "content_block": _BLOCK} | _AT),
        told({"type": always("content_block_delta"), "delta": _DELTA} | _AT),
        told({"type": always("content_block_stop")} | _AT),
        told({"type": always("message_delta"), "delta": told(_STOP), "usage": _ANTHROPIC_USAGE}, _FIGURES),
        told({"type": always("message_stop")}),
        ref("AnthropicError"),
    ),
    "TokenCount": told({"input_tokens": COUNT}),
}

SCHEMAS = _CHAT | _COMPLETIONS | _RESPONSES | _ANTHROPIC
