"""POST /v1/completions: the shapes of OpenAI's completions, in a stream and whole."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from aiohttp import web

from tided.api.answers import Answers, Piece
from tided.api.chunks import Chunks
from tided.api.completions_request import PreparedCompletion, prepare_completion
from tided.api.context import CONTEXT, NOTE
from tided.api.exchange import answer_in_pieces, answer_whole, receive
from tided.api.logprob_json import LogprobJson
from tided.api.served import ServedModel
from tided.api.sse import data
from tided.chat.deltas import Content


async def completions(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    with context.admission.place(request.content_length) as place:
        completion = await receive(request, context, place, prepare_completion)
        if request.headers.get("x-engine-stats") == "0":
            completion = completion.without_stats()
        chat = completion.prepared[0].chat
        answers = Answers(context.engine, completion.prepared, context.served, context.limits.keepalive_s, each=chat.n)
    request[NOTE].generation = answers
    wire = CompletionWire(answers, completion, context.served, context.fingerprint)
    try:
        if chat.stream:
            return await answer_in_pieces(request, context, answers, wire, request[NOTE])
        return await answer_whole(context, answers, wire)
    finally:
        answers.close()


class CompletionWire(Chunks):
    """`exchange.Writer` of completions."""

    def __init__(self, answers: Answers, completion: PreparedCompletion, served: ServedModel, fingerprint: str) -> None:
        echoes, self._of_echo, self._by_id = completion.echoes, completion.echo_logprobs, completion.prompt_logprobs
        self._answers, self._chat, self._echoes = answers, answers.prepared.chat, echoes
        self._id, self._created = answers.prepared.request.request_id, int(time.time())
        self._model, self._fingerprint = served.settings.model.served_name, fingerprint
        self._logprobs = LogprobJson(served.tokenizer)
        self._offsets = [len(echo) for echo in echoes]  # characters of text that log probabilities were given for
        self._echoed = [not echo and self._by_id is None for echo in echoes]
        self._ended = [False] * len(answers.generations)

    def begin(self) -> str:
        """What is echoed, once; of a scored prompt when all is known of it."""
        return data(self._chunk([self._echo(at)]) for at in range(len(self._echoes)) if self._may_echo(at))

    def _may_echo(self, at: int) -> bool:
        generation = self._answers.generations[at]
        whole = len(generation.reader.scores) == len(generation.prepared.request.prompt_ids) - 1
        return not self._echoed[at] and (whole or not generation.prepared.request.scored)

    def _echo(self, at: int) -> dict[str, Any]:
        self._echoed[at] = True
        generation, echo, told = self._answers.generations[at], self._echoes[at], None
        request, scores = generation.prepared.request, generation.reader.scores
        if self._of_echo is not None:
            told = self._logprobs.prompt(request.prompt_ids, scores, echo, self._of_echo)
        choice = {"index": at, "text": echo, "logprobs": told, "finish_reason": None}
        by_id = {} if self._by_id is None else {"prompt_logprobs": self._logprobs.by_id(scores, self._by_id)}
        return choice | by_id

    def reply(self, deltas: Sequence[Piece]) -> dict[str, Any]:
        choices = []
        for at in range(len(self._echoes)):
            text = "".join(delta.text for of, delta in deltas if of == at and isinstance(delta, Content))
            choices.append(_joined(self._echo(at), self._choice(at, text, last=True)))
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
        if self._chat.logprobs is None:
            return None
        told = self._logprobs.listed(self._answers.generations[at].reader.take_logprobs("content"), self._offsets[at])
        self._offsets[at] += sum(map(len, told["tokens"]))
        return told

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


def _joined(echo: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """One choice of the prompt and its answer."""
    first, then = echo["logprobs"], answer["logprobs"]
    both = {name: first[name] + then[name] for name in then} if first and then else then
    return echo | answer | {"text": echo["text"] + answer["text"], "logprobs": both}
