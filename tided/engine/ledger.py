"""Rank 0's account of the open requests: their counters and events, and what the pilot is told of them.

Each request ends exactly once: by a stop id, by its length, because it goes round in circles, by a cancellation, or
with the pair.
"""

import logging
import time
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Any, Literal

import numpy.typing as npt
from msgspec import structs

from tided.control.messages import Decode, Mask, Prefill, Step
from tided.engine.board import LaneFigures
from tided.engine.costs import NOTHING, Touched
from tided.engine.executor import Executor
from tided.engine.figures import lane_figures, reads_of, residency_of, waits_of
from tided.engine.lane import Demand, Outcome
from tided.engine.loops import LoopWatch
from tided.engine.moments import Moments
from tided.engine.motion import Motion, Moved
from tided.engine.ports import Pilot
from tided.engine.scheduler import Running, Scheduler
from tided.engine.stats import Drafts, Picks, Reads, RequestStats, log_line
from tided.engine.trace import Traces, Uses
from tided.engine.types import Event, Failed, Finished, Guide, Pixels, Request, Scored, Started, TokenLogprob, Tokens
from tided.errors import PairError, RequestError
from tided.experts.fetch import Waits

log = logging.getLogger("tided.engine")

Array = npt.NDArray[Any]
NO_ROOM = (
    "the context pool is full, and this request's context could not be kept on disk; "
    "raise pool_tokens or park_tokens in [cache], or send fewer long requests at once"
)
UNREAD = (
    "{lost}, and this request waited for it; that rank's log names the file and the offset: check its disk (dmesg) "
    "and put the file back. Requests of fidelity balanced and fast do without the expert meanwhile"
)
Reason = Literal["stop", "length", "cancelled"]


class Ledger:
    """`events` wait to be emitted; `residency` is the routable set as published. `token_bytes`: what a token id spells,
    None for special ones."""

    def __init__(self, executor: Executor, scheduler: Scheduler, motion: Motion, pilot: Pilot | None) -> None:
        self.events: list[Event] = []
        self.residency = residency_of(executor)
        self._executor, self._scheduler, self._motion = executor, scheduler, motion
        self._moments = Moments(motion, pilot) if pilot else None
        self._open: dict[str, RequestStats] = {}
        self.traces = Traces()
        self._guides: dict[str, Guide] = {}  # by request
        self._waits = Waits()  # before the step in hand
        self.token_bytes: Sequence[bytes | None] = ()
        self._watches: dict[str, LoopWatch] = {}  # by request
        self._taken = Picks()  # of all requests that somebody asked, as far as their demand was taken
        self._totals: dict[int, Array] = {}  # by lane, as the newest step left them: of what was not
        self.answer_tokens, self.drafts = 0, Drafts()

    @property
    def wanted(self) -> Array | None:
        """[layers * experts]: what plans are made from, as of the newest prompt or request. None: nobody plans."""
        return self._moments.wanted if self._moments else None

    def routed(self) -> Picks:
        """By all requests since the start; of answers that go on, as of their newest step."""
        return sum((Picks(*totals.tolist()) for totals in self._totals.values()), self._taken)

    def lanes(self) -> tuple[LaneFigures, ...]:
        running = sorted(self._scheduler.running.items())
        return tuple(lane_figures(lane, one, self._stats_of(one)) for lane, one in running)

    @property
    def open_ids(self) -> list[str]:
        return list(self._open)

    def accept(
        self, request: Request, submitted_s: float, guide: Guide | None = None, pixels: Sequence[Pixels] = ()
    ) -> None:
        if request.request_id in self._open:
            raise PairError(f"request {request.request_id} was submitted twice")
        try:
            self._scheduler.submit(request)
        except RequestError as error:
            self.events.append(Failed(request.request_id, error.what))
        else:
            self._open[request.request_id] = RequestStats(request, submitted_s, self._motion.has_ring)
            if guide is not None:
                self._guides[request.request_id] = guide
            if pixels:
                self._executor.sight.keep(request.request_id, pixels)
            if request.loop_break:
                self._watches[request.request_id] = LoopWatch(request.loop_break, self.token_bytes)

    def masks(self, work: Prefill | Decode | None) -> list[Mask]:
        """What the lanes that this work draws a token for may draw."""
        if not self._guides or work is None:
            return []
        lanes = [work.lane] if isinstance(work, Prefill) else work.lanes
        guides = {lane: self._guides.get(self._scheduler.running[lane].request.request_id) for lane in lanes}
        bits = {lane: guide.mask() for lane, guide in guides.items() if guide is not None}
        return [Mask(lane, mask) for lane, mask in bits.items() if mask is not None]

    def begin(self, step: Step) -> None:
        """The step's admissions have their lanes."""
        self._waits = waits_of(self._executor)
        for admission in step.admit:
            stats = self._open[admission.request.request_id]
            if not admission.request.background:
                self.traces.began(admission.request.request_id, step.seq - 1, time.monotonic())
            stats.admitted(admission.lane, time.monotonic(), len(self._scheduler.running), self.reads())
            stats.cached_tokens = admission.restore.tokens if admission.restore else 0
            stats.prefix_source = self._executor.caching.source(admission.restore)
            self.events.append(Started(admission.request.request_id, stats.cached_tokens))
        for lane in step.park:
            self._stats(lane).parked += 1

    def changed(self, step: Step, moved: Moved, now_s: float) -> None:
        """The step's change is done, and its work launched: before `account`, where a token may end its request."""
        self.traces.changed(step.seq, step.change, self._motion.why, now_s)
        self._published(moved)

    def account(self, step: Step, outcome: Outcome, seconds: float, now_s: float) -> None:
        """The step took `seconds` and ended at `now_s`. Chunk and prompt first: a token may end its request."""
        self._scheduler.took(step.work, seconds, len(outcome.tokens))
        if self._is_quiet(step.work):
            self._executor.tap.forget_wishes()
        elif step.work is not None:
            rows = step.work.count if isinstance(step.work, Prefill) else len(outcome.tokens)
            if self._motion.stepped(rows):
                weights, of_layer = self._executor.tap.take_wanted()
                self._motion.observe(weights.cpu().numpy(), of_layer.cpu().numpy())
        for lane, lost in outcome.failed.items():
            self._give_up(self._scheduler.finish(lane), UNREAD.format(lost=lost))
        work = of_others(step.work, outcome.failed)
        if isinstance(work, Prefill):
            self._prefilled(work, outcome, seconds)
        elif isinstance(work, Decode):
            self._decoded(work, outcome, seconds)
        told = {lane: iter(logprobs) for lane, logprobs in outcome.logprobs.items()}
        for lane, token in outcome.tokens:
            if lane in self._scheduler.running:  # what comes behind the end of an answer in a block is dropped
                self._token(lane, token, now_s, next(told[lane]) if lane in told else None)
        if isinstance(work, Decode) and self._moments:
            self._step_done(self._moments, work.lanes)

    def _is_quiet(self, work: Prefill | Decode | None) -> bool:
        """Whether these are rows that nothing is read for while they run."""
        if not isinstance(work, Prefill):
            return False
        request = self._stats(work.lane).request
        return request.background or not request.adapts

    def _prefilled(self, work: Prefill, outcome: Outcome, seconds: float) -> None:
        stats = self._stats(work.lane)
        if outcome.unfinished:
            stats.prefill_s += seconds
            return
        if work.a_part:
            self._scheduler.finished_chunk(work)
        stats.chunk(work.count, seconds)
        if outcome.scores:
            self.events.append(Scored(stats.request.request_id, outcome.scores, outcome.redrawn))
        if outcome.prompt_demand:
            self._prompt_done(stats, work.lane, outcome.prompt_demand)
        elif self._moments and not self._is_quiet(work):
            self._chunk_done(self._moments, stats, work)
        if work.propose:
            executor = self._executor
            self._scheduler.depths.begun(work.lane, executor.lanes[work.lane].sure, executor.draft_s or None)

    def _decoded(self, work: Decode, outcome: Outcome, seconds: float) -> None:
        """A step of drafts that were verified, and of others that were made."""
        came = Counter(lane for lane, _ in outcome.tokens)
        depths = dict(zip(work.lanes, work.drafts or [0] * len(work.lanes), strict=True))
        for lane, depth in depths.items():
            self._stats(lane).stepped(depth, came[lane])
            self.drafts = Drafts(self.drafts.drafted + depth, self.drafts.accepted + came[lane] - 1)
        if not self._scheduler.depths.drafts:
            return
        draft_s, lanes = self._executor.draft_s if work.propose else 0.0, self._executor.lanes
        self._scheduler.depths.done(
            {lane: (depth, came[lane]) for lane, depth in depths.items()},
            {lane: lanes[lane].sure for lane in work.lanes},
            seconds - draft_s,
            draft_s or None,
            self._touched(),
        )

    def _touched(self) -> Touched:
        """By the newest step, for who learns what steps cost."""
        if not self._scheduler.depths.learns:
            return NOTHING
        before, now = self._waits, waits_of(self._executor)
        return Touched(self._executor.tap.touched(), now.reads - before.reads, now.seconds - before.seconds)

    def cancel(self, request_id: str) -> None:
        """Of a request that ended meanwhile nothing is left to cancel."""
        found = self._scheduler.cancel(request_id)
        if found is not None:
            self._finish(request_id, "cancelled", found.lane if isinstance(found, Running) else None)

    def gave_way(self, running: Running) -> None:
        """The background's lane is somebody else's."""
        self._finish(running.request.request_id, "cancelled", running.lane)

    def give_up(self, running: Running) -> None:
        """The scheduler has no room for this request."""
        self._give_up(running, NO_ROOM)

    def _give_up(self, running: Running, why: str) -> None:
        """This request ends, and no other is touched."""
        name = running.request.request_id
        log.warning("request %s: %s", name, why)
        self._take_demand(self._stats_of(running), running.lane)
        if not running.request.background:
            self.traces.ended(name, "failed", self._executor.seq, time.monotonic(), None)
        self._forget(name)
        self.events.append(Failed(name, why))

    def fail(self, request_ids: Sequence[str], message: str) -> None:
        self.events += [Failed(request_id, message) for request_id in request_ids]
        self._open.clear()
        self._guides.clear()
        self._watches.clear()

    def rest(self) -> Iterator[None]:
        """Nothing is asked for: the tide may plan, a piece at a time."""
        if self._moments:
            yield from self._moments.rest()

    def _published(self, moved: Moved) -> None:
        self.residency = residency_of(self._executor)
        if not moved.residents:
            return
        if self._moments:
            self._moments.published(moved)
        for running in self._scheduler.running.values():
            self._open[running.request.request_id].swapped(moved.plans)

    def _stats(self, lane: int) -> RequestStats:
        return self._stats_of(self._scheduler.running[lane])

    def _stats_of(self, running: Running) -> RequestStats:
        return self._open[running.request.request_id]

    def reads(self) -> Reads:
        """What was read since the start, by all requests."""
        return reads_of(self._executor, self._motion)

    def _prompt_done(self, stats: RequestStats, lane: int, demand: Demand) -> None:
        stats.prefill = picks(demand)
        if not stats.request.background:
            self._taken += stats.prefill
        if self._moments and stats.request.adapts:
            self._moments.prompt_done(*on_host(demand), stats.prefilled_tokens, lane)

    def _chunk_done(self, moments: Moments, stats: RequestStats, work: Prefill) -> None:
        left = len(stats.request.prompt_ids) - work.start - work.count
        chunks = -(-left // self._scheduler.limits.chunk_tokens)
        moments.chunk_done(stats.prefilled_tokens, chunks, self._demand_so_far, work.lane)

    def _step_done(self, moments: Moments, lanes: Sequence[int]) -> None:
        """For the answers that go on."""
        totals = self._executor.tap.totals_here()
        running = [lane for lane in lanes if lane in self._scheduler.running]
        self._totals |= {lane: totals[lane] for lane in running}
        answers = {lane: (self._stats(lane).decoded_tokens, totals[lane]) for lane in running}
        moments.step_done(answers, self._demand_so_far)

    def _demand_so_far(self, lane: int) -> tuple[Array, Array, Array]:
        return on_host(self._executor.tap.peek(lane))

    def _token(self, lane: int, token: int, now_s: float, logprob: TokenLogprob | None) -> None:
        stats = self._stats(lane)
        request = stats.request
        if (guide := self._guides.get(request.request_id)) is not None:
            guide.advance(token)
            if guide.error:
                self._give_up(self._scheduler.finish(lane), f"the grammar cannot be followed: {guide.error}")
                return
        stats.token(now_s)
        self.answer_tokens += not request.background
        self._scheduler.drew(lane, 1)
        stopped = token in request.stop_ids
        stats.loop_break = not stopped and self._loops(request, stats.completion_tokens, token)
        if not stopped:
            self.events.append(Tokens(request.request_id, [token], [] if logprob is None else [logprob]))
        if stopped or stats.loop_break or stats.completion_tokens >= request.max_tokens:
            self._scheduler.finish(lane)
            self._finish(request.request_id, "stop" if stopped or stats.loop_break else "length", lane)

    def _loops(self, request: Request, tokens: int, token: int) -> bool:
        """Whether the answer of so many tokens goes round in circles. What it must have at least is not watched."""
        watch = self._watches.get(request.request_id)
        loop = watch.feed(token) if watch is not None and tokens > request.min_tokens else None
        if loop is not None:
            log.warning(
                "request %s: ended, the last %d tokens came %d times in a row",
                request.request_id,
                loop.tokens,
                loop.repeats,
            )
        return loop is not None

    def _finish(self, request_id: str, reason: Reason, lane: int | None) -> None:
        """The request's last event, with its own counters whatever ended it. The lane's state goes with the next step,
        its demand is taken now."""
        stats = self._open[request_id]
        if lane is not None:
            self._take_demand(stats, lane)
        if not stats.request.background:
            uses = None if lane is None else Uses(*self._executor.tap.uses[:, lane].cpu().numpy().copy())
            self.traces.ended(request_id, reason, self._executor.seq, time.monotonic(), uses)
        report = stats.report(self.residency, time.monotonic(), self.reads())
        guide = self._guides.get(request_id)
        report["grammar"] = {"active": guide is not None, "mask_ms": None if guide is None else 1e3 * guide.mask_s}
        used, total = self._scheduler.held_tokens, self._scheduler.limits.pool_tokens
        report["kv"] = {"tokens_used": used, "tokens_total": total}
        log.info("%s", log_line(request_id, reason, report))
        prompt, completion = len(stats.request.prompt_ids), stats.completion_tokens
        self.events.append(Finished(request_id, reason, prompt, completion, report))
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._open[request_id]
        self._executor.sight.drop(request_id)
        self._guides.pop(request_id, None)
        self._watches.pop(request_id, None)

    def _take_demand(self, stats: RequestStats, lane: int) -> None:
        """What was routed since the prompt was complete; of an incomplete prompt, all."""
        demand = self._executor.tap.take(lane)
        self._totals.pop(lane, None)
        if not stats.request.background:
            self._taken += picks(demand)
        if stats.first_token_s is None:
            stats.prefill = picks(demand)
        else:
            stats.decode = picks(demand)
        gave_way = stats.request.background and stats.first_token_s is None  # it begins again, and votes then
        if self._moments and stats.request.adapts and not gave_way:
            self._moments.request_done(*on_host(demand), stats.decoded_tokens, lane)


def of_others(work: Prefill | Decode | None, failed: Container[int]) -> Prefill | Decode | None:
    """The work without lanes that have failed in it."""
    if isinstance(work, Prefill):
        return None if work.lane in failed else work
    if work is None or not any(lane in failed for lane in work.lanes):
        return work
    kept = [at for at, lane in enumerate(work.lanes) if lane not in failed]
    drafts = [work.drafts[at] for at in kept] if work.drafts else []
    return structs.replace(work, lanes=[work.lanes[at] for at in kept], drafts=drafts) if kept else None


def picks(demand: Demand) -> Picks:
    return Picks(*demand[2].tolist())


def on_host(demand: Demand) -> tuple[Array, Array, Array]:
    """As the pilot takes it: of the totals, what was wanted and what was missed."""
    counts, mass, totals = (part.cpu().numpy() for part in demand)
    return counts, mass, totals[:4]
