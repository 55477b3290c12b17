"""A deterministic model of a few lines, residents without bytes, and a link of two queues."""

import errno
import hashlib
import queue
import time
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from tided.control.messages import Decode, Prefill, Recalled, Step, Stop
from tided.engine.core import FollowerEngine
from tided.engine.executor import Executor
from tided.engine.leader import LeaderEngine
from tided.engine.scheduler import Limits, Scheduler
from tided.engine.types import Finished, Request, Sampling, Started, Tokens
from tided.errors import PairError
from tided.experts.tables import DemandTap, RoutingTables

LAYERS, EXPERTS, TOP_K, VOCAB = 3, 8, 2, 64


@dataclass
class FakeShape:
    vocab_size: int = VOCAB
    moe_layers: int = LAYERS
    experts_per_layer: int = EXPERTS
    top_k: int = TOP_K


@dataclass
class FakeLane:
    index: int
    position: int = 0
    ids: list[int] = field(default_factory=list)


class FakeModel:
    """Logits depend on every token of the lane and on the routable set, and on nothing else."""

    def __init__(self, tables: RoutingTables, tap: DemandTap) -> None:
        self.shape, self.tables, self.tap = FakeShape(), tables, tap
        self.open: list[FakeLane] = []
        self.nan_at: int | None = None
        self.raise_at: int | None = None
        self.calls: list[tuple[str, int]] = []

    def open_lane(self, index: int) -> FakeLane:
        self.open.append(FakeLane(index))
        return self.open[-1]

    def close_lane(self, lane: FakeLane) -> None:
        self.open.remove(lane)

    def _append(self, lane: FakeLane, token: int) -> torch.Tensor:
        lane.ids.append(token)
        lane.position += 1
        if lane.position == self.raise_at:
            raise OSError(errno.EIO, "the disk is gone", "/secret/x")
        wanted = torch.tensor([[(token + layer + i * 3) % EXPERTS for i in range(TOP_K)] for layer in range(LAYERS)])
        for layer in range(LAYERS):
            missed = ~self.tables.routable[layer, wanted[layer]][None]
            halves = torch.full((1, TOP_K), 1 / TOP_K)
            self.tap.record(layer, torch.tensor([lane.index]), wanted[layer][None], halves * 0.5, halves, missed)
        mask = self.tables.routable.numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(repr(lane.ids).encode() + mask).digest()[:6])
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
        return logits * float("nan") if lane.position == self.nan_at else logits

    page_tokens, page_bytes = 4, 32

    def lane_parts(self, lane):
        return {"ids": torch.tensor(lane.ids)}

    def page_parts(self, lane, first, last):
        """Each page holds its ids, so that pages put into the wrong place are seen."""
        return {"ids": torch.tensor(lane.ids[first * self.page_tokens : last * self.page_tokens])}

    def restore_lane(self, index, tokens, parts, pages):
        lane = self.open_lane(index)
        lane.ids, lane.position = parts["ids"].tolist(), tokens
        assert len(lane.ids) == tokens
        for first, page in pages:
            begin = first * self.page_tokens
            assert lane.ids[begin : begin + len(page["ids"])] == page["ids"].tolist()
        assert sum(len(page["ids"]) for _, page in pages) == tokens
        return lane

    def check(self, lanes):
        if sorted(id(lane) for lane in lanes) != sorted(id(lane) for lane in self.open):
            raise PairError("lanes are open that no request has")

    def image_tokens(self, height, width):
        return 0

    def prefill(self, lane, token_ids, logits, pictured=None):
        self.calls.append(("prefill", len(token_ids)))
        rows = torch.stack([self._append(lane, token) for token in token_ids.tolist()])
        return {"none": None, "last": rows[-1:], "all": rows}[logits]

    def prefill_by_layer(self, lane, token_ids, pictured=None):
        for _ in range(LAYERS - 1):
            yield
        return self.prefill(lane, token_ids, "all")

    def logits(self, rows):
        self.calls.append(("head", len(rows)))
        return rows

    def is_captured(self, rows):
        return False

    def decode(self, lanes, token_ids, counts=None):
        self.calls.append(("decode", len(lanes)))
        return torch.stack([self._append(lane, token) for lane, token in zip(lanes, token_ids.tolist(), strict=True)])


class FakeResidents:
    """Books without bytes. A read lands at once, or when the test lets it (`holds`)."""

    slots, arena_bytes, sizes, bytes_share = 64, 4096, None, None

    def __init__(self, tables: RoutingTables, pairs: list[tuple[int, int]], ring_slots: int = 0) -> None:
        self.tables, self.pairs, self.ring_slots = tables, list(pairs), ring_slots
        self.ring: list[tuple[int, int]] = []
        self.broken = self.holds = False
        self.fails: set[tuple[int, int]] = set()
        self.checked, self.mask_hash, self.reads = 0, 0, {}
        self.under_way: dict[int, tuple] = {}
        self.told: set[int] = set()
        for slot, (layer, expert) in enumerate(pairs):
            tables.publish(layer, expert, slot)

    @property
    def count(self) -> int:
        return len(self.pairs)

    @property
    def by_layer(self) -> tuple[int, ...]:
        return tuple(sum(pair[0] == layer for pair in self.pairs) for layer in range(LAYERS))

    def slot_of(self, pair) -> int | None:
        return next((at for at, held in enumerate([*self.pairs, *self.ring]) if held == pair), None)

    @property
    def reading(self) -> int:
        return len(self.under_way)

    def at_once(self):
        return self.tables.at_once()

    def read(self, number, pair, out, joins=False) -> None:
        assert not joins
        assert pair not in self.pairs
        assert pair not in self.ring
        self.under_way[number] = (pair, out)

    def adopt(self, pairs) -> None:
        assert not pairs

    def landed(self) -> list[int]:
        return self._new(lambda pair: pair not in self.fails)

    def failed(self) -> list[int]:
        return self._new(lambda pair: pair in self.fails)

    def _new(self, told) -> list[int]:
        new = [n for n, (pair, _) in self.under_way.items() if n not in self.told and not self.holds and told(pair)]
        self.told |= set(new)
        return new

    def give_up(self, numbers) -> None:
        for number in numbers:
            assert number in self.told, "given up before it ended here"
            del self.under_way[number]

    def publish(self, numbers) -> None:
        for number in numbers:
            assert number in self.told, "published before it was read here"
            pair, out = self.under_way.pop(number)
            if out is None:
                self.ring.append(pair)
            else:
                self.pairs[self.pairs.index(out)] = pair
                self.tables.withdraw(*out)
            self.tables.publish(*pair, 0)
        assert len(self.ring) <= self.ring_slots

    def promote(self, swaps) -> None:
        for out, in_ in swaps:
            self.pairs[self.pairs.index(out)] = in_
            self.ring[self.ring.index(in_)] = out

    def withdraw(self, pairs) -> None:
        for pair in pairs:
            self.ring.remove(pair)
            self.tables.withdraw(*pair)

    def change(self, swaps) -> None:
        """A change that no step told of."""
        for out, in_ in swaps:
            self.pairs[self.pairs.index(out)] = in_
            self.tables.withdraw(*out)
            self.tables.publish(*in_, 0)

    def check_integrity(self) -> None:
        self.checked += 1
        if self.broken:
            raise PairError("the resident set is broken")

    def digest(self) -> str:
        return hashlib.sha256(self.tables.routable.numpy().tobytes()).hexdigest()

    def state(self) -> str:
        return f"{self.digest()} {self.ring} {self.under_way}"


PATIENCE_S = 60  # with the other rank's thread


class Wire:
    """Both ends of a link: steps cross it as msgpack, as they do between processes."""

    followers = 1

    def __init__(self) -> None:
        self.steps: queue.Queue[bytes] = queue.Queue(64)
        self.digests: queue.Queue[tuple[int, str]] = queue.Queue(64)
        self.tickets: queue.Queue[list[int]] = queue.Queue(64)
        self.given_up: queue.Queue[list[int]] = queue.Queue(64)
        self.answers: queue.Queue[Recalled] = queue.Queue(64)
        self.sent: list[Step] = []
        self.compared = 0

    def send(self, step: Step) -> None:
        self.sent.append(step)
        self.steps.put(msgspec.msgpack.encode(step), timeout=PATIENCE_S)

    def receive(self, timeout_s: float) -> Step | Stop | None:
        try:
            return msgspec.msgpack.decode(self.steps.get(timeout=timeout_s), type=Step | Stop)
        except queue.Empty:
            return None

    def landed(self, tickets: list[int] | None = None, failed: list[int] = ()) -> list[int]:
        """A follower's word, or what rank 0 hears."""
        if tickets is not None:
            self.tickets.put(tickets, timeout=PATIENCE_S)
            self.given_up.put(list(failed), timeout=PATIENCE_S)
            return []
        return heard(self.tickets)

    def failed(self) -> list[int]:
        return heard(self.given_up)

    def recalled(self, *answer) -> list[Recalled]:
        """A follower's word, or what rank 0 hears."""
        if answer:
            self.answers.put(Recalled(1, *answer), timeout=PATIENCE_S)
            return []
        heard = []
        while not self.answers.empty():
            heard.append(self.answers.get_nowait())
        return heard

    def report(self, seq: int, digest: str) -> None:
        self.digests.put((seq, digest), timeout=PATIENCE_S)

    def compare(self, seq: int, digest: str) -> dict[int, float]:
        if self.digests.get(timeout=PATIENCE_S) != (seq, digest):
            raise PairError(f"the ranks differ after step {seq}")
        self.compared += 1
        return {1: 0.25}

    def stop(self, reason: str) -> None:
        self.steps.put(msgspec.msgpack.encode(Stop(reason)), timeout=PATIENCE_S)


def heard(from_: queue.Queue[list[int]]) -> list[int]:
    tickets = []
    while not from_.empty():
        tickets += from_.get_nowait()
    return tickets


class Alone:
    """The link of one rank: keeps what was sent."""

    followers = 0

    def __init__(self) -> None:
        self.sent: list[Step] = []
        self.stopped = ""

    def send(self, step: Step) -> None:
        self.sent.append(msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step))

    def landed(self) -> list[int]:
        return []

    def failed(self) -> list[int]:
        return []

    def recalled(self) -> list[Recalled]:
        return []

    def compare(self, seq: int, digest: str) -> dict[int, float]:
        assert digest
        return {}

    def stop(self, reason: str) -> None:
        self.stopped = reason


class FakePilot:
    """Gives out the plans it was made with, and remembers what it was told."""

    floor = TOP_K

    def scores(self):
        return np.ones((LAYERS, EXPERTS))

    max_swaps, rest_due = 512, True

    def rested(self):
        self.told.append(("idle", 0))

    def rest_scores(self):
        return self.scores() / EXPERTS

    def steadied(self, scores):
        return scores

    def __init__(self, prompt=(), idle=()) -> None:
        self.prompt, self.idle = list(prompt), list(idle)
        self.told: list[tuple[str, int]] = []
        self.published: list = []

    def chunk_done(self, tokens, chunks_left, demand, *, lane):
        return []

    def step_done(self, answers, demand, moving):
        return None

    def prompt_done(self, counts, mass, totals, tokens, *, lane):
        self.told.append(("prompt", int(counts.sum())))
        swaps, self.prompt = self.prompt, []
        return swaps

    def request_done(self, counts, mass, totals, tokens, *, lane):
        self.told.append(("request", int(counts.sum())))

    def applied(self, swaps, settled=True):
        self.published += list(swaps)

    def idle_plan(self):
        self.told.append(("idle", 0))
        swaps, self.idle = self.idle, []
        return swaps


PAIRS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS - 3)]
LIMITS = Limits(
    lanes=2, queue=4, context_tokens=400, pool_tokens=400, page_tokens=1, chunk_tokens=8, swaps=2, guard_every_steps=4
)
SWAPS = [((0, 0), (0, 7)), ((1, 1), (1, 6)), ((2, 2), (2, 5))]


def executor(ring_slots: int = 0) -> Executor:
    tables = RoutingTables(LAYERS, EXPERTS, torch.device("cpu"))
    tap = DemandTap(LIMITS.lanes, LAYERS, EXPERTS, torch.device("cpu"))
    return Executor(FakeModel(tables, tap), FakeResidents(tables, PAIRS, ring_slots), tap)


class Bench:
    """A leader turned by hand, with all it said."""

    def __init__(self, link=None, pilot=None, limits: Limits = LIMITS, ring_slots: int = 0) -> None:
        self.link, self.events, self.faults = link or Alone(), [], []
        self.engine = LeaderEngine(
            executor(ring_slots),
            Scheduler(limits),
            self.link,
            self.events.extend,
            self.faults.append,
            pilot,
            rest_after_s=0.0,
        )

    @property
    def model(self) -> FakeModel:
        return self.engine.executor.model

    def submit(self, *requests: Request) -> None:
        for one in requests:
            self.engine.submit(one)
        self.engine.take_in()

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)
        self.engine.take_in()
        self.engine._emit()

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.turn()

    def finish(self) -> None:
        """Until nothing is to be done, and nothing is being read."""
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            if not self.engine.turn() and not self.engine._reading:
                return
        raise AssertionError("the engine does not come to rest")

    def tokens(self, request_id: str) -> list[int]:
        return tokens_of(self.events, request_id)

    def end(self, request_id: str) -> Finished:
        (end,) = [e for e in self.events if isinstance(e, Finished) and e.request_id == request_id]
        return end

    def started(self) -> list[str]:
        return [e.request_id for e in self.events if isinstance(e, Started)]

    def work(self) -> list[str]:
        return [{Prefill: "p", Decode: "d"}[type(step.work)] for step in self.link.sent if step.work]


def follower(link: Wire, faults: list, ring_slots: int = 0) -> FollowerEngine:
    return FollowerEngine(executor(ring_slots), link, faults.append)


def tokens_of(events, request_id: str) -> list[int]:
    return [t for e in events if isinstance(e, Tokens) and e.request_id == request_id for t in e.token_ids]


def request(request_id: str, prompt: int = 5, max_tokens: int = 6, stop=(), **sampling) -> Request:
    ids = [(i * 7 + prompt) % VOCAB for i in range(prompt)]
    return Request(
        request_id=request_id,
        prompt_ids=ids,
        sampling=Sampling(**{"temperature": 0.0} | sampling),
        max_tokens=max_tokens,
        stop_ids=tuple(stop),
    )
