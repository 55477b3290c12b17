"""A checkpoint's experts as packs: what joins a model family, a checkpoint and the writer of packs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from kernels.record import ExpertRecord
from packers.mxfp4 import Header, Progress, cut, header_of
from packers.pack import ReadRecords, pack
from packers.shards import Checkpoint
from tided.errors import DataError, UsageError
from tided.experts.source import CheckpointSource, ExpertSource
from tided.models.families import Family, family_of


def pack_checkpoint(path: Path, ranks: int, rank: int | None, directory: Path, progress: Progress) -> list[Path]:
    """Writes the packs of all `ranks`, or of one, in one pass over the checkpoint. Returns their paths, ranks in order.

    Raises DataError, ConfigError (the experts cannot be cut so), UnavailableError (no room); a run that was ended goes
    on where it stopped."""
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError(f"there is no rank {rank} of {ranks}")
    checkpoint = Checkpoint.open(path)
    family = family_of(checkpoint.config)
    header = pack_header(checkpoint, family, 0, ranks)
    headers = [replace(header, rank=r) for r in (range(ranks) if rank is None else [rank])]
    whole = family.expert_record(checkpoint, 1 if rank is None else ranks)
    source = CheckpointSource(checkpoint, family.expert_names(checkpoint), whole, rank or 0)
    try:
        return pack(directory, headers, _reader(source, whole, headers), progress)
    finally:
        source.close()


def pack_header(checkpoint: Checkpoint, family: Family, rank: int, ranks: int) -> Header:
    """What the pack of this rank must say of itself."""
    shape, record = family.shape(checkpoint.config), family.expert_record(checkpoint, ranks)
    if record.codec != "mxfp4":
        raise DataError(
            f"a pack holds MXFP4 experts, these are {record.codec}",
            where=str(checkpoint.path),
            hint='serve it as it is: source = "checkpoint" in [experts]',
        )
    return header_of(checkpoint.identity(), record, rank, shape.moe_layers, shape.experts_per_layer)


def _reader(source: ExpertSource, record: ExpertRecord, headers: Sequence[Header]) -> ReadRecords:
    """Reads `record`s: the only rank's own, or whole experts that are cut into every rank's."""

    def read(layer: int, expert: int) -> list[memoryview]:
        whole = _room(record.slot_bytes)
        source.read(layer, expert, whole)
        if headers[0].ranks == record.ranks:
            return [whole]
        outs = [_room(header.record_bytes) for header in headers]
        for header, out in zip(headers, outs, strict=True):
            cut(whole, header.record, header.rank, out)
        return outs

    return read


def _room(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data
