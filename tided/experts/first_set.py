"""The first resident set is read into the slots that it was given."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice

from tided.experts.arena import Arena, Pair
from tided.experts.io import IoScheduler, Priority, Ticket

Progress = Callable[[int, int], None]  # (records read, records in all)

READ_TIMEOUT_S = 60.0  # for the read that has waited longest: the disk is gone
MAX_QUEUED = 512  # of a first set that is larger than the scheduler's queue


def read_first(arena: Arena, io: IoScheduler, slots: Mapping[Pair, int], progress: Progress) -> None:
    """Every pair's record into its slot, which is taken. What fails is raised, and what is not read by then is
    cancelled; a read that hangs may still write into its slot."""
    running = deque[Ticket]()
    try:
        for done in _landing(arena, io, slots, running):
            progress(done, len(slots))
    except BaseException:
        for ticket in running:
            ticket.cancel()
        raise


def _landing(arena: Arena, io: IoScheduler, slots: Mapping[Pair, int], running: deque[Ticket]) -> Iterator[int]:
    """Few of them queued at a time; yields how many are there."""
    waiting = iter(slots.items())
    for done in range(1, len(slots) + 1):
        for pair, slot in islice(waiting, MAX_QUEUED - len(running)):
            running.append(io.submit(Priority.SWAP, *pair, partial(arena.load, slot)))
        running[0].wait(READ_TIMEOUT_S)
        running.popleft()
        yield done
