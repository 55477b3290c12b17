"""Dated backups of the history: from before a day's votes, few, whole, private, and good to start from."""

import logging
import sqlite3

import numpy as np
import pytest

from tided.tide import backup, history
from tided.tide.backup import KEPT, backups_of
from tided.tide.demand import RouterShape, Vote, vote_of
from tided.tide.history import History, set_aside

SHAPE = RouterShape(3, 4, 2)


def vote(seed: int = 1) -> Vote:
    rng = np.random.default_rng(seed)
    return vote_of(rng.random((3, 4)), rng.random((3, 4)), SHAPE)


def opened(directory) -> History:
    return History.open(directory, "a" * 64, SHAPE, record=True)


def same(one: History, other: History) -> bool:
    a, b = one.demand, other.demand
    return np.array_equal(a.counts, b.counts) and np.array_equal(a.mass, b.mass) and a.requests == b.requests


@pytest.fixture
def day(monkeypatch):
    def begins(name: str) -> None:
        monkeypatch.setattr(history, "_day", lambda: name)

    begins("20260101")
    return begins


def recorded(directory, times: int = 1) -> History:
    kept = opened(directory)
    for i in range(times):
        kept.fold(vote(i), 0.9)
    kept.close()
    return kept


def test_a_backup_holds_what_was_known_before_the_days_first_vote(tmp_path, day):
    yesterday = recorded(tmp_path, 3)
    day("20260102")
    recorded(tmp_path, 2)
    today = recorded(tmp_path, 2)  # a second start of the day leaves it as it is
    [path] = backups_of(today.path)
    assert path.name == f"{today.path.name}.backup-20260102"
    assert path.stat().st_mode & 0o777 == 0o600

    assert today.demand.requests == 7
    assert set_aside(today.path) is not None
    path.rename(today.path)
    restored = opened(tmp_path)
    assert same(restored, yesterday)
    assert not restored.note
    restored.close()


def test_a_daemon_that_never_stops_makes_one_a_day_and_keeps_few(tmp_path, day):
    kept = opened(tmp_path)
    others = [tmp_path / f"{kept.path.name}{end}" for end in (".set-aside-20200101T000000Z", ".backup-mine")]
    for other in others:
        other.write_bytes(b"not a backup of ours")
    days = [f"202601{number:02}" for number in range(1, KEPT + 5)]
    for name in days:
        day(name)
        kept.fold(vote(), 0.9)
        kept.fold(vote(), 0.9)
    kept.close()
    assert [path.name[-8:] for path in backups_of(kept.path)] == days[-KEPT:]
    assert all(other.exists() for other in others)


def test_what_is_replaced_is_backed_up_first(tmp_path, day):
    before = recorded(tmp_path, 3)
    kept = opened(tmp_path)
    kept.replace(kept.demand.folded(vote(8), 0.0))
    kept.close()
    [path] = backups_of(kept.path)
    set_aside(kept.path)
    path.rename(kept.path)
    assert same(opened(tmp_path), before)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), sqlite3.OperationalError("disk I/O error")])
def test_a_backup_that_fails_costs_no_vote_and_is_said_once(tmp_path, day, monkeypatch, caplog, error):
    recorded(tmp_path, 1)

    def fail(self, target):
        raise error

    monkeypatch.setattr(backup.Path, "rename", fail)
    with caplog.at_level(logging.WARNING):
        kept = recorded(tmp_path, 3)
    assert sum("backup could not be written" in record.message for record in caplog.records) == 1
    assert not kept.write_error
    assert backups_of(kept.path) == []
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    assert opened(tmp_path).demand.requests == 4


def test_a_half_written_backup_of_a_crash_is_no_backup_and_is_no_hindrance(tmp_path, day):
    kept = recorded(tmp_path, 2)
    halves = [
        kept.path.with_name(f"{kept.path.name}.backup-{day}.tmp{journal}")
        for day in ("20251231", "20260101")
        for journal in ("", "-journal")
    ]
    for half in halves:
        half.write_bytes(b"SQLite format 3\0 and no more")
    assert backups_of(kept.path) == []
    recorded(tmp_path)
    assert [path.name[-8:] for path in backups_of(kept.path)] == ["20260101"]
    assert not [half for half in halves if half.exists()]
