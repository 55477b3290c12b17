"""What the next step does, decided from state alone: no clock, no tensor, no other rank.

Requests wait in order and take a lane once the pool can hold the whole of them, prompt and answer. A newcomer's prompt
is computed in chunks that take turns with decode steps, so a running answer waits for one chunk at most. Questions
(`can_...`) change nothing; verbs do.
"""

from collections import deque
from dataclasses import dataclass

from tided.control.messages import Admission, Change, Decode, Prefill, Step
from tided.engine.types import Request
from tided.errors import QueueFullError

UNCHANGED = Change()


@dataclass
class Running:
    """A request in a lane. `computed` counts prompt tokens; the answer begins when the whole prompt is computed."""

    request: Request
    lane: int
    computed: int = 0

    @property
    def in_prefill(self) -> bool:
        return self.computed < len(self.request.prompt_ids)


@dataclass(frozen=True)
class Limits:
    """Lanes, waiting requests, tokens of context of one request, of all lanes together and of a page of it, tokens of a
    prefill chunk, swaps read at once, steps between comparisons of the ranks; whether there are slots to read experts
    into before use."""

    lanes: int
    queue: int
    context_tokens: int
    pool_tokens: int
    page_tokens: int
    chunk_tokens: int
    swaps: int
    guard_every_steps: int
    can_wait: bool = True

    def __post_init__(self) -> None:
        if self.context_tokens > self.pool_tokens:
            raise ValueError("a request that fits the context but not the pool would wait for ever")


class Scheduler:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Running] = {}
        self.seq = 0
        self.plan_version = 0
        self._free = deque(range(limits.lanes))
        self._release: list[int] = []
        self._prefilled_last = False

    @property
    def held_tokens(self) -> int:
        return sum(self.price_tokens(running.request) for running in self.running.values())

    def price_tokens(self, request: Request) -> int:
        """Tokens of the pool that the request may come to hold: whole pages."""
        return self._whole_pages(len(request.prompt_ids) + request.max_tokens)

    def _whole_pages(self, tokens: int) -> int:
        return -(-tokens // self.limits.page_tokens) * self.limits.page_tokens

    def submit(self, request: Request) -> None:
        """Appends to the queue, which is in order. Raises QueueFullError."""
        if len(self.waiting) + len(self.running) >= self.limits.lanes + self.limits.queue:
            raise QueueFullError(len(self.waiting))
        self.waiting.append(request)

    def cancel(self, request_id: str) -> Running | Request | None:
        """Takes the request out, wherever it is. A waiting one never runs; a running one leaves with the next step."""
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
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
        return running

    def can_admit(self) -> bool:
        if not self.waiting or not self._free:
            return False
        wanted = self.held_tokens + self.price_tokens(self.waiting[0])
        return wanted <= self._whole_pages(self.limits.pool_tokens)

    def admit(self) -> Admission:
        request, lane = self.waiting.popleft(), self._free.popleft()
        self.running[lane] = Running(request, lane)
        return Admission(lane, request)

    def next_step(self, change: Change = UNCHANGED, moves_residents: bool = False) -> Step | None:
        """The step to send and execute now, with a change of the routable set if there is one; None when there is
        nothing to do."""
        release, self._release = self._release, []
        admit = []
        while self.can_admit():
            admit.append(self.admit())
        work = self._next_work()
        if not (release or admit or change or work):
            return None
        self.seq += 1
        self.plan_version += moves_residents
        due = self.seq % self.limits.guard_every_steps == 0
        return Step(self.seq, self.plan_version, release, admit, change, work, due)

    def _next_work(self) -> Prefill | Decode | None:
        newcomer = next((running for running in self.running.values() if running.in_prefill), None)
        decoding = [running.lane for running in self.running.values() if not running.in_prefill]
        if newcomer and not (decoding and self._prefilled_last):
            self._prefilled_last = True
            start, left = newcomer.computed, len(newcomer.request.prompt_ids) - newcomer.computed
            count = min(self.limits.chunk_tokens, left)
            newcomer.computed += count
            return Prefill(newcomer.lane, start, count)
        self._prefilled_last = False
        return Decode(decoding) if decoding else None
