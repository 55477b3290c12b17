"""The engine of rank 0: takes in requests, decides each step, shares it, executes it.

Its thread is the only one that touches scheduler, executor, link and pilot; other threads reach it through the inbox.
"""

import math
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs

from tided.control.messages import Recalled, Step, Stop
from tided.engine.board import FIGURES_EVERY_S, ExpertBoard, Figures, PlanShown
from tided.engine.budget import BudgetAsk, Budgets, Forecast, Nodes
from tided.engine.checks import check_images, check_request
from tided.engine.core import IDLE_WAIT_S, LANDING_WAIT_S, REST_AFTER_S, Engine, OnFault
from tided.engine.executor import Executor
from tided.engine.ledger import Ledger
from tided.engine.motion import Motion, Moved, Plan
from tided.engine.ports import LeaderLink, Pilot
from tided.engine.recall import Candidate, Recalls
from tided.engine.scheduler import Scheduler
from tided.engine.stats import Residency
from tided.engine.trace import Traces
from tided.engine.types import Event, Guide, Pixels, Request
from tided.errors import PairError, RequestError, TideError
from tided.tide.demand import RouterShape
from tided.tide.heat import Weights
from tided.tide.hot import HotReads
from tided.tide.kinds import Kinds

Sink = Callable[[Sequence[Event]], None]


class Submission(NamedTuple):
    request: Request
    submitted_s: float
    guide: Guide | None = None
    pixels: Sequence[Pixels] = ()


class Cancellation(NamedTuple):
    request_id: str


Command = Submission | Cancellation | BudgetAsk | Stop


class LeaderEngine(Engine):
    """`sink` gets the events of a step at once, on this thread; so does `on_fault`, after the last events."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        link: LeaderLink,
        sink: Sink,
        on_fault: OnFault,
        pilot: Pilot | None = None,
        threads: int = 1,
        expert_reads: Mapping[str, Any] | None = None,
        rest_after_s: float = REST_AFTER_S,
        resident: int = 0,
        nodes: Nodes | None = None,
    ) -> None:
        """`resident`: the budget of the profile; 0: what is resident now. `nodes`: where the ranks lie."""
        super().__init__(executor, on_fault, threads)
        self.expert_reads: Mapping[str, Any] = expert_reads or {}  # where experts come from, for who asks
        self.data_plane: Mapping[str, Any] = {}  # how fast the ranks add, alike
        self.about: Mapping[str, Any] = {}  # build, machine and checkpoint, alike
        limits = scheduler.limits
        self.motion = Motion(hot_reads(executor, pilot), 1 + link.followers, limits.swaps, limits.look_rows)
        self.budgets = Budgets(executor.residents, self.motion, pilot, resident or executor.residents.count, nodes)
        self.living = self.budgets.resident, self.budgets.of_profile  # replaced and never changed
        scheduler.recalls = Recalls(1 + link.followers, self._held_prefixes)
        self.scheduler, self.ledger = scheduler, Ledger(executor, scheduler, self.motion, pilot)
        self._link, self._sink = link, sink
        # An open request has one submission and one cancellation at most on their way.
        places = 4 * (limits.lanes + limits.queue) + 16
        self._inbox: queue.Queue[Command] = queue.Queue(places)
        self._moved = Moved()  # by the step in hand
        self._rest_after_s = rest_after_s
        self._rested = True  # no work since the pair came to rest
        self._resting: Iterator[None] | None = None  # what is still to be done before it has
        self._mask = ""  # that snapshots were looked up for
        self._stop: Stop | None = None
        shape = executor.model.shape
        residents = executor.residents
        self.board = ExpertBoard(
            shape.moe_layers,
            shape.experts_per_layer,
            residents.pairs,
            slot_of=residents.slot_of,
            arena_slots=residents.slots,
        )
        self.figures = Figures()
        self._figures_s = -math.inf
        self._swaps = self._waits = 0
        self._plan: Plan | None = None  # the one that is shown
        self._wait_s: dict[int, float] = {}  # by rank; replaced and never changed

    # For other threads

    @property
    def residency(self) -> Residency:
        return self.ledger.residency

    @property
    def heat(self) -> Weights | None:
        """[layers * experts], replaced and never changed: what the next tokens are expected to ask for; without a ring
        what plans are made from, as of the newest prompt or request. None: nobody follows it."""
        return self.motion.hot.heat.expected if self.motion.has_ring else self.ledger.wanted

    @property
    def traces(self) -> Traces:
        return self.ledger.traces

    @property
    def token_bytes(self) -> Sequence[bytes | None]:
        """What each token id spells, None for special ones; to be told before the first request."""
        return self.ledger.token_bytes

    @token_bytes.setter
    def token_bytes(self, known: Sequence[bytes | None]) -> None:
        self.ledger.token_bytes = known

    def submit(self, request: Request, guide: Guide | None = None, pixels: Sequence[Pixels] = ()) -> None:
        """Raises RequestError, here and now, for one that could not run. `guide`: the engine's own from here on.
        `pixels`: of the request's images."""
        check_request(request, self.scheduler.limits, self.executor.model.shape.vocab_size)
        check_images(request, pixels, self.executor.model.image_tokens)
        self._inbox.put_nowait(Submission(request, time.monotonic(), guide, pixels))

    def cancel(self, request_id: str) -> None:
        self._inbox.put_nowait(Cancellation(request_id))

    def ask_budget(self, ask: BudgetAsk) -> None:
        self._inbox.put_nowait(ask)

    def close(self, reason: str) -> None:
        """Ends the engine after the step in progress; open requests are cancelled."""
        self._inbox.put_nowait(Stop(reason))

    # For its own

    def turn(self) -> bool:
        """Decides and executes one step, or does a piece of what is due at rest; False: there was nothing to do."""
        self._collect_reads()
        step = self._next_step()
        busy = step is not None or self._rest()
        if step is not None:
            self._run_step(step)
        self._emit()
        return busy

    def _run_step(self, step: Step) -> None:
        self.ledger.begin(step)
        self._emit()
        began_s = time.monotonic()
        self._link.send(step)
        self.executor.beside = partial(self._changed, step)
        outcome = self._execute(step)
        if step.digest_due:
            self._compare(step.seq, outcome.digest)
        self.ledger.account(step, outcome, self.last_step_s - began_s, self.last_step_s)
        if step.work is not None:
            self._rested, self._resting = False, None
        self._show()

    def _compare(self, seq: int, digest: str) -> None:
        waited_s = self._link.compare(seq, digest)
        self._waits += 1
        self._wait_s = {rank: self._wait_s.get(rank, 0.0) + seconds for rank, seconds in waited_s.items()}

    def _changed(self, step: Step) -> None:
        """Beside the step's work: what its change means to the books and to who looks, and what was read meanwhile."""
        now_s = time.monotonic()
        self._swaps += len(self._moved.swaps)
        if step.change:
            self.ledger.changed(step, self._moved, now_s)
            self.board.changed(step.change, now_s)
            self.board.arena_slots = self.executor.residents.slots
            self._show_plan()
        if not step.digest_due:  # else the next that another rank says may be its digest
            self._collect_experts()

    def _show(self) -> None:
        """What others may look at. The figures are made few times a second, whoever looks."""
        if self.last_step_s - self._figures_s >= FIGURES_EVERY_S or not self.scheduler.running:
            self._figures_s = self.last_step_s
            routed, drafts = self.ledger.routed(), self.ledger.drafts
            self.figures = Figures(
                steps=self.seq,
                weight=routed.weight,
                missed_weight=routed.missed_weight,
                substituted_weight=routed.missed_weight - routed.read_weight,
                answer_tokens=self.ledger.answer_tokens,
                drafted=drafts.drafted,
                accepted=drafts.accepted,
                lanes=self.ledger.lanes(),
                reads=self.ledger.reads(),
                swaps=self._swaps,
                kv_tokens_used=self.scheduler.held_tokens,
                kv_tokens_capacity=self.scheduler.limits.pool_tokens,
                rank_wait_s=self._wait_s,
                rank_waits=self._waits,
                device_bytes=torch.cuda.memory_allocated(),
                arena_bytes=self.executor.residents.arena_bytes,
            )

    def _show_plan(self) -> None:
        plan, shown = self.motion.newest, self.board.plan
        if plan is None:
            return
        since_s = shown.at_s if shown and plan is self._plan else self.last_step_s
        self._plan, self.board.plan = plan, PlanShown(plan.reason, plan.swaps, self.motion.done, since_s)

    def _held_prefixes(self, request: Request) -> Sequence[Candidate]:
        return self.executor.caching.candidates(request, self.executor.residents.mask_hash)

    def _next_step(self) -> Step | None:
        self.budgets.begin()
        self.living = self.budgets.resident, self.budgets.of_profile
        change, self._moved = self.motion.change()
        step = self.scheduler.next_step(change, self._moved.residents)
        if step is not None and (masks := self.ledger.masks(step.work)):
            step = structs.replace(step, masks=masks)
        for running in self.scheduler.failed:
            self.ledger.give_up(running)
        for running in self.scheduler.gave_way:
            self.ledger.gave_way(running)
        self.scheduler.failed.clear()
        self.scheduler.gave_way.clear()
        return step

    @property
    def _reading(self) -> int:
        """Reads of any kind that some rank has not told of."""
        return self.motion.reading + self.scheduler.recalls.pending

    def _collect_reads(self) -> None:
        """Reads that ended here, and elsewhere. What cannot be read, an expert or a snapshot or a parked lane, is told
        like what can: all ranks do without it, or none."""
        recalls, caching = self.scheduler.recalls, self.executor.caching
        if recalls.pending or caching.recalling:
            for answer in (*(Recalled(0, *answer) for answer in caching.answers()), *self._link.recalled()):
                recalls.heard(answer)
        if caching.plan.strict and self.ledger.residency.mask_hash != self._mask:
            self._mask = self.ledger.residency.mask_hash
            recalls.renew()
        self._collect_experts()

    def _collect_experts(self) -> None:
        if self.motion.reading:
            for reads in (self.executor.residents, self._link):
                self.motion.landed(reads.landed())
                self.motion.failed(reads.failed())

    def take_in(self, wait_s: float = 0.0) -> None:
        """All that waits in the inbox; when it is empty, the next that comes within `wait_s`."""
        try:
            self._receive(self._inbox.get(block=wait_s > 0, timeout=wait_s or None))
            while True:
                self._receive(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _loop(self) -> None:
        busy = False
        while self._stop is None:
            self.turned_s = time.monotonic()
            self.take_in(0.0 if busy else self._idle_wait_s())
            busy = self.turn()
        for request_id in self.ledger.open_ids:
            self.ledger.cancel(request_id)
        self._emit()
        self._link.stop(self._stop.reason)

    def _idle_wait_s(self) -> float:
        if self._reading:
            return LANDING_WAIT_S
        rest_s = self.last_step_s + self._rest_after_s - time.monotonic()
        return IDLE_WAIT_S if self._rested else min(IDLE_WAIT_S, max(0.0, rest_s))

    def _rest(self) -> bool:
        """Nothing has been asked for since a while: once, a piece of the rest that is due. Whoever comes meanwhile
        waits for one piece; the rest begins again after its request."""
        if self._rested or self.scheduler.waiting or self.scheduler.behind or self.scheduler.running:
            return False
        if time.monotonic() - self.last_step_s < self._rest_after_s:
            return False
        self._resting = self._resting or self._at_rest()
        if next(self._resting, self) is self:
            self._rested, self._resting = True, None
        return True

    def _at_rest(self) -> Iterator[None]:
        """Verifies the books, then lets the tide plan. Each piece takes milliseconds."""
        if self.executor.lanes or self.scheduler.held_tokens:
            raise PairError(f"lanes {sorted(self.executor.lanes)} are held while no request runs")
        if self.executor.caching.kept:
            raise PairError(f"{self.executor.caching.kept} snapshots are kept for nobody")
        if self.executor.sight.kept:
            raise PairError(f"images of {self.executor.sight.kept} requests are kept for nobody")
        self.scheduler.check()
        for check in self.executor.checks():
            check()
            yield
        self.motion.hot.check(self.executor.residents.pairs, self.executor.residents.ring)
        yield
        yield from self.ledger.rest()

    def _receive(self, command: Command) -> None:
        if isinstance(command, Submission):
            self.ledger.accept(*command)
        elif isinstance(command, Cancellation):
            self.ledger.cancel(command.request_id)
        elif isinstance(command, BudgetAsk):
            command.reply(self._judged(command))
        else:
            self._stop = command

    def _judged(self, ask: BudgetAsk) -> Forecast | RequestError:
        """A change that is wanted begins with one of the next steps."""
        try:
            found = self.budgets.forecast(ask.resident, ask.nbytes)
            if found.bytes > found.bytes_now:
                more = found.arena_bytes - found.arena_bytes_now + self.budgets.owed_bytes
                beside = self.executor.caching.prefixes.room_bytes  # of rank 0; the others' fill like it
                self.budgets.nodes.refuse_growth(more + beside, ask.free_bytes)
        except RequestError as error:
            return error
        if not ask.apply or found.resident == self.budgets.resident:
            return found
        self.budgets.ask(found.resident)
        return structs.replace(found, applied=True, changing=True)

    def _emit(self) -> None:
        if self.ledger.events:
            events, self.ledger.events = self.ledger.events, []
            self._sink(events)

    def _end(self, fault: TideError) -> None:
        """Whoever waits is told: open requests, and those that were still on their way here."""
        waiting = self.ledger.open_ids
        while not self._inbox.empty():
            command = self._inbox.get_nowait()
            waiting += [command.request.request_id] if isinstance(command, Submission) else []
        self.ledger.fail(waiting, fault.what)
        self._emit()
        super()._end(fault)


def hot_reads(executor: Executor, pilot: Pilot | None) -> HotReads:
    """The policy of what is read while serving, for the residents and the ring that this rank has."""
    shape, residents = executor.model.shape, executor.residents
    router = RouterShape(shape.moe_layers, shape.experts_per_layer, shape.top_k)
    base = pilot.scores() if pilot else np.ones((router.layers, router.experts))
    floor, sizes = pilot.floor if pilot else router.top_k, residents.sizes
    kinds = None if sizes is None else Kinds(*sizes)
    return HotReads(router, residents.pairs, residents.ring_slots, floor, base, kinds)
