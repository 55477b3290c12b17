"""POST /v1/completions: the shapes of OpenAI's completions, in a stream and whole."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from tided.api.answers import Answers, Piece
from tided.api.completions_request import PreparedCompletion, prepare_completion
from tided.api.context import CONTEXT, NOTE
from tided.api.errors import error_body
from tided.api.exchange import answer_in_pieces, answer_whole, receive
from tided.api.logprob_json import LEAST, LogprobJson
from tided.api.served import ServedModel
from tided.api.slots import Alive
from tided.api.sse import DONE, comment, data
from tided.chat.deltas import Content
from tided.errors import RequestError


async def completions(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]

    def work(body: bytes | bytearray, alive: Alive) -> PreparedCompletion:
        return prepare_completion(body, context.served, alive)

    with context.admission.place(request.content_length) as place:
        completion = await receive(request, context, place, work)
        if request.headers.get("x-engine-stats") == "0":
            completion = completion.without_stats()
        chat = completion.prepared[0].chat
        answers = Answers(context.engine, completion.prepared, context.served, context.limits.keepalive_s, each=chat.n)
    request[NOTE].generation = answers
    wire = CompletionWire(answers, completion.echoes, context.served, context.fingerprint)
    try:
        if chat.stream:
            return await answer_in_pieces(request, context, answers, wire, request[NOTE])
        return await answer_whole(context, answers, wire)
    finally:
        answers.close()


class CompletionWire:
    """`exchange.Writer` of completions."""

    def __init__(self, answers: Answers, echoes: Sequence[str], served: ServedModel, fingerprint: str) -> None:
        self._answers, self._chat, self._echoes = answers, answers.prepared.chat, list(echoes)
        self._id, self._created = answers.prepared.request.request_id, int(time.time())
        self._model, self._fingerprint = served.settings.model.served_name, fingerprint
        self._logprobs = LogprobJson(served.tokenizer)
        self._offsets = [len(echo) for echo in echoes]  # characters of text that log probabilities were given for
        self._ended = [False] * len(answers.generations)

    def begin(self) -> str:
        """What is echoed, once."""
        echoes, self._echoes = self._echoes, [""] * len(self._echoes)
        return data(self._chunk([self._choice(at, echo)]) for at, echo in enumerate(echoes) if echo)

    def pieces(self, deltas: Sequence[Piece]) -> str:
        return data(self._pieces(deltas))

    def silence(self) -> str:
        return comment("keep-alive")

    def end(self) -> str:
        return data(self._end()) + DONE

    def fault(self, error: RequestError) -> str:
        return data([error_body(error)]) + DONE

    def reply(self, deltas: Sequence[Piece]) -> dict[str, Any]:
        texts = list(self._echoes)
        for at, delta in deltas:
            texts[at] += delta.text if isinstance(delta, Content) else ""
        choices = [self._choice(at, text, last=True) for at, text in enumerate(texts)]
        return self._envelope(choices) | {"usage": self._answers.usage()} | self._stats(0)

    def _pieces(self, deltas: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        for at, delta in deltas:
            if isinstance(delta, Content):
                yield self._chunk([self._choice(at, delta.text)])
        if len(self._ended) > 1:
            for at, generation in enumerate(self._answers.generations):
                if generation.over and not self._ended[at]:
                    yield self._last(at)

    def _end(self) -> Iterator[dict[str, Any]]:
        yield from (self._last(at) for at, ended in enumerate(self._ended) if not ended)
        if self._chat.usage_chunk:
            yield self._chunk([]) | {"usage": self._answers.usage()}

    def _last(self, at: int) -> dict[str, Any]:
        self._ended[at] = True
        return self._chunk([self._choice(at, "", last=True)]) | self._stats(at)

    def _choice(self, at: int, text: str, last: bool = False) -> dict[str, Any]:
        parser = self._answers.generations[at].reader.parser
        choice = {"index": at, "text": text, "logprobs": self._told(at), "finish_reason": None}
        return choice | ({"finish_reason": parser.finish_reason, "stop_reason": parser.stop_string} if last else {})

    def _told(self, at: int) -> dict[str, Any] | None:
        """OpenAI's older shape: parallel lists."""
        if self._chat.logprobs is None:
            return None
        told = self._answers.generations[at].reader.take_logprobs("content")
        tokens, offsets = [self._logprobs.text(one.token_id) for one in told], []
        for token in tokens:
            offsets.append(self._offsets[at])
            self._offsets[at] += len(token)
        tops = [{self._logprobs.text(token_id): max(value, LEAST) for token_id, value in one.top} for one in told]
        values = [max(one.logprob, LEAST) for one in told]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _stats(self, at: int) -> dict[str, Any]:
        return {"x_engine_stats": self._answers.generations[at].engine_stats()} if self._chat.show_stats else {}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope(choices)
        if self._chat.usage_everywhere:
            return chunk | {"usage": self._answers.usage()}
        return chunk | ({"usage": None} if self._chat.usage_chunk else {})

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }
