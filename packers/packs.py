"""Files of experts, one a rank, each record one aligned read: docs/formats/mxfp4-pack.md, docs/formats/exl3-pack.md.

    [0, header)     magic, version, length, checksum, then JSON, then zeros to a multiple of 4 KiB
    [header, data)  index: 16 bytes a record, its checksum, by (layer, expert); zeros to a multiple of 4 KiB
    [data, size)    records by (layer, expert), each a multiple of 4 KiB

Every byte of the file is under a checksum. Checksums are xxh3_128: they find damage, they do not stop a forger.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

import msgspec
import xxhash

from kernels.record import PAGE_BYTES
from packers.exl3_pack import Exl3Header
from packers.mxfp4 import Header
from packers.pack_header import DIGEST_BYTES, MAX_RECORDS, PackHeader
from tided.errors import DataError

VERSION = 1
MAX_HEADER_BYTES = 64 << 20
SHOWN_FAULTS = 10
REPACK = "delete the file and make it again: tidectl pack PROFILE --out DIR"
KINDS: tuple[type[PackHeader], ...] = (Header, Exl3Header)

_PREFIX = struct.Struct("<8sII16s")  # magic, version, bytes of JSON, checksum of the region with this field zero

Progress = Callable[[int, int], None]  # (records done, records in all)


def checksum(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def encode_header(header: PackHeader, magic: bytes) -> bytes:
    """The header's region. Raises ValueError for one that does not fit."""
    text = msgspec.json.encode(header)
    if _PREFIX.size + len(text) > header.header_bytes:
        raise ValueError(f"a header of {len(text)} bytes")
    rest = text.ljust(header.header_bytes - _PREFIX.size, b"\0")
    digest = checksum(_PREFIX.pack(magic, VERSION, len(text), bytes(DIGEST_BYTES)) + rest)
    return _PREFIX.pack(magic, VERSION, len(text), digest) + rest


def region_bytes(page: bytes) -> int:
    """How long a header is, by its first page: as far as one may believe what is not checked yet."""
    if len(page) < PAGE_BYTES:
        return PAGE_BYTES
    length = _PREFIX.size + int(_PREFIX.unpack_from(page)[2])
    return max(PAGE_BYTES, min(MAX_HEADER_BYTES, -(-length // PAGE_BYTES) * PAGE_BYTES))


def decode_header(region: bytes, path: Path, partial: bool = False) -> PackHeader:
    """Of a whole pack, or of one that is being written. Raises DataError, naming file and offset, for bytes that
    `encode_header` did not make."""
    if len(region) < PAGE_BYTES:
        raise DataError(
            f"ends after {len(region)} bytes, inside its header", where=f"{path}:{len(region)}", hint=REPACK
        )
    found, version, length, digest = _PREFIX.unpack_from(region)
    kind = next((one for one in KINDS if found == (one.PARTIAL if partial else one.MAGIC)), None)
    if kind is None:
        unfinished = any(found == one.PARTIAL for one in KINDS)
        what = "a pack that is not finished" if unfinished else "no pack of experts"
        raise DataError(f"is {what}", where=f"{path}:0", hint="tidectl pack PROFILE --out DIR makes one")
    if version != VERSION:
        raise DataError(f"is a pack of version {version}, this build reads {VERSION}", where=f"{path}:8", hint=REPACK)
    if digest != checksum(_PREFIX.pack(found, version, length, bytes(DIGEST_BYTES)) + region[_PREFIX.size :]):
        raise DataError("the header is damaged: its checksum differs", where=f"{path}:0", hint=REPACK)
    try:
        header = msgspec.json.decode(region[_PREFIX.size : _PREFIX.size + length], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise DataError(f"the header is not what a pack holds: {e}", where=f"{path}:{_PREFIX.size}") from e
    _check_sense(header, len(region), path)
    return header


def _check_sense(header: PackHeader, region: int, path: Path) -> None:
    fault = header.fault()
    if not fault and (header.rank >= header.ranks or header.records > MAX_RECORDS or header.header_bytes != region):
        fault = f"rank {header.rank} of {header.ranks}, {header.records} records, a header of {region} bytes"
    if fault:
        raise DataError(f"the header contradicts itself: {fault}", where=f"{path}:{_PREFIX.size}")


@dataclass(frozen=True)
class Pack:
    """A finished pack whose header and index are undamaged; the records have not been looked at."""

    path: Path
    header: PackHeader
    _index: bytes

    @classmethod
    def open(cls, path: Path) -> "Pack":
        """Reads header and index. Raises DataError, naming file and offset."""
        try:
            found = path.stat()
            if not S_ISREG(found.st_mode):
                raise DataError("is not a regular file", where=str(path))
            with path.open("rb") as file:
                page = file.read(PAGE_BYTES)
                header = decode_header(page + file.read(region_bytes(page) - PAGE_BYTES), path)
                index = file.read(header.index_bytes)
        except OSError as e:
            hint = "tidectl pack PROFILE --out DIR makes it"
            raise DataError(f"is missing or cannot be read ({e.strerror})", where=str(path), hint=hint) from e
        _check_size(header, found.st_size, path)
        if checksum(index).hex() != header.index:
            raise DataError(
                "the index is damaged: its checksum differs", where=f"{path}:{header.header_bytes}", hint=REPACK
            )
        return cls(path, header, index)

    def number(self, layer: int, expert: int) -> int:
        if not (0 <= layer < self.header.layers and 0 <= expert < self.header.experts):
            raise DataError(f"there is no expert {expert} of layer {layer} in this pack", where=str(self.path))
        return layer * self.header.experts + expert

    def check_record(self, number: int, record: memoryview) -> None:
        """Raises DataError unless `record` is what was packed."""
        if checksum(record) != self._index[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            layer, expert = divmod(number, self.header.experts)
            raise DataError(
                f"expert {expert} of layer {layer} is damaged: its checksum differs",
                where=f"{self.path}:{self.header.offset(number)}",
                hint=REPACK,
            )

    def check_begin(self, number: int, record: memoryview) -> None:
        """Raises DataError unless `record` begins as one of its kind: a kernel finds its matrices by these bytes, and a
        GPU that finds none there computes zeros without a word."""
        wanted = self.header.begin(number)
        found = bytes(record[: len(wanted)])
        if found != wanted:
            layer, expert = divmod(number, self.header.experts)
            raise DataError(
                f"expert {expert} of layer {layer} is damaged: it begins with {found[:8].hex(' ')}, "
                f"not with {wanted[:8].hex(' ')}",
                where=f"{self.path}:{self.header.offset(number)}",
                hint=REPACK,
            )

    def verify(self, progress: Progress = lambda done, total: None) -> None:
        """Reads all of the file. Raises DataError that names the damaged records, the first ten of them."""
        faults, largest = list[DataError](), max(map(self.header.nbytes, range(self.header.records)))
        room = memoryview(bytearray(largest))
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.header.data_offset)
            for number in range(self.header.records):
                offset, record = self.header.offset(number), room[: self.header.nbytes(number)]
                read_full(file.readinto, record, self.path, offset)
                # A pack is larger than the page cache, which others have better use for.
                os.posix_fadvise(file.fileno(), offset, len(record), os.POSIX_FADV_DONTNEED)
                try:
                    self.check_record(number, record)
                except DataError as fault:
                    faults.append(fault)
                progress(number + 1, self.header.records)
        if faults:
            shown = "; ".join(f"{fault.what} ({fault.where})" for fault in faults[:SHOWN_FAULTS])
            more = f" and {len(faults) - SHOWN_FAULTS} more" if len(faults) > SHOWN_FAULTS else ""
            raise DataError(f"{len(faults)} damaged: {shown}{more}", where=str(self.path), hint=REPACK)


def _check_size(header: PackHeader, size: int, path: Path) -> None:
    if size < header.size_bytes:
        raise DataError(
            f"the file ends at byte {size}, a pack of {header.records} records has {header.size_bytes}: truncated",
            where=f"{path}:{size}",
            hint=REPACK,
        )
    if size > header.size_bytes:
        raise DataError(
            f"{size - header.size_bytes} bytes after the last record belong to none",
            where=f"{path}:{header.size_bytes}",
            hint=REPACK,
        )


def read_full(readinto: Callable[[memoryview], int | None], out: memoryview, path: Path, offset: int) -> None:
    """Fills `out` from a file that is at `offset`. Raises DataError."""
    got = 0
    while got < len(out):
        try:
            count = readinto(out[got:])
        except OSError as e:
            raise DataError(f"cannot be read: {e.strerror}", where=f"{path}:{offset + got}") from e
        if not count:
            raise DataError("the file ends inside a record", where=f"{path}:{offset + got}", hint=REPACK)
        got += count
