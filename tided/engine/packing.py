"""A checkpoint's experts as packs: what joins a model family, a checkpoint and the writer of packs."""

from itertools import accumulate
from pathlib import Path

from msgspec.structs import replace

from kernels.exl3_record import Exl3Record
from kernels.record import PAGE_BYTES
from packers.exl3_pack import exl3_header_of
from packers.memory import device_memory
from packers.mxfp4 import header_of
from packers.pack import AT_ONCE, ReadRecords, pack
from packers.pack_header import PackHeader
from packers.packs import Progress
from packers.shards import Checkpoint
from tided.errors import DataError, UsageError
from tided.experts.checkpoint import source_of
from tided.experts.exl3_source import Exl3Source
from tided.experts.source import EveryRank
from tided.models.families import Family, family_of


def pack_checkpoint(
    path: Path, ranks: int, rank: int | None, directory: Path, progress: Progress, kind: str = ""
) -> list[Path]:
    """Writes the packs of all `ranks`, or of one, in one pass over the checkpoint. Returns their paths, ranks in order.
    `kind`: what the experts must be stored in ("exl3"); empty: whatever a pack can hold.

    Raises DataError, ConfigError (the experts cannot be cut so), UnavailableError (no room); a run that was ended goes
    on where it stopped."""
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError(f"there is no rank {rank} of {ranks}")
    checkpoint = Checkpoint.open(path)
    family = family_of(checkpoint.config)
    header = pack_header(checkpoint, family, 0, ranks)
    if kind and kind != header.SUFFIX:
        raise DataError(
            f"its routed experts are {header.SUFFIX.upper()}, not {kind.upper()}",
            where=str(path),
            hint="tidectl pack --checkpoint DIR packs whatever they are stored in",
        )
    headers = [replace(header, rank=r) for r in (range(ranks) if rank is None else [rank])]
    names, record = family.expert_names(checkpoint), family.expert_record(checkpoint, ranks)
    source = EveryRank([source_of(checkpoint, names, record, header.rank) for header in headers])
    try:
        return pack(directory, headers, _reader(source, header.experts), progress)
    finally:
        source.close()


def pack_header(checkpoint: Checkpoint, family: Family, rank: int, ranks: int) -> PackHeader:
    """What the pack of this rank must say of itself."""
    shape, record = family.shape(checkpoint.config), family.expert_record(checkpoint, ranks)
    sizes, identity = (shape.moe_layers, shape.experts_per_layer), checkpoint.identity()
    if isinstance(record, Exl3Record):
        source = Exl3Source(checkpoint, family.expert_names(checkpoint), record, rank)
        stored = [source.stored(layer, expert) for layer in range(sizes[0]) for expert in range(sizes[1])]
        return exl3_header_of(identity, record, rank, *sizes, stored)
    if record.codec != "mxfp4":
        raise DataError(
            f"a pack holds MXFP4 or EXL3 experts, these are {record.codec}",
            where=str(checkpoint.path),
            hint='serve it as it is: source = "checkpoint" in [experts]',
        )
    return header_of(identity, record, rank, *sizes)


def _reader(source: EveryRank, experts: int) -> ReadRecords:
    """Into rooms that are used in turns, and so are memory already when they are read into. `experts`: of a layer."""
    rooms = [device_memory(PAGE_BYTES) for _ in range(AT_ONCE)]

    def read(layer: int, expert: int) -> list[memoryview]:
        sizes, turn = source.sizes(layer, expert), (layer * experts + expert) % AT_ONCE
        if len(rooms[turn]) < sum(sizes):
            rooms[turn] = device_memory(sum(sizes))
        room = rooms[turn][: sum(sizes)]
        source.read(layer, expert, room)
        begins = accumulate(sizes, initial=0)
        return [room[begin : begin + nbytes] for begin, nbytes in zip(begins, sizes, strict=False)]

    return read
