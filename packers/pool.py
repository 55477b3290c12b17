"""Threads that read and write for a packer."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

MOST_ASKED = 64

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """Does what it is asked for, in that order. Unlike an executor's, its threads keep no process from ending: one
    whose disk is gone may never come back."""

    def __init__(self, threads: int, name: str) -> None:
        self._asked = queue.Queue[tuple[Future[Any], Callable[[], Any]] | None](MOST_ASKED + threads)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Raises queue.Full: who asks for so much never waits for any of it. `end` has room behind it."""
        if self._asked.qsize() >= MOST_ASKED:
            raise queue.Full
        future = Future[T]()
        self._asked.put_nowait((future, partial(call, *arguments, **named)))
        return future

    def end(self, timeout_s: float) -> bool:
        """What has not begun never does. False: what has begun is not done by then; it may be called again."""
        if not self._ended.is_set():
            self._ended.set()
            for _ in self._threads:
                self._asked.put_nowait(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, call = asked
            if self._ended.is_set():
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del asked, future, call  # they hold a record, and this thread may sleep long
