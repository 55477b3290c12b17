"""What completions and Responses take."""

from tided.api.completions_request import MAX_LOGPROBS, MAX_PROMPT_LOGPROBS, MAX_PROMPTS
from tided.api.messages import MAX_PARTS, MAX_TOOLS
from tided.api.openapi.chat import (
    ANSWER,
    BLIND,
    FORMAT,
    IMAGE_URL,
    SAMPLING,
    SEEN_NOWHERE,
    SEES,
    THINKING,
    TOOL_CHOICE,
    TOOL_NAMES,
)
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
    one,
    ref,
    said,
    text,
)
from tided.api.responses_request import MAX_ITEMS

_IDS = array(integer(0))
_PROMPT = said(
    "A text or token ids, or several of either.", either(text(), _IDS, array(either(text(), _IDS), MAX_PROMPTS))
)
_TEXTS = either(
    asked({"type": one("input_text", "output_text", "text"), "text": text()}),
    asked({"type": always("refusal"), "refusal": text()}),
)
_IMAGE = said(SEEN_NOWHERE, asked({"type": one("input_image", "image_url"), "image_url": IMAGE_URL}))
_SAID = either(text(), array(_TEXTS, MAX_PARTS))
_SEEN = either(text(), array(either(_TEXTS, _IMAGE), MAX_PARTS))
_FUNCTION = asked(
    {"name": TOOL_NAMES}, {"description": text(), "parameters": asked({}, {"properties": ANY_OBJECT}), "strict": TRUTH}
)
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed")

SCHEMAS: dict[str, Schema] = {
    "CompletionRequest": asked(
        {},
        ANSWER
        | SAMPLING
        | {
            "prompt": _PROMPT,
            "add_bos": said("false: without the beginning token.", TRUTH),
            "parse_special": said("false: spellings of special tokens are text.", TRUTH),
            "max_tokens": said("0 with echo or prompt_logprobs: the prompt alone is told.", integer(0)),
            "echo": said("Beside logprobs the prompt's own are told too.", TRUTH),
            "logprobs": integer(0, MAX_LOGPROBS),
            "prompt_logprobs": said(
                "The prompt's tokens with their ranks, by id, and beside each so many of the likeliest.",
                integer(0, MAX_PROMPT_LOGPROBS),
            ),
            "adapt": said("false, of a prompt that is scored alone: nobody learns from it, no expert moves.", TRUTH),
            "best_of": said("Only where it equals n.", integer(1)),
            "suffix": text(0, 0),
        },
    ),
    "ResponseItem": either(
        asked({"role": one(*SEES)}, {"type": always("message"), "content": _SEEN}),
        asked({"role": one(*BLIND)}, {"type": always("message"), "content": _SAID}),
        asked({"type": always("reasoning")}, {"content": array(asked({}, {"text": text()}), MAX_ITEMS)}),
        asked({"type": always("function_call"), "name": text(1)}, {"call_id": text(), "arguments": text()}),
        asked({"type": always("function_call_output")}, {"call_id": text(), "output": _SEEN}),
    ),
    "ResponseRequest": asked(
        {"input": either(text(), array(ref("ResponseItem"), MAX_ITEMS, least=1))},
        {name: ANSWER[name] for name in ("model", "stream", "fidelity", "loop_break", "ignore_eos", "x_engine_stats")}
        | {"cache_salt": ANSWER["cache_salt"]}
        | {name: SAMPLING[name] for name in _SAME}
        | {name: THINKING[name] for name in ("enable_thinking", "chat_template_kwargs")}
        | {
            "reasoning": said("A summary is never made.", THINKING["reasoning"]),
            "instructions": text(),
            "max_output_tokens": integer(1),
            "parallel_tool_calls": TRUTH,
            "tool_choice": TOOL_CHOICE,
            "tools": array(ref("ResponseTool"), MAX_TOOLS),
            "metadata": said("Repeated in the reply where it is an object.", {}),
            "text": asked({}, {"format": FORMAT}),
            "background": said("Only false.", one(False)),
            "previous_response_id": NULL,
            "conversation": NULL,
            "prompt": NULL,
        },
    ),
    "ResponseTool": either(
        {"allOf": [asked({}, {"type": always("function")}), _FUNCTION]},
        asked({"type": {"type": "string", "not": always("function")}}),
    ),
}  # fmt: skip
