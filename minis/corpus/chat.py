"""Frames shared by all dialogue generators."""

from __future__ import annotations

import random
from typing import Any

from minis.dialogue import Dialogue, Message

_BEFORE = [
    "Please tell me: ",
    "Could you tell me: ",
    "Tell me, ",
    "Quick question: ",
    "Hi! ",
    "Hello. ",
    "I would like to know: ",
]
_AFTER = [" Please be brief.", " Thanks!", " Thank you.", " Please."]
_SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Be brief.",
    "Be exact.",
    "Answer in one sentence.",
    "You are TideLM, a small and friendly assistant.",
    "You answer questions.",
]


def wrap(rng: random.Random, question: str) -> str:
    """A third of all questions get a frame, so that unseen wordings are understood too."""
    r = rng.random()
    if r < 0.17:
        return rng.choice(_BEFORE) + question
    if r < 0.33:
        return question + rng.choice(_AFTER)
    if r < 0.38:
        return question[0].lower() + question[1:]  # never the whole text: values must stay copyable
    return question


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str | None = None, calls: list[dict[str, Any]] | None = None) -> Message:
    m: Message = {"role": "assistant", "content": text}
    if reasoning is not None:
        m["reasoning_content"] = reasoning
    if calls:
        m["tool_calls"] = calls
    return m


def system(rng: random.Random, share: float = 0.25) -> list[Message]:
    return [{"role": "system", "content": rng.choice(_SYSTEMS)}] if rng.random() < share else []


def effort(rng: random.Random) -> int:
    return rng.choice([50, 75, 75, 100])


def turns(rng: random.Random, pairs: list[tuple[str, str]]) -> Dialogue:
    """Question and answer pairs -> one conversation without thinking."""
    messages = system(rng)
    for q, a in pairs:
        messages += [user(wrap(rng, q)), assistant(a)]
    return Dialogue(messages)


def fill(rng: random.Random, variants: list[str], **slots: Any) -> str:
    return rng.choice(variants).format(**slots)
