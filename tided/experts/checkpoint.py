"""Experts of a checkpoint, whatever they are stored in: where their records come from, and how large each is."""

import numpy as np
import numpy.typing as npt

from kernels.exl3_record import Exl3Record
from kernels.record import ExpertRecord
from packers.shards import Checkpoint
from tided.experts.exl3_source import Exl3Source, sizes_of
from tided.experts.source import CheckpointSource, ExpertNames

Record = ExpertRecord | Exl3Record


def source_of(checkpoint: Checkpoint, names: ExpertNames, record: Record, rank: int) -> CheckpointSource | Exl3Source:
    """`names`: of the parts of a record, or of an EXL3 expert's matrices."""
    if isinstance(record, Exl3Record):
        return Exl3Source(checkpoint, names, record, rank)
    return CheckpointSource(checkpoint, names, record, rank)


def sizes_in(
    checkpoint: Checkpoint, names: ExpertNames, record: Record, layers: int, experts: int
) -> npt.NDArray[np.int64] | None:
    """[layers, experts] bytes of every record on one rank (on all the same); None: all have `record.slot_bytes`."""
    if isinstance(record, ExpertRecord):
        return None
    return sizes_of(Exl3Source(checkpoint, names, record, 0), layers, experts)
