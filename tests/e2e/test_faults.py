"""C10: a rank of any bundled model that dies or hangs while an answer streams. Named for what users saw elsewhere: a
pair that hangs until a timeout of many minutes, a dead worker that stalls the head for ever."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest

from tests.daemon.helpers import Running, started, until, write_profile
from tests.e2e.conftest import answer, ask, chunks, mini, post

pytestmark = pytest.mark.xdist_group("faults")
LIMIT_S = 20.0  # silence counts after 3 s, a step that does not end after 60; a busy machine takes its time


class Site:
    """Where a pair lives and dies, again and again: what one test started anew, the next one strikes."""

    def __init__(self, folder: Path, text: str, stack: ExitStack) -> None:
        self._profile, self._port = write_profile(folder, text)
        self._state_dir, self._stack = folder / "state", stack
        self._pair: Running | None = None

    def pair(self) -> Running:
        """One that serves."""
        if self._pair is None or self._pair.handle.process.poll() is not None:
            self._pair = self._stack.enter_context(started(self._profile, self._state_dir, self._port))
            self._pair.handle.wait_ready(120)
        return self._pair


@pytest.fixture(scope="module")
def site(model, tmp_path_factory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path_factory.mktemp("site"), mini(model), stack)


async def stream_until(pair, strike):
    """Streams an answer, calls `strike` after its first words, returns the events and the seconds from then on."""
    body = ask("Tell me a long story about the sea.", temperature=1, max_tokens=800, stream=True)
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{pair.url}/v1/chat/completions", json=body) as reply,
    ):
        for _ in range(6):
            await reply.content.readline()
        strike()
        began = time.monotonic()
        events = await chunks(reply)
        return events, time.monotonic() - began


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_or_stuck_rank_ends_the_pair_within_seconds_and_it_starts_again(site, rank, number):
    pair = site.pair()
    pids = pair.pids
    events, seconds = asyncio.run(stream_until(pair, lambda: pair.kill(rank, number)))
    assert seconds < LIMIT_S
    if rank == 1:  # rank 0 holds the connection and can say so
        error = next(e for e in events if isinstance(e, dict) and "error" in e)
        assert error["error"]["type"] == "server_error"
        assert events[-1] == "[DONE]"
    last = pair.ended()
    assert last is not None
    for pid in pids:
        until(lambda pid=pid: not alive(pid))
    survivor = pair.state_dir / f"flight-{1 - rank}.jsonl"
    *steps, fault = [json.loads(line) for line in survivor.read_text().splitlines()]
    assert steps[0]["work"] == "prefill"
    assert fault["fault"]
    again = site.pair()
    assert not set(again.pids) & set(pids)
    assert answer(asyncio.run(post(again.url, ask("What is the capital of Italy?"))))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in {"Z", "X"}
    except FileNotFoundError:
        return False
