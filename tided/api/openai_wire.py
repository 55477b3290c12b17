"""The shapes of OpenAI's chat completions: chunks of a stream, and the whole reply."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from tided.api.answers import Answers, Piece
from tided.api.chunks import Chunks
from tided.api.generation import Generation
from tided.api.logprob_json import LogprobJson
from tided.api.sse import data
from tided.chat.deltas import CallArguments, CallStarted, Content, Delta, Reasoning
from tided.chat.tokenizer import Tokenizer

# How reasoning stands in the text for clients that ask for it there, whatever the model's own tokens are.
THINK, END_THINK = "<think>", "</think>"


class ChatWire(Chunks):
    """`exchange.Writer` of chat completions. All chunks of a reply share id, time, model and fingerprint."""

    def __init__(self, answers: Answers, tokenizer: Tokenizer, model: str, fingerprint: str) -> None:
        self._answers, self._chat = answers, answers.prepared.chat
        self._id, self._created = answers.prepared.request.request_id, int(time.time())
        self._model, self._fingerprint = model, fingerprint
        logprobs = LogprobJson(tokenizer)
        self._choices = [_Choice(at, generation, logprobs) for at, generation in enumerate(answers.generations)]

    def begin(self) -> str:
        return "".join(data(self._begin(choice)) for choice in self._choices if choice.generation.started)

    def _begin(self, choice: "_Choice") -> Iterator[dict[str, Any]]:
        """The choice's role, once."""
        if not choice.role_sent:
            choice.role_sent = True
            yield self._chunk([choice.chunk({"role": "assistant", "content": ""})])

    def _pieces(self, deltas: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        for at, delta in deltas:
            choice = self._choices[at]
            for shown in choice.shown(delta):
                yield from self._begin(choice)
                yield self._chunk([choice.chunk(_delta(shown), shown)])
        if len(self._choices) > 1:
            # Of several each has its last chunk when it ends; of one it comes with the end of the stream.
            for choice in self._choices:
                if choice.generation.over and not choice.ended:
                    yield from self._last(choice)

    def _last(self, choice: "_Choice") -> Iterator[dict[str, Any]]:
        choice.ended = True
        yield from self._begin(choice)
        for shown in choice.rest():
            yield self._chunk([choice.chunk(_delta(shown), shown)])
        parser = choice.generation.reader.parser
        last = choice.chunk({}, finish_reason=parser.finish_reason)
        if parser.stop_string is not None:
            last["stop_reason"] = parser.stop_string
        yield self._chunk([last]) | self._stats(choice)

    def _end(self) -> Iterator[dict[str, Any]]:
        """The chunks with finish reasons, and the usage chunk where it was asked for."""
        for choice in self._choices:
            if not choice.ended:
                yield from self._last(choice)
        if self._chat.usage_chunk:
            yield self._chunk([]) | {"usage": self._answers.usage()}

    def reply(self, deltas: Sequence[Piece]) -> dict[str, Any]:
        choices = [choice.whole([delta for at, delta in deltas if at == choice.index]) for choice in self._choices]
        usage = {"usage": self._answers.usage()}
        return self._envelope("chat.completion", choices) | usage | self._stats(self._choices[0])

    def _stats(self, choice: "_Choice") -> dict[str, Any]:
        return {"x_engine_stats": choice.generation.engine_stats()} if self._chat.show_stats else {}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope("chat.completion.chunk", choices)
        if self._chat.usage_everywhere:
            chunk["usage"] = self._answers.usage()
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


class _Choice:
    """One answer of the reply."""

    def __init__(self, index: int, generation: Generation, logprobs: LogprobJson) -> None:
        self.index, self.generation = index, generation
        self.role_sent = self.ended = False
        self._chat, self._logprobs = generation.prepared.chat, logprobs
        self._thinking = False  # `<think>` is in the text, and not closed

    def shown(self, delta: Delta) -> list[Delta]:
        """The piece as the client wants it: reasoning apart, in the text, or not at all."""
        if not isinstance(delta, Reasoning):
            return [*self.rest(), delta]
        if not self._chat.show_reasoning:
            return []
        if self._chat.reasoning_apart:
            return [delta]
        opening, self._thinking = "" if self._thinking else THINK, True
        return [Content(opening + delta.text)]

    def rest(self) -> list[Delta]:
        """What closes reasoning that stands in the text."""
        closing, self._thinking = self._thinking, False
        return [Content(END_THINK)] if closing else []

    def chunk(
        self, delta: dict[str, Any], shown: Delta | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        """Log probabilities go with the next text of their kind, what is left with the last chunk."""
        last = finish_reason is not None
        content = self._content_logprobs() if last or isinstance(shown, Content) else None
        chunk = {"index": self.index, "delta": delta, "logprobs": content, "finish_reason": finish_reason}
        return chunk | (self._reasoning_logprobs() if last or isinstance(shown, Reasoning) else {})

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        parser = self.generation.reader.parser
        return {
            "index": self.index,
            "message": self._message([shown for delta in deltas for shown in self.shown(delta)] + self.rest()),
            "logprobs": self._content_logprobs(),
            "finish_reason": parser.finish_reason,
            "stop_reason": parser.stop_string,
            **self._reasoning_logprobs(),
        }

    def _message(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.generation.reader.parser.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        return message | {"refusal": None}

    def _content_logprobs(self) -> dict[str, Any] | None:
        if self._chat.logprobs is None:
            return None
        return {"content": self._logprobs.chat(self.generation.reader.take_logprobs("content")), "refusal": None}

    def _reasoning_logprobs(self) -> dict[str, Any]:
        if self._chat.logprobs is None or not self._chat.reasoning_logprobs:
            return {}
        return {"x_reasoning_logprobs": self._logprobs.chat(self.generation.reader.take_logprobs("reasoning"))}


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
