"""The history file: survives crashes, belongs to one model, and is set aside rather than half used or lost."""

import hashlib
import random
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from tided.errors import DataError, UnavailableError
from tided.tide.demand import RouterShape, Vote, vote_of
from tided.tide.history import History, set_aside

SHAPE = RouterShape(3, 4, 2)
IDENTITY = hashlib.sha256(b"a model").hexdigest()
OTHER = IDENTITY[:16] + "0" * 48  # the same file name


def vote(seed: int = 1, shape: RouterShape = SHAPE) -> Vote:
    rng = np.random.default_rng(seed)
    return vote_of(rng.random((shape.layers, shape.experts)), rng.random((shape.layers, shape.experts)), shape)


def opened(directory: Path, record: bool = True, identity: str = IDENTITY, shape: RouterShape = SHAPE) -> History:
    return History.open(directory, identity, shape, record)


def recorded(directory: Path, requests: int = 3) -> History:
    history = opened(directory)
    for i in range(requests):
        history.fold(vote(i), 0.9)
    history.close()
    return history


def same(one: History, other: History) -> bool:
    a, b = one.demand, other.demand
    return np.array_equal(a.counts, b.counts) and np.array_equal(a.mass, b.mass) and a.requests == b.requests


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_what_was_learned_is_there_after_a_restart(tmp_path):
    history = recorded(tmp_path / "state")
    again = opened(tmp_path / "state")
    assert same(history, again)
    assert again.demand.requests == 3
    assert not again.note
    again.fold(vote(9), 0.9)
    again.close()
    assert opened(tmp_path / "state").demand.requests == 4


def test_the_file_is_private(tmp_path):
    history = recorded(tmp_path / "state")
    assert history.path.stat().st_mode & 0o777 == 0o600
    assert history.path.parent.stat().st_mode & 0o777 == 0o700


def test_each_model_and_router_shape_has_its_own_file(tmp_path):
    recorded(tmp_path)
    assert opened(tmp_path, identity="f" * 64).demand.requests == 0
    assert opened(tmp_path, shape=RouterShape(3, 4, 1)).demand.requests == 0
    assert opened(tmp_path).demand.requests == 3


@pytest.mark.parametrize("crashed", [False, True])
def test_a_read_only_history_keeps_the_file_byte_identical(tmp_path, crashed):
    """Whatever a benchmark asks for: it learns in memory and leaves no trace."""
    if crashed:  # the votes are still in the write-ahead log
        writer = opened(tmp_path / "live")
        writer.fold(vote(), 0.9)
        (tmp_path / "state").mkdir()
        for path in (tmp_path / "live").iterdir():
            (tmp_path / "state" / path.name).write_bytes(path.read_bytes())
        assert any(name.endswith("-wal") for name in contents(tmp_path / "state"))
    else:
        recorded(tmp_path / "state", 1)
    before = contents(tmp_path / "state")
    history = opened(tmp_path / "state", record=False)
    assert history.demand.requests == 1
    for i in range(100):
        history.fold(vote(i), 0.9)
    history.close()
    assert history.demand.requests == 101
    assert contents(tmp_path / "state") == before


def test_without_recording_nothing_is_created(tmp_path):
    history = opened(tmp_path / "state", record=False)
    history.fold(vote(), 0.9)
    history.close()
    assert not (tmp_path / "state").exists()


def alter(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def blob(value: float) -> str:
    return np.full(4, value).tobytes().hex()


def with_checksum(value: float) -> str:
    row = np.full(4, value).tobytes()
    return f"UPDATE demand SET counts = X'{blob(value)}', mass = X'{blob(value)}', crc32 = {zlib.crc32(row + row)}"


DAMAGE = {
    "raw scores of an old version": (["PRAGMA user_version = 1"], "version 1"),
    "of a later version": (["PRAGMA user_version = 3"], "version 3"),
    "counted in slots": (["UPDATE meta SET value = 'slot' WHERE key = 'unit'"], "unit is slot"),
    "of another model": ([f"UPDATE meta SET value = '{OTHER}' WHERE key = 'identity'"], "identity"),
    "of another router": (["UPDATE meta SET value = '8' WHERE key = 'top_k'"], "top_k is 8"),
    "without a layer": (["DELETE FROM demand WHERE layer = 1"], "not complete"),
    "with one layer too many": (["INSERT INTO demand SELECT 3, counts, mass, crc32 FROM demand LIMIT 1"], "complete"),
    "altered values": ([f"UPDATE demand SET mass = X'{blob(2)}' WHERE layer = 2"], "layer 2 of it is damaged"),
    "short rows": (["UPDATE demand SET counts = X'00', mass = X'00', crc32 = 0"], "damaged"),
    "NaN": ([with_checksum(float("nan"))], "NaN"),
    "negative values": ([with_checksum(-1.0)], "negative"),
    "no count of requests": (["UPDATE meta SET value = '-3' WHERE key = 'requests'"], "number"),
    "without tables": (["DROP TABLE demand"], "cannot be read"),
    "of another program": (["PRAGMA application_id = 7"], "another program"),
}  # fmt: skip


@pytest.mark.parametrize(("statements", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_foreign_or_damaged_history_is_set_aside_whole_and_said_so(tmp_path, statements, message):
    path = recorded(tmp_path).path
    alter(path, *statements)
    before = path.read_bytes()

    refused = opened(tmp_path, record=False)
    assert refused.demand.requests == 0
    assert message in refused.note
    assert contents(tmp_path) == {path.name: before}

    fresh = opened(tmp_path)
    assert fresh.demand.requests == 0
    assert not fresh.demand.mass.any()
    (aside,) = [p for p in tmp_path.iterdir() if ".set-aside-" in p.name]
    assert message in fresh.note
    assert str(aside) in fresh.note
    assert aside.read_bytes() == before
    fresh.fold(vote(), 0.9)
    fresh.close()
    assert opened(tmp_path).demand.requests == 1


@pytest.mark.parametrize(
    "content",
    [b"{}", b"SQLite format 3\0" + b"\xff" * 5000, random.Random(7).randbytes(100)],
    ids=["text", "torn", "noise"],
)
def test_a_file_that_is_no_database_is_set_aside(tmp_path, content):
    path = opened(tmp_path, record=False).path
    path.write_bytes(content)
    fresh = opened(tmp_path)
    assert "set aside" in fresh.note
    (aside,) = [p for p in tmp_path.iterdir() if ".set-aside-" in p.name]
    assert aside.read_bytes() == content
    fresh.close()


def test_a_damaged_page_is_found(tmp_path):
    path = recorded(tmp_path).path
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = b"\x5a" * (len(content) - len(content) // 2)
    path.write_bytes(content)
    assert "set aside" in opened(tmp_path).note


def test_damage_that_only_a_later_vote_would_meet_is_found(tmp_path):
    """Of the index over `meta`, which reading does not use: the next vote would write through it."""
    path = recorded(tmp_path).path
    with sqlite3.connect(path) as connection:
        page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
        query = "SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_autoindex_meta_1'"
        page = connection.execute(query).fetchone()[0]
    connection.close()
    content, first_cell = bytearray(path.read_bytes()), (page - 1) * page_bytes + 8
    content[first_cell : first_cell + 2] = b"\xff\xff"
    path.write_bytes(content)
    refused = opened(tmp_path)
    assert refused.demand.requests == 0
    assert "it is damaged" in refused.note
    refused.close()


def test_two_set_aside_in_one_second_do_not_overwrite_each_other(tmp_path):
    path = opened(tmp_path, record=False).path
    for content in (b"first", b"second", b"third"):
        path.write_bytes(content)
        opened(tmp_path).close()
        path.unlink()
    assert sorted(p.read_bytes() for p in tmp_path.iterdir() if ".set-aside-" in p.name) == [
        b"first",
        b"second",
        b"third",
    ]


def test_an_empty_file_of_a_crash_at_creation_is_simply_begun(tmp_path):
    path = opened(tmp_path, record=False).path
    path.touch()
    history = opened(tmp_path)
    assert not history.note
    history.fold(vote(), 0.9)
    history.close()
    assert opened(tmp_path).demand.requests == 1


def test_two_daemons_cannot_record_into_one_history(tmp_path, monkeypatch):
    monkeypatch.setattr("tided.tide.history.LOCK_TIMEOUT_S", 0.1)
    first = opened(tmp_path)
    with pytest.raises(UnavailableError, match="another process"):
        opened(tmp_path)
    first.fold(vote(), 0.9)
    first.close()
    assert opened(tmp_path).demand.requests == 1


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(DataError, match="state"):
        opened(tmp_path / "state")


@pytest.mark.parametrize("asked_again", [True, False])
def test_a_full_disk_costs_votes_of_the_file_not_the_service(tmp_path, asked_again):
    """Once there is room, the next vote, or the end, writes what is missing."""
    history = opened(tmp_path)
    pages = history._connection.execute("PRAGMA page_count").fetchone()[0]
    history._connection.execute(f"PRAGMA max_page_count = {pages}")
    history._connection.execute(
        "CREATE TEMP TRIGGER full BEFORE INSERT ON demand BEGIN SELECT RAISE(ABORT, 'disk full'); END"
    )
    history.fold(vote(1), 0.9)
    assert "disk full" in history.write_error
    assert history.demand.requests == 1
    history._connection.execute("DROP TRIGGER full")
    if asked_again:
        history.fold(vote(2), 0.9)
        assert not history.write_error
    history.close()
    again = opened(tmp_path)
    assert same(history, again)
    assert again.demand.requests == 1 + asked_again


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_history import opened, vote
history = opened(Path(sys.argv[1]))
while True:
    history.fold(vote(history.demand.requests), 0.9)
    print(history.demand.requests, flush=True)
"""


@pytest.mark.parametrize("after", [1, 7, 40])
def test_a_killed_writer_leaves_whole_votes_only(tmp_path, after):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as writer:
        deadline = time.monotonic() + 60
        told = 0
        while told < after and time.monotonic() < deadline:
            told = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        told = max([told, *(int(line) for line in writer.stdout.read().split("\n")[:-1])])
    history = opened(tmp_path)
    assert not history.note
    assert told <= history.demand.requests <= told + 1
    expected = opened(tmp_path / "again", record=False)
    for i in range(history.demand.requests):
        expected.fold(vote(i), 0.9)
    assert same(expected, history)


def test_a_history_is_set_aside_whole_and_never_deleted(tmp_path):
    history = recorded(tmp_path)
    before = history.path.read_bytes()
    aside = set_aside(history.path)
    assert aside.read_bytes() == before
    assert not history.path.exists()
    assert set_aside(history.path) is None
    fresh = opened(tmp_path)
    assert (fresh.demand.requests, fresh.note) == (0, "")
    fresh.close()


def test_votes_of_a_crash_go_with_what_is_set_aside(tmp_path):
    writer = opened(tmp_path / "live")
    writer.fold(vote(), 0.9)
    (tmp_path / "state").mkdir()
    for path in (tmp_path / "live").iterdir():
        (tmp_path / "state" / path.name).write_bytes(path.read_bytes())
    aside = set_aside(tmp_path / "state" / writer.path.name)
    aside.rename(writer.path.with_name("back.sqlite"))
    for path in (tmp_path / "state").iterdir():
        path.rename(tmp_path / "live" / path.name.replace(aside.name, "back.sqlite"))
    back = writer.path.with_name("back.sqlite")
    with sqlite3.connect(back) as connection:
        assert connection.execute("SELECT value FROM meta WHERE key = 'requests'").fetchone() == ("1",)
    connection.close()
    writer.close()


def test_a_history_that_is_being_recorded_into_is_not_set_aside(tmp_path, monkeypatch):
    monkeypatch.setattr("tided.tide.history.LOCK_TIMEOUT_S", 0.1)
    owner = opened(tmp_path)
    with pytest.raises(UnavailableError, match="another process"):
        set_aside(owner.path)
    owner.fold(vote(), 0.9)
    owner.close()
    assert opened(tmp_path).demand.requests == 1


def test_noise_is_set_aside_too(tmp_path):
    path = tmp_path / "demand.sqlite"
    path.write_bytes(b"noise" * 1000)
    assert set_aside(path).read_bytes() == b"noise" * 1000


def test_a_whole_demand_is_taken_over_and_kept(tmp_path):
    other = recorded(tmp_path / "other", 7)
    history = recorded(tmp_path / "state", 2)
    history = opened(tmp_path / "state")
    history.replace(other.demand)
    history.close()
    assert same(opened(tmp_path / "state"), other)


def test_a_history_is_readable_while_it_is_written(tmp_path):
    """Every copy is one moment's: whole votes, never set aside, never more than were written."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as writer:
        assert writer.stdout.readline() == "1\n"
        seen = [opened(tmp_path, record=False) for _ in range(40)]
        writer.send_signal(signal.SIGKILL)
        told = int(writer.stdout.read().split("\n")[-2])
    assert [history.note for history in seen] == [""] * 40
    requests = [history.demand.requests for history in seen]
    assert requests == sorted(requests)
    assert 1 <= requests[0] <= requests[-1] <= told + 1


def test_a_copy_that_was_overtaken_is_made_again(tmp_path, monkeypatch):
    """The log was carried over and begun anew between the two halves of a copy: together they are no moment."""
    path, copied = recorded(tmp_path).path, []

    def overtaken(source, target):
        copied.append(source)
        target.write_bytes(source.read_bytes())
        if len(copied) == 1:
            again = opened(tmp_path)
            again.fold(vote(9), 0.9)
            again.close()

    monkeypatch.setattr("tided.tide.history.shutil.copyfile", overtaken)
    assert opened(tmp_path, record=False).demand.requests == 4
    assert copied.count(path) == 2
