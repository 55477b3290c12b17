"""Several running answers to one request: the choices of a chat, the prompts of a completion."""

import asyncio
from collections.abc import Sequence
from typing import Any

from tided.api.generation import Generation, usage_of
from tided.api.ports import Engine
from tided.api.prepare import Prepared
from tided.api.served import ServedModel
from tided.chat.deltas import Delta
from tided.engine.types import Event

Piece = tuple[int, Delta]
"""(which answer, a piece of it)."""


class Answers:
    """All are submitted on creation, or none. `close` in any case. `each`: answers of one prompt, which follow each
    other: its tokens count once."""

    def __init__(
        self,
        engine: Engine,
        choices: Sequence[Prepared],
        served: ServedModel,
        patience_s: float,
        each: int,
    ) -> None:
        self.prepared, self._each, self._patience_s = choices[0].without_pixels(), each, patience_s
        self.generations: list[Generation] = []
        self._waits: dict[int, asyncio.Task[Event | None]] = {}
        try:
            for prepared in choices:
                self.generations.append(Generation(engine, prepared, served, patience_s))
        except BaseException:
            self.close()
            raise

    @property
    def started(self) -> bool:
        return any(generation.started for generation in self.generations)

    @property
    def over(self) -> bool:
        return all(generation.over for generation in self.generations)

    @property
    def ending(self) -> str:
        return ",".join(dict.fromkeys(generation.ending for generation in self.generations))

    async def next(self, timeout_s: float) -> list[Piece] | None:
        """The next pieces of any; None when nothing came in time. Raises the engine's fault. What comes between two
        calls waits: while a thread writes, no answer changes."""
        if len(self.generations) == 1:
            deltas = await self.generations[0].next(timeout_s)
            return None if deltas is None else [(0, delta) for delta in deltas]
        for at, generation in enumerate(self.generations):
            if not generation.over and at not in self._waits:
                self._waits[at] = asyncio.create_task(generation.event(self._patience_s))
        done, _ = await asyncio.wait(self._waits.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        ended = [(at, self._waits.pop(at)) for at, task in list(self._waits.items()) if task in done]
        if faults := [fault for _, task in ended if (fault := task.exception())]:
            raise faults[0]
        read = [(at, self.generations[at].read(task.result())) for at, task in ended]
        return [(at, delta) for at, deltas in read for delta in deltas or ()] if ended else None

    @property
    def prompt_logprobs(self) -> int:
        return sum(generation.prompt_logprobs for generation in self.generations)

    @property
    def answer_logprobs(self) -> int:
        return sum(generation.answer_logprobs for generation in self.generations)

    def close(self) -> None:
        for task in self._waits.values():
            task.cancel()
        for generation in self.generations:
            generation.close()

    def usage(self) -> dict[str, Any]:
        firsts = self.generations[:: self._each]
        return usage_of(
            sum(len(generation.prepared.request.prompt_ids) for generation in firsts),
            sum(generation.completion_tokens for generation in self.generations),
            sum(generation.cached_tokens for generation in firsts),
            sum(generation.reader.reasoning_tokens for generation in self.generations),
            sum(generation.image_tokens for generation in firsts),
        )
