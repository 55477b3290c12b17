"""Reads of experts beside the steps: on their way into a slot, landed, or failed."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tided.errors import DataError, PairError
from tided.experts.arena import Pair
from tided.experts.io import Ticket

log = logging.getLogger("experts")

HUNG_S = 300.0  # a read beside the steps, which waits for all that is more urgent


@dataclass(slots=True)
class Reading:
    """A pair on its way into a taken slot; `out` is the resident that it will replace, None: it joins the ring, or the
    residents, where it `joins` them."""

    pair: Pair
    out: Pair | None
    joins: bool
    slot: int
    ticket: Ticket
    landed: bool = False
    failed: bool = False


def newly_landed(reading: Mapping[int, Reading]) -> list[int]:
    """Those that ended well since the last call. Raises PairError for one that hangs."""
    now_s = time.perf_counter()
    done = [number for number, r in reading.items() if not r.landed and r.ticket.done and not r.ticket.error]
    for number in done:
        reading[number].landed = True
    for one in reading.values():
        if not one.ticket.done and now_s - one.ticket.submitted_s > HUNG_S:
            raise PairError(f"the read of {one.pair} hangs for {HUNG_S:g} s", hint="check the disk (dmesg)")
    return done


def newly_failed(reading: Mapping[int, Reading]) -> list[int]:
    """Those that ended since the last call, and whose record could not be had. Raises what else went wrong with one."""
    ended = [(n, r) for n, r in reading.items() if r.ticket.done and not r.failed]
    done = [(n, r, r.ticket.error) for n, r in ended if r.ticket.error]
    for _, one, error in done:
        if not isinstance(error, DataError):
            raise error
        one.failed = True
        log.warning("expert %d of layer %d is not read: %s", one.pair[1], one.pair[0], error)
    return [number for number, _, _ in done]
