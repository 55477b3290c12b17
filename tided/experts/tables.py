"""The routable set as the model reads it, and the demand it records. Tensors are mutated in place, never replaced:
captured graphs hold their addresses (contract C2)."""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tided.errors import PairError
from tided.experts.mask_hash import indices
from tided.experts.sendings import Here, Sendings

if TYPE_CHECKING:
    from tided.experts.standing import Standing


class RoutingTables:
    """`slot_of` [layers, experts] int32, -1 for an absent expert; `routable` [layers, experts] bool. Both are a copy of
    what is kept on the host, made whole: one of some ten kilobytes takes a GPU less than a scattered write."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        count = layers * experts
        here = torch.empty(5 * count, dtype=torch.uint8)
        self._slots, self._routable = here.numpy()[: 4 * count].view(np.int32), here.numpy()[4 * count :].view(np.bool_)
        self._slots.fill(-1)
        self._routable.fill(False)
        self._experts, self._sendings = experts, Sendings(here, device)
        there = self._sendings.there
        self.slot_of: Tensor = there[: 4 * count].view(torch.int32).view(layers, experts)
        self.routable: Tensor = there[4 * count :].view(torch.bool).view(layers, experts)
        self._waiting: dict[tuple[int, int], int] = {}  # what was changed, and is not sent yet
        self._gathers = False

    def change(self, slots: Mapping[tuple[int, int], int]) -> None:
        """(layer, expert) -> its slot from now on, -1: none. What was launched before sees the tables as they were."""
        self._waiting.update(slots)
        if not self._gathers:
            self._send()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Changes in here are seen at its end, all together. Nothing is launched in here that reads the tables."""
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False
            self._send()

    def publish(self, layer: int, expert: int, slot: int) -> None:
        self.change({(layer, expert): slot})

    def withdraw(self, layer: int, expert: int) -> None:
        self.change({(layer, expert): -1})

    def _send(self) -> None:
        if not self._waiting:
            return
        slots, self._waiting = self._waiting, {}
        where, found = indices(slots, self._experts), np.fromiter(slots.values(), np.int32, len(slots))
        self._slots[where] = found
        self._routable[where] = found >= 0
        self._sendings.send()


class Seen(NamedTuple):
    """What one layer of one step routed. See `DemandTap.record`."""

    layer: int
    lane_of_row: Tensor
    wanted: Tensor
    scores: Tensor
    weights: Tensor
    missed: Tensor
    read: Tensor | None

    def rows(self, rows: Tensor) -> "Seen":
        read = None if self.read is None else self.read[rows]
        layer, lane_of_row, wanted, scores, weights, missed, _ = self
        return Seen(layer, lane_of_row[rows], wanted[rows], scores[rows], weights[rows], missed[rows], read)


class Together(NamedTuple):
    """What n layers of one step routed for the same rows: layers [n] int64, each once; the rest as `Seen`, stacked.
    `lanes`: of the rows, where the host knows them; it must ask the device otherwise, if rows are given up. `standing`:
    what adds up the wishes that lie here."""

    layers: Tensor
    lane_of_row: Tensor
    wanted: Tensor
    scores: Tensor
    weights: Tensor
    missed: Tensor
    read: Tensor | None
    lanes: tuple[int, ...] | None = None
    standing: "Standing | None" = None

    def rows(self, rows: Tensor) -> "Together":
        layers, lanes, wanted, scores, weights, missed, read, *_ = self
        w, s, v, m = (part[:, rows].contiguous() for part in (wanted, scores, weights, missed))
        return Together(layers, lanes[rows], w, s, v, m, None if read is None else read[:, rows].contiguous())

    def copied(self) -> "Together":
        """Whose wishes lie elsewhere."""
        layers, lanes, wanted, scores, weights, missed, read, known, _ = self
        w, s, v, m = (part.clone() for part in (wanted, scores, weights, missed))
        return Together(layers, lanes.clone(), w, s, v, m, None if read is None else read.clone(), known)


class Wish(NamedTuple):
    """The router's true picks of some layers of a step. layers [n]; wanted, weights [n, T, k], of which `rows` count
    and the others have no weight. All may be on the host, and there once what `standing` launched is done."""

    layers: Tensor
    wanted: Tensor
    weights: Tensor
    rows: int
    standing: "Standing | None" = None


class Wanted(NamedTuple):
    """weights [layers, experts] fp32: the routing weight that rows wanted; rows [layers] fp32: how many a layer had."""

    weights: Tensor
    rows: Tensor


TOTALS = 8
KEPT_STEPS = 8  # whose wishes wait for whoever asks; a rank that nobody asks keeps no more


class DemandTap:
    """What the router wanted, before residency was applied, by lane. A layer leaves its tensors here; they are added up
    together, once a step.

    counts, mass [lanes, layers, experts]: true top-k picks and their scores (unbiased, before normalisation).
    totals [lanes, 8] float64: picks, missed picks (not routable), routing weight of all picks, of missed ones; of the
    missed, picks read before use, picks substituted and lighter than `light`, and the weights of both.
    `wishes`: picks of all lanes, by step, since they were last taken.
    uses [3, lanes, layers, experts]: of a lane since `forget`: picks, missed weight, weight read before use.
    Rows that a step computes and gives up again (`keep`) are in none of them.
    """

    def __init__(self, lanes: int, layers: int, experts: int, device: torch.device, light: float = 0.0) -> None:
        self._counts: Tensor = torch.zeros((lanes, layers, experts), dtype=torch.float32, device=device)
        self._mass: Tensor = torch.zeros((lanes, layers, experts), dtype=torch.float32, device=device)
        self.uses: Tensor = torch.zeros((3, lanes, layers, experts), dtype=torch.float32, device=device)
        self._totals: Tensor = torch.zeros((lanes, TOTALS), dtype=torch.float64, device=device)
        self._seen: list[Seen] = []
        self._whole: list[Together] = []
        self._step: list[Seen] = []  # of the newest step, rows that were given up included
        self._step_whole: list[Together] = []
        self._kept: dict[int, int] = {}
        self.wishes: deque[list[Wish]] = deque([[]], maxlen=KEPT_STEPS)
        self.light, self.enabled = light, True
        self._here = Here(self._totals) if device.type == "cuda" else None

    @property
    def counts(self) -> Tensor:
        self.add_up()
        return self._counts

    @property
    def mass(self) -> Tensor:
        self.add_up()
        return self._mass

    @property
    def totals(self) -> Tensor:
        self.add_up()
        return self._totals

    def totals_here(self) -> npt.NDArray[np.float64]:
        """`totals` on the host. Behind a step they have come along with it: nobody waits for the device again."""
        self.add_up()
        here = None if self._here is None else self._here.now()
        return self._totals.cpu().numpy() if here is None else here

    def record(
        self,
        layer: int,
        lane_of_row: Tensor,
        wanted: Tensor,
        scores: Tensor,
        weights: Tensor,
        missed: Tensor,
        read: Tensor | None = None,
    ) -> None:
        """One layer of one step. lane_of_row [T] int64; wanted [T, k] int64 true top-k; scores [T, k] fp32 unbiased;
        weights [T, k] normalised to sum 1 a row; missed [T, k] bool; read [T, k] bool: missed, and computed after all
        (None: no row may wait for a read). The tensors must not be changed afterwards."""
        if self.enabled:
            self._seen.append(Seen(layer, lane_of_row, wanted, scores, weights, missed, read))
            self._step.append(self._seen[-1])

    def record_step(self, step: Together) -> None:
        """All layers of a step at once. The tensors must not be changed before the step's end."""
        if self.enabled:
            self._whole.append(step)
            self._step_whole.append(step)

    def keep(self, lane: int, rows: int) -> None:
        """Of the lane's rows of this step, only the first `rows` count."""
        self._kept[lane] = rows

    def begin_step(self) -> None:
        self.add_up()
        self._step, self._step_whole = [], []
        self.wishes.append([])

    def forget_wishes(self) -> None:
        """The newest step's rows are not among what `take_wanted` gives."""
        self.add_up()
        self.wishes[-1] = []

    def touched(self) -> int:
        """Distinct experts that all rows of the newest step wanted, given up or not, summed over its layers. Rows that
        were computed apart count apart."""
        step, total = self._step, sum(_distinct(whole.wanted.flatten(1)) for whole in self._step_whole)
        while step:
            rows = step[0].lane_of_row
            total += _distinct(torch.stack([one.wanted.flatten() for one in step if one.lane_of_row is rows]))
            step = [one for one in step if one.lane_of_row is not rows]
        return total

    def add_up(self) -> None:
        """What the layers left since the last time. Layers with the same rows are added together."""
        together, seen = self._whole, self._seen
        self._seen, self._whole = [], []
        while seen:
            rows = seen[0].lane_of_row
            together.append(_stacked([one for one in seen if one.lane_of_row is rows]))
            seen = [one for one in seen if one.lane_of_row is not rows]
        copied = True
        for one in together:
            copied = self._add(one)
        self._kept = {}
        if together and self._here is not None:
            if not copied:
                self._here.copy()
            self._here.sent()

    def standing(self, seen: Together) -> "Standing | None":
        """For steps that leave their wishes where these lie. None: not on this device."""
        if self._here is None:
            return None
        from tided.experts.standing import Standing  # a compiler, which a CPU need not have

        books = (self._counts, self._mass, self.uses, self._totals)
        return Standing(seen[:6], books, self.light, self._here.copy, KEPT_STEPS)

    def _counting(self, seen: Together) -> list[int] | None:
        """The rows that count; None: all."""
        if not self._kept:
            return None
        count, rows = Counter[int](), []
        lanes = seen.lane_of_row.tolist() if seen.lanes is None else seen.lanes
        for row, lane in enumerate(lanes):
            if count[lane] < self._kept.get(lane, len(lanes)):
                rows.append(row)
            count[lane] += 1
        return None if len(rows) == len(lanes) else rows

    def _add(self, seen: Together) -> bool:
        """Whether the totals' copy is on its way with it."""
        rows, wishes = self._counting(seen), self.wishes[-1]
        if seen.standing is not None and not wishes:  # it keeps one wish a step
            wanted, weights = seen.standing.add(rows)
            count = wanted.shape[1] if rows is None else len(rows)
            wishes.append(Wish(seen.standing.layers, wanted, weights, count, seen.standing))
            return True
        if rows is not None:
            seen = seen.rows(torch.tensor(rows, dtype=torch.int64, device=seen.lane_of_row.device))
        layers, lanes, wanted, scores, weights, missed, read, *_ = seen
        if wanted.is_cuda:
            from kernels.demand_triton import add_demand  # a compiler, which a CPU need not have

            wanted, weights = add_demand(*seen[:7], self._counts, self._mass, self.uses, self._totals, self.light)
        else:
            both = self._add_here(layers, lanes, wanted, scores, weights, missed, read)
            self._totals.index_add_(0, lanes, both.to(self._totals.dtype))
            wanted, weights = wanted.clone(), weights.clone()
        wishes.append(Wish(layers, wanted, weights, wanted.shape[1]))
        return False

    def _add_here(
        self,
        layers: Tensor,
        lanes: Tensor,
        wanted: Tensor,
        scores: Tensor,
        weights: Tensor,
        missed: Tensor,
        read: Tensor | None,
    ) -> Tensor:
        """-> [T, 8]: what each row adds to its lane's totals."""
        where = (lanes[None, :, None].expand_as(wanted), layers[:, None, None].expand_as(wanted), wanted)
        self._counts.index_put_(where, torch.ones_like(scores), accumulate=True)
        self._mass.index_put_(where, scores, accumulate=True)
        read = torch.zeros_like(missed) if read is None else read
        part = torch.arange(3, device=wanted.device)[:, None, None, None]
        each = torch.stack([torch.ones_like(weights), weights * missed, weights * read])
        self.uses.index_put_((part.expand_as(each), *(at.expand_as(each) for at in where)), each, accumulate=True)
        light = missed & ~read & (weights < self.light)
        known = torch.stack([torch.ones_like(missed), missed, read, light], dim=-1).to(weights.dtype)  # [n, T, k, 4]
        picks, weight = known.sum(dim=(0, 2)), (known * weights[..., None]).sum(dim=(0, 2))
        return torch.cat([picks[:, :2], weight[:, :2], picks[:, 2:], weight[:, 2:]], dim=1)

    def take_wanted(self) -> Wanted:
        """What rows wanted since the last call (of the newest KEPT_STEPS steps), before residency and over all lanes;
        picks lighter than `light` count for nothing. Layers may have computed other rows than those before them
        (bounded replay). On the host."""
        self.add_up()
        _, layers, experts = self._counts.shape
        total, rows = np.zeros(layers * experts), np.zeros(layers, np.float32)
        wishes = [wish for step in self.wishes for wish in step]
        self.wishes = deque([[]], maxlen=KEPT_STEPS)
        for wish in wishes:
            if wish.standing is not None:
                wish.standing.behind.synchronize()
            of, wanted, weights = (part.cpu().numpy() for part in (wish.layers, wish.wanted, wish.weights))
            heavy = np.where(weights >= self.light, weights, 0.0)
            total += np.bincount((of[:, None, None] * experts + wanted).ravel(), heavy.ravel(), len(total))
            rows[of] += wish.rows
        return Wanted(torch.from_numpy(total.astype(np.float32)).view(layers, experts), torch.from_numpy(rows))

    def peek(self, lane: int) -> tuple[Tensor, Tensor, Tensor]:
        """What `take` would give now, and nothing starts again. Views: they change with the next step."""
        self.add_up()
        return self._counts[lane], self._mass[lane], self._totals[lane]

    def check(self, open_lanes: Collection[int]) -> None:
        """Raises PairError unless the lanes that nobody has count nothing."""
        self.add_up()
        free = [lane for lane in range(self._counts.shape[0]) if lane not in open_lanes]
        counted = [self._counts[free], self._mass[free], self._totals[free], self.uses[:, free]]
        if any(bool(part.any()) for part in counted):
            raise PairError("demand is counted for a lane that no request has")

    def forget(self, lane: int) -> None:
        """The lane is free: the next request begins with nothing."""
        self.take(lane)
        self.uses[:, lane].zero_()

    def take(self, lane: int) -> tuple[Tensor, Tensor, Tensor]:
        """The lane's counts, mass [layers, experts] and totals [8] so far; its buffers start again at zero."""
        self.add_up()
        taken = (self._counts[lane].clone(), self._mass[lane].clone(), self._totals[lane].clone())
        self._counts[lane].zero_()
        self._mass[lane].zero_()
        self._totals[lane].zero_()
        if self._here is not None:
            self._here.stale()
        return taken


def _stacked(seen: list[Seen]) -> Together:
    """Layers of the same rows."""
    layers = torch.tensor([one.layer for one in seen], device=seen[0].wanted.device)
    read = None
    if any(one.read is not None for one in seen):
        read = torch.stack([torch.zeros_like(one.missed) if one.read is None else one.read for one in seen])
    wanted, scores = torch.stack([one.wanted for one in seen]), torch.stack([one.scores for one in seen])
    weights, missed = torch.stack([one.weights for one in seen]), torch.stack([one.missed for one in seen])
    return Together(layers, seen[0].lane_of_row, wanted, scores, weights, missed, read)


def _distinct(picks: Tensor) -> int:
    """picks [n, m] -> distinct values of each line, summed."""
    ordered = picks.sort(dim=1).values
    return len(ordered) + int((ordered[:, 1:] != ordered[:, :-1]).sum())
