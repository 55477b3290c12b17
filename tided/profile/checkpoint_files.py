"""Which files a directory lacks to be a checkpoint: by names alone, without a shard being opened. The loader judges the
contents."""

import re
import shlex
from pathlib import Path
from typing import TypeVar

import msgspec

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FETCHED = "tidelm-fetch.json"  # `tidectl fetch` leaves it there
MAX_BYTES = 100_000_000
REPOSITORY = re.compile(r"[A-Za-z0-9._-]{1,96}/[A-Za-z0-9._-]{1,96}")

T = TypeVar("T")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Fetched(msgspec.Struct):
    repository: str


def checkpoint_fault(path: Path) -> str:
    """Why a directory is not a whole checkpoint, or ""."""
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return f"there is no checkpoint at {path}"
    except OSError as error:
        return f"{path} cannot be read as a checkpoint directory ({error.strerror})"
    if "config.json" not in names:
        return f"{path} has no config.json"
    if INDEX not in names:
        return "" if SINGLE in names else f"{path} has no {INDEX}, and no {SINGLE}"
    found = _read(path / INDEX, _Index)
    if found is None:
        return f"{path / INDEX} is not what a checkpoint holds, or cannot be read"
    return _absent(path, sorted(set(found.weight_map.values()) - names))


def fetch_command(path: Path, *options: str) -> str:
    """That brings what is missing: of the repository that the directory began with, where it says so."""
    found = _read(path / FETCHED, _Fetched)
    known = found is not None and REPOSITORY.fullmatch(found.repository)
    repository = found.repository if found is not None and known else "REPOSITORY"
    return shlex.join(("tidectl", "fetch", repository, *options, "--to", str(path)))


def _absent(path: Path, shards: list[str]) -> str:
    if not shards:
        return ""
    first = shards[0] if shards[0].isprintable() else ascii(shards[0])
    more = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
    return f"{path} has no {first[:200]}{more}, which its {INDEX} names"


def _read(file: Path, kind: type[T]) -> T | None:
    """None for what is none of the kind."""
    try:
        with file.open("rb") as opened:
            return msgspec.json.decode(opened.read(MAX_BYTES), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
