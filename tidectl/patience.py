"""A sign of life while a request waits for a lane. A stream says nothing until the request has one; the server's
/health tells how many wait."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidectl import http
from tidectl.output import say
from tided.errors import TideError

EVERY_S = 2.0
HEALTH_S = 2.0


@contextmanager
def waiting_is_told(url: str) -> Iterator[Callable[[], None]]:
    """Gives what is to be called at the first part of the answer; from then on nothing is told."""
    began = threading.Event()
    thread = threading.Thread(target=_tell, args=(url, began), daemon=True)
    thread.start()
    try:
        yield began.set
    finally:
        began.set()
        thread.join(2 * HEALTH_S)


def _tell(url: str, began: threading.Event) -> None:
    """Those that came later wait too, but the number before a request only falls."""
    before = -1
    while not began.wait(EVERY_S):
        waiting = _waiting(url)
        if waiting < 1 or began.is_set():  # it has its lane: the first part is on its way
            continue
        now = min(waiting - 1, before) if before >= 0 else waiting - 1
        if now != before:
            before = now
            say(f"waiting for a lane ({before} before you)", "dim")


def _waiting(url: str) -> int:
    try:
        queue = http.health(url, HEALTH_S).get("queue")
    except TideError:  # the request itself will say so
        return 0
    return queue if isinstance(queue, int) else 0
