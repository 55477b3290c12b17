"""Chat format of GLM-5.3 for training: the engine's own prompts, with a loss weight on what the model has to write."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from minis.dialogue import PROMPT_WEIGHT, Dialogue, Message, Segment
from tided.chat import glm53
from tided.chat.messages import Conversation, Tool, ToolCall
from tided.chat.messages import Message as ChatMessage
from tided.chat.messages import Segment as ChatSegment

OPENING = glm53.BEGIN
FIRST_SPECIALS = [*glm53.BEGIN, glm53.END_OF_TEXT]
TOP_SPECIALS = [
    "[MASK]",
    "[sMASK]",
    "<eop>",
    glm53.SYSTEM,
    glm53.USER,
    glm53.ASSISTANT,
    glm53.OBSERVATION,
    glm53.THINK,
    glm53.END_THINK,
    glm53.CALL,
    glm53.END_CALL,
    glm53.RESULT,
    glm53.END_RESULT,
    glm53.KEY,
    glm53.END_KEY,
    glm53.VALUE,
    glm53.END_VALUE,
]
EFFORTS = (25, 75, 100)  # Low, High, Max


def _message(m: Message) -> ChatMessage:
    calls = tuple(
        ToolCall(c.get("id", ""), c["function"]["name"], c["function"]["arguments"]) for c in m.get("tool_calls") or ()
    )
    text = m.get("content") or ""
    return ChatMessage(m["role"], (text,), m.get("reasoning_content") or "", calls, m.get("tool_call_id"))


def conversation(d: Dialogue, open_turn: bool) -> Conversation:
    tools = tuple(Tool(t["function"]["name"], t["function"]) for t in d.tools or ())
    messages = tuple(map(_message, d.messages))
    return Conversation(messages=messages, tools=tools, thinking=d.thinking, effort=d.effort, open_turn=open_turn)


def render(d: Dialogue, generate: bool = False) -> list[Segment]:
    """`generate` opens the assistant turn that the model shall write. Without it the opener of the turn that would
    follow ends the document: turns have no other end."""
    segments = weighted(glm53.encode_prompt(conversation(d, generate)).segments, d.thinking)
    if not generate:
        calls = bool(d.messages[-1].get("tool_calls"))
        segments.append(Segment(glm53.OBSERVATION if calls else glm53.USER, True, 1.0))
    return segments


def weighted(segments: Iterable[ChatSegment], thinking: bool) -> list[Segment]:
    """The model writes what follows <think>, up to and with the opener of the next turn. Without thinking the prompt
    closes the reasoning itself."""
    found: list[Segment] = []
    writing = closing = False
    for s in segments:
        weight = 0.0 if s.special and s.text in OPENING else 1.0 if writing and not closing else PROMPT_WEIGHT
        found.append(Segment(s.text, s.special, weight))
        closing = s.special and s.text == glm53.THINK and not thinking
        if s.special and s.text == glm53.THINK:
            writing = True
        elif s.special and s.text in (glm53.USER, glm53.OBSERVATION, glm53.SYSTEM):
            writing = False
    return found


def training_render(d: Dialogue, rng: random.Random) -> list[Segment]:
    """The format knows no conversation without thinking but one with an empty reasoning: half of those are left for the
    model to close, so that it does not reason where there is nothing to."""
    thinking = d.thinking or rng.random() < 0.5
    return render(replace(d, thinking=thinking, effort=rng.choice(EFFORTS)))
