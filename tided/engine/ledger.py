"""Rank 0's account of the open requests: their counters and events, and what the pilot is told of them.

Each request ends exactly once: by a stop id, by its length, by a cancellation, or with the pair.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy.typing as npt

from tided.control.messages import Prefill, Step, Swap
from tided.engine.executor import Demand, Executor, Outcome
from tided.engine.ports import PairSwap, Pilot
from tided.engine.scheduler import Running, Scheduler
from tided.engine.stats import Picks, RequestStats, Residency, log_line
from tided.engine.types import Event, Failed, Finished, Request, Started, Tokens
from tided.errors import PairError, RequestError

log = logging.getLogger("tided.engine")

Array = npt.NDArray[Any]
Reason = Literal["stop", "length", "cancelled"]


class Ledger:
    """`events` wait to be emitted; `residency` is the routable set as published."""

    def __init__(self, executor: Executor, scheduler: Scheduler, pilot: Pilot | None) -> None:
        self.events: list[Event] = []
        self.residency = residency_of(executor)
        self._executor, self._scheduler, self._pilot = executor, scheduler, pilot
        self._open: dict[str, RequestStats] = {}

    @property
    def open_ids(self) -> list[str]:
        return list(self._open)

    def accept(self, request: Request, submitted_s: float) -> None:
        if request.request_id in self._open:
            raise PairError(f"request {request.request_id} was submitted twice")
        try:
            self._scheduler.submit(request)
        except RequestError as error:
            self.events.append(Failed(request.request_id, error.what))
        else:
            self._open[request.request_id] = RequestStats(request, submitted_s)

    def begin(self, step: Step) -> None:
        """The step's admissions have their lanes."""
        for admission in step.admit:
            stats = self._open[admission.request.request_id]
            stats.admitted(admission.lane, time.monotonic(), len(self._scheduler.running))
            self.events.append(Started(admission.request.request_id))

    def account(self, step: Step, outcome: Outcome, seconds: float, now_s: float) -> None:
        """The step took `seconds` and ended at `now_s`. Swaps, chunk and prompt first: a token may end its request."""
        if step.swaps:
            self._published([(swap.out, swap.in_) for swap in step.swaps])
        if isinstance(step.work, Prefill):
            stats = self._stats(step.work.lane)
            stats.chunk(step.work.count, seconds)
            if outcome.prompt_demand:
                self._prompt_done(stats, step.work.lane, outcome.prompt_demand)
        for lane, token in outcome.tokens:
            self._token(lane, token, now_s)

    def cancel(self, request_id: str) -> None:
        """Of a request that ended meanwhile nothing is left to cancel."""
        found = self._scheduler.cancel(request_id)
        if found is not None:
            self._finish(request_id, "cancelled", found.lane if isinstance(found, Running) else None)

    def fail(self, request_ids: Sequence[str], message: str) -> None:
        self.events += [Failed(request_id, message) for request_id in request_ids]
        self._open.clear()

    def idle(self) -> None:
        """Nothing is asked for: the tide may plan."""
        self._plan(self._pilot.idle_plan() if self._pilot else ())

    def _published(self, swaps: Sequence[PairSwap]) -> None:
        self.residency = residency_of(self._executor)
        if self._pilot:
            self._pilot.applied(swaps)
        for running in self._scheduler.running.values():
            self._open[running.request.request_id].swaps += len(swaps)

    def _stats(self, lane: int) -> RequestStats:
        return self._open[self._scheduler.running[lane].request.request_id]

    def _prompt_done(self, stats: RequestStats, lane: int, demand: Demand) -> None:
        stats.prefill = picks(demand)
        if self._pilot:
            self._plan(self._pilot.prompt_done(*on_host(demand), stats.prefilled_tokens, lane=lane))

    def _plan(self, swaps: Sequence[PairSwap]) -> None:
        self._scheduler.take_plan([Swap(out, in_) for out, in_ in swaps])

    def _token(self, lane: int, token: int, now_s: float) -> None:
        stats = self._stats(lane)
        request = stats.request
        stats.token(now_s)
        stopped = token in request.stop_ids
        if not stopped:
            self.events.append(Tokens(request.request_id, [token]))
        if stopped or stats.completion_tokens >= request.max_tokens:
            self._scheduler.finish(lane)
            self._finish(request.request_id, "stop" if stopped else "length", lane)

    def _finish(self, request_id: str, reason: Reason, lane: int | None) -> None:
        """The request's last event, with its own counters whatever ended it. The lane's state goes with the next step,
        its demand is taken now."""
        stats = self._open[request_id]
        if lane is not None:
            self._take_demand(stats, lane)
        report = stats.report(self.residency, time.monotonic())
        log.info("%s", log_line(request_id, reason, report))
        prompt, completion = len(stats.request.prompt_ids), stats.completion_tokens
        self.events.append(Finished(request_id, reason, prompt, completion, report))
        del self._open[request_id]

    def _take_demand(self, stats: RequestStats, lane: int) -> None:
        """What was routed since the prompt was complete; of an incomplete prompt, all."""
        demand = self._executor.tap.take(lane)
        if stats.first_token_s is None:
            stats.prefill = picks(demand)
        else:
            stats.decode = picks(demand)
        if self._pilot:
            self._pilot.request_done(*on_host(demand), stats.decode_steps, lane=lane)


def picks(demand: Demand) -> Picks:
    return Picks(*demand[2].tolist())


def on_host(demand: Demand) -> tuple[Array, Array, Array]:
    counts, mass, totals = (part.cpu().numpy() for part in demand)
    return counts, mass, totals


def residency_of(executor: Executor) -> Residency:
    residents, counts = executor.residents, executor.tap.counts
    total = counts.shape[1] * counts.shape[2]
    return Residency(executor.plan_version, len(residents.pairs), total, residents.digest())
