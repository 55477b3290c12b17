"""The engine of one rank that says what it is told: forced, held-out answers, at a budget and with a policy."""

import hashlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from residency_report import Answer, Seen
from torch import Tensor

from tidectl.evals.texts import Text
from tided.control.lockstep import Solo
from tided.engine.build import OpenedModel, Rank, build_rank, open_model, scheduler_limits
from tided.engine.leader import LeaderEngine
from tided.engine.offline import first_pairs
from tided.engine.sampling import first_max
from tided.engine.scheduler import Scheduler
from tided.engine.types import Event, Failed, Fidelity, Finished, Request, Sampling
from tided.errors import TideError
from tided.models.base import LaneState, Pictured
from tided.models.parallel import Alone
from tided.settings import Settings
from tided.tide.demand import RouterShape
from tided.tide.history import History
from tided.tide.pilot import Pilot
from tided.tide.seed import load_seed

RING_SLOTS, SYNC_SLOTS = 16, 8
REST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Variant:
    name: str
    adapts: bool = False
    ring: int = 0
    plans: bool = True
    fidelity: Fidelity = "fast"

    @property
    def sync(self) -> int:
        return 0 if self.fidelity == "fast" else SYNC_SLOTS


FROZEN = Variant("substitution")
ADAPTS = Variant("+ adaptation", True)
RING = Variant("+ hot reads", True, RING_SLOTS)
RING_ALONE = Variant("hot reads alone", True, RING_SLOTS, plans=False)
BALANCED = Variant("+ balanced", True, RING_SLOTS, fidelity="balanced")
EXACT = Variant("exact", True, RING_SLOTS, fidelity="exact")
LADDER = (FROZEN, ADAPTS, RING, BALANCED, RING_ALONE)


class Forced:
    """A rank's model that says what it is told, and notes what it would have said. `whole`: what all experts say, by
    text, log probabilities [answer tokens, vocabulary]; answers to other texts are not compared. With `keeps` what this
    model says is kept for that in `said`."""

    def __init__(self, rank: Rank) -> None:
        self.whole: Mapping[str, npt.NDArray[np.float32]] = {}
        self.keeps = False
        self.said: dict[str, list[npt.NDArray[np.float32]]] = {}
        self._model, self._tap = rank.model, rank.executor.tap
        self.shape, self.open_lane, self.close_lane = rank.model.shape, rank.model.open_lane, rank.model.close_lane
        self.check, self.image_tokens = rank.model.check, rank.model.image_tokens
        self._hash = hashlib.blake2b(digest_size=8)

    def say(self, text: Text) -> Answer:
        self._text, self.answer, self._hash = text, Answer(text.domain), hashlib.blake2b(digest_size=8)
        return self.answer

    def prefill(
        self,
        lane: LaneState,
        token_ids: Tensor,
        logits: Literal["none", "last", "all"],
        pictured: Pictured | None = None,
    ) -> Tensor | None:
        before = self._totals(lane)
        row = self._model.prefill(lane, token_ids, logits, pictured)
        self._note(lane, before, len(token_ids), False)
        return None if row is None else self._judge(lane, row)

    def is_captured(self, rows: int) -> bool:
        return self._model.is_captured(rows)

    def decode(self, lanes: Sequence[LaneState], token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        before = self._totals(lanes[0])
        row = self._model.decode(lanes, token_ids, counts)
        self._note(lanes[0], before, 1, True)
        return self._judge(lanes[0], row)

    def _totals(self, lane: LaneState) -> Tensor:
        return self._tap.peek(lane.index)[2].clone()

    def _note(self, lane: LaneState, before: Tensor, tokens: int, decodes: bool) -> None:
        _, _, weight, missed, _, _, read, _ = (self._totals(lane) - before).tolist()
        self.answer.seen.append(Seen(tokens, decodes, weight, missed, missed - read))

    def _compare(self, said: Tensor) -> None:
        """said [vocab]: of the answer's next token."""
        key = self._text.key
        if self.keeps:
            self.said.setdefault(key, []).append(said.float().numpy())
        elif key in self.whole:
            whole = torch.from_numpy(self.whole[key][len(self.answer.apart)]).double()
            self.answer.apart.append(float((whole.exp() * (whole - said)).sum()))
            self.answer.other.append(int(whole.argmax()) != int(said.argmax()))

    def _judge(self, lane: LaneState, row: Tensor) -> Tensor:
        """row [1, vocab] -> the same shape, with the held-out token as its maximum."""
        target = self._text.ids[lane.position]
        said = torch.log_softmax(row[0].double(), 0)
        self.answer.losses.append(float(-said[target]))
        self._compare(said)
        self.answer.hits.append(int(first_max(row)[0]) == target)
        self._hash.update(row.numpy().tobytes())
        self.answer.digest = self._hash.hexdigest()
        forced = torch.zeros_like(row)
        forced[0, target] = 1.0
        return forced


class Server:
    """The engine of one rank with its residents, serving forced requests one at a time."""

    def __init__(self, rank: Rank, pilot: Pilot | None, fidelity: Fidelity) -> None:
        self.rank, self._fidelity, self._served = rank, fidelity, 0
        self.model = Forced(rank)
        rank.executor.model = self.model
        self._events: list[Event] = []
        self.decodes: list[tuple[float, float]] = []  # seconds of each decode step, of a clock and of the processor
        self._faults: list[TideError] = []
        scheduler = Scheduler(scheduler_limits(rank.opened.settings))
        self.engine = LeaderEngine(
            rank.executor, scheduler, Solo(), self._events.extend, self._faults.append, pilot, rest_after_s=0.0
        )

    def answer(self, text: Text) -> Answer:
        """Serves it, and waits for the rest that follows."""
        self._served += 1
        before, answer = self._read_bytes(), self.model.say(text)
        self.engine.submit(
            Request(
                request_id=f"forced-{self._served}",
                prompt_ids=text.ids[: text.prompt_tokens],
                sampling=Sampling(temperature=0.0),
                max_tokens=text.answer_tokens,
                stop_ids=(),
                fidelity=self._fidelity,
            )
        )
        deadline_s = time.monotonic() + REST_TIMEOUT_S
        while self._moves():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"a request of {text.domain} did not end within {REST_TIMEOUT_S:g} s")
        if not isinstance(self._events[-1], Finished) or any(isinstance(event, Failed) for event in self._events):
            raise RuntimeError(f"a request of {text.domain} failed: {self._events[-1]}")
        self._events.clear()
        answer.read_bytes = self._read_bytes() - before
        return answer

    def _moves(self) -> bool:
        self.engine.take_in(0.001 if self.engine.motion.reading and not self.engine.scheduler.running else 0.0)
        passes, began, worked = len(self.model.answer.seen), time.perf_counter(), time.process_time()
        moves = self.engine.turn()
        if len(self.model.answer.seen) > passes and self.model.answer.seen[-1].decodes:
            self.decodes.append((time.perf_counter() - began, time.process_time() - worked))
        return moves or self.engine.motion.reading > 0

    def _read_bytes(self) -> int:
        return sum(count.bytes for count in self.rank.residents.reads.values())


@contextmanager
def serving(base: Settings, budget: float, variant: Variant) -> Iterator[Server]:
    """`budget`: experts held, in percent of all."""
    every = open_model(base)
    total = round(budget / 100 * len(every.all_pairs))
    settings = replace(
        base,
        experts=replace(base.experts, resident=total - variant.ring - variant.sync),
        cache=replace(base.cache, prefix_ram_bytes=0, prefix_disk_bytes=0),  # every prompt is computed
        tide=replace(
            base.tide,
            hot_ring_slots=variant.ring,
            sync_slots=variant.sync,
            record=False,
            sensitivity=base.tide.sensitivity if variant.plans else "off",
        ),
    )
    opened = open_model(settings)
    pilot = pilot_of(opened) if variant.adapts else None
    rank = build_rank(opened, Alone(), first_pairs(opened), lambda what, done, total: None)
    with closing(rank.reads):
        yield Server(rank, pilot, variant.fidelity)


def pilot_of(opened: OpenedModel) -> Pilot:
    """As at a first start: no history, and none is written."""
    settings, shape = opened.settings, opened.shape
    router = RouterShape(shape.moe_layers, shape.experts_per_layer, shape.top_k)
    with tempfile.TemporaryDirectory() as name:
        history = History.open(Path(name), opened.checkpoint.identity(), router, False)
    seed = load_seed(Path(settings.tide.seed), shape.family, router) if settings.tide.seed else None
    return Pilot(history, seed, settings.tide, router, settings.experts.resident, opened.kinds)
