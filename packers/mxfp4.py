"""The pack of one rank: its share of every routed expert, each one aligned read. docs/formats/mxfp4-pack.md.

    [0, 4096)               header: magic, version, length, checksum, then JSON, then zeros
    [4096, data_offset)     index: 16 bytes a record, its checksum, by (layer, expert); zeros to a multiple of 4 KiB
    [data_offset, size)     records by (layer, expert), each `record_bytes` (a multiple of 4 KiB)

Every byte of the file is under a checksum. Checksums are xxh3_128: they find damage, they do not stop a forger.
"""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Annotated

import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from kernels.record import PAGE_BYTES, ExpertRecord
from tided.errors import DataError

MAGIC, PARTIAL = b"TIDEPACK", b"TIDEPART"  # a whole pack; one that is being written
VERSION = 1
DIGEST_BYTES = 16
MAX_RECORDS = 1 << 20
SHOWN_FAULTS = 10
REPACK = "delete the file and make it again: tidectl pack PROFILE --out DIR"

_PREFIX = struct.Struct("<8sII16s")  # magic, version, bytes of JSON, checksum of the page with this field zero
_Count = Annotated[int, Meta(ge=1, le=MAX_RECORDS)]

Progress = Callable[[int, int], None]  # (records done, records in all)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a pack holds. `model`: the checkpoint's identity (`Checkpoint.identity`). `index`: the checksum of the index
    region, hexadecimal; empty in a pack that is being written."""

    model: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    hidden: _Count
    intermediate: _Count
    rank: Annotated[int, Meta(ge=0, le=63)]
    ranks: Annotated[int, Meta(ge=1, le=64)]
    layers: _Count
    experts: _Count
    record_bytes: Annotated[int, Meta(ge=PAGE_BYTES, le=1 << 32)]
    index: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")] = ""

    @property
    def records(self) -> int:
        return self.layers * self.experts

    @property
    def index_bytes(self) -> int:
        return -(-self.records * DIGEST_BYTES // PAGE_BYTES) * PAGE_BYTES

    @property
    def data_offset(self) -> int:
        return PAGE_BYTES + self.index_bytes

    @property
    def size_bytes(self) -> int:
        return self.data_offset + self.records * self.record_bytes

    @property
    def record(self) -> ExpertRecord:
        return ExpertRecord(self.hidden, self.intermediate, self.ranks)

    def offset(self, number: int) -> int:
        """Of record `number` = layer * experts + expert, from the file's start."""
        return self.data_offset + number * self.record_bytes


def header_of(model: str, record: ExpertRecord, rank: int, layers: int, experts: int) -> Header:
    return Header(
        model=model,
        hidden=record.hidden,
        intermediate=record.intermediate,
        rank=rank,
        ranks=record.ranks,
        layers=layers,
        experts=experts,
        record_bytes=record.slot_bytes,
    )


def file_name(rank: int, ranks: int) -> str:
    return f"experts-rank-{rank}-of-{ranks}.mxfp4"


def checksum(data: bytes | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def encode_page(header: Header, magic: bytes) -> bytes:
    """The header's page. Raises ValueError for one that does not fit."""
    text = msgspec.json.encode(header)
    if _PREFIX.size + len(text) > PAGE_BYTES:
        raise ValueError(f"a header of {len(text)} bytes")
    rest = text.ljust(PAGE_BYTES - _PREFIX.size, b"\0")
    digest = checksum(_PREFIX.pack(magic, VERSION, len(text), bytes(DIGEST_BYTES)) + rest)
    return _PREFIX.pack(magic, VERSION, len(text), digest) + rest


def decode_page(page: bytes, magic: bytes, path: Path) -> Header:
    """Raises DataError, naming file and offset, for a page that `encode_page` did not make."""
    if len(page) < PAGE_BYTES:
        raise DataError(f"ends after {len(page)} bytes, inside its header", where=f"{path}:{len(page)}", hint=REPACK)
    found, version, length, digest = _PREFIX.unpack_from(page)
    if found != magic:
        kind = "a pack that is not finished" if found == PARTIAL else "no pack of experts"
        raise DataError(f"is {kind}", where=f"{path}:0", hint="tidectl pack PROFILE --out DIR makes one")
    if version != VERSION:
        raise DataError(f"is a pack of version {version}, this build reads {VERSION}", where=f"{path}:8", hint=REPACK)
    if digest != checksum(_PREFIX.pack(found, version, length, bytes(DIGEST_BYTES)) + page[_PREFIX.size :]):
        raise DataError("the header is damaged: its checksum differs", where=f"{path}:0", hint=REPACK)
    try:
        header = msgspec.json.decode(page[_PREFIX.size : _PREFIX.size + length], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise DataError(f"the header is not what a pack holds: {e}", where=f"{path}:{_PREFIX.size}") from e
    _check_sense(header, path)
    return header


def _check_sense(header: Header, path: Path) -> None:
    try:
        slot_bytes = header.record.slot_bytes
    except ValueError as e:
        raise DataError(f"the header describes no expert: {e}", where=f"{path}:{_PREFIX.size}") from e
    if header.rank >= header.ranks or header.records > MAX_RECORDS or header.record_bytes != slot_bytes:
        raise DataError(
            f"the header contradicts itself: rank {header.rank} of {header.ranks}, {header.records} records of "
            f"{header.record_bytes} bytes where an expert's share has {slot_bytes}",
            where=f"{path}:{_PREFIX.size}",
        )


@dataclass(frozen=True)
class Pack:
    """A finished pack whose header and index are undamaged; the records have not been looked at."""

    path: Path
    header: Header
    _index: bytes

    @classmethod
    def open(cls, path: Path) -> "Pack":
        """Reads header and index. Raises DataError, naming file and offset."""
        try:
            found = path.stat()
            if not S_ISREG(found.st_mode):
                raise DataError("is not a regular file", where=str(path))
            with path.open("rb") as file:
                header = decode_page(file.read(PAGE_BYTES), MAGIC, path)
                index = file.read(header.index_bytes)
        except OSError as e:
            hint = "tidectl pack PROFILE --out DIR makes it"
            raise DataError(f"is missing or cannot be read ({e.strerror})", where=str(path), hint=hint) from e
        _check_size(header, found.st_size, path)
        if checksum(index).hex() != header.index:
            raise DataError("the index is damaged: its checksum differs", where=f"{path}:{PAGE_BYTES}", hint=REPACK)
        return cls(path, header, index)

    def number(self, layer: int, expert: int) -> int:
        if not (0 <= layer < self.header.layers and 0 <= expert < self.header.experts):
            raise DataError(f"there is no expert {expert} of layer {layer} in this pack", where=str(self.path))
        return layer * self.header.experts + expert

    def check_record(self, number: int, record: memoryview) -> None:
        """Raises DataError unless `record` [record_bytes] is what was packed."""
        if checksum(record) != self._index[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            layer, expert = divmod(number, self.header.experts)
            raise DataError(
                f"expert {expert} of layer {layer} is damaged: its checksum differs",
                where=f"{self.path}:{self.header.offset(number)}",
                hint=REPACK,
            )

    def verify(self, progress: Progress = lambda done, total: None) -> None:
        """Reads all of the file. Raises DataError that names the damaged records, the first ten of them."""
        faults, record = list[DataError](), memoryview(bytearray(self.header.record_bytes))
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.header.data_offset)
            for number in range(self.header.records):
                offset = self.header.offset(number)
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


def _check_size(header: Header, size: int, path: Path) -> None:
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


def cut(whole: memoryview, record: ExpertRecord, rank: int, out: memoryview) -> None:
    """The rank's record, from that of one rank alone. whole [uncut.slot_bytes], out [record.slot_bytes], uint8."""
    uncut = ExpertRecord(record.hidden, record.intermediate, 1)
    source, target = np.frombuffer(whole, np.uint8), np.frombuffer(out, np.uint8)
    for index, (a, b) in enumerate(zip(uncut.parts, record.parts, strict=True)):
        rows = source[a.offset : a.offset + a.nbytes].reshape(a.rows, a.row_bytes)
        columns = index % 3 == 2  # w2 is cut by columns, w1 and w3 by rows
        share = rows[:, rank * b.row_bytes :][:, : b.row_bytes] if columns else rows[rank * b.rows :][: b.rows]
        target[b.offset : b.offset + b.nbytes].reshape(b.rows, b.row_bytes)[:] = share
    target[record.nbytes :] = 0
