"""What `tidectl fetch` leaves beside the files of a checkpoint: where they come from, and the sha256 of each. It is
written anew with every file that is whole, so that a fetch that was ended goes on, and it says at the end what a check
of all bytes compares with."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from packers.shard_writer import write_file
from tided.errors import DataError

NAME = "tidelm-fetch.json"
MAX_BYTES = 64 << 20
HASHED_BYTES = 4 << 20  # read at a time
Kind = Literal["whole", "dense"]
Progress = Callable[[int], None]  # (bytes more that were read)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that is whole. `by`: whose word the bytes were held against when they came: the hub's sha256 of a large
    file, its SHA-1 of a small one, or nobody's (a file that was put together here). `mtime_ns` tells whether it has
    been written to since."""

    bytes: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    by: Literal["sha256", "git", ""]
    mtime_ns: int


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """`revision`: what was asked for, empty: the newest; `commit`: what it was then. `kind` "dense": without the routed
    experts. `complete`: all that the last call asked for is here."""

    repository: str
    commit: Annotated[str, Meta(pattern="^[0-9A-Za-z._-]{1,100}$")]
    revision: str = ""
    kind: Kind = "whole"
    complete: bool = False
    files: dict[str, Entry] = {}
    version: Literal[1] = 1


def read_manifest(directory: Path) -> Manifest | None:
    """None where there is none. Raises DataError for one that was not written by us."""
    path = directory / NAME
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror})", where=str(path)) from e
    try:
        if len(text) > MAX_BYTES:
            raise msgspec.DecodeError(f"more than {MAX_BYTES} bytes")
        return msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        hint = (
            "delete it, and run `tidectl fetch` again: files that are here are compared with the hub's sums, and kept"
        )
        raise DataError(f"is not what `tidectl fetch` writes: {e}", where=str(path), hint=hint) from e


def write_manifest(directory: Path, manifest: Manifest) -> None:
    write_file(directory / NAME, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def is_untouched(path: Path, entry: Entry) -> bool:
    """By size and time alone; damage under an old time is for `faults`."""
    try:
        found = path.stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (entry.bytes, entry.mtime_ns)


def faults(directory: Path, manifest: Manifest, read: Progress = lambda nbytes: None) -> Iterator[str]:
    """Reads all of every file; one line for each that is not what was fetched."""
    for name, entry in sorted(manifest.files.items()):
        try:
            size = (directory / name).stat().st_size
            found = sha256_of(directory / name, read) if size == entry.bytes else ""
        except OSError as e:
            yield f"{name}: cannot be read ({e.strerror})"
            continue
        if size != entry.bytes:
            yield f"{name}: {size} bytes, not {entry.bytes}"
        elif found != entry.sha256:
            yield f"{name}: sha256 {found[:16]}..., not {entry.sha256[:16]}..."


def sha256_of(path: Path, read: Progress = lambda nbytes: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(HASHED_BYTES):
            digest.update(part)
            read(len(part))
    return digest.hexdigest()
