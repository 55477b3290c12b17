"""Dated copies of the demand history, beside it: what it was before a daemon's first vote of a day. The
newest `KEPT` are kept.

    <history>.backup-YYYYMMDD      mode 0600, a whole SQLite database, opened like the history itself

To go back, with the daemon stopped: `tidectl tide reset` (which sets the present history aside), then copy the backup
to the history's own name.
"""

import os
import re
import sqlite3
from contextlib import suppress
from pathlib import Path

KEPT = 7


def backups_of(history: Path) -> list[Path]:
    """Oldest first."""
    pattern = re.compile(re.escape(history.name) + r"\.backup-\d{8}")
    return sorted(p for p in history.parent.iterdir() if pattern.fullmatch(p.name))


def back_up(connection: sqlite3.Connection, history: Path, day: str) -> None:
    """`day`: YYYYMMDD. A backup of that day which exists stays as it is: it is from before today's votes, and today's
    mistake must not replace it. Raises sqlite3.Error or OSError; nothing half-written is left then."""
    target = history.with_name(f"{history.name}.backup-{day}")
    _remove_halves(history)
    if not target.exists():
        _write(connection, target)
    for old in backups_of(history)[:-KEPT]:
        old.unlink()


def _write(connection: sqlite3.Connection, target: Path) -> None:
    half = target.with_name(target.name + ".tmp")
    try:
        fd = os.open(half, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            copy = sqlite3.connect(half, isolation_level=None)
            try:
                connection.backup(copy)
            finally:
                copy.close()
            os.fsync(fd)
        finally:
            os.close(fd)
        half.rename(target)
    except BaseException:
        with suppress(OSError):
            half.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)


def _remove_halves(history: Path) -> None:
    """Of a daemon that was killed meanwhile, on whatever day; its journal would be taken for one of the next."""
    pattern = re.compile(re.escape(history.name) + r"\.backup-\d{8}\.tmp(-journal)?")
    for path in list(history.parent.iterdir()):
        if pattern.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
