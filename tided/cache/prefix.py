"""The prompt cache of a rank: contexts at chunk boundaries, in memory and on disk, each within its bytes.

A snapshot is what a lane's context is at a place of a prompt, in two kinds of bundle: the pages of each chunk, which
all snapshots behind it share, and its own state (windows, remainders, the unfinished page). On disk `<key>.pages` and
`<key>.state`: the state is written last, so a state whose pages are missing was cut off, and is a miss. Keys name
every token and every number that the content depends on (`tided.cache.chain`): a file of another model, or of other
numbers, is never asked for, and ages like the rest.

`save` is called between steps and copies; `read` runs on a reader's thread. What cannot be kept or read is a miss with
a line in the log. Nothing here knows or decides what other ranks hold."""

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from tided.cache import bundle
from tided.cache.background import Background, free_bytes, private_folder
from tided.cache.bundle import Damaged, Parts
from tided.cache.index import Entry, Gone, Index

log = logging.getLogger("cache")

STATE, PAGES = ".state", ".pages"
HEAD_BYTES = 1 << 16


class Snapshot(NamedTuple):
    """`pages[i]`: those that chunk i completed. `source`: where it was found; of one on disk pages may be in memory."""

    key: str
    tokens: int
    state: Parts
    pages: tuple[Parts, ...]
    source: Literal["ram", "disk"] = "ram"


class PrefixCache:
    """`folder` None: nothing on disk."""

    def __init__(self, ram_bytes: int, disk_bytes: int, folder: Path | None, background: Background) -> None:
        """Raises OSError when the folder cannot be made or read."""
        self._ram, self._disk = Index(ram_bytes), Index(disk_bytes if folder else 0)
        self._background = background
        self._lock = threading.Lock()
        self._states: dict[str, tuple[int, Parts]] = {}  # in memory, with tokens
        self._pages: dict[str, Parts] = {}
        self._written: set[str] = set()  # states that are on disk whole
        self._pages_written: set[str] = set()
        self._folder = folder
        if folder is not None and disk_bytes:
            self._scan(private_folder(folder), disk_bytes)

    def holds(self, key: str) -> bool:
        with self._lock:
            return key in self._states or key in self._written

    def save(
        self, key: str, tokens: int, needs: Sequence[str], pages: Callable[[int], Parts], state: Callable[[], Parts]
    ) -> None:
        """Keeps a snapshot. `pages(i)` copies what chunk i completed, and is asked only for what is not held yet."""
        with self._lock:
            to_ram = self._ram.budget_bytes > 0 and key not in self._states
            to_disk = self._disk.budget_bytes > 0 and key not in self._disk.entries
            held = {need: self._pages[need] for need in needs if need in self._pages}
            on_disk = set(self._pages_written)
        if not (to_ram or to_disk):
            return
        wanted = [(i, n) for i, n in enumerate(needs) if n not in held and (to_ram or n not in on_disk)]
        parts = held | {need: pages(i) for i, need in wanted}
        own = state()
        if to_ram:
            self._keep(key, tokens, needs, parts, own)
        if to_disk:
            fresh = {need: parts[need] for need in needs if need in parts and need not in on_disk}
            size = bundle.nbytes(own) + sum(map(bundle.nbytes, fresh.values()))
            if not self._background.write(size, lambda: self._write(key, tokens, tuple(needs), fresh, own)):
                log.warning("prompt cache: a snapshot of %d tokens is not written, too much waits for the disk", tokens)

    def read(self, keys: Sequence[str]) -> tuple[list[int], int, Snapshot | None]:
        """Which of the keys are held, and the first of them that can be read: its number, -1 for none."""
        for number, key in enumerate(keys):
            if self.holds(key) and (snapshot := self._read(key)) is not None:
                return [i for i, k in enumerate(keys) if self.holds(k)], number, snapshot
        return [], -1, None

    @property
    def room_bytes(self) -> int:
        """Of memory, what may still be filled."""
        return max(0, self._ram.budget_bytes - self._ram.used_bytes)

    def shed(self) -> int:
        """Gives up all that is in memory, and tells its bytes; what is on disk stays. Any thread may call: a rank that
        holds less makes all begin earlier, and nothing else."""
        with self._lock:
            given = self._ram.used_bytes
            for key in list(self._ram.entries):
                self._drop(self._ram.remove(key))
        return given

    def check(self) -> None:
        """Raises AssertionError unless the books agree."""
        with self._lock:
            self._ram.check()
            self._disk.check()
            assert set(self._states) == set(self._ram.entries), "memory holds other snapshots than its book"
            assert set(self._pages) == set(self._ram.page_bytes), "memory holds other pages than its book"
            assert self._written <= set(self._disk.entries), "a snapshot is on disk that no book knows"

    # Memory

    def _keep(self, key: str, tokens: int, needs: Sequence[str], pages: Mapping[str, Parts], state: Parts) -> None:
        with self._lock:
            sizes = {need: bundle.nbytes(pages[need]) for need in needs}
            gone = self._ram.add(key, Entry(tuple(needs), bundle.nbytes(state)), sizes)
            if gone is None:
                return
            self._states[key] = (tokens, state)
            self._pages.update({need: pages[need] for need in needs})
            self._drop(gone)

    def _drop(self, gone: Gone) -> None:
        for key in gone.entries:
            del self._states[key]
        for need in gone.pages:
            del self._pages[need]

    # Reading

    def _read(self, key: str) -> Snapshot | None:
        with self._lock:
            if key in self._states:
                self._ram.touch(key)
                tokens, state = self._states[key]
                return Snapshot(key, tokens, state, tuple(self._pages[n] for n in self._ram.entries[key].needs))
            entry = self._disk.entries.get(key)
            held = {need: self._pages[need] for need in entry.needs if need in self._pages} if entry else {}
        if entry is None:
            return None
        head = self._load(key, STATE)
        if head is None:
            return None
        pages = dict(held)
        for need in entry.needs:
            if need not in pages:
                if (loaded := self._load(need, PAGES)) is None:
                    return None
                pages[need] = loaded[1]
        with self._lock:
            if key in self._disk.entries:
                self._disk.touch(key)
        with suppress(OSError):  # the order of use outlives the process
            os.utime(self._path(key, STATE))
        if self._ram.budget_bytes:
            self._keep(key, head[0].tokens, entry.needs, pages, head[1])
        return Snapshot(key, head[0].tokens, head[1], tuple(pages[need] for need in entry.needs), "disk")

    def _load(self, key: str, kind: str) -> tuple[bundle.Head, Parts] | None:
        """What a file holds; a file that does not count any more, and all that need it, are dropped."""
        path = self._path(key, kind)
        try:
            return bundle.read(path, key, self._background.turn_to_read)
        except (OSError, Damaged) as error:
            log.warning("prompt cache: %s is dropped: %s", path.name, error)
        with self._lock:
            gone = self._disk.remove(key) if kind == STATE else self._disk.remove_pages(key)
            self._forget(gone)
        self._unlink(gone)
        return None

    # Writing, on the writer's thread

    def _write(self, key: str, tokens: int, needs: tuple[str, ...], fresh: dict[str, Parts], state: Parts) -> None:
        """Pages first, the state last. Pages that were on disk when the snapshot was taken and went since: a miss. What
        counts is files, with their heads."""
        own = bundle.encode(key, tokens, list(needs), state)
        pages = {need: bundle.encode(need, tokens, [], parts) for need, parts in fresh.items()}
        with self._lock:
            sizes = self._disk.page_bytes | {need: bundle.file_bytes(file) for need, file in pages.items()}
            if any(need not in sizes for need in needs):
                return
            gone = self._disk.add(key, Entry(needs, bundle.file_bytes(own)), sizes)
            self._forget(gone or Gone())
            missing = [need for need in needs if need not in self._pages_written]
        self._unlink(gone or Gone())
        if gone is None:
            return
        try:
            if free_bytes(self._path(key, STATE).parent) < bundle.file_bytes(own) + sum(
                sizes[need] for need in missing
            ):
                raise OSError("the disk is almost full")
            if not set(missing) <= set(pages):
                raise OSError("its first chunks are gone")
            for need in missing:
                self._put(need, PAGES, pages[need])
            self._put(key, STATE, own)
        except OSError as error:
            log.warning("prompt cache: a snapshot of %d tokens is not written: %s", tokens, error)
            with self._lock:
                gone = self._disk.remove(key)
                self._forget(gone)
            self._unlink(gone)

    def _put(self, key: str, kind: str, file: list[memoryview]) -> None:
        """Raises OSError. A file that lost its place in the book while it was written (a reader found pages damaged
        that its snapshot shares) does not stay."""
        bundle.write(self._path(key, kind), file, self._background.turn_to_write)
        with self._lock:
            counts = key in (self._disk.entries if kind == STATE else self._disk.page_bytes)
            if counts:
                (self._written if kind == STATE else self._pages_written).add(key)
        if not counts:
            self._path(key, kind).unlink(missing_ok=True)
            raise OSError("pages that it shares were lost meanwhile")

    def _forget(self, gone: Gone) -> None:
        self._written -= set(gone.entries)
        self._pages_written -= set(gone.pages)

    def _unlink(self, gone: Gone) -> None:
        for key, kind in [(key, STATE) for key in gone.entries] + [(key, PAGES) for key in gone.pages]:
            with suppress(OSError):
                self._path(key, kind).unlink(missing_ok=True)

    def _path(self, key: str, kind: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{key}{kind}"

    # At a start

    def _scan(self, folder: Path, disk_bytes: int) -> None:
        """Takes in what an earlier run wrote whole, by age; removes leftovers."""
        sizes: dict[str, int] = {}
        states: list[tuple[float, str, bundle.Head, int]] = []
        for entry in os.scandir(folder):
            stem, kind, size = entry.name[:32], entry.name[32:], entry.stat().st_size
            if kind == PAGES:
                sizes[stem] = size
            elif kind == STATE and (head := _head(Path(entry.path), stem, size)):
                states.append((entry.stat().st_mtime, stem, head, size))
            else:
                Path(entry.path).unlink(missing_ok=True)
        for _, key, head, size in sorted(states, key=lambda state: state[:2]):
            whole = all(need in sizes for need in head.needs)
            gone = self._disk.add(key, Entry(tuple(head.needs), size), sizes) if whole else None
            if gone is not None:
                self._written.add(key)
                self._forget(gone)
                self._unlink(gone)
                for need in gone.pages:
                    sizes.pop(need)
            else:
                self._path(key, STATE).unlink(missing_ok=True)
        self._pages_written = set(self._disk.page_bytes)
        for need in sizes.keys() - self._pages_written:
            self._path(need, PAGES).unlink(missing_ok=True)
        used = self._disk.used_bytes
        log.info("prompt cache: %d snapshots, %.1f of %.1f MB on disk", len(states), used / 1e6, disk_bytes / 1e6)


def _head(path: Path, key: str, size: int) -> bundle.Head | None:
    try:
        with path.open("rb") as file:
            return bundle.read_head(bytearray(file.read(HEAD_BYTES)), key, size)[0]
    except (OSError, Damaged) as error:
        log.warning("prompt cache: %s is dropped: %s", path.name, error)
        return None
