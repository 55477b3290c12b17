"""Clients of the pair: they read streamed answers, and some hang up."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.soak.bodies import Ask, Visit

TIMEOUT_S = 400.0  # of a machine that others use as well: what is cut here counts as nothing that happened


@dataclass
class Answer:
    """What a client came to know. `whole`: up to the end of the stream."""

    text: str = ""
    reasoning: str = ""
    calls: str = ""
    finish: str = ""
    error: str = ""
    whole: bool = False
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def said(self) -> tuple[str, ...]:
        """What must be the same whenever the same is asked; ids of calls are made anew each time."""
        return self.text, self.reasoning, self.calls, self.finish

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
        self.stats |= event.get("x_engine_stats") or {}
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            self.text += delta.get("content") or ""
            self.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                function = call.get("function", {})
                self.calls += (function.get("name") or "") + (function.get("arguments") or "")
            self.finish = choice.get("finish_reason") or self.finish


async def ask(session: aiohttp.ClientSession, url: str, visit: Visit) -> Answer:
    """The answer, or as much of it as the client waits for. Errors are in it."""
    answer = Answer()
    try:
        await asyncio.wait_for(_read(session, url, visit, answer), visit.seconds or TIMEOUT_S)
    except TimeoutError:
        if visit.seconds is None:
            answer.error = f"no end after {TIMEOUT_S:g} s"
    except aiohttp.ClientError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _read(session: aiohttp.ClientSession, url: str, visit: Visit, answer: Answer) -> None:
    async with session.post(f"{url}/v1/chat/completions", json=visit.ask.body) as reply:
        if reply.status != 200:
            answer.error = f"status {reply.status}: {await reply.text()}"
            return
        events = 0
        async for line in reply.content:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                answer.whole = True
                return
            answer.take(json.loads(line[6:]))
            events += 1
            if events == visit.events:
                return  # the connection is closed with the rest unread
        answer.error = answer.error or "the stream ended without [DONE]"


async def one_by_one(url: str, asks: Sequence[Ask], tell: Callable[[int], None]) -> dict[str, Answer]:
    """Each alone."""
    found = {}
    async with _session() as session:
        for number, one in enumerate(asks, 1):
            found[one.name] = await ask(session, url, Visit(one))
            tell(number)
    return found


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None), connector=aiohttp.TCPConnector(limit=0))


@dataclass
class Tally:
    """What came of the visits. `wrong`: requests that failed or were answered otherwise than alone."""

    done: int = 0
    compared: int = 0
    hung_up: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def take(self, visit: Visit, answer: Answer, expected: Answer | None) -> None:
        self.done += 1
        name = f"{visit.ask.kind} {visit.ask.name}"
        if answer.error:
            self.wrong.append(f"{name}: {answer.error}")
        elif not answer.whole:
            self.hung_up += 1
            if expected and not _begins_like(answer, expected):
                self.wrong.append(f"{name}: what came before the client hung up is not the beginning of the answer")
        else:
            self._count(answer.stats)
            if expected:
                self.compared += 1
                if answer.said != expected.said:
                    self.wrong.append(f"{name}: {answer.said} where alone it is {expected.said}")

    def _count(self, stats: dict[str, Any]) -> None:
        self.counts["parked"] += stats.get("parked") or 0
        self.counts["cached"] += stats.get("cached_tokens") or stats.get("prefix_cached_tokens") or 0
        self.counts["accepted"] += (stats.get("spec") or {}).get("accepted") or 0
        self.counts["swaps"] += stats.get("swaps") or 0
        self.counts["beside"] += (stats.get("lanes_busy") or 0) > 1


def _begins_like(answer: Answer, expected: Answer) -> bool:
    return all(whole.startswith(part) for part, whole in zip(answer.said[:3], expected.said[:3], strict=True))


async def at_once(
    url: str, visits: Sequence[Visit], expected: dict[str, Answer], clients: int, tally: Tally, tell: Callable[[], None]
) -> None:
    """`clients` at a time, in order."""
    waiting = iter(visits)

    async def client(session: aiohttp.ClientSession) -> None:
        for visit in waiting:
            answer = await ask(session, url, visit)
            tally.take(visit, answer, expected.get(visit.ask.name) if visit.ask.compared else None)
            tell()

    async with _session() as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
