"""How the memory of experts is shared out over sizes of records: for the arena that is made, and for the bytes that are
judged before. Where records differ, `experts.resident` says how many mean ones' worth of bytes are kept."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.record import ExpertRecord
from tided.experts.arena import Arena, Pair, SlotClass

if TYPE_CHECKING:
    from tided.engine.build import OpenedModel


def arena_of(opened: "OpenedModel", pairs: Sequence[Pair], device: torch.device) -> Arena:
    """With places for the residents `pairs`, and for what is read beside them."""
    experts, tide, record, kinds = opened.settings.experts, opened.settings.tide, opened.record, opened.kinds
    if kinds is None:
        assert isinstance(record, ExpertRecord), "others have kinds"
        beside, most = (tide.hot_ring_slots, tide.sync_slots), len(opened.all_pairs)
        return Arena(record, experts.resident, experts.spare_slots, device, *beside, most=most)
    residents = Counter(int(kinds.of[pair]) for pair in pairs)
    slots = zip(kinds.nbytes, kinds.spare, kinds.ring, np.bincount(kinds.of.ravel()).tolist(), strict=True)
    classes = [
        SlotClass(nbytes, residents[kind], spare, ring, most) for kind, (nbytes, spare, ring, most) in enumerate(slots)
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


def resident_bytes(opened: "OpenedModel") -> int:
    """Of the residents on each rank; at most, where records differ in size."""
    resident, kinds = opened.settings.experts.resident, opened.kinds
    return resident * opened.largest_bytes if kinds is None else kinds.most_bytes(resident)
