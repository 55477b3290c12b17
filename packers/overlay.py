"""A file that changes what a checkpoint computes, while the checkpoint stays as it is."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from packers.headers import TensorInfo, read_shard
from tided.errors import DataError

HASHED_BYTES = 1 << 22  # read at a time


@dataclass(frozen=True)
class Overlay:
    """`sha256` of the whole file: two files are one overlay only if every byte agrees. What the model's family makes of
    it: `points`, what it changes, for people and the boot guard; `replaces`, tensors that stand for the model's own."""

    path: Path
    sha256: str
    tensors: Mapping[str, TensorInfo]
    points: str = ""
    replaces: Mapping[str, TensorInfo] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path) -> "Overlay":
        """Reads the header and hashes the file, about a second a gigabyte. Raises DataError or TensorError for a file
        that is not exactly what its header says. Which tensors it may hold is for the model's family to say."""
        found = read_overlay(path)
        return replace(found, sha256=_sha256(found.path))


def read_overlay(path: str | Path) -> Overlay:
    """The same by its header alone, without its name: to judge what it holds."""
    shard = read_shard(Path(path).resolve())
    return Overlay(shard.path, "", {tensor.name: tensor for tensor in shard.tensors})


def identity_under(identity: str, overlay: str) -> str:
    """What names the weights that are served: the checkpoint's `identity`, and an overlay's sha256 if there is one.
    Whatever is learned or cached under one such name is not used under another."""
    return hashlib.sha256(f"{identity}\noverlay {overlay}".encode()).hexdigest() if overlay else identity


def digest_of(path: str) -> str:
    """The sha256 of an overlay of the settings; "" for none. Raises DataError."""
    return _sha256(Path(path)) if path else ""


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(HASHED_BYTES):
                digest.update(part)
    except OSError as e:
        raise DataError(f"is missing or cannot be read ({e.strerror})", where=str(path)) from e
    return digest.hexdigest()
