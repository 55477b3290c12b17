"""The body of an Anthropic Messages request as a conversation.

System text, messages and tools become what every model format renders from; what clients send for billing, caching or
telemetry is left out, so that the same conversation is the same prompt.
"""

import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from tided.chat.anthropic_options import parse_shape, parse_thinking, parse_tools
from tided.chat.families import Family
from tided.chat.fields import Fields, refuse
from tided.chat.messages import Conversation, Image, Message, Part, ToolCall
from tided.chat.shape import AnswerShape

log = logging.getLogger("tided.chat")

MAX_MESSAGES, MAX_BLOCKS = 10_000, 10_000

# Claude Code's first line of the system text: it is another one with every request.
BILLING = "x-anthropic-billing-header:"

# Left out elsewhere, these would be lost without a word.
_ONLY_IN = {
    "thinking": "messages of the assistant",
    "tool_use": "messages of the assistant",
    "tool_result": "messages of the user",
}


def parse_request(body: Fields, thinking: bool, *, family: Family) -> tuple[Conversation, AnswerShape]:
    """`thinking`: of a request that does not say. Raises RequestError."""
    reader = _Reader()
    messages = reader.messages(body)
    system = reader.system(body)
    tools = parse_tools(body)
    shape = parse_shape(body, tools)
    on, effort = parse_thinking(body, thinking, family)
    last = messages[-1]
    conversation = Conversation(
        messages=((Message(role="system", parts=system), *messages) if system else messages),
        tools=shape.shown_tools(tools),
        thinking=on,
        effort=effort,
        schema=shape.shown_schema,
        must_call=shape.choice.mode == "required",
        continue_final=last.role == "assistant" and not last.calls,
    )
    return conversation, shape


class _Reader:
    def system(self, body: Fields) -> tuple[Part, ...]:
        given = body.get("system")
        if given is None or isinstance(given, str):
            return _filled(_without_billing(given or ""))
        parts = [part for block in _as_blocks(body, "system") for part in self._part(block)]
        return _paragraphs(_system_texts(parts))

    def messages(self, body: Fields) -> tuple[Message, ...]:
        given = body.array("messages", MAX_MESSAGES)
        if not given:
            refuse("messages", "expected an array of at least one message")
        merged: list[Message] = []
        for index, value in enumerate(given):
            for message in self._message(value, f"messages[{index}]"):
                before = merged[-1] if merged else None
                if before and before.role == message.role and message.role in ("assistant", "system"):
                    merged[-1] = _joined(before, message)
                else:
                    merged.append(message)
        if not merged:
            refuse("messages", "expected a message that says something")
        return tuple(merged)

    def _message(self, value: Any, path: str) -> list[Message]:
        if not isinstance(value, dict):
            refuse(path, "expected an object")
        fields = Fields(value, f"{path}.")
        role = fields.get("role")
        if role == "user":
            return list(self._user(fields))
        if role == "assistant":
            return [self._assistant(fields)]
        if role != "system":
            fields.wrong("role", "user, assistant or system")
        parts = _paragraphs(_system_texts(self._parts(fields)))
        return [Message(role="system", parts=parts)] if parts else []

    def _user(self, fields: Fields) -> Iterator[Message]:
        """Text and tool results in their order: neighbours share a block of the prompt."""
        content: list[Part | Message] = [*self._contents(fields)]
        run: list[Part] = []
        for entry in content:
            if not isinstance(entry, Message):
                run.append(entry)
                continue
            if run:
                yield Message(role="user", parts=tuple(run))
                run = []
            yield entry
        if run or not content:
            yield Message(role="user", parts=tuple(run))

    def _contents(self, fields: Fields) -> Iterator[Part | Message]:
        for block in _content(fields):
            if isinstance(block, str):
                yield block
            elif block.get("type") == "tool_result":
                call_id = block.string("tool_use_id")
                if call_id is None:
                    refuse(block.param("tool_use_id"), "expected the id of a tool_use block")
                parts = _paragraphs(self._parts(block, optional=True))
                yield Message(role="tool", parts=parts, call_id=call_id)
            else:
                yield from self._part(block)

    def _assistant(self, fields: Fields) -> Message:
        parts: list[Part] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for block in _content(fields):
            if isinstance(block, str):
                parts.append(block)
            elif block.get("type") == "thinking":
                reasoning.append(_text(block, "thinking"))
            elif block.get("type") == "tool_use":
                calls.append(_call(block))
            else:
                parts += self._part(block)
        return Message(role="assistant", parts=tuple(parts), reasoning="".join(reasoning), calls=tuple(calls))

    def _parts(self, fields: Fields, optional: bool = False) -> tuple[Part, ...]:
        """Text and images of `content`; empty texts say nothing."""
        found: list[Part] = []
        for block in _content(fields, optional):
            found += [block] if isinstance(block, str) else self._part(block)
        return tuple(found)

    def _part(self, block: Fields) -> list[Part]:
        kind = block.get("type")
        if kind == "text":
            return list(_filled(_text(block, "text")))
        if kind == "image":
            return [self._image(block)]
        if kind == "document":
            return list(_filled(_document(block)))
        if kind == "search_result":
            return [part for text in _as_blocks(block, "content") for part in self._found(text)]
        if not isinstance(kind, str):
            block.wrong("type", "the type of a content block")
        if kind in _ONLY_IN:
            refuse(block.param("type"), f"a {kind} block may stand only in {_ONLY_IN[kind]}")
        log.debug("a content block of an unknown type is left out")  # or reasoning that nobody can read
        return []

    def _found(self, block: Fields) -> list[Part]:
        """What a search found is text."""
        if block.get("type") != "text":
            block.wrong("type", "text")
        return self._part(block)

    def _image(self, block: Fields) -> Image:
        source = block.fields("source")
        place = block.path[:-1]
        if source.get("type") == "url":
            return Image(_text(source, "url"), place)
        if source.get("type") != "base64":
            source.wrong("type", "base64 or url")
        return Image(f"data:{_text(source, 'media_type')};base64,{_text(source, 'data')}", place)


def _content(fields: Fields, optional: bool = False) -> Iterator[str | Fields]:
    given = fields.get("content")
    if isinstance(given, str):
        yield from _filled(given)
    elif given is not None or not optional:
        yield from _as_blocks(fields, "content")


def _as_blocks(fields: Fields, name: str) -> Iterator[Fields]:
    if not isinstance(fields.get(name), list):
        fields.wrong(name, "a string or an array of content blocks")
    for index, block in enumerate(fields.array(name, MAX_BLOCKS) or ()):
        path = f"{fields.param(name)}[{index}]"
        if not isinstance(block, dict):
            refuse(path, "expected a content block")
        yield Fields(block, f"{path}.")


def _paragraphs(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Neighbouring texts as one, with blank lines between them, whatever a model's format puts between parts."""
    joined: list[Part] = []
    for part in parts:
        before = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(before, str):
            joined[-1] = f"{before}\n\n{part}"
        else:
            joined.append(part)
    return tuple(joined)


def _filled(text: str) -> tuple[str, ...]:
    return (text,) if text else ()


def _system_texts(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, Image):
            refuse(part.param, "an image may stand in messages of the user, and in tool results")
        yield from _filled(_without_billing(part))


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _text(fields: Fields, name: str) -> str:
    text = fields.string(name)
    if text is None:
        refuse(fields.param(name), "expected a string")
    return text


def _document(block: Fields) -> str:
    source = block.fields("source")
    if source.get("type") != "text":
        refuse(source.param("type"), "only documents of plain text are supported")
    return _text(source, "data")


def _call(block: Fields) -> ToolCall:
    name = _text(block, "name")
    if not name:
        refuse(block.param("name"), "expected the name of a tool")
    given = block.fields("input").values
    return ToolCall(id=_text(block, "id"), name=name, arguments=json.dumps(given, ensure_ascii=False))


def _joined(first: Message, second: Message) -> Message:
    parts = first.parts + second.parts
    return msgspec.structs.replace(
        first,
        parts=_paragraphs(parts) if first.role == "system" else parts,
        reasoning=first.reasoning + second.reasoning,
        calls=first.calls + second.calls,
    )
