"""Writes one safetensors file: its header, then its tensors as they are made, or their room alone. A file is whole or
not there: it grows under another name."""

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np

from packers.generated import Bytes
from packers.headers import DTYPE_BYTES, LENGTH_BYTES, TensorInfo
from packers.shards import TensorSpec
from tided.errors import UnavailableError
from tided.files import whole

PIECE_BYTES = 32 << 20
Fill = Callable[[TensorInfo, int, Bytes], None]  # (tensor, first byte, room) -> the room holds those bytes
Written = Callable[[int], None]  # bytes more that are written


def described(path: Path, tensors: Iterable[tuple[str, TensorSpec]]) -> tuple[bytes, list[TensorInfo]]:
    """The file's first bytes, and where each tensor comes to lie, in this order."""
    entries, found, offset = {}, [], 0
    for name, spec in tensors:
        dtype = spec.dtype if isinstance(spec.dtype, str) else spec.dtype[0]
        nbytes = DTYPE_BYTES[dtype] * int(np.prod(spec.shape, dtype=np.int64))
        entries[name] = {"dtype": dtype, "shape": spec.shape, "data_offsets": (offset, offset + nbytes)}
        found.append(TensorInfo(name, dtype, spec.shape, path, offset, nbytes))
        offset += nbytes
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    begin = LENGTH_BYTES + len(header)
    infos = [TensorInfo(t.name, t.dtype, t.shape, t.path, begin + t.offset, t.nbytes) for t in found]
    return len(header).to_bytes(LENGTH_BYTES, "little") + header, infos


def write_shard(path: Path, head: bytes, tensors: list[TensorInfo], fill: Fill | None, written: Written) -> None:
    """`fill` None: the file has its size and nothing else behind the header. Raises UnavailableError where the file
    system is full or takes no such file."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            _put(fd, head)
            if fill is None:
                os.ftruncate(fd, tensors[-1].offset + tensors[-1].nbytes)
            else:
                _fill(fd, tensors, fill, written)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(path)
        sync_directory(path.parent)
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the file system is full" if full else f"cannot be written ({e.strerror})"
        raise UnavailableError(what, where=str(path)) from e
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """A small file, whole or not there."""
    with whole(path) as file:
        file.write(data)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fill(fd: int, tensors: list[TensorInfo], fill: Fill, written: Written) -> None:
    room, since = np.empty(PIECE_BYTES, np.uint8), 0
    for tensor in tensors:
        for at in range(0, tensor.nbytes, PIECE_BYTES):
            piece = room[: min(PIECE_BYTES, tensor.nbytes - at)]
            fill(tensor, at, piece)
            _put(fd, piece.data)
            written(len(piece))
            since += len(piece)
            if since > 64 * PIECE_BYTES:  # no dirty pages beyond that: a checkpoint is larger than the memory
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                since = 0


def _put(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]
