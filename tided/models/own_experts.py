"""Experts that are always here: those of a drafter, in memory of their own, outside the arena and never counted."""

from itertools import accumulate

import torch

from kernels.record import PAGE_BYTES
from tided.experts.bank import ExpertBank
from tided.experts.checkpoint import Record
from tided.experts.source import RunSource
from tided.experts.tables import DemandTap, RoutingTables


def resident_bank(source: RunSource, record: Record, layers: int, experts: int, device: torch.device) -> ExpertBank:
    """All experts of `layers` layers, read and published; `source` is closed. One record at a time is held beside the
    device's memory, which may be the same."""
    pairs = [divmod(number, experts) for number in range(layers * experts)]
    sizes = [source.slot_bytes(*pair) for pair in pairs]
    unit = sizes[0] if len(set(sizes)) == 1 else PAGE_BYTES
    slots = list(accumulate((size // unit for size in sizes), initial=0))
    data = torch.empty(slots.pop(), unit, dtype=torch.uint8, device=device)
    staging = torch.empty(max(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    tables, tap = RoutingTables(layers, experts, device), DemandTap(1, layers, experts, device)
    tap.enabled = False
    try:
        for pair, slot, size in zip(pairs, slots, sizes, strict=True):
            source.read(*pair, staging[:size].numpy().data)
            data.view(-1)[slot * unit :][:size].copy_(staging[:size])
    finally:
        source.close()
    tables.change(dict(zip(pairs, slots, strict=True)))
    return ExpertBank(record, data, tables, tap)
