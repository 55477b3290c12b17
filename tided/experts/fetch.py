"""Experts that a layer waits for: read after its router has run and before its output is needed.

A request is `fast` (a missing expert is substituted), `balanced` (the heaviest misses are read before use, a few a
step) or `exact` (every miss is). Which experts are read follows from router outputs and from what was read before, both
the same on every rank, so every rank reads the same ones into the same slots, and nobody needs to ask.

The records land in slots of their own and stay there until others need the slots. Only rows of balanced and exact
requests see them: what a fast request is answered with does not depend on who is beside it.

A record that cannot be read at the third try ends no rank, for the others compute with it already: this one goes on
with nothing in its place, and behind the step's work all ranks tell each other what they did not get. What was computed
with it is nobody's answer (`settle`), and no balanced row waits for such a record until somebody has read it.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tided.engine.types import Fidelity
from tided.errors import DataError, PairError
from tided.experts.arena import Arena, Pair
from tided.experts.io import IoScheduler, Priority, Ticket
from tided.experts.tables import RoutingTables

log = logging.getLogger("experts")

READ_TIMEOUT_S = 60.0
TRIES = 3  # of a record, one after the other: a step that waits for it cannot do without
MOST_LOST = 64  # records that some rank did not get, one after the other, and none between them that all ranks got
FAST, BALANCED, EXACT = range(3)
CLASS: dict[Fidelity, int] = {"fast": FAST, "balanced": BALANCED, "exact": EXACT}
_UNITS = 1 << 24  # routing weights are added as integers: one sum, in whatever order a device adds


class Wishes(Protocol):
    """What a router tells of the experts that rows want, [T, k] each (`kernels.router.Routing`)."""

    @property
    def wanted(self) -> Tensor: ...
    @property
    def wanted_weights(self) -> Tensor: ...
    @property
    def missed(self) -> Tensor: ...


@dataclass(frozen=True)
class SyncRules:
    """A balanced row waits for a missing expert of weight `least_weight` or more; `reads` a step at most."""

    least_weight: float
    reads: int


@dataclass(frozen=True)
class Lost:
    """A record that a step waited for and some rank has not; `ranks`: a bit each, rank 0's the lowest."""

    pair: Pair
    ranks: int

    def __str__(self) -> str:
        names = [str(rank) for rank in range(self.ranks.bit_length()) if self.ranks >> rank & 1]
        on = f"rank {names[0]}" if len(names) == 1 else f"ranks {' and '.join(names)}"
        return f"expert {self.pair[1]} of layer {self.pair[0]} cannot be read on {on}"


@dataclass
class Waits:
    """Since the start: records read, experts used that an earlier read had left here, seconds a layer waited."""

    reads: int = 0
    kept: int = 0
    seconds: float = 0.0


class UrgentReads:
    """The `urgent` slots of an arena. One thread uses it: the engine's. `asked`: the reads of this step, in order;
    `unreadable`: what some rank did not get when it was last read, by whomever. Both are equal on every rank."""

    def __init__(self, arena: Arena, tables: RoutingTables, io: IoScheduler, rules: SyncRules, lanes: int) -> None:
        self.arena, self.rules, self.waits = arena, rules, Waits()
        self.active = False  # whether a row of this step may wait for a read
        self._tables, self._io = tables, io
        self._layers, self._experts = tables.slot_of.shape
        self._class_of_lane: Tensor = torch.zeros(lanes, dtype=torch.int8, device=tables.slot_of.device)
        self._classes = [FAST] * lanes
        self._slot_of: dict[Pair, int] = {}
        self._pair_in: dict[int, Pair] = {}
        self._by_use = dict.fromkeys(arena.urgent)  # slots, the least recently used first
        self._spent = 0  # reads of this step that balanced rows asked for
        self.asked: list[Pair] = []
        self.unreadable: set[Pair] = set()
        self._users: list[tuple[int, Tensor, Tensor]] = []  # (layer, lanes [T], experts [T, k]) that waited for reads
        self._lost: set[Pair] = set()  # of this step, on this rank: what its slot holds is not the record
        self._lost_in_a_row: set[Pair] = set()  # one that is damaged may be asked for again and again

    def open(self, lane: int, fidelity: Fidelity) -> None:
        """The lane's rows are of this class from now on. Raises PairError where there is no slot to wait for."""
        self._classes[lane] = CLASS[fidelity]
        self._class_of_lane[lane] = CLASS[fidelity]
        if CLASS[fidelity] and not self.arena.urgent:
            raise PairError(f"a {fidelity} request, but there are no slots to read experts into before use")

    def may_wait(self, lanes: Iterable[int]) -> bool:
        """Whether a row of one of these lanes may wait for a read."""
        return any(self._classes[lane] for lane in lanes)

    def begin_step(self, lanes: Iterable[int]) -> None:
        """A step of these lanes: its reads are counted anew. Raises PairError where the last one was not settled."""
        if self._lost:
            raise PairError(f"experts {sorted(self._lost)} were not read, and nobody was told")
        self.active = self.may_wait(lanes)
        self._spent = 0
        self.asked, self._users = [], []

    def allowed(self, layer: int, lane_of_row: Tensor, routing: Wishes) -> Tensor | None:
        """[T, E] bool, the experts that each row may use, those to be read included; None: just the routable ones."""
        classes = self._class_of_lane[lane_of_row]
        waiting = routing.missed & (classes > FAST)[:, None]
        if not bool(waiting.any()):
            return None
        present = self._tables.routable[layer].clone()
        present[self._kept(layer)] = True
        balanced, exact = (classes == BALANCED)[:, None], (classes == EXACT)[:, None]
        if bool(balanced.any()):
            heavy = waiting & balanced & (routing.wanted_weights >= self.rules.least_weight)
            barred = present.clone()
            barred[[expert for at, expert in self.unreadable if at == layer]] = True
            present[self._heaviest(layer, routing, heavy & ~barred[routing.wanted])] = True
        return torch.where(balanced, present, self._tables.routable[layer]) | exact

    def serve(self, layer: int, experts: Sequence[int], users: tuple[Tensor, Tensor] | None = None) -> "Serving":
        """Begins to read those of a layer's experts that are not here. Ascending, each once. `users`: the lanes [T] of
        the rows that wait, and the experts [T, k] that each row is computed with."""
        if users is not None:
            self._users.append((layer, *users))
        return Serving(self, [(layer, expert) for expert in experts])

    def missing_here(self) -> list[bool]:
        """Of `asked`: what this rank did not get."""
        return [pair in self._lost for pair in self.asked]

    def settle(self, missing_on: Sequence[int]) -> dict[int, Lost]:
        """Ends a step's reads. `missing_on`: of `asked`, the ranks that did not get it, a bit each. Gives the lanes
        that were computed with what some rank has not, and by what. Raises PairError when nothing at all is read."""
        lost = {pair: Lost(pair, ranks) for pair, ranks in zip(self.asked, missing_on, strict=True) if ranks}
        for pair in self.asked:
            self._lost_in_a_row = self._lost_in_a_row | {pair} if pair in lost else set()
            self.told(pair, pair not in lost)
        lanes: dict[int, Lost] = {}
        for (layer, expert), what in lost.items():
            hit = [of[(ids == expert).any(1)].tolist() for at, of, ids in self._users if at == layer]
            if not any(hit):
                raise PairError(f"{what}, and whose answer it was read for is not known")
            lanes |= {lane: what for several in hit for lane in several}
        self.asked, self._users = [], []
        self._lost.clear()
        if len(self._lost_in_a_row) >= MOST_LOST:
            raise PairError(
                f"experts cannot be read: the last {len(self._lost_in_a_row)} that requests waited for failed",
                hint="the log of the rank that failed names files and offsets; check its disk (dmesg)",
            )
        return lanes

    def told(self, pair: Pair, read: bool) -> None:
        """A read of the pair has ended, on every rank well or on some not; the same on all."""
        if read:
            self.unreadable.discard(pair)
            return
        self.unreadable.add(pair)
        slot = self._slot_of.pop(pair, None)
        if slot is not None:
            del self._pair_in[slot]

    def state(self) -> str:
        """Who lies where, in what order slots are given away, and what nobody waits for: equal on ranks that decide
        alike."""
        return repr(([(slot, self._pair_in.get(slot)) for slot in self._by_use], sorted(self.unreadable)))

    def check(self) -> None:
        """Raises PairError unless every slot is one pair's at most."""
        if {pair: slot for slot, pair in self._pair_in.items()} != self._slot_of or set(self._by_use) != set(
            self.arena.urgent
        ):
            raise PairError("the directory of experts read before use is broken")

    def _kept(self, layer: int) -> list[int]:
        return [pair[1] for pair in self._slot_of if pair[0] == layer]

    def _heaviest(self, layer: int, routing: Wishes, heavy: Tensor) -> list[int]:
        """The experts to read for balanced rows: the most routing weight first, as many as this layer's share of the
        step allows. Up to layer l of L a step may have spent (l + 1) / L of its reads: early layers leave some."""
        most = min(self.rules.reads * (layer + 1) // self._layers - self._spent, len(self.arena.urgent))
        if most <= 0 or not bool(heavy.any()):
            return []
        units = (routing.wanted_weights[heavy] * _UNITS).to(torch.int64)
        total = torch.zeros(self._experts, dtype=torch.int64, device=units.device)
        total.index_add_(0, routing.wanted[heavy], units)
        ranked = sorted((-weight, expert) for expert, weight in enumerate(total.tolist()) if weight)[:most]
        self._spent += len(ranked)
        return [expert for _, expert in ranked]

    def _find(self, pair: Pair) -> int | None:
        """The slot where the pair lies already; it counts as used."""
        slot = self._slot_of.get(pair)
        if slot is not None:
            self._touch(slot)
            self.waits.kept += 1
        return slot

    def _assign(self, pair: Pair, busy: set[int]) -> int | None:
        """Takes the least recently used slot that is not busy for the pair; None: all are."""
        slot = next((slot for slot in self._by_use if slot not in busy), None)
        if slot is None:
            return None
        before = self._pair_in.pop(slot, None)
        if before is not None:
            del self._slot_of[before]
        self._slot_of[pair], self._pair_in[slot] = slot, pair
        self._touch(slot)
        self.arena.fence(slot)
        return slot

    def _read(self, pair: Pair, slot: int) -> Ticket:
        self.waits.reads += 1
        return self._io.submit(Priority.SYNC_HOT, *pair, partial(self.arena.load, slot))

    def _computed_from(self, pair: Pair, slot: int) -> int:
        """The slot where the pair lies; -1: this rank did not get it."""
        return -1 if pair in self._lost else slot

    def _wait(self, pair: Pair, slot: int, ticket: Ticket) -> None:
        began_s = time.perf_counter()
        for tries in range(1, TRIES + 1):
            try:
                ticket.wait(READ_TIMEOUT_S)
                break
            except DataError as error:
                if tries == TRIES:
                    log.error("expert %d of layer %d cannot be read: %s", pair[1], pair[0], error)
                    self._lost.add(pair)
                    break
                log.warning("expert %d of layer %d is read again: %s", pair[1], pair[0], error)
                ticket = self._read(pair, slot)
        self.waits.seconds += time.perf_counter() - began_s

    def _touch(self, slot: int) -> None:
        del self._by_use[slot]
        self._by_use[slot] = None


class Serving:
    """A layer's experts on their way. Iterating yields {expert: slot} as records arrive, -1 for what cannot be read; a
    slot may be read into again once the next are asked for, so what was yielded must be computed (or launched) by
    then."""

    def __init__(self, owner: UrgentReads, pairs: Sequence[Pair]) -> None:
        self._owner = owner
        self._layer = pairs[0][0] if pairs else -1
        here = {pair: slot for pair in pairs if (slot := owner._find(pair)) is not None}
        self._ready = {expert: slot for (_, expert), slot in here.items()}
        self._busy = set(here.values())  # what nothing may be read into now
        self._queue = deque(pair for pair in pairs if pair not in here)
        owner.asked += self._queue
        self._waiting: deque[tuple[Pair, int, Ticket]] = deque()
        self._submit()

    def __iter__(self) -> Iterator[dict[int, int]]:
        while self._ready or self._waiting:
            batch, self._ready = self._ready or self._arrived(), {}
            yield {expert: self._owner._computed_from((self._layer, expert), slot) for expert, slot in batch.items()}
            self._busy -= set(batch.values())
            self._submit()
        if self._queue:
            raise PairError(f"{len(self._queue)} experts were not read: no slot came free")

    def _arrived(self) -> dict[int, int]:
        """The oldest read, and those behind it that are done as well."""
        batch: dict[int, int] = {}
        while self._waiting and (not batch or self._waiting[0][2].done):
            pair, slot, ticket = self._waiting.popleft()
            self._owner._wait(pair, slot, ticket)
            batch[pair[1]] = slot
        return batch

    def _submit(self) -> None:
        while self._queue and (slot := self._owner._assign(self._queue[0], self._busy)) is not None:
            if slot in self._busy:
                raise PairError(f"expert slot {slot} was promised twice")
            pair = self._queue.popleft()
            self._busy.add(slot)
            self._waiting.append((pair, slot, self._owner._read(pair, slot)))
