"""The demand history: what this model's traffic asked for so far, in one SQLite file that rank 0 owns.

    <directory>/demand-<identity, 16 digits>-<layers>x<experts>k<top_k>.sqlite

    PRAGMA application_id, user_version    "TIDE", version of this format
    meta(key, value)                       identity, unit, layers, experts, top_k, requests
    demand(layer, counts, mass, crc32)     float64 little endian [experts] each, and the crc32 of both

One request is one transaction, so a crash loses votes, never parts of one. A file that is damaged, of another version,
unit, model or shape is renamed beside the new one, with a message: never deleted, never half used. No tokens, no text.
Before a daemon's first vote of a day the file is copied (`tided.tide.backup`).
"""

import logging
import os
import shutil
import sqlite3
import tempfile
import zlib
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from tided.errors import DataError, UnavailableError
from tided.tide.backup import back_up
from tided.tide.demand import Demand, Grid, RouterShape, Vote, checked_grid

log = logging.getLogger(__name__)

APPLICATION_ID = 0x54494445  # "TIDE"
VERSION = 2  # 1 held raw scores, which do not mix with votes
UNIT = "request"
LOCK_TIMEOUT_S = 2.0
COPY_TRIES = 20
SIDE_FILES = ("", "-wal", "-shm")

SCHEMA = (
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT",
    "CREATE TABLE demand (layer INTEGER PRIMARY KEY, counts BLOB NOT NULL, mass BLOB NOT NULL, crc32 INTEGER NOT NULL)"
    " STRICT",
)


class Foreign(Exception):
    """The file is not a history of this model; the text says why."""


class History:
    """`demand`: what is known. `fold` adds a request and, when recording, writes it. One thread at a time."""

    def __init__(self, path: Path, demand: Demand, connection: sqlite3.Connection | None, note: str) -> None:
        self.path, self.demand, self.note = path, demand, note
        self.write_error = ""
        self._connection = connection
        self._backed_up = ""

    @classmethod
    def open(cls, directory: Path, identity: str, shape: RouterShape, record: bool) -> "History":
        """`identity`: the checkpoint's. With `record` off nothing in `directory` is created or changed, and what is
        folded later is kept in memory only. `note` tells, if anything was found unusable, what and where it is now.

        Raises UnavailableError when another process records into the file, DataError when the disk fails.
        """
        path = path_of(directory, identity, shape)
        if not record:
            demand, note = _read_copy(path, identity, shape)
            return cls(path, demand, None, note)
        _make(directory)
        try:
            connection, demand = _open_or_create(path, identity, shape)
            return cls(path, demand, connection, "")
        except Foreign as e:
            note = f"{_set_aside(path)}: set aside, {e}; a new history begins"
        log.warning(note)
        connection, demand = _open_or_create(path, identity, shape)
        return cls(path, demand, connection, note)

    def fold(self, vote: Vote, decay: float) -> None:
        """One request's vote; what was there before is worth `decay` of what it was. A failed write is reported (log,
        `write_error`) and costs durability only: serving goes on, and the next write, at the latest that of `close`,
        holds everything."""
        self._back_up()
        self.demand = self.demand.folded(vote, decay)
        if self._connection is not None:
            self._save(self._connection)

    def _save(self, connection: sqlite3.Connection) -> None:
        try:
            _write(connection, self.demand)
        except sqlite3.Error as e:
            self.write_error = f"{self.path}: the newest demand could not be written: {e}"
            log.error(self.write_error)
        else:
            self.write_error = ""

    def replace(self, demand: Demand) -> None:
        """What was known is forgotten for this. Raises DataError when it cannot be written; nothing is changed then."""
        assert self._connection is not None, "opened for reading"
        self._back_up()
        try:
            _write(self._connection, demand)
        except sqlite3.Error as e:
            raise DataError(f"cannot be written: {e}", where=str(self.path)) from e
        self.demand = demand

    def _back_up(self) -> None:
        """Once a day, and tried once: a full disk is said once and not after each request."""
        if self._connection is None or self._backed_up == (day := _day()):
            return
        self._backed_up = day
        if not self.demand.requests:
            return
        try:
            back_up(self._connection, self.path, day)
        except (sqlite3.Error, OSError) as e:
            log.warning("%s: today's backup could not be written: %s", self.path, e)

    def close(self) -> None:
        if self._connection is not None:
            if self.write_error:
                self._save(self._connection)
            self._connection.close()
            self._connection = None


def _day() -> str:
    return f"{datetime.now(UTC):%Y%m%d}"


def path_of(directory: Path, identity: str, shape: RouterShape) -> Path:
    return directory / f"demand-{identity[:16]}-{shape.layers}x{shape.experts}k{shape.top_k}.sqlite"


def set_aside(path: Path) -> Path | None:
    """Ends a history, whatever its state: it is renamed, never deleted. Returns its new name, None where there is none.
    Raises UnavailableError when another process records into it, DataError when the disk fails."""
    if not path.exists():
        return None
    connection = _connect(path)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("ROLLBACK")
        return _set_aside(path)  # under the lock: no daemon may open it in between and record into the renamed file
    except sqlite3.Error as e:
        if isinstance(error := _translated(path, e), Foreign):
            return _set_aside(path)  # what is no history is nobody's
        raise error from e
    except OSError as e:
        raise DataError(f"cannot be renamed: {e.strerror}", where=str(path)) from e
    finally:
        connection.close()


def _open_or_create(path: Path, identity: str, shape: RouterShape) -> tuple[sqlite3.Connection, Demand]:
    connection = _connect(path)
    try:
        # Exclusive: a second daemon must not write its own votes over ours. NORMAL: a power cut may cost the newest
        # votes, and saves the engine from waiting for the disk after each request.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA synchronous = NORMAL")
        is_new = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        if not is_new:
            _check_format(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        if is_new:
            _create(connection, identity, shape)
        return connection, _load(connection, identity, shape)
    except sqlite3.Error as e:
        connection.close()
        raise _translated(path, e) from e
    except BaseException:
        connection.close()
        raise


def _connect(path: Path) -> sqlite3.Connection:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as e:
        raise DataError(f"the demand history cannot be written: {e.strerror}", where=str(path)) from e
    return sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise DataError(f"cannot be made: {e.strerror}", where=str(directory)) from e


def _read_copy(path: Path, identity: str, shape: RouterShape) -> tuple[Demand, str]:
    """Reads a copy: merely opening a WAL database may write to it."""
    if not path.exists():
        return Demand.none(shape), ""
    with tempfile.TemporaryDirectory(prefix="tided-history-") as scratch:
        copy = Path(scratch) / path.name
        try:
            _copy(path, copy)
        except OSError as e:
            raise DataError(f"cannot be read: {e.strerror}", where=str(path)) from e
        try:
            connection, demand = _open_or_create(copy, identity, shape)
        except Foreign as e:
            note = f"{path}: not used, {e}; left where it is, since nothing is recorded"
            log.warning(note)
            return Demand.none(shape), note
        connection.close()
    return demand, ""


def _copy(path: Path, copy: Path) -> None:
    """Database and log of one moment, though a daemon may be writing. Votes go to the end of the log, where a half
    written one does not count; the database itself changes only when the log is carried over, and then again."""
    for _ in range(COPY_TRIES):
        before = path.stat()
        for suffix in ("", "-wal"):
            source, target = path.with_name(path.name + suffix), copy.with_name(copy.name + suffix)
            target.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                shutil.copyfile(source, target)
        after = path.stat()
        if (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size):
            return
    raise DataError("is being written without a pause", where=str(path), hint="try again")


def _create(connection: sqlite3.Connection, identity: str, shape: RouterShape) -> None:
    meta = {"identity": identity, "unit": UNIT, **{k: str(v) for k, v in shape._asdict().items()}}
    connection.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA:
        connection.execute(statement)
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
    _put(connection, Demand.none(shape))
    connection.execute("COMMIT")


def _load(connection: sqlite3.Connection, identity: str, shape: RouterShape) -> Demand:
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    expected = {"identity": identity, "unit": UNIT, **{k: str(v) for k, v in shape._asdict().items()}}
    for key, value in expected.items():
        if meta.get(key) != value:
            raise Foreign(f"its {key} is {meta.get(key)}, not {value}")
    if not (requests := meta.get("requests", "")).isdecimal():
        raise Foreign("its number of requests is no number")
    rows = connection.execute("SELECT layer, counts, mass, crc32 FROM demand ORDER BY layer").fetchall()
    if [row[0] for row in rows] != list(range(shape.layers)):
        raise Foreign("its layers are not complete")
    for layer, counts, mass, crc32 in rows:
        if zlib.crc32(mass, zlib.crc32(counts)) != crc32 or not len(counts) == len(mass) == 8 * shape.experts:
            raise Foreign(f"layer {layer} of it is damaged")
    try:
        counts = checked_grid([np.frombuffer(row[1], dtype="<f8") for row in rows], "counts", shape)
        mass = checked_grid([np.frombuffer(row[2], dtype="<f8") for row in rows], "mass", shape)
    except ValueError as e:
        raise Foreign(str(e)) from e
    return Demand(counts, mass, int(requests))


def _check_format(connection: sqlite3.Connection) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise Foreign("another program wrote it")
    if version != VERSION:
        raise Foreign(f"its format is version {version}, this build writes {VERSION}")
    if (state := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise Foreign(f"it is damaged ({state})")


def _write(connection: sqlite3.Connection, demand: Demand) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        _put(connection, demand)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _put(connection: sqlite3.Connection, demand: Demand) -> None:
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('requests', ?)", (str(demand.requests),))
    rows = [_row(layer, demand.counts[layer], demand.mass[layer]) for layer in range(len(demand.counts))]
    connection.executemany("INSERT OR REPLACE INTO demand VALUES (?, ?, ?, ?)", rows)


def _row(layer: int, counts: Grid, mass: Grid) -> tuple[int, bytes, bytes, int]:
    blobs = counts.astype("<f8").tobytes(), mass.astype("<f8").tobytes()
    return (layer, *blobs, zlib.crc32(blobs[1], zlib.crc32(blobs[0])))


def _translated(path: Path, error: sqlite3.Error) -> Exception:
    """SQLite's primary result code decides: someone else's lock, a failing disk, or a file that is not ours."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return UnavailableError(
            "another process records demand into this history",
            where=str(path),
            hint="stop the other daemon, or set `record = false` in the [tide] section",
        )
    if code in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_MISMATCH):
        return Foreign(f"it cannot be read ({error})")
    return DataError(f"the demand history cannot be used: {error}", where=str(path))


def _set_aside(path: Path) -> Path:
    """Renames the file and what SQLite keeps beside it; returns the new name."""
    stem = f"{path.name}.set-aside-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    target, n = path.with_name(stem), 1
    while target.exists():
        n += 1
        target = path.with_name(f"{stem}-{n}")
    for suffix in SIDE_FILES:
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.rename(target.with_name(target.name + suffix))
    return target
