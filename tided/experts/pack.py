"""Experts out of a pack: one aligned read a record, straight into the slot."""

import threading
import time
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from packers.pack_header import PackHeader
from packers.packs import Pack
from tided.errors import DataError
from tided.experts.files import ALIGN_BYTES, RangeFile, Staging
from tided.experts.source import ReadStats


class PackSource:
    """The records of a pack. Each must begin as one of its kind; `verify`: be what its checksum says, too."""

    def __init__(self, directory: Path, expected: PackHeader, verify: bool) -> None:
        """Raises DataError for a pack that is missing, damaged, or not `expected`'s."""
        self._pack = Pack.open(directory / expected.file_name)
        _check_identity(self._pack, expected)
        self.record, self.rank, self._verify = expected.record, expected.rank, verify
        self._file = RangeFile(self._pack.path)
        self._staging = Staging()
        self._lock = threading.Lock()
        self._stats = ReadStats(direct=self._file.direct)

    @property
    def path(self) -> Path:
        return self._pack.path

    @property
    def stats(self) -> ReadStats:
        return self._stats

    def read(self, layer: int, expert: int, out: memoryview) -> None:
        """Memory that is page-aligned, as every slot is, is read into directly; other memory through a copy."""
        began_s = time.perf_counter()
        number = self._pack.number(layer, expert)
        nbytes = self._pack.header.nbytes(number)
        if out.nbytes < nbytes:
            raise ValueError(f"{out.nbytes} bytes of room for a record of {nbytes}")
        out = out[:nbytes]  # a slot for records of any size is as large as the largest
        aligned = _address(out) % ALIGN_BYTES == 0
        read = self._file.read(
            self._pack.header.offset(number), nbytes, out if aligned else self._staging.buffer(nbytes)
        )
        self._pack.check_begin(number, read)
        if self._verify:
            self._pack.check_record(number, read)
        if not aligned:
            out[:] = read
        self._count(nbytes, time.perf_counter() - began_s)

    def close(self) -> None:
        """No read may be running or follow."""
        self._file.close()

    def _count(self, read_bytes: int, seconds: float) -> None:
        with self._lock:
            s = self._stats
            self._stats = ReadStats(
                s.records + 1, s.reads + 1, s.read_bytes + read_bytes, s.seconds + seconds, s.direct
            )


def _check_identity(pack: Pack, expected: PackHeader) -> None:
    found, hint = pack.header, "make the pack of this checkpoint: tidectl pack PROFILE --out DIR"
    if found.model != expected.model:
        raise DataError(
            f"is a pack of another checkpoint ({found.model[:16]}, not {expected.model[:16]})",
            where=str(pack.path),
            hint=hint,
        )
    if type(found) is not type(expected):
        raise DataError(f"is a pack of {found.SUFFIX} experts, not {expected.SUFFIX}", where=str(pack.path), hint=hint)
    for name in ("hidden", "intermediate", "rank", "ranks", "layers", "experts"):
        mine, other = getattr(expected, name), getattr(found, name)
        if mine != other:
            raise DataError(f"its {name} is {other}, this model's {mine}", where=str(pack.path), hint=hint)
    if replace(found, index="") != expected:
        raise DataError("its experts are stored otherwise than this checkpoint's", where=str(pack.path), hint=hint)


def _address(out: memoryview) -> int:
    return int(np.frombuffer(out, np.uint8).ctypes.data)
