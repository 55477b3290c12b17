"""The header of one safetensors file, read and checked without touching its data (and without torch).

    8 bytes   length n of the header, little endian
    n bytes   JSON: name -> {dtype, shape, data_offsets: [begin, end)}, offsets relative to the end of the header
    rest      the tensors, without gaps

A file comes from elsewhere and is not trusted: every number is checked against the file's size before it is used.
"""

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec

from tided.errors import DataError, TensorError

MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8
METADATA = "__metadata__"
REFETCH = "fetch this file again"

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `nbytes` bytes at `offset` of the file `path`, counted from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """A checked file: its tensors by offset, all of `size_bytes` accounted for."""

    path: Path
    size_bytes: int
    data_offset: int
    tensors: tuple[TensorInfo, ...]


MAX_DIMENSIONS = 64  # their product is worked out before it is compared
_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


_DECODER = msgspec.json.Decoder(_Entry)


def read_shard(path: Path) -> Shard:
    """Raises DataError, naming the file and the offset, for a file that is not exactly what its header says."""
    size = _regular_size(path)
    return shard_of(path, size, _header_bytes(path, size))


def shard_of(path: Path, size: int, header: bytes) -> Shard:
    """Of a file of `size` bytes that begins with the length of `header` and `header`. Raises as `read_shard`."""
    data_offset = LENGTH_BYTES + len(header)
    tensors = [_tensor(path, name, entry, data_offset, size) for name, entry in _entries(path, header).items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    _check_contiguous(path, tensors, data_offset, size)
    return Shard(path, size, data_offset, tuple(tensors))


def shown(name: str) -> str:
    """A name out of a file, fit for a message: one line, no control characters, not endless."""
    return ascii(name if len(name) <= 200 else name[:200] + "...")[1:-1]


def _regular_size(path: Path) -> int:
    try:
        found = path.stat()
    except OSError as e:
        raise DataError(f"is missing or cannot be read ({e.strerror})", where=str(path), hint=REFETCH) from e
    if not stat.S_ISREG(found.st_mode):
        raise DataError("is not a regular file", where=str(path))
    return found.st_size


def _header_bytes(path: Path, size: int) -> bytes:
    if size < LENGTH_BYTES:
        raise DataError(f"{size} bytes long, no room for a safetensors header", where=f"{path}:0", hint=REFETCH)
    try:
        with path.open("rb") as file:
            length = header_length(path, size, file.read(LENGTH_BYTES))
            header = file.read(length)
    except OSError as e:
        raise DataError(f"cannot be read: {e.strerror}", where=str(path)) from e
    if len(header) != length:
        raise DataError(f"header ends after {len(header)} of {length} bytes", where=f"{path}:{LENGTH_BYTES}")
    return header


def header_length(path: Path, size: int, prefix: bytes) -> int:
    """Of the header of a file of `size` bytes, by its first `LENGTH_BYTES`. Raises DataError."""
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES or length > size - LENGTH_BYTES:
        raise DataError(
            f"header of {length} bytes in a file of {size} (at most {MAX_HEADER_BYTES} are allowed)",
            where=f"{path}:0",
            hint=REFETCH,
        )
    return length


def _entries(path: Path, header: bytes) -> dict[str, _Entry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop(METADATA, None)
        return {name: _DECODER.decode(entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise DataError(f"header is not what safetensors writes: {e}", where=f"{path}:{LENGTH_BYTES}") from e


def _tensor(path: Path, name: str, entry: _Entry, data_offset: int, size: int) -> TensorInfo:
    begin, end = (data_offset + offset for offset in entry.data_offsets)
    where = f"{path}:{begin}"
    item_bytes = DTYPE_BYTES.get(entry.dtype)
    if item_bytes is None:
        raise TensorError(f"tensor {shown(name)} has the unknown dtype {shown(entry.dtype)}", where=where)
    if not begin <= end <= size:
        raise TensorError(
            f"tensor {shown(name)} ends at byte {end}, the file at {size}: truncated or damaged",
            where=where,
            hint=REFETCH,
        )
    if prod(entry.shape) * item_bytes != end - begin:
        raise TensorError(
            f"tensor {shown(name)} of {entry.dtype} {entry.shape} needs {prod(entry.shape) * item_bytes} bytes, "
            f"its range holds {end - begin}",
            where=where,
        )
    return TensorInfo(name, entry.dtype, tuple(entry.shape), path, begin, end - begin)


def _check_contiguous(path: Path, tensors: list[TensorInfo], data_offset: int, size: int) -> None:
    """`tensors` by offset. A gap could hide bytes, an overlap would let two tensors be one."""
    at = data_offset
    for tensor in tensors:
        if tensor.offset != at:
            kind = "a gap before" if tensor.offset > at else "an overlap at"
            raise TensorError(f"{kind} tensor {shown(tensor.name)}", where=f"{path}:{at}")
        at += tensor.nbytes
    if at != size:
        raise DataError(f"{size - at} bytes after the last tensor belong to none", where=f"{path}:{at}")
