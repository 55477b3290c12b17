"""What HTTP costs: an engine replaced by a source of tokens, some streams read by another process.

    python bench/http_overhead.py [STREAMS] [SECONDS]

The source is a thread, as the engine is: RATE times a second it hands one token of each stream to the real
`EngineClient`. Prints what the streams lose of that rate, the loop thread's share of a core while they run, and the
time from a token's handing over to its reader, who is another process with the same clock; exits with 1 where one of
them is not below its limit (`over`). To be run at rest.
"""

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import aiohttp

from tided.api.app import build_app
from tided.api.door import Door
from tided.chat.families import DEEPSEEK_V41
from tided.chat.tokenizer import Tokenizer
from tided.engine import board
from tided.engine.client import EngineClient
from tided.engine.stats import Residency
from tided.engine.types import Event, Finished, Request, Started, Tokens
from tided.settings import Cache, Experts, Model, Settings

RATE = 200
MINI = Path(__file__).parents[1] / "minis" / "deepseek"
TEXT = "The tide comes in, and the tide goes out: at four in the morning, 涨潮 🌊, nobody sees it. "
ASK = {
    "messages": [{"role": "user", "content": "go"}],
    "stream": True,
    "enable_thinking": False,
    "ignore_eos": True,
    "loop_break": 0,
    "x_engine_stats": False,
}


class Figures(NamedTuple):
    """`lost_percent`: of the rate, by the slowest stream; `loop_percent`: of a core; `median_ms`: added latency."""

    lost_percent: float
    loop_percent: float
    median_ms: float


LIMITS = Figures(2.0, 25.0, 1.0)


class Source(SimpleNamespace):
    """What `EngineClient` needs of an engine. `born[n]`: when the n-th token of every stream was handed over."""

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop, ids: Sequence[int], streams: int) -> None:
        super().__init__(
            residency=Residency(1, 1, 1, ""),
            expert_reads={},
            data_plane={},
            about={},
            seq=0,
            last_step_s=0.0,
            traces=None,
            living=(1, 1),
            board=board.ExpertBoard(1, 1, []),
            figures=board.Figures(),
            heat=None,
        )
        self.client, self.loop, self.ids, self.streams = client, loop, ids, streams
        self.requests: list[Request] = []
        self.born: list[float] = []
        self.began_s = self.loop_s = self.took_s = 0.0
        self.thread = threading.Thread(target=self._run, daemon=True)

    def submit(self, request: Request, *_: Any) -> None:
        """All streams begin together."""
        self.requests.append(request)
        if len(self.requests) == self.streams:
            self.thread.start()

    def cancel(self, request_id: str) -> None:
        raise SystemExit("a stream was given up")

    def _run(self) -> None:
        names, count = [one.request_id for one in self.requests], self.requests[0].max_tokens
        self.client.post([Started(name) for name in names])
        loop_s = self._loop_s()
        self.began_s = began_s = time.monotonic()
        for number in range(count):
            time.sleep(max(0.0, began_s + number / RATE - time.monotonic()))
            events: list[Event] = [Tokens(name, [self.ids[number % len(self.ids)]]) for name in names]
            self.born.append(time.monotonic())
            self.client.post(events)
        self.took_s, self.loop_s = time.monotonic() - began_s, self._loop_s() - loop_s
        self.client.post([Finished(name, "length", 1, count, {}) for name in names])

    def _loop_s(self) -> float:
        """The loop thread's time on a core."""

        async def read() -> float:
            return time.thread_time()

        return asyncio.run_coroutine_threadsafe(read(), self.loop).result(10)


async def read(url: str, streams: int, tokens: int) -> None:
    """The other process. For each stream: (when, characters so far) of every piece."""

    async def one(session: aiohttp.ClientSession) -> list[tuple[float, int]]:
        lines: list[tuple[float, bytes]] = []
        async with session.post(f"{url}/v1/chat/completions", json=ASK | {"max_tokens": tokens}) as reply:
            async for line in reply.content:
                lines.append((time.monotonic(), line))
        assert lines[-2][1] == b"data: [DONE]\n", lines[-2]
        found, characters = [], 0
        for when, line in lines:
            chunk = json.loads(line[6:]) if line.startswith(b'data: {"id"') else {"choices": []}
            for choice in chunk["choices"]:
                characters += len(choice["delta"].get("content", ""))
                found.append((when, characters))
        return found

    async with aiohttp.ClientSession() as session:
        print(json.dumps(await asyncio.gather(*(one(session) for _ in range(streams)))))


async def measure(streams: int, seconds: float) -> Figures:
    tokenizer = Tokenizer.open(MINI)
    ids, count = tokenizer.encode_text(TEXT), int(RATE * seconds)
    client = EngineClient(streams, 0, tokenizer.token_bytes)
    source = Source(client, asyncio.get_running_loop(), ids, streams)
    client.attach(source)
    settings = Settings(
        model=Model(path=str(MINI), served_name="m"),
        experts=Experts(resident=1),
        cache=Cache(context_tokens=1 << 20, pool_tokens=1 << 24),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    door = await Door.open(build_app(client, tokenizer, DEEPSEEK_V41, settings), listener)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    reader = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--read", url, str(streams), str(count), stdout=subprocess.PIPE
    )
    out, _ = await reader.communicate()
    await door.close()
    return report(json.loads(out), source, tokenizer)


def over(figures: Figures) -> list[str]:
    """Those that are not below their limits, in words."""
    return [
        f"{name} {value:.3f}, to be below {limit:g}"
        for name, value, limit in zip(Figures._fields, figures, LIMITS, strict=True)
        if not value < limit
    ]


def report(streams: list[list[tuple[float, int]]], source: Source, tokenizer: Tokenizer) -> Figures:
    """A token has arrived with the piece that brings the last of its characters, wherever pieces are cut or joined."""
    decoder, ends, characters = tokenizer.decoder(), [], 0
    for number in range(len(source.born)):
        characters += len(decoder.feed([source.ids[number % len(source.ids)]]))
        ends.append(characters)
    late, rates = [], []
    for pieces in streams:
        assert pieces[-1][1] == ends[-1], "a stream is not whole"
        at = 0
        for born, end in zip(source.born, ends, strict=True):
            while pieces[at][1] < end:
                at += 1
            late.append(pieces[at][0] - born)
        rates.append((len(ends) - 1) / (pieces[-1][0] - source.began_s))
    cuts = statistics.quantiles(late, n=100)
    found = Figures(100 * (1 - min(rates) / RATE), 100 * source.loop_s / source.took_s, 1e3 * cuts[49])
    print(f"{len(streams)} streams of {RATE} tok/s: lost {found.lost_percent:.2f} % (the slowest)")
    print(f"loop thread {found.loop_percent:.1f} % of a core")
    print(
        f"added latency: median {found.median_ms:.3f} ms, 99th {1e3 * cuts[98]:.2f} ms, worst {1e3 * max(late):.2f} ms"
    )
    slips = [born - source.began_s - number / RATE for number, born in enumerate(source.born)]
    print(f"the source itself: median {1e3 * statistics.median(slips):.3f} ms late, worst {1e3 * max(slips):.2f} ms")
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        asyncio.run(read(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    else:
        import uvloop

        found = uvloop.run(measure(int((sys.argv[1:] or ["8"])[0]), float((sys.argv[2:] or ["10"])[0])))
        if missed := over(found):
            raise SystemExit("; ".join(missed))
