"""The shapes of OpenAI's chat completions: chunks of a stream, and the whole reply."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from tided.api.errors import error_body
from tided.api.generation import Generation
from tided.api.sse import DONE, comment, data
from tided.chat.deltas import CallArguments, CallStarted, Content, Delta, Reasoning
from tided.errors import RequestError


class ChatWire:
    """`exchange.Writer` of chat completions. All chunks of a reply share id, time, model and fingerprint."""

    def __init__(self, generation: Generation, model: str, fingerprint: str) -> None:
        self._generation, self._chat = generation, generation.prepared.chat
        self._id, self._created = generation.prepared.request.request_id, int(time.time())
        self._model, self._fingerprint = model, fingerprint
        self._role_sent = False

    def begin(self) -> str:
        return data(self._begin())

    def pieces(self, deltas: Sequence[Delta]) -> str:
        return data(self._pieces(deltas))

    def silence(self) -> str:
        return comment("keep-alive")

    def end(self) -> str:
        return data(self._end()) + DONE

    def fault(self, error: RequestError) -> str:
        return data([error_body(error)]) + DONE

    def _begin(self) -> Iterator[dict[str, Any]]:
        """The role's chunk, once."""
        if not self._role_sent:
            self._role_sent = True
            yield self._chunk([_choice({"role": "assistant", "content": ""})])

    def _pieces(self, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        for delta in deltas:
            if self._shown(delta):
                yield from self._begin()
                yield self._chunk([_choice(_delta(delta))])

    def _end(self) -> Iterator[dict[str, Any]]:
        """The chunk with the finish reason, and the usage chunk where it was asked for."""
        yield from self._begin()
        parser = self._generation.reader.parser
        choice = _choice({}, parser.finish_reason)
        if parser.stop_string is not None:
            choice["stop_reason"] = parser.stop_string
        yield self._chunk([choice]) | self._stats()
        if self._chat.usage_chunk:
            yield self._chunk([]) | {"usage": self._generation.usage()}

    def reply(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        parser = self._generation.reader.parser
        choice = {
            "index": 0,
            "message": self._message(deltas),
            "logprobs": None,
            "finish_reason": parser.finish_reason,
            "stop_reason": parser.stop_string,
        }
        return self._envelope("chat.completion", [choice]) | {"usage": self._generation.usage()} | self._stats()

    def _message(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning) and self._shown(delta))
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self._generation.reader.parser.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        return message | {"refusal": None}

    def _shown(self, delta: Delta) -> bool:
        return self._chat.show_reasoning or not isinstance(delta, Reasoning)

    def _stats(self) -> dict[str, Any]:
        return {"x_engine_stats": self._generation.engine_stats()} if self._chat.show_stats else {}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope("chat.completion.chunk", choices)
        if self._chat.usage_everywhere:
            chunk["usage"] = self._generation.usage()
        elif self._chat.usage_chunk:
            chunk["usage"] = None
        return chunk

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }


def _choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _delta(delta: Delta) -> dict[str, Any]:
    match delta:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case CallStarted(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
