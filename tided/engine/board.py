"""What rank 0 shows of its experts and its reads to whoever looks.

The engine's thread writes in place or replaces whole values; others read. Nobody waits for anybody: there is no lock,
and no question ever reaches the engine.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tided.control.messages import Change, Load
from tided.engine.stats import Reads
from tided.engine.types import Fidelity

Pair = tuple[int, int]
SlotOf = Callable[[Pair], int | None]

STATE_NAMES = ("not_loaded", "resident", "transient", "loading")
NOT_LOADED, RESIDENT, TRANSIENT, LOADING = b"0123"
RECENT_S = 3.0  # who looks once a second sees every load
MOST_RECENT = 1024
FIGURES_EVERY_S = 0.25
HEAT_EVERY_S = 1.0
NO_HEAT = 15


Phase = Literal["prompt", "answer", "parked"]


class LaneFigures(msgspec.Struct, frozen=True):
    """A request that has a lane. `admitted_s` (monotonic) tells it from others of the lane; tokens of its prompt that
    are computed, and of its answer; drafts of it that were verified, and of those the accepted ones."""

    lane: int
    phase: Phase
    admitted_s: float
    prompt_tokens: int
    computed_tokens: int
    answer_tokens: int
    drafted: int
    accepted: int
    fidelity: Fidelity


class Figures(msgspec.Struct, frozen=True):
    """Counters of rank 0 since its start, and its memory, as of one moment. `rank_wait_s`: by rank, how long rank 0
    waited for it when digests were compared (`rank_waits` times); the others' lag, as rank 0 sees it. `weight`: routing
    weight of all picks; of it that of missed ones, and of those that were substituted."""

    steps: int = 0
    reads: Reads = Reads()
    swaps: int = 0
    kv_tokens_used: int = 0
    kv_tokens_capacity: int = 0
    rank_wait_s: dict[int, float] = {}
    rank_waits: int = 0
    device_bytes: int = 0
    arena_bytes: int = 0
    weight: float = 0.0
    missed_weight: float = 0.0
    substituted_weight: float = 0.0
    answer_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    lanes: tuple[LaneFigures, ...] = ()


class PlanShown(msgspec.Struct, frozen=True):
    """The newest plan that had something to exchange: the moment that it was made at, how many swaps it planned, and
    how many of these are done. `at_s`: monotonic."""

    reason: str
    swaps: int
    done: int
    at_s: float


class Recent(msgspec.Struct, frozen=True):
    at_s: float
    pair: Pair


class ExpertBoard:
    """Where every expert is, a digit and a slot each (-1: none). `changed` is called by the engine's thread after each
    step that changes the routable set; `states` and `slots` are written in place (a reader's copy of one is one
    instruction), the rest is replaced. `slot_of` tells where a routable pair lies now."""

    def __init__(
        self,
        layers: int,
        experts: int,
        residents: Iterable[Pair],
        ring: Iterable[Pair] = (),
        *,
        slot_of: SlotOf = lambda pair: None,
        arena_slots: int = 0,
    ) -> None:
        self.layers, self.experts, self.arena_slots = layers, experts, arena_slots
        self.states = bytearray(b"0" * (layers * experts))
        self.slots = [-1] * (layers * experts)
        self._slot_of = slot_of
        self.sequence = 0
        self.loading: tuple[Pair, ...] = ()
        self.recent: tuple[Recent, ...] = ()
        self.plan: PlanShown | None = None
        self._loads: dict[int, Load] = {}
        for pair in residents:
            self._set(pair, RESIDENT)
        for pair in ring:
            self._set(pair, TRANSIENT)

    def changed(self, change: Change, now_s: float) -> None:
        landed = [self._loads.pop(ticket) for ticket in change.publish]
        for load in landed:
            self._set(load.pair, RESIDENT if load.moves_residents else TRANSIENT)
            if load.out is not None:
                self._set(load.out, NOT_LOADED)
        for swap in change.promote:
            self._set(swap.out, TRANSIENT)
            self._set(swap.in_, RESIDENT)
        for pair in change.withdraw:
            self._set(pair, NOT_LOADED)
        for pair in change.adopt:
            self._set(pair, RESIDENT)
        if change.resize is not None:
            for pair in change.resize.evict:
                self._set(pair, NOT_LOADED)
            self._look_again()
        for ticket in change.give_up:
            self._set(self._loads.pop(ticket).pair, NOT_LOADED)
        for load in change.load:
            self._loads[load.ticket] = load
            self._set(load.pair, LOADING)
        self.loading = tuple(load.pair for load in self._loads.values())
        kept = [one for one in self.recent if now_s - one.at_s <= RECENT_S]
        self.recent = tuple([*kept, *(Recent(now_s, load.pair) for load in landed)][-MOST_RECENT:])
        self.sequence += 1

    def _look_again(self) -> None:
        """Experts have moved to other slots."""
        for at, state in enumerate(self.states):
            if state in (RESIDENT, TRANSIENT):
                self._set(divmod(at, self.experts), state)

    def _set(self, pair: Pair, state: int) -> None:
        at = pair[0] * self.experts + pair[1]
        self.states[at] = state
        slot = self._slot_of(pair) if state in (RESIDENT, TRANSIENT) else None
        self.slots[at] = -1 if slot is None else slot


def tide(board: ExpertBoard, now_s: float) -> dict[str, Any]:
    """For /health: whether experts are being read beside the steps, and what the newest plan did."""
    plan = board.plan
    told = plan and {
        "reason": plan.reason,
        "swaps": plan.swaps,
        "done": plan.done,
        "age_s": round(now_s - plan.at_s, 1),
    }
    return {"moving": bool(board.loading), "last_plan": told}


def as_json(
    board: ExpertBoard, heat: npt.NDArray[np.float64] | None, now_s: float, slots: bool = False
) -> dict[str, Any]:
    """The board as the API shows it: strings of a digit for each expert of a layer. `heat` [layers * experts]: the
    routing weight that the next tokens are expected to give each, of which the digits are the place among all, 9 the
    hottest tenth. `slots`: with each expert's slot of the arena, by layer."""
    states, recent = bytes(board.states), board.recent
    rows = [states[at : at + board.experts] for at in range(0, len(states), board.experts)]
    return {
        "layers": board.layers,
        "experts_per_layer": board.experts,
        "total_experts": board.layers * board.experts,
        "states": [row.decode() for row in rows],
        "state_names": list(STATE_NAMES),
        "counts": {name: states.count(b"%d" % digit) for digit, name in enumerate(STATE_NAMES)},
        "resident_per_layer": [row.count(b"1") for row in rows],
        "activity": {
            "sequence": board.sequence,
            "active": [list(pair) for pair in board.loading],
            "recent": [list(one.pair) for one in recent if now_s - one.at_s <= RECENT_S],
        },
        "heat": None if heat is None else _digits(heat, board.experts),
        "arena_slots": board.arena_slots,
    } | ({"slots": _by_layer(board.slots.copy(), board.experts)} if slots else {})


def _by_layer(slots: list[int], experts: int) -> list[list[int]]:
    return [slots[at : at + experts] for at in range(0, len(slots), experts)]


def _digits(heat: npt.NDArray[np.float64], experts: int) -> Sequence[str]:
    text = (heat_levels(heat) + ord("0")).tobytes().decode()
    return [text[at : at + experts] for at in range(0, len(text), experts)]


def heat_levels(heat: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """[pairs] -> [pairs], 0 to 9: the tenth of all pairs that each is in, equal ones in the same, which is the lowest
    that one of them is in."""
    last = np.maximum(np.arange(1, 10) * len(heat) // 10 - 1, 0)  # of each tenth but the hottest
    edges = np.partition(heat, last)[last]
    levels: npt.NDArray[np.uint8] = np.searchsorted(edges, heat, side="left").astype(np.uint8)
    return levels


class HeatLevels:
    """`heat_levels` for who looks often: made anew once a second at most, and only where there is something new."""

    def __init__(self) -> None:
        self._heat: npt.NDArray[np.float64] | None = None
        self._levels: npt.NDArray[np.uint8] | None = None
        self._made_s = -math.inf

    def of(self, heat: npt.NDArray[np.float64] | None, now_s: float) -> npt.NDArray[np.uint8] | None:
        if heat is not self._heat and now_s - self._made_s >= HEAT_EVERY_S:
            self._heat, self._made_s = heat, now_s
            self._levels = None if heat is None else heat_levels(heat)
        return self._levels


def cells(board: ExpertBoard, levels: npt.NDArray[np.uint8] | None) -> bytes:
    """A byte an expert: its state times 16, and its heat, 15 where nobody follows it."""
    states = np.left_shift(np.frombuffer(bytes(board.states), dtype=np.uint8), 4, dtype=np.uint8)  # "0" is 0x30
    return bytes(states | (np.uint8(NO_HEAT) if levels is None else levels))


def held(board: ExpertBoard, heat: npt.NDArray[np.float64]) -> float:
    """The share of what the next tokens are expected to ask for that can be routed to now; layers count alike."""
    states = np.frombuffer(bytes(board.states), dtype=np.uint8).reshape(board.layers, board.experts)
    here = (states == RESIDENT) | (states == TRANSIENT)
    grid = heat.reshape(here.shape)
    whole = grid.sum(axis=1)
    return float(np.divide((grid * here).sum(axis=1), whole, out=np.ones(len(whole)), where=whole > 0).mean())
