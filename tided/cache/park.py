"""Contexts that left the pool for others: in memory until they are written, then on disk, until their lane comes back.

Files are of one run: a start removes what an earlier one left. A context that cannot be written stays in memory; one
that cannot be read again is lost, and its request alone ends."""

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from tided.cache import bundle
from tided.cache.background import Background, free_bytes, private_folder, remove_files
from tided.cache.bundle import Damaged, Parts

log = logging.getLogger("cache")


@dataclass
class Parked:
    """`parts` None: they are in the file. `wanted`: the lane is about to come back, so they stay in memory."""

    key: str
    tokens: int
    parts: Parts | None
    on_disk: bool = False
    wanted: bool = False


class ParkedLanes:
    """`folder` None: parked contexts stay in memory."""

    def __init__(self, folder: Path | None, background: Background) -> None:
        """Raises OSError when the folder cannot be made."""
        self._folder, self._background = folder, background
        self._lock = threading.Lock()
        self._lanes: dict[int, Parked] = {}
        self._serial = 0
        if folder is not None:
            remove_files(private_folder(folder))

    @property
    def lanes(self) -> list[int]:
        return sorted(self._lanes)

    def park(self, lane: int, tokens: int, parts: Parts) -> None:
        self._serial += 1
        parked = Parked(f"{lane}-{self._serial}", tokens, parts)
        with self._lock:
            self._lanes[lane] = parked
        if self._folder is not None:
            self._background.write(bundle.nbytes(parts), lambda: self._write(lane, parked), must=True)

    def load(self, lane: int) -> bool:
        """Whether the context is in memory again; on a reader's thread."""
        with self._lock:
            parked = self._lanes.get(lane)
            if parked is None:
                return False
            parked.wanted = True
            if parked.parts is not None:
                return True
        try:
            _, parts = bundle.read(self._path(parked), parked.key, self._background.turn_to_read)
        except (OSError, Damaged) as error:
            log.warning("the parked context of lane %d is lost: %s", lane, error)
            return False
        with self._lock:
            parked.parts = parts
        return True

    def take(self, lane: int) -> tuple[int, Parts]:
        """The context of a lane that was loaded; it is parked no more. Raises KeyError."""
        with self._lock:
            parked = self._lanes.pop(lane)
        if parked.parts is None:
            raise KeyError(lane)
        self._unlink(parked)
        return parked.tokens, parked.parts

    def drop(self, lane: int) -> None:
        """The request is over."""
        with self._lock:
            parked = self._lanes.pop(lane, None)
        if parked is not None:
            self._unlink(parked)

    def _write(self, lane: int, parked: Parked) -> None:
        with self._lock:
            parts = parked.parts if self._lanes.get(lane) is parked and not parked.wanted else None
        if parts is None:
            return
        try:
            if free_bytes(self._path(parked).parent) < bundle.nbytes(parts):
                raise OSError("the disk is almost full")
            file = bundle.encode(parked.key, parked.tokens, [], parts)
            bundle.write(self._path(parked), file, self._background.turn_to_write)
        except OSError as error:
            log.warning("the parked context of lane %d stays in memory: %s", lane, error)
            return
        with self._lock:
            parked.on_disk = True
            current = self._lanes.get(lane) is parked
            if current and not parked.wanted:
                parked.parts = None
        if not current:
            self._unlink(parked)

    def _unlink(self, parked: Parked) -> None:
        """The writer unlinks what it finishes for a lane that has gone."""
        with self._lock:
            on_disk = parked.on_disk
        if on_disk:
            self._path(parked).unlink(missing_ok=True)

    def _path(self, parked: Parked) -> Path:
        assert self._folder is not None
        return self._folder / f"{parked.key}.context"
