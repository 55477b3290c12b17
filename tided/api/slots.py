"""Threads between a body and the engine, and for long replies: few, and none for a client that has gone."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from tided.errors import RequestError

T = TypeVar("T")

# Up to so many bytes a body is short. Short ones never wait behind a long one, and long ones are worked on one by one:
# one unfolds, and one holds the interpreter while it is parsed.
SHORT_BYTES = 1 << 18
_SHORT_THREADS, _LONG_THREADS, _REPLY_THREADS = 2, 1, 1


class AbandonedError(Exception):
    """Nobody waits for this work any more."""


class Alive:
    """Asked by the work between its steps; raises `AbandonedError` once its client has gone."""

    def __init__(self) -> None:
        self._gone = threading.Event()

    def end(self) -> None:
        self._gone.set()

    def __call__(self) -> None:
        if self._gone.is_set():
            raise AbandonedError


class Slots:
    """`wait_s`: longest time for a slot and the work on a body. The executor has no queue: who waits, waits on the
    loop, and leaves it with its body when it is cancelled."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._short, self._long = asyncio.Semaphore(_SHORT_THREADS), asyncio.Semaphore(_LONG_THREADS)
        self._reply = asyncio.Semaphore(_REPLY_THREADS)
        threads = _SHORT_THREADS + _LONG_THREADS + _REPLY_THREADS
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="prepare")

    async def run(self, size_bytes: int, work: Callable[[Alive], T]) -> T:
        """The work's result, computed in a thread. Raises RequestError 503 when it takes too long."""
        slot = self._short if size_bytes <= SHORT_BYTES else self._long
        alive = Alive()
        try:
            async with asyncio.timeout(self._wait_s):
                await slot.acquire()
                future = self._executor.submit(work, alive)
                _release_after(future, slot)
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise RequestError(
                "Too many long prompts are being prepared; try again in a moment", status=503, kind="server_error"
            ) from None
        finally:
            alive.end()

    async def write(self, work: Callable[[], T]) -> T:
        """A long reply, written in a thread; one at a time, since each holds the interpreter. What has been computed
        is not refused any more: it waits for those before it, which are as long as a reply may be."""
        await self._reply.acquire()
        future = self._executor.submit(work)
        _release_after(future, self._reply)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _release_after(future: "Future[T]", slot: asyncio.Semaphore) -> None:
    """The slot is free when its thread is, not when its client leaves."""
    loop = asyncio.get_running_loop()

    def release(_: "Future[T]") -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(slot.release)

    future.add_done_callback(release)
