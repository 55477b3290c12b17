"""Experts that are always here: those of a drafter, in memory of their own, outside the arena and never counted."""

import torch

from kernels.record import ExpertRecord
from tided.experts.bank import ExpertBank
from tided.experts.source import CheckpointSource
from tided.experts.tables import DemandTap, RoutingTables


def resident_bank(
    source: CheckpointSource, record: ExpertRecord, layers: int, experts: int, device: torch.device
) -> ExpertBank:
    """All experts of `layers` layers, read and published; `source` is closed."""
    slots = torch.zeros(layers * experts, record.slot_bytes, dtype=torch.uint8)
    tables, tap = RoutingTables(layers, experts, device), DemandTap(1, layers, experts, device)
    tap.enabled = False
    try:
        for slot in range(len(slots)):
            source.read(*divmod(slot, experts), slots[slot].numpy().data)
    finally:
        source.close()
    tables.change({divmod(slot, experts): slot for slot in range(len(slots))})
    return ExpertBank(record, slots.to(device), tables, tap)
