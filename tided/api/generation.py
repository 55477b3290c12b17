"""One running answer: the engine's events in, pieces of the answer out."""

import asyncio
import math
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Literal

from tided.api.errors import engine_failed, unavailable
from tided.api.ports import Engine
from tided.api.prepare import Prepared
from tided.api.served import ServedModel
from tided.chat.deltas import Content, Delta, merged
from tided.engine.types import Event, Failed, Finished, Scored, Started, TokenLogprob, Tokens


class AnswerReader:
    """Token ids to pieces of the answer, with the counts of its usage."""

    def __init__(self, prepared: Prepared, served: ServedModel) -> None:
        self.scores: list[TokenLogprob] = []  # of the prompt's tokens, from the second on
        chat, family, tokenizer = prepared.chat, served.family, served.tokenizer
        tools = chat.conversation.tools
        kinds = ("content", "reasoning") if chat.reasoning_logprobs else ("content",)
        self.logprobs: dict[str, list[TokenLogprob]] = {kind: [] for kind in kinds}  # those that are to be told
        self.parser = family.parser(
            start=prepared.prompt.start,
            leading=prepared.prompt.leading,
            stops=chat.stops,
            tools=tools or None,
            max_calls=chat.max_calls,
        )
        self.tokens = self.reasoning_tokens = 0
        self._last = chat.show_stop  # the stop string is to come yet
        self.mute = chat.max_tokens == 0  # the prompt alone is asked about
        unread = family.stop_tokens if chat.ignore_eos else ()  # then they are special tokens like others: no text
        self._marks = {
            tokenizer.special_id(spelling): private
            for spelling, private in family.marks.items()
            if spelling not in unread
        }
        self._decoder = tokenizer.decoder(self._marks)
        self._end_think = tokenizer.special_id(family.end_think)

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> list[Delta]:
        """Tokens after the end of the answer (behind a stop string, after the calls) do not count."""
        out: list[Delta] = []
        for token_id, logprob in () if self.mute else zip_longest(token_ids, logprobs):
            if self.parser.done:
                break
            self.tokens += 1
            if logprob is not None and token_id not in self._marks and self.parser.state in self.logprobs:
                self.logprobs[self.parser.state].append(logprob)
            self.reasoning_tokens += self.parser.state == "reasoning" and token_id != self._end_think
            out += self.parser.feed(self._decoder.feed([token_id]))
        return self._ended(out)

    def take_logprobs(self, kind: str) -> list[TokenLogprob]:
        """Those of tokens since the last call, of content or of reasoning."""
        taken, self.logprobs[kind] = self.logprobs[kind], []
        return taken

    def finish(self, reason: Literal["stop", "length"]) -> list[Delta]:
        return self._ended(self.parser.feed(self._decoder.flush()) + self.parser.finish(reason))

    def _ended(self, pieces: list[Delta]) -> list[Delta]:
        if self._last and self.parser.stop_string is not None:
            self._last = False
            pieces.append(Content(self.parser.stop_string))
        return list(merged(pieces))


class Generation:
    """Submits on creation. `close` in any case: an answer that is left before its end is cancelled, once.

    `patience_s`: how long a complete answer waits for the engine's figures. `ending`: what the log says of it.
    """

    def __init__(self, engine: Engine, prepared: Prepared, served: ServedModel, patience_s: float) -> None:
        self.prepared = prepared.without_pixels()
        self.reader = AnswerReader(prepared, served)
        self.started = self.over = False
        self.ending = "not finished"
        self.stats: dict[str, Any] = {}
        self._engine_tokens: int | None = None
        self.cached_tokens = 0
        self._engine = engine
        self._patience_s, self._cancelled_s = patience_s, math.inf
        self._events = engine.submit(prepared.request, prepared.guides.open(), prepared.pixels)

    async def next(self, timeout_s: float) -> list[Delta] | None:
        """The next pieces, possibly none; None when nothing came in time. Raises the engine's fault."""
        return self.read(await self.event(timeout_s))

    async def event(self, timeout_s: float) -> Event | None:
        """The engine's next; None when nothing came in time. Nothing of the answer changes before it is read."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self._events)
        except TimeoutError:
            return None
        except StopAsyncIteration:
            self.ending = "failed"
            raise engine_failed("The engine gave this request up.") from None

    def read(self, event: Event | None) -> list[Delta] | None:
        """What `next` returns."""
        match event:
            case None:
                waited_s = time.monotonic() - self._cancelled_s
                return self._end_without_figures() if waited_s >= self._patience_s else None
            case Started(cached_tokens=cached_tokens):
                # Of a context that was parked meanwhile the first beginning counts.
                self.cached_tokens = self.cached_tokens if self.started else cached_tokens
                self.started = True
                return []
            case Scored(logprobs=told):
                self.reader.scores += told
                return []
            case Tokens(token_ids=token_ids, logprobs=logprobs):
                self.started = True
                complete = self.reader.parser.done
                pieces = self.reader.feed(token_ids, logprobs)
                # After a call block only the end token should follow: what follows instead is not worth computing.
                if self.reader.parser.stop_string is not None or complete:
                    self._cancel()
                return pieces
            case Finished():
                return self._finish(event)
            case Failed(message=message):
                self.over, self.ending = True, "failed"
                raise engine_failed(f"The engine failed: {message}")

    def _finish(self, event: Finished) -> list[Delta]:
        self.over, self.stats = True, event.stats
        if event.reason == "cancelled" and not self.reader.parser.done:
            self.ending = "cancelled"
            raise unavailable("The server is shutting down; the answer is not complete.")
        if event.reason != "cancelled":
            self._engine_tokens = event.completion_tokens
        return self._complete("length" if event.reason == "length" or self.reader.mute else "stop")

    def _end_without_figures(self) -> list[Delta]:
        """The answer is complete; only the engine's figures of it are missing, and they have had their time."""
        self.over = True
        return self._complete("stop")

    def _complete(self, reason: Literal["stop", "length"]) -> list[Delta]:
        deltas = self.reader.finish(reason)
        self.ending = self.reader.parser.finish_reason
        return deltas

    def close(self) -> None:
        if not self.over:
            self._cancel()

    def _cancel(self) -> None:
        if self._cancelled_s == math.inf:
            self._cancelled_s = time.monotonic()
            self._engine.cancel(self.prepared.request.request_id)

    # The answer's figures

    @property
    def prompt_logprobs(self) -> int:
        """That a reply tells, about: more where it tells them in two shapes."""
        request = self.prepared.request
        return len(request.prompt_ids) * (1 + request.scored_top) if request.scored else 0

    @property
    def answer_logprobs(self) -> int:
        """That wait to be told: of a whole reply all, of a stream what no piece has told yet."""
        told = self.prepared.request.logprobs
        return 0 if told is None else sum(map(len, self.reader.logprobs.values())) * (1 + told)

    def usage(self) -> dict[str, Any]:
        prompt, completion = len(self.prepared.request.prompt_ids), self.completion_tokens
        return usage_of(prompt, completion, self.cached_tokens, self.reader.reasoning_tokens, self.image_tokens)

    @property
    def image_tokens(self) -> int:
        """Of the prompt."""
        return sum(image.tokens for image in self.prepared.request.images)

    @property
    def completion_tokens(self) -> int:
        """Tokens kept: with the end token when the answer ended by itself, without those drawn behind a stop string."""
        ended = self._engine_tokens is not None and self.reader.parser.stop_string is None and not self.reader.mute
        return self._engine_tokens if ended and self._engine_tokens is not None else self.reader.tokens

    def engine_stats(self) -> dict[str, Any]:
        conversation = self.prepared.chat.conversation
        return {
            **self.stats,
            "prompt_tokens": len(self.prepared.request.prompt_ids),
            "completion_tokens": self.completion_tokens,
            "thinking": conversation.thinking,
            "effort": conversation.effort if conversation.thinking else None,
            "notes": list(self.prepared.prompt.notes),
            "seed": self.prepared.request.sampling.seed,
        }


def usage_of(prompt: int, completion: int, cached: int, reasoning: int, images: int) -> dict[str, Any]:
    """Tokens as OpenAI names them, and DeepSeek."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "image_tokens": images},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
        "prompt_cache_hit_tokens": cached,
        "prompt_cache_miss_tokens": prompt - cached,
    }
