"""Random conversations render as DeepSeek's own package `deepseek-recipe` renders them, special tokens included.

What the package does not model is kept out by construction: system messages without text, efforts by number, quick
tasks, continued turns, a call forced after thinking or by the `any` of a message, the format of a message, and the
reasoning of a tool round in a request without tools (ours is kept).
"""

import json

from deepseek_recipe import ChatCompletionRequest, ConversionOptions, DeepseekV41Encoding, MessagesRequest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tided.api.chat_request import read_conversation
from tided.api.messages import parse_tools
from tided.api.shape import parse_choice, parse_format
from tided.chat.anthropic import parse_request
from tided.chat.deepseek_v41 import REQUIRED_SPECIALS, encode_prompt
from tided.chat.families import DEEPSEEK_V41
from tided.chat.fields import Fields
from tided.chat.messages import Prompt
from tided.chat.shape import AnswerShape

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [*REQUIRED_SPECIALS, "<tool_result>", "é潮🌊", "\n\n", " x ", '"\\']
)
FILLED = TEXT.filter(bool)
NAMES = st.sampled_from(["read_file", "run", "mcp__tide-db__query"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
KEYS = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5)
OBJECTS = st.dictionaries(KEYS, JSON, max_size=3)
SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(KEYS, st.just({}), max_size=2)}
)


@st.composite
def rounds(draw, with_tools: bool):
    """One question with its answer, perhaps by way of tool calls."""
    messages = [{"role": "user", "content": draw(TEXT)} for _ in range(draw(st.integers(1, 2)))]
    if with_tools and draw(st.booleans()):
        messages += draw(tool_rounds())
    if draw(st.integers(0, 3)) == 0:
        messages.append({"role": "system", "content": draw(FILLED)})
    return [*messages, draw(answers())]


@st.composite
def tool_rounds(draw):
    """Calls of an answer, and their results in any order."""
    ids = draw(st.permutations(["c1", "c2", "c3"][: draw(st.integers(1, 3))]))
    asked = {**draw(answers()), "tool_calls": [draw(calls(call_id)) for call_id in sorted(ids)]}
    return [asked, *({"role": "tool", "tool_call_id": call_id, "content": draw(TEXT)} for call_id in ids)]


@st.composite
def answers(draw):
    answer = {"role": "assistant", "content": draw(TEXT)}
    return answer | ({"reasoning_content": draw(TEXT)} if draw(st.booleans()) else {})


@st.composite
def calls(draw, call_id: str):
    arguments = json.dumps(draw(OBJECTS), ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": draw(NAMES), "arguments": arguments}}


@st.composite
def bodies(draw):
    names = draw(st.lists(NAMES, unique=True, max_size=3))
    tools = [
        {"type": "function", "function": {"name": name, "description": draw(TEXT), "parameters": draw(SCHEMAS)}}
        for name in names
    ]
    lead = [{"role": "system", "content": draw(FILLED)}] if draw(st.booleans()) else []
    past = [message for one in draw(st.lists(rounds(bool(names)), max_size=3)) for message in one]
    newest = draw(tool_rounds()) if tools and draw(st.booleans()) else []
    body = {"messages": [*lead, *past, {"role": "user", "content": draw(TEXT)}, *newest]}
    body |= {"tools": tools} if tools else {}
    if draw(st.booleans()):
        body["thinking"] = {"type": draw(st.sampled_from(["enabled", "disabled"]))}
    if draw(st.booleans()):
        body["reasoning_effort"] = draw(st.sampled_from(["low", "medium", "high", "xhigh", "max"]))
    if draw(st.integers(0, 3)) == 0:
        schema = {"name": "s", "schema": draw(SCHEMAS)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if tools and draw(st.booleans()):
        named = {"type": "function", "function": {"name": draw(st.sampled_from(names))}}
        forced = ["required", named] if body.get("thinking") == {"type": "disabled"} else []
        body["tool_choice"] = draw(st.sampled_from(["auto", *forced, *([] if newest else ["none"])]))
    return body


def spans(prompt: Prompt) -> list[tuple[int, int]]:
    found, at = [], 0
    for segment in prompt.segments:
        found += [(at, at + len(segment.text))] if segment.special else []
        at += len(segment.text)
    return found


def of_package(request: ChatCompletionRequest | MessagesRequest) -> tuple[str, list[tuple[int, int]]]:
    rendered = DeepseekV41Encoding().render_conversation(request.convert(ConversionOptions()).conversation)
    return rendered.prompt, rendered.special_ranges


@settings(max_examples=300, deadline=None)
@given(bodies())
def test_chat_completions(body):
    fields = Fields(body)
    tools = parse_tools(fields)
    shape = AnswerShape(choice=parse_choice(fields, tools), format=parse_format(fields))
    prompt = encode_prompt(read_conversation(fields, True, tools, shape, DEEPSEEK_V41))
    assert (prompt.text, spans(prompt)) == of_package(ChatCompletionRequest({"model": "DeepSeek-V4.1-Flash", **body}))


@st.composite
def messages_bodies(draw):
    tools = [{"name": name, "description": draw(TEXT), "input_schema": draw(SCHEMAS)} for name in ("read_file", "run")]
    messages = []
    for _ in range(draw(st.integers(0, 2))):
        messages.append({"role": "user", "content": draw(FILLED)})
        blocks = [{"type": "thinking", "thinking": draw(FILLED), "signature": "s"}] * draw(st.integers(0, 1))
        blocks += [{"type": "text", "text": draw(FILLED)}]
        if draw(st.booleans()):
            ids = draw(st.permutations(["c1", "c2"]))
            blocks += [{"type": "tool_use", "id": c, "name": draw(NAMES), "input": draw(OBJECTS)} for c in sorted(ids)]
            results = [{"type": "tool_result", "tool_use_id": c, "content": draw(FILLED)} for c in ids]
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
            blocks = [{"type": "text", "text": draw(FILLED)}]
        messages.append({"role": "assistant", "content": blocks})
    body = {"max_tokens": 10, "messages": [*messages, {"role": "user", "content": draw(FILLED)}], "tools": tools}
    body |= {"system": draw(FILLED)} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        body["output_config"] = {"effort": draw(st.sampled_from(["low", "medium", "high", "xhigh", "max"]))}
    if draw(st.booleans()):
        body["thinking"] = {"type": draw(st.sampled_from(["adaptive", "disabled"]))}
    kinds = ["auto", "none", *(["tool"] if body.get("thinking") == {"type": "disabled"} else [])]
    if draw(st.booleans()):
        kind = draw(st.sampled_from(kinds))
        body["tool_choice"] = {"type": kind} | ({"name": "run"} if kind == "tool" else {})
    return body


@settings(max_examples=300, deadline=None)
@given(messages_bodies())
def test_messages(body):
    assume(not str(body.get("system", "")).startswith("x-anthropic-billing-header:"))
    conversation, _ = parse_request(Fields(body), True, family=DEEPSEEK_V41)
    prompt = encode_prompt(conversation)
    assert (prompt.text, spans(prompt)) == of_package(MessagesRequest({"model": "DeepSeek-V4.1-Flash", **body}))
