"""The shapes of Anthropic's messages: events of a stream, and the whole reply.

    message_start, ping, { content_block_start, content_block_delta…, content_block_stop }, message_delta, message_stop

A block opens with its first text, one at a time, indexes 0, 1, 2: thinking (closed by its signature), text, tool_use.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from tided.api.errors import anthropic_error_body
from tided.api.generation import Generation
from tided.api.sse import event
from tided.chat.deltas import CallArguments, CallStarted, Content, Delta, Reasoning
from tided.errors import RequestError

Block = dict[str, Any]
Kind = Literal["thinking", "text", "tool_use"]

PING = event({"type": "ping"})


class MessageWire:
    """`exchange.Writer` of messages. `model`: the name that was asked for; `request_id` is told with faults."""

    def __init__(self, generation: Generation, model: str, request_id: str) -> None:
        self._generation, self._model, self._request_id = generation, model, request_id
        self._begun = False
        self._blocks = 0
        self._open: Kind | None = None
        self._arguments = False  # of the open call: any were sent
        self._thought: list[str] = []

    def begin(self) -> str:
        if self._begun:
            return ""
        self._begun = True
        return event({"type": "message_start", "message": self._message([], None, None, self._usage(0))}) + PING

    def pieces(self, deltas: Sequence[Delta]) -> str:
        return "".join(map(event, self._pieces(deltas)))

    def silence(self) -> str:
        """A ping is an event, and none may come before message_start."""
        return PING if self._begun else ": keep-alive\n\n"

    def end(self) -> str:
        last = {
            "type": "message_delta",
            "delta": self._stop(),
            "usage": self._usage(self._generation.completion_tokens),
        } | self._stats()
        closing = [*self._close(), last, {"type": "message_stop"}]
        return self.begin() + "".join(map(event, closing))

    def fault(self, error: RequestError) -> str:
        return event(anthropic_error_body(error, self._request_id))

    def reply(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        thought = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        said = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        blocks: list[Block] = []
        blocks += [{"type": "thinking", "thinking": thought, "signature": signature(thought)}] if thought else []
        blocks += [{"type": "text", "text": said}] if said else []
        blocks += [block for block in map(_tool_use, self._generation.reader.parser.calls) if block]
        stop, usage = self._stop(), self._usage(self._generation.completion_tokens)
        return self._message(blocks, stop["stop_reason"], stop["stop_sequence"], usage) | self._stats()

    def _pieces(self, deltas: Sequence[Delta]) -> Iterator[Block]:
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    yield from self._opened("thinking", {"thinking": "", "signature": ""})
                    self._thought.append(text)
                    yield self._delta({"type": "thinking_delta", "thinking": text})
                case Content(text):
                    yield from self._opened("text", {"text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case CallStarted(_, call_id, name):
                    yield from self._close()
                    yield from self._opened("tool_use", {"id": tool_use_id(call_id), "name": name, "input": {}})
                case CallArguments(_, text):
                    self._arguments = True
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def _opened(self, kind: Kind, fields: Block) -> Iterator[Block]:
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield {"type": "content_block_start", "index": self._blocks, "content_block": {"type": kind, **fields}}

    def _close(self) -> Iterator[Block]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature("".join(self._thought))})
            self._thought = []
        if self._open == "tool_use" and not self._arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": "{}"})
        yield {"type": "content_block_stop", "index": self._blocks}
        self._blocks += 1
        self._open, self._arguments = None, False

    def _delta(self, delta: Block) -> Block:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _message(
        self, content: list[Block], stop_reason: str | None, stop_sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._generation.prepared.request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }

    def _stop(self) -> dict[str, Any]:
        parser = self._generation.reader.parser
        if parser.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": parser.stop_string}
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(parser.finish_reason, "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        """The three input counts add up to the prompt."""
        usage = self._generation.usage()
        return {
            "input_tokens": usage["prompt_cache_miss_tokens"],
            "cache_read_input_tokens": usage["prompt_cache_hit_tokens"],
            "cache_creation_input_tokens": 0,
            "output_tokens": output_tokens,
            "service_tier": "standard",
        }

    def _stats(self) -> dict[str, Any]:
        return {"x_engine_stats": self._generation.engine_stats()} if self._generation.prepared.chat.show_stats else {}


def signature(thought: str) -> str:
    """An opaque token that clients send back with the block; nobody verifies it."""
    return hashlib.sha256(thought.encode()).hexdigest()


def tool_use_id(call_id: str) -> str:
    return "toolu_" + call_id.removeprefix("call_")


def _tool_use(call: Any) -> Block | None:
    """None for a call that was cut: its arguments are no object."""
    try:
        given = json.loads(call.arguments)
    except ValueError:
        return None
    if not isinstance(given, dict):
        return None
    return {"type": "tool_use", "id": tool_use_id(call.id), "name": call.name, "input": given}
