"""What the next step does, decided from state alone: no clock, no tensor, no other rank.

Requests wait in order and take a lane once the pool can hold their prompt and a page more. A newcomer's prompt is
computed in chunks, with as many decode steps between them as running answers need to keep their share of the time
(`engine.fairness`). Questions (`can_...`) change nothing; verbs do.

Contexts grow page by page. Where the pool cannot hold what the next step may add, the newest request is parked: its
context goes to disk, its lane's number stays its own. It comes back, the oldest first and before any newcomer, when the
others leave it room to go on for a while. The oldest is never parked: one request always fits, so all end.

A request in the background (`Request.background`) runs while there is nobody else: not beside answers, not before who
waits, and without a lane or a page that somebody else needs. One at a time, a layer of a chunk a step: who asks waits
for no more. It goes on when all others have ended, or ends without a result (`gave_way`).
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import structs

from tided.control.messages import Admission, Change, Decode, Prefill, Restore, Step
from tided.engine.depth import Depths, Row
from tided.engine.fairness import Pace, whose_turn
from tided.engine.recall import Recalls
from tided.engine.types import Request
from tided.errors import PairError, QueueFullError

UNCHANGED = Change()
MOST_SNAPSHOTS = 32  # of one prompt, about: each holds windows of its own beside the pages that all share
RESUME_SHARE = 8  # a parked lane comes back when it can grow by an eighth: it is not written again after a few tokens


@dataclass
class Running:
    """A request in a lane. `computed` counts prompt tokens, `drawn` those of the answer, which begins when the whole
    prompt is computed. `pages`: what it may hold of the pool by now; 0 while it is parked. `undrawn`: the prompt was
    restored whole, and its first token is still to be drawn. `turn`: the step of its last chunk."""

    request: Request
    lane: int
    computed: int = 0
    drawn: int = 0
    pages: int = 0
    parked: bool = False
    undrawn: bool = False
    turn: int = 0

    @property
    def in_prefill(self) -> bool:
        return self.computed < len(self.request.prompt_ids) or self.undrawn

    @property
    def room(self) -> int:
        """Tokens that may be drafted for the next step: it brings one more than that."""
        return max(0, self.request.max_tokens - self.drawn - 1) if self.request.may_draft else 0

    @property
    def length(self) -> int:
        """Tokens in the context: the newest of an answer is not."""
        return self.computed + max(0, self.drawn - 1)

    def chunk(self, chunk_tokens: int) -> Prefill:
        """The next chunk of the prompt; in the background a part of it. Chunks end at multiples of `chunk_tokens`
        whatever runs beside them: a snapshot at such a place is what a computation from the start would have there."""
        start, count = self.computed, self.next_tokens(chunk_tokens)
        if self.request.background:
            return Prefill(self.lane, start, count, a_part=True)
        self.computed, self.undrawn = start + count, False
        return Prefill(self.lane, start, count)

    def next_tokens(self, chunk_tokens: int) -> int:
        """Of the next chunk; 0 where the prompt was restored whole."""
        return min(chunk_tokens - self.computed % chunk_tokens, len(self.request.prompt_ids) - self.computed)


@dataclass(frozen=True)
class Limits:
    """Lanes, waiting requests, tokens of context of one request, of all lanes together and of a page of it, tokens of a
    prefill chunk, swaps read at once, steps between comparisons of the ranks; whether there are slots to read experts
    into before use; tokens of context that may be parked (0: a lane is admitted when the pool can hold its prompt and
    longest answer), most tokens that a decode step drafts, whether snapshots are taken; share of the time that
    prompts take beside running answers; rows between two looks of the hot ring."""

    lanes: int
    queue: int
    context_tokens: int
    pool_tokens: int
    page_tokens: int
    chunk_tokens: int
    swaps: int
    guard_every_steps: int
    can_wait: bool = True
    park_tokens: int = 0
    draft_tokens: int = 0
    snapshots: bool = False
    prefill_share: float = 0.3
    look_rows: int = 1

    def __post_init__(self) -> None:
        if self.context_tokens > self.pool_tokens:
            raise ValueError("a request that fits the context but not the pool would wait for ever")

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    @property
    def pool_pages(self) -> int:
        return self.pages(self.pool_tokens)


class Scheduler:
    """`failed`: requests that a step gave up, for who tells their clients; `gave_way`: the same of the background."""

    def __init__(self, limits: Limits, recalls: Recalls | None = None, depths: Depths | None = None) -> None:
        self.limits = limits
        self.depths = depths or Depths("off", 0)
        self.recalls = recalls or Recalls()
        self.waiting: deque[Request] = deque()
        self.behind: Request | None = None  # in the background, without a lane yet
        self.gave_way: list[Running] = []
        self.running: dict[int, Running] = {}  # by age: a lane is put in when it is admitted
        self.failed: list[Running] = []
        self.seq = 0
        self.plan_version = 0
        self._free = deque(range(limits.lanes))
        self._release: list[int] = []
        self.pace = Pace(limits.prefill_share)
        self._prefilled_last = False
        self._shared = False  # a prompt waited and answers were running when the last step was decided

    @property
    def held_tokens(self) -> int:
        """Of the pool, as admission counts it."""
        return self._claims(self.active) * self.limits.page_tokens

    @property
    def active(self) -> list[Running]:
        """The lanes that take part in steps, the oldest first."""
        return [running for running in self.running.values() if not running.parked]

    @property
    def in_front(self) -> list[Running]:
        """The lanes that somebody waits for."""
        return [running for running in self.running.values() if not running.request.background]

    @property
    def parked(self) -> list[Running]:
        return [running for running in self.running.values() if running.parked]

    def price_tokens(self, request: Request) -> int:
        """Tokens of the pool that the request may come to hold: whole pages."""
        return self.limits.pages(len(request.prompt_ids) + request.max_tokens) * self.limits.page_tokens

    def _claim(self, running: Running, more_tokens: int = 0) -> int:
        """Pages without which a lane is better not begun: its prompt and a page more, and what it holds."""
        limits, request = self.limits, running.request
        whole = len(request.prompt_ids) + request.max_tokens
        if not limits.park_tokens:
            return limits.pages(whole)
        length = max(len(request.prompt_ids), running.length + self._growth(running))
        return max(running.pages, limits.pages(min(whole, length + max(limits.page_tokens, more_tokens))))

    def _claims(self, lanes: Iterable[Running]) -> int:
        return sum(self._claim(running) for running in lanes)

    def _growth(self, running: Running) -> int:
        """Most tokens that the next step may add to the lane."""
        left = len(running.request.prompt_ids) - running.computed
        return min(self.limits.chunk_tokens, left) if left else 1 + self.limits.draft_tokens

    def submit(self, request: Request) -> None:
        """Appends to the queue, which is in order. Raises QueueFullError."""
        if request.background:
            if self.behind is not None or any(running.request.background for running in self.running.values()):
                raise QueueFullError(1)
            self.behind = request
            return
        if len(self.waiting) + len(self.in_front) >= self.limits.lanes + self.limits.queue:
            raise QueueFullError(len(self.waiting))
        self.waiting.append(request)

    def cancel(self, request_id: str) -> Running | Request | None:
        """Takes the request out, wherever it is. A waiting one never runs; a running one leaves with the next step."""
        if self.behind is not None and self.behind.request_id == request_id:
            request, self.behind = self.behind, None
            return request
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                self.recalls.drop(request)
                return request
        for running in self.running.values():
            if running.request.request_id == request_id:
                return self.finish(running.lane)
        return None

    def finish(self, lane: int) -> Running:
        """The lane's request is over: the next step releases the lane, and may give it to another request."""
        running = self.running.pop(lane)
        self._release.append(lane)
        self._free.append(lane)
        self.recalls.left(lane)
        self.depths.forget(lane)
        return running

    def finished_chunk(self, work: Prefill) -> None:
        """Of a chunk in parts the last one is done."""
        self.running[work.lane].computed = work.start + work.count

    def drew(self, lane: int, tokens: int) -> None:
        """The answer has so many tokens more."""
        self.running[lane].drawn += tokens

    def can_admit(self) -> bool:
        """Parked requests come first: whoever is in the queue is newer."""
        if not self.waiting or not self._free or self.parked:
            return False
        newcomer = Running(self.waiting[0], self._free[0])
        return self._claims((*self.active, newcomer)) <= self.limits.pool_pages

    def admit(self, restore: Restore | None = None) -> Admission:
        return self._admit(self.waiting.popleft(), restore)

    def _admit(self, request: Request, restore: Restore | None = None) -> Admission:
        lane = self._free.popleft()
        running = self.running[lane] = Running(request, lane, turn=self.seq)
        if restore is not None:
            running.computed = restore.tokens
            running.undrawn = restore.tokens == len(request.prompt_ids)
        self._hold(running)
        self.recalls.taken(request)
        return Admission(lane, request, restore)

    def _admissions(self) -> list[Admission]:
        """Of a newcomer that may begin with a snapshot, the ranks are asked first; the steps of others go on."""
        admitted = []
        while self.can_admit() or (self.waiting and self._give_way() and self.can_admit()):
            found = self.recalls.find(self.waiting[0])
            if found is None:
                break
            admitted.append(self.admit(found.restore))
        if self.behind is not None and self._is_idle and self._free:
            request, self.behind = self.behind, None
            admitted.append(self._admit(request))
        return admitted

    @property
    def _is_idle(self) -> bool:
        """Whether there is nobody but the background."""
        return not self.waiting and not self.in_front

    def _give_way(self) -> bool:
        """The background's lane and pages are free for this step; False: it has none."""
        behind = [running for running in self.active if running.request.background]
        self.gave_way += [self.finish(running.lane) for running in behind]
        return bool(behind)

    def _hold(self, running: Running) -> None:
        whole = len(running.request.prompt_ids) + running.request.max_tokens
        growth = running.length + self._growth(running)
        running.pages = max(running.pages, self.limits.pages(min(growth, whole)))

    def _make_room(self) -> list[int]:
        """The lanes to be parked so that the pool holds whatever the next step adds to the others."""
        active, parked = self.active, []
        for running in active:
            self._hold(running)
        is_short = sum(running.pages for running in active) > self.limits.pool_pages
        if (is_short or self.parked) and self._give_way():
            active = self.active
        while sum(running.pages for running in active) > self.limits.pool_pages:
            newest = active.pop()
            if self._can_park(newest):
                newest.pages, newest.parked = 0, True
                parked.append(newest.lane)
            else:
                self.failed.append(self.finish(newest.lane))
        return parked

    def _can_park(self, running: Running) -> bool:
        lanes = (*self.parked, running)
        return sum(self.limits.pages(lane.length) for lane in lanes) <= self.limits.pages(self.limits.park_tokens)

    def can_resume(self) -> bool:
        """Whether the oldest parked lane may grow for a while beside the active ones."""
        if not (parked := self.parked):
            return False
        more = parked[0].length // RESUME_SHARE
        return self._claims(self.active) + self._claim(parked[0], more) <= self.limits.pool_pages

    def _resume(self) -> list[int]:
        """Of a lane whose context a rank cannot read again, the request fails, and no other is touched."""
        resumed = []
        while self.can_resume() and (back := self.recalls.is_back(self.parked[0].lane)) is not None:
            running = self.parked[0]
            if not back:
                self.failed.append(self.finish(running.lane))
                continue
            running.parked = False
            self._hold(running)
            self.recalls.left(running.lane)
            resumed.append(running.lane)
        return resumed

    def next_step(self, change: Change = UNCHANGED, moves_residents: bool = False) -> Step | None:
        """The step to send and execute now, with a change of the routable set if there is one; None when there is
        nothing to do."""
        park = self._make_room()
        resume = [] if park else self._resume()
        admit = self._admissions()
        release, self._release = self._release, []
        work = self._next_work()
        save = self._snapshots(work)
        recall, forget = self.recalls.take()
        if not (release or admit or change or work or park or resume or recall or forget):
            return None
        self.seq += 1
        self.plan_version += moves_residents
        due = self.seq % self.limits.guard_every_steps == 0
        return Step(
            self.seq, self.plan_version, release, admit, change, work, due, park, resume, recall, forget, save
        )  # fmt: skip

    def _next_work(self) -> Prefill | Decode | None:
        may_begin = self.active if self._is_idle else self.in_front
        newcomer = whose_turn(running for running in may_begin if running.in_prefill and not running.parked)
        decoding = [running for running in self.active if not running.in_prefill]
        self._shared = newcomer is not None and bool(decoding)
        if not self._shared:
            self.pace.alone()
        if newcomer and not (decoding and self._answers_first(newcomer)):
            self._prefilled_last, newcomer.turn = True, self.seq + 1
            return self._chunk(newcomer)
        self._prefilled_last = False
        if not decoding:
            return None
        drafts, propose = self.depths.plan([row_of(running) for running in decoding])
        lanes = [running.lane for running in decoding]
        return Decode(lanes, drafts if any(drafts) else [], propose, self.depths.places if propose else 0)

    def _chunk(self, newcomer: Running) -> Prefill:
        """Behind the prompt's last chunk comes the first token: what follows it is drafted at once."""
        work = newcomer.chunk(self.limits.chunk_tokens)
        if newcomer.in_prefill:
            return work
        propose = self.depths.begin(row_of(newcomer, 1))
        return structs.replace(work, propose=propose, places=self.depths.places if propose else 0)

    def _answers_first(self, newcomer: Running) -> bool:
        return self._prefilled_last or not self.pace.may_prefill(newcomer.next_tokens(self.limits.chunk_tokens))

    def check(self) -> None:
        """Raises PairError unless every lane is free or somebody's, once, the pool holds all claims, and what is read
        back is for somebody who waits."""
        if sorted([*self._free, *self.running]) != list(range(self.limits.lanes)):
            raise PairError(f"lanes {sorted(self._free)} are free beside {sorted(self.running)}: one is lost, or twice")
        pages = sum(running.pages for running in self.active)
        if pages > self.limits.pool_pages:
            raise PairError(f"{pages} pages are promised of a pool of {self.limits.pool_pages}")
        self.recalls.check({request.request_id for request in self.waiting}, {lane.lane for lane in self.parked})

    def took(self, work: Prefill | Decode | None, seconds: float, tokens: int) -> None:
        """The step that was decided last took so long, and brought so many tokens. What is read for the background says
        nothing of prompts."""
        if isinstance(work, Prefill) and work.count and not self.running[work.lane].request.background:
            self.pace.prefilled(work.count, seconds, self._shared)
        elif isinstance(work, Decode):
            self.pace.decoded(len(work.lanes), tokens, seconds, self._shared)

    def _snapshots(self, work: Prefill | Decode | None) -> list[int]:
        if not self.limits.snapshots or not isinstance(work, Prefill) or not work.count:
            return []
        request = self.running[work.lane].request
        if request.scored:  # asked once: it would push out what is asked again
            return []
        prompt = len(request.prompt_ids)
        return [work.lane] if worth_saving(work.start + work.count, prompt, self.limits.chunk_tokens) else []


def row_of(running: Running, ahead: int = 0) -> Row:
    """`ahead`: tokens that come before what is asked about."""
    return Row(running.lane, running.room - ahead, running.request.fidelity != "fast")


def worth_saving(end: int, prompt_tokens: int, chunk_tokens: int) -> bool:
    """Whether the boundary of a chunk becomes a snapshot: evenly spread ones of a long prompt, and its last ones, where
    the next prompt of a conversation most often differs."""
    chunks = -(-prompt_tokens // chunk_tokens)
    apart = -(-chunks // MOST_SNAPSHOTS)
    number = -(-end // chunk_tokens)
    return number % apart == 0 or number >= chunks - 1
