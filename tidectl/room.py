"""Room for files: what of them is to come, and what the file system of their directory has."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tidectl.node_messages import Free
from tided.errors import UnavailableError

SPARE_BYTES = 256 << 20  # of the file system, for what else is written meanwhile


def room_of(directory: Path, files: Mapping[str, int]) -> Free:
    """`files`: their bytes by name. What is here of them by its length is not to come. Raises UnavailableError for what
    cannot be a directory of this user's."""
    try:
        there = _nearest(directory)
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise UnavailableError("cannot be made or used", where=str(directory))
        left = sum(_left_bytes(directory / name, nbytes) for name, nbytes in files.items())
        return Free(str(directory), free_bytes(directory), left)
    except OSError as error:
        raise UnavailableError(f"cannot be made or used ({error.strerror})", where=str(directory)) from error


def _left_bytes(path: Path, nbytes: int) -> int:
    from packers.transfer import part_bytes

    is_here = path.is_file() and path.stat().st_size == nbytes
    return 0 if is_here else nbytes - part_bytes(path, nbytes)


def refuse_shortage(where: str, left_bytes: int, free: int) -> None:
    """Raises UnavailableError where the file system cannot hold what is left."""
    if left_bytes and left_bytes + SPARE_BYTES > free:
        need = f"{size(left_bytes)} are to come, {size(free)} are free"
        hint = f"make room, or name another directory with --to ({SPARE_BYTES >> 20} MiB are to stay free)"
        raise UnavailableError(f"the file system is too small: {need}", where=where, hint=hint)


def free_bytes(directory: Path) -> int:
    """Of the file system that the directory lies on, or will."""
    return shutil.disk_usage(_nearest(directory)).free


def _nearest(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.exists())


def size(nbytes: int) -> str:
    if nbytes >= 10**9:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 10**6 else f"{nbytes / 1e3:.1f} kB"
