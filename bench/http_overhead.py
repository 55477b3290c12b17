"""What HTTP costs: an engine replaced by a source of tokens, some streams read by another process.

    python bench/http_overhead.py [STREAMS] [SECONDS]

Prints what the streams lose of the source's rate, the loop thread's share of a core, and the median time from a token's
birth to its reader. To be run on a machine at rest.
"""

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tided.api.app import build_app
from tided.api.door import Door
from tided.chat.families import DEEPSEEK_V41
from tided.chat.messages import Segment
from tided.chat.tokenizer import Tokenizer
from tided.engine.types import Event, Finished, Request, Started, Tokens
from tided.settings import Cache, Experts, Model, Settings

RATE = 200
MINI = Path(__file__).parents[1] / "minis" / "deepseek"


class Source:
    """Every request is answered with `count` tokens at RATE a second; `born` keeps when each was due and sent."""

    def __init__(self, token: int, count: int) -> None:
        self.token, self.count = token, count
        self.born: list[list[float]] = []

    async def submit(self, request: Request, guide: object = None, pixels: object = ()) -> AsyncIterator[Event]:
        born: list[float] = []
        self.born.append(born)
        yield Started(request.request_id)
        start = time.monotonic()
        for number in range(self.count):
            await asyncio.sleep(max(0.0, start + number / RATE - time.monotonic()))
            born.append(time.monotonic())
            yield Tokens(request.request_id, [self.token])
        yield Finished(request.request_id, "length", len(request.prompt_ids), self.count, {})

    def cancel(self, request_id: str) -> None:
        pass

    def health(self) -> dict[str, Any]:
        return {"state": "ready", "fault": "", "lanes": {"total": 64, "busy": 0}, "queue": 0, "busy": True}

    def figures(self) -> dict[str, float]:
        return {}

    def trace(self, request_id: str) -> None:
        return None

    def expert_map(self, slots: bool = False) -> None:
        return None


async def read(url: str, streams: int) -> None:
    """The other process: arrival times of every stream's pieces, as JSON."""
    body = {
        "messages": [{"role": "user", "content": "go"}],
        "stream": True,
        "enable_thinking": False,
        "max_tokens": 9000,
    }

    async def one(session: aiohttp.ClientSession) -> list[float]:
        times = []
        async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
            async for line in reply.content:
                times += [time.monotonic()] if b'"content": "' in line and b'"role"' not in line else []
        return times

    async with aiohttp.ClientSession() as session:
        print(json.dumps(await asyncio.gather(*(one(session) for _ in range(streams)))))


async def measure(streams: int, seconds: float) -> None:
    tokenizer = Tokenizer.open(MINI)
    [token, *_] = tokenizer.encode([Segment("tide")])
    source = Source(token, int(RATE * seconds))
    settings = Settings(
        model=Model(path=str(MINI), served_name="m"),
        experts=Experts(resident=1),
        cache=Cache(context_tokens=1 << 16, pool_tokens=1 << 20),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    door = await Door.open(build_app(source, tokenizer, DEEPSEEK_V41, settings), listener)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    began_s, busy_s = time.monotonic(), time.thread_time()
    reader = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--read", url, str(streams), stdout=subprocess.PIPE
    )
    out, _ = await reader.communicate()
    took_s, busy_s = time.monotonic() - began_s, time.thread_time() - busy_s
    await door.close()
    arrived = sorted(json.loads(out))
    late = [
        there - born
        for times, due in zip(arrived, sorted(source.born), strict=True)
        for there, born in zip(times, due, strict=False)
    ]
    spans = [(len(times) - 1) / (times[-1] - times[0]) for times in arrived]
    print(f"{streams} streams of {RATE} tok/s: lost {100 * (1 - statistics.mean(spans) / RATE):.2f} %")
    print(f"loop thread {100 * busy_s / took_s:.1f} % of a core (source included)")
    print(f"added latency: median {1e3 * statistics.median(late):.3f} ms, worst {1e3 * max(late):.2f} ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        asyncio.run(read(sys.argv[2], int(sys.argv[3])))
    else:
        import uvloop

        uvloop.run(measure(int((sys.argv[1:] or ["8"])[0]), float((sys.argv[2:] or ["10"])[0])))
