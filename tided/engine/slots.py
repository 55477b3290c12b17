"""How the memory of experts is shared out over sizes of records: for the arena that is made, and for the bytes that are
judged before. Where records differ, `experts.resident` says how many mean ones' worth of bytes are kept."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.record import ExpertRecord
from tided.experts import placement
from tided.experts.arena import Arena, Pair
from tided.experts.slot_classes import SlotClass
from tided.models.parallel import Group

if TYPE_CHECKING:
    from tided.engine.build import OpenedModel

log = logging.getLogger("experts")


def agreed_arena(opened: "OpenedModel", pairs: Sequence[Pair], device: torch.device, group: Group) -> Arena:
    """A collective of all ranks. Whether places can change is a fact of each node (how it counts addresses, what its
    device allows, how fast it measured), and decides where slots lie: so they change on all ranks or on none."""
    arena = arena_of(opened, pairs, device)
    can_change = arena.most_residents is not None
    told = group.sum(torch.tensor([float(can_change)], device=device))
    if not can_change or int(told) == group.ranks:
        return arena
    log.warning("the budget of experts cannot change while serving: %d of the ranks cannot", group.ranks - int(told))
    del arena  # or there would be two for a while
    return arena_of(opened, pairs, device, elastic=False)


def arena_of(opened: "OpenedModel", pairs: Sequence[Pair], device: torch.device, elastic: bool = True) -> Arena:
    """With places for the residents `pairs`, and for what is read beside them. `elastic`: where that can be had, there
    may come to be places for all experts."""
    experts, tide, record, kinds = opened.settings.experts, opened.settings.tide, opened.record, opened.kinds
    if kinds is None:
        assert isinstance(record, ExpertRecord), "others have kinds"
        beside, most = (tide.hot_ring_slots, tide.sync_slots), len(opened.all_pairs)
        return Arena(record, experts.resident, experts.spare_slots, device, *beside, most=most * elastic)
    residents = Counter(int(kinds.of[pair]) for pair in pairs)
    slots = zip(kinds.nbytes, kinds.spare, kinds.ring, np.bincount(kinds.of.ravel()).tolist(), strict=True)
    classes = [
        SlotClass(nbytes, residents[kind], spare, ring, most * elastic)
        for kind, (nbytes, spare, ring, most) in enumerate(slots)
    ]
    return Arena.of_sizes(classes, kinds.of, device, tide.sync_slots)


def arena_bytes(opened: "OpenedModel") -> int:
    """Of the arena on each rank; at most, where records differ in size."""
    experts, tide, kinds = opened.settings.experts, opened.settings.tide, opened.kinds
    beside = (tide.sync_slots + 1) * opened.largest_bytes
    if kinds is None:
        beside += (experts.spare_slots + tide.hot_ring_slots) * opened.largest_bytes
    else:
        slots = zip(kinds.nbytes, kinds.spare, kinds.ring, strict=True)
        beside += sum(size * (spare + ring) for size, spare, ring in slots)
    return beside + resident_bytes(opened)


def rounding_bytes(opened: "OpenedModel") -> int:
    """At most, of the arena where a device reads the system's memory: beside the slots of each size, and those behind
    them all."""
    sizes = 1 if opened.kinds is None else len(opened.kinds.nbytes)
    return placement.rounding_bytes(sizes + 1)


def resident_bytes(opened: "OpenedModel") -> int:
    """Of the residents on each rank; at most, where records differ in size."""
    resident, kinds = opened.settings.experts.resident, opened.kinds
    return resident * opened.largest_bytes if kinds is None else kinds.most_bytes(resident)
