"""The engine of rank 0: takes in requests, decides each step, shares it, executes it, keeps every request's account.

Its thread is the only one that touches scheduler, executor, link and pilot; other threads reach it through the inbox.
"""

import logging
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy.typing as npt

from tided.control.messages import Prefill, Step, Stop, Swap
from tided.engine.checks import check_request
from tided.engine.core import IDLE_WAIT_S, Engine, OnFault
from tided.engine.executor import Demand, Executor, Outcome
from tided.engine.ports import LeaderLink, PairSwap, Pilot
from tided.engine.scheduler import Running, Scheduler
from tided.engine.stats import Picks, RequestStats, Residency, log_line
from tided.engine.types import Event, Failed, Finished, Request, Started, Tokens
from tided.errors import PairError, RequestError, TideError

log = logging.getLogger("tided.engine")

Array = npt.NDArray[Any]
Sink = Callable[[Sequence[Event]], None]
Reason = Literal["stop", "length", "cancelled"]


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
    ) -> None:
        super().__init__(executor, on_fault, threads)
        self.scheduler, self.residency = scheduler, _residency(executor)
        self._link, self._sink, self._pilot = link, sink, pilot
        limits = scheduler.limits
        # An open request has one submission and one cancellation at most on their way.
        self._inbox: queue.Queue[Request | str | Stop] = queue.Queue(4 * (limits.lanes + limits.queue) + 16)
        self._open: dict[str, RequestStats] = {}
        self._events: list[Event] = []
        self._rested = True  # no step since the idle plan was asked for
        self._stop: Stop | None = None

    def submit(self, request: Request) -> None:
        """Raises RequestError, here and now, for one that could not run."""
        check_request(request, self.scheduler.limits, self.executor.model.shape.vocab_size)
        self._inbox.put_nowait(request)

    def cancel(self, request_id: str) -> None:
        self._inbox.put_nowait(request_id)

    def close(self, reason: str) -> None:
        """Ends the engine after the step in progress; open requests are cancelled."""
        self._inbox.put_nowait(Stop(reason))

    # The loop

    def _loop(self) -> None:
        busy = False
        while self._stop is None:
            self._take_in(0.0 if busy else IDLE_WAIT_S)
            busy = self.turn()
        for request_id in list(self._open):
            self._cancel(request_id)
        self._emit()
        self._link.stop(self._stop.reason)

    def turn(self) -> bool:
        """Decides and executes one step; False when there was nothing to do."""
        step = self.scheduler.next_step() or self._rest()
        if step is not None:
            self._rested = False if step.work else self._rested
            self._begin(step)
            began_s = time.monotonic()
            self._link.send(step)
            outcome = self._execute(step)
            if step.digest_due:
                self._link.compare(step.seq, outcome.digest)
            self._account(step, outcome, self.last_step_s - began_s)
        self._emit()
        return step is not None

    def _rest(self) -> Step | None:
        """Nothing is asked for: check the books once, then let the tide plan once."""
        if self._rested or self.scheduler.waiting:
            return None
        self._rested = True
        if self.executor.lanes or self.scheduler.held_tokens:
            raise PairError(f"lanes {sorted(self.executor.lanes)} are held while no request runs")
        self.executor.residents.check_integrity()
        self._plan(self._pilot.idle_plan() if self._pilot else ())
        return self.scheduler.next_step()

    def _take_in(self, wait_s: float) -> None:
        try:
            self._receive(self._inbox.get(block=wait_s > 0, timeout=wait_s or None))
            while True:
                self._receive(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _receive(self, command: Request | str | Stop) -> None:
        if isinstance(command, Stop):
            self._stop = command
        elif isinstance(command, str):
            self._cancel(command)
        else:
            self._accept(command)

    def _accept(self, request: Request) -> None:
        if request.request_id in self._open:
            raise PairError(f"request {request.request_id} was submitted twice")
        try:
            self.scheduler.submit(request)
        except RequestError as error:
            self._events.append(Failed(request.request_id, error.what))
        else:
            self._open[request.request_id] = RequestStats(request, time.monotonic())

    def _cancel(self, request_id: str) -> None:
        """Of a request that ended meanwhile nothing is left to cancel."""
        found = self.scheduler.cancel(request_id)
        if found is not None:
            self._finish(request_id, "cancelled", found.lane if isinstance(found, Running) else None)

    # Accounting

    def _begin(self, step: Step) -> None:
        for admission in step.admit:
            stats = self._open[admission.request.request_id]
            stats.admitted(admission.lane, time.monotonic(), len(self.scheduler.running))
            self._events.append(Started(admission.request.request_id))
        if step.admit:
            self._emit()

    def _account(self, step: Step, outcome: Outcome, seconds: float) -> None:
        if step.swaps:
            self.residency = _residency(self.executor)
            if self._pilot:
                self._pilot.applied([(swap.out, swap.in_) for swap in step.swaps])
            for running in self.scheduler.running.values():
                self._open[running.request.request_id].swaps += len(step.swaps)
        if isinstance(step.work, Prefill):
            self._stats(step.work.lane).chunk(step.work.count, seconds)
        if outcome.prompt_demand and isinstance(step.work, Prefill):
            self._prompt_done(step.work.lane, outcome.prompt_demand)
        for lane, token in outcome.tokens:
            self._token(lane, token)

    def _stats(self, lane: int) -> RequestStats:
        return self._open[self.scheduler.running[lane].request.request_id]

    def _token(self, lane: int, token: int) -> None:
        stats = self._stats(lane)
        request = stats.request
        stats.token(self.last_step_s)
        stopped = token in request.stop_ids
        if not stopped:
            self._events.append(Tokens(request.request_id, [token]))
        if stopped or stats.completion_tokens >= request.max_tokens:
            self.scheduler.finish(lane)
            self._finish(request.request_id, "stop" if stopped else "length", lane)

    def _prompt_done(self, lane: int, demand: Demand) -> None:
        stats = self._stats(lane)
        stats.prefill = picks(demand)
        if self._pilot:
            counts, mass, totals = on_host(demand)
            self._plan(self._pilot.prompt_done(counts, mass, totals, stats.prefilled_tokens, lane=lane))

    def _plan(self, swaps: Sequence[PairSwap]) -> None:
        self.scheduler.take_plan([Swap(out, in_) for out, in_ in swaps])

    def _finish(self, request_id: str, reason: Reason, lane: int | None) -> None:
        """The request's last event, with its own counters whatever ended it. The lane's state goes with the next step,
        its demand is taken now."""
        stats = self._open.pop(request_id)
        if lane is not None and lane in self.executor.lanes:
            demand = self.executor.tap.take(lane)
            answering = stats.first_token_s is not None
            stats.decode, stats.prefill = (picks(demand), stats.prefill) if answering else (Picks(), picks(demand))
            if self._pilot:
                counts, mass, totals = on_host(demand)
                self._pilot.request_done(counts, mass, totals, stats.decode_steps, lane=lane)
        report = stats.report(self.residency, time.monotonic())
        log.info("%s", log_line(request_id, reason, report))
        prompt, completion = len(stats.request.prompt_ids), stats.completion_tokens
        self._events.append(Finished(request_id, reason, prompt, completion, report))

    def _emit(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._sink(events)

    def _end(self, fault: TideError) -> None:
        """Whoever waits is told: open requests, and those that were still on their way here."""
        waiting = list(self._open)
        while not self._inbox.empty():
            command = self._inbox.get_nowait()
            waiting += [command.request_id] if isinstance(command, Request) else []
        self._events += [Failed(request_id, fault.what) for request_id in waiting]
        self._emit()
        super()._end(fault)


def picks(demand: Demand) -> Picks:
    return Picks(*demand[2].tolist())


def on_host(demand: Demand) -> tuple[Array, Array, Array]:
    counts, mass, totals = (part.cpu().numpy() for part in demand)
    return counts, mass, totals


def _residency(executor: Executor) -> Residency:
    residents, counts = executor.residents, executor.tap.counts
    total = counts.shape[1] * counts.shape[2]
    return Residency(executor.plan_version, len(residents.pairs), total, residents.digest())
