"""Tensors in a file that is whole or does not count (docs/formats/context-bundle.md).

    0   8  magic "TIDECTX1"
    8   8  bytes of the head, little-endian
    16  8  bytes of the body
    24  16 xxh3-128 of head and body
    40     head: msgpack, `Head`; then the body: the tensors one after the other, each from a multiple of 64

A file gets its name when it is whole and on the disk. Truncated, altered or of another version: `Damaged`.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import Tensor

from tided import files

MAGIC = b"TIDECTX1"
ALIGN = 64
START = 40
MOST_HEAD_BYTES = 1 << 24
PIECE_BYTES = 4 << 20  # a millisecond of an NVMe disk
MOST_DIMENSIONS = 64
Parts = Mapping[str, Tensor]
DTYPES = {
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "i64": torch.int64,
    "u8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


Turn = Callable[[Callable[[], None]], None]  # does the work when the disk has time for it


def at_once(work: Callable[[], None]) -> None:
    """The turn of who has the disk for himself."""
    work()


class Damaged(Exception):
    """Not what was written. Says why; never what it holds."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: list[int]


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`needs`: keys of the bundles that hold the rest of the prefix."""

    key: str
    tokens: int
    needs: list[str]
    parts: list[Part]


def nbytes(parts: Parts) -> int:
    return sum(tensor.nbytes for tensor in parts.values())


def encode(key: str, tokens: int, needs: list[str], parts: Parts) -> list[memoryview]:
    """The file in pieces, its tensors not copied. `parts` lie on the CPU, contiguous."""
    head = msgspec.msgpack.encode(
        Head(key, tokens, needs, [Part(name, _NAMES[t.dtype], list(t.shape)) for name, t in parts.items()])
    )
    pieces = [memoryview(head + bytes(-(START + len(head)) % ALIGN))]
    for tensor in parts.values():
        pieces.append(_bytes(tensor))
        pieces.append(memoryview(bytes(-tensor.nbytes % ALIGN)))
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    total = sum(map(len, pieces))
    begin = MAGIC + len(head).to_bytes(8, "little") + (total - len(head)).to_bytes(8, "little") + digest.digest()
    return [memoryview(begin), *pieces]


def file_bytes(file: list[memoryview]) -> int:
    """Bytes of a file that `encode` made."""
    return sum(map(len, file))


def decode(data: bytearray, key: str) -> tuple[Head, dict[str, Tensor]]:
    """The tensors share the memory of `data`. Raises Damaged."""
    head, size = read_head(data, key)
    if xxhash.xxh3_128(memoryview(data)[START:]).digest() != data[24:START]:
        raise Damaged("its checksum is another")
    parts, at = {}, _aligned(START + size)
    for part in head.parts:
        dtype = DTYPES.get(part.dtype)
        if dtype is None or len(part.shape) > MOST_DIMENSIONS or not all(0 <= side < 1 << 63 for side in part.shape):
            raise Damaged(f"a tensor of {part.dtype[:9]} {part.shape[:MOST_DIMENSIONS]}")
        count = 1
        for side in part.shape:
            count *= side
        if at + count * dtype.itemsize > len(data):
            raise Damaged("its tensors reach beyond its end")
        tensor = torch.frombuffer(data, dtype=dtype, count=count, offset=at) if count else torch.empty(0, dtype=dtype)
        parts[part.name] = tensor.view(part.shape)
        at = _aligned(at + count * dtype.itemsize)
    return head, parts


def read_head(data: bytearray, key: str, whole: int | None = None) -> tuple[Head, int]:
    """The head, and its bytes, of a file whose beginning is `data` and whose length is `whole`. Raises Damaged."""
    if len(data) < START or data[:8] != MAGIC:
        raise Damaged("it is no context bundle of this version")
    size, body = (int.from_bytes(data[at : at + 8], "little") for at in (8, 16))
    if START + size + body != (len(data) if whole is None else whole):
        raise Damaged("it is not as long as it says")
    if size > MOST_HEAD_BYTES or START + size > len(data):
        raise Damaged("its head is too long")
    try:
        head = msgspec.msgpack.decode(memoryview(data)[START : START + size], type=Head)
    except msgspec.MsgspecError as error:
        raise Damaged("its head cannot be read") from error
    if head.key != key:
        raise Damaged("it is another bundle")
    return head, size


def write(path: Path, pieces: list[memoryview], turn: Turn = at_once) -> None:
    """Whole or not at all, 0600; PIECE_BYTES on the disk at each `turn`. Raises OSError."""
    with files.whole(path, files.PRIVATE, durable=False) as file:  # durable in a turn of its own
        for piece in _cut(pieces):
            turn(partial(_write_down, file.fileno(), piece))
        turn(partial(os.fsync, file.fileno()))


def read(path: Path, key: str, turn: Turn = at_once) -> tuple[Head, dict[str, Tensor]]:
    """PIECE_BYTES at each `turn`. Raises OSError, Damaged."""
    with path.open("rb", buffering=0) as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        for piece in _cut([memoryview(data)]):
            turn(partial(_read_all, file.fileno(), piece))
    return decode(data, key)


def _cut(pieces: list[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes, in lists of PIECE_BYTES at most."""
    cut, room = [], PIECE_BYTES
    for piece in pieces:
        while len(piece):
            cut.append(piece[:room])
            room -= len(cut[-1])
            piece = piece[len(cut[-1]) :]
            if not room:
                yield cut
                cut, room = [], PIECE_BYTES
    if cut:
        yield cut


def _read_all(fd: int, pieces: list[memoryview]) -> None:
    for piece in pieces:
        while len(piece):
            count = os.readv(fd, [piece])
            if not count:
                raise Damaged("it ends early")
            piece = piece[count:]


def _write_down(fd: int, pieces: list[memoryview]) -> None:
    """To the disk itself: what is left to the page cache is written in one go later, in nobody's turn."""
    for piece in pieces:
        while len(piece):
            piece = piece[os.write(fd, piece) :]
    os.fdatasync(fd)


def _bytes(tensor: Tensor) -> memoryview:
    if not tensor.numel():  # which no view can be cast of
        return memoryview(b"")
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data.cast("B")


def _aligned(at: int) -> int:
    return at + -at % ALIGN
