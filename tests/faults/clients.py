"""Who asks the pair while it is struck: requests whose answer no resident set changes, which are compared with those of
a clean run, and others that move the set, fill the caches and start helpers."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.soak.bodies import COUNTRIES, SYSTEM, chat
from tests.soak.clients import Answer

TIMEOUT_S = 150.0
EXACT: dict[str, dict[str, Any]] = {
    "country": chat("Tell me about Japan.", max_tokens=20),
    "function": chat("Write a function that counts the vowels.", max_tokens=24),
    "story": chat("Tell me a short story about a fox.", temperature=1.0, top_p=0.95, seed=4, max_tokens=28),
    "river": chat("What is this about?", SYSTEM, max_tokens=8),
    "mill": chat("How many barrels in line 9?", SYSTEM, temperature=0.8, seed=5, max_tokens=8),
    "sum": chat("What is 23 + 17?", enable_thinking=True, max_tokens=32),
}
EXACT = {name: body | {"fidelity": "exact"} for name, body in EXACT.items()}


@dataclass
class Heard:
    """`name` of an exact request, or empty. `times` of events, by the monotonic clock."""

    name: str
    answer: Answer = field(default_factory=Answer)
    times: list[float] = field(default_factory=list)
    lasts: bool = False  # it reads nothing behind the strike until the others have ended

    def fault(self, expected: dict[str, Answer]) -> str:
        """What is wrong with what was told; an answer may have been cut off, but never another."""
        if not self.name:
            return ""
        whole, told = expected[self.name], self.answer
        for part, of in zip(told.said[:3], whole.said[:3], strict=True):
            if not of.startswith(part):
                return f"{self.name}: {part!r} where a clean run says {of!r}"
        if told.whole and not told.error and told.said != whole.said:
            return f"{self.name}: ended with {told.said}, where a clean run ends with {whole.said}"
        return ""

    @property
    def finished(self) -> bool:
        return self.answer.whole and not self.answer.error


def others(number: int) -> list[dict[str, Any]]:
    """Never compared, and new each time: prompts of many chunks, a topic, a grammar."""
    country = COUNTRIES[number % len(COUNTRIES)]
    return [
        chat("What is this about?", f"Book {number}.\n{SYSTEM}", max_tokens=8, fidelity="fast"),
        chat(f"{number}. Tell me about {country}.", ignore_eos=True, max_tokens=24, fidelity="fast"),
        chat(f"{number}. Name a river of {country}.", response_format={"type": "json_object"}, max_tokens=8),
    ]


async def listen(
    url: str, body: dict[str, Any], heard: Heard, hold: Callable[[], bool] = lambda: False, timeout_s: float = TIMEOUT_S
) -> Heard:
    """All that comes, or what went wrong. While it may `hold`, the client leaves the rest unread."""
    try:
        async with (
            asyncio.timeout(timeout_s),
            session() as client,
            client.post(f"{url}/v1/chat/completions", json=body) as reply,
        ):
            if reply.status != 200:
                heard.answer.error = f"status {reply.status}"
                return heard
            async for line in reply.content:
                while hold():
                    await asyncio.sleep(0.05)
                if line.startswith(b"data: "):
                    heard.times.append(time.monotonic())
                    if line.strip() == b"data: [DONE]":
                        heard.answer.whole = True
                        return heard
                    heard.answer.take(json.loads(line[6:]))
            heard.answer.error = heard.answer.error or "the stream ended without [DONE]"
    except TimeoutError:
        heard.answer.error = f"no end after {timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        heard.answer.error = f"{type(error).__name__}"
    return heard


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None), connector=aiohttp.TCPConnector(limit=0))


async def ask_all(url: str, names: Sequence[str]) -> list[Heard]:
    return await asyncio.gather(*(listen(url, EXACT[name], Heard(name)) for name in names))


def asked(url: str, names: Sequence[str]) -> list[Heard]:
    return asyncio.run(ask_all(url, names))
