"""Experts of a checkpoint, whatever they are stored in: where their records come from, and how large each is."""

from kernels.exl3_record import Exl3Record
from kernels.record import ExpertRecord
from packers.shards import Checkpoint
from tided.experts.exl3_source import Described, Exl3Source, describe
from tided.experts.source import CheckpointSource, ExpertNames

Record = ExpertRecord | Exl3Record


def source_of(checkpoint: Checkpoint, names: ExpertNames, record: Record, rank: int) -> CheckpointSource | Exl3Source:
    """`names`: of the parts of a record, or of an EXL3 expert's matrices."""
    if isinstance(record, Exl3Record):
        return Exl3Source(checkpoint, names, record, rank)
    return CheckpointSource(checkpoint, names, record, rank)


def described(
    checkpoint: Checkpoint, names: ExpertNames, record: Record, layers: int, experts: int
) -> Described | None:
    """What is known of these layers' experts, where their records may differ in size; None: all have
    `record.slot_bytes`. Reads headers alone."""
    if isinstance(record, ExpertRecord):
        return None
    return describe(Exl3Source(checkpoint, names, record, 0), layers, experts)
