"""`tidectl purge`: what goes, what stays, and when it is refused."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tidectl.canned import Tidectl
from tidectl import purge, record, runner, supervisor
from tidectl.nodes import Node
from tided.control import state as state_file
from tided.control.state import Claim
from tided.settings import MOST_RANKS

GOES = {
    "cache/rank-0/prefix/abc.state": 700,
    "cache/rank-1/parked/3-1.context": 300,
    "logs/rank-0.log": 20,
    "logs/rank-0.log.1": 5,
    "flight-0.jsonl": 9,
}
LEARNED = {"history/demand-a.sqlite": 40, "history/demand-a.sqlite.backup-20260101": 2}
STAYS = ("curve.key", "node.toml", "last.json", "rank-0.json", "rank-0.lock", "lock")


@pytest.fixture
def used(state: Path) -> Path:
    """A state directory after a run."""
    for name, size in {**GOES, **LEARNED, **dict.fromkeys(STAYS, 1)}.items():
        file = state / name
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    state.chmod(0o700)
    return state


def left(state: Path) -> set[str]:
    return {str(file.relative_to(state)) for file in state.rglob("*") if not file.is_dir()}


def test_what_requests_left_goes_and_what_was_learned_stays(tidectl: Tidectl, used: Path) -> None:
    (used / ".flight-0.jsonl.0123abcd.tmp").write_bytes(b"of a rank that was killed")
    ran = tidectl("purge", "--yes", "--json")
    assert ran.exit_code == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "schema": "tidectl.purge/1",
        "state_dir": str(used),
        "removed": {
            "cache": {"files": 2, "bytes": 1000},
            "logs": {"files": 2, "bytes": 25},
            "flight": {"files": 1, "bytes": 9},
        },
        "other_nodes": [],
    }
    assert left(used) == {*STAYS, *LEARNED}
    again = tidectl("purge")  # nothing to ask about
    assert (again.exit_code, again.stdout) == (0, "")
    assert "nothing to remove" in again.stderr


def test_histories_go_where_it_is_said(tidectl: Tidectl, used: Path) -> None:
    ran = tidectl("purge", "--history", "--yes")
    assert (ran.exit_code, ran.stdout) == (0, "")
    assert "kept prompts and parked contexts: 2 files, 0.0 MB" in ran.stderr
    assert "histories: 2 files" in ran.stderr
    assert left(used) == set(STAYS)


def test_it_asks_first(tidectl: Tidectl, used: Path) -> None:
    before = left(used)
    ran = tidectl("purge")
    assert ran.exit_code == 2
    assert "--yes" in ran.stderr
    assert left(used) == before


def test_other_nodes_are_named(tidectl: Tidectl, used: Path) -> None:
    record.write(used, [Node("10.0.0.1", (0,), True), Node("10.0.0.2", (1,), False)])
    ran = tidectl("purge", "--yes")
    assert "10.0.0.2 keep theirs" in ran.stderr
    assert "10.0.0.1" not in ran.stderr


def test_it_is_refused_while_something_starts_or_runs(tidectl: Tidectl, used: Path) -> None:
    before, lock = left(used), supervisor.take_lock(used)
    try:
        ran = tidectl("purge", "--history", "--yes")
    finally:
        os.close(lock)
    assert ran.exit_code == 69
    assert left(used) == before


def test_it_is_refused_while_a_rank_runs_that_no_supervisor_holds(tidectl: Tidectl, used: Path) -> None:
    code = "import sys; from pathlib import Path; from tided.control.state import Claim\n"
    code += "held = Claim(Path(sys.argv[1]), 0, 'a rank'); print('held', flush=True); sys.stdin.read()"
    command, before = [sys.executable, "-c", code, str(used)], left(used)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"held\n"
        ran = tidectl("purge", "--yes")
        assert ran.exit_code == 69
        assert "rank 0 runs here already (a rank" in ran.stderr
        assert left(used) == before
        rank.communicate(timeout=60)
    assert tidectl("purge", "--yes").exit_code == 0


@pytest.mark.parametrize("name", ["cache", "cache/rank-0/prefix", "flight-1.jsonl"])
def test_a_link_leads_it_nowhere(tidectl: Tidectl, used: Path, tmp_path: Path, name: str) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "precious").write_text("kept")
    link = used / name
    if link.exists():
        link.rename(tmp_path / "aside")
    link.symlink_to(elsewhere)
    before = left(used)
    ran = tidectl("purge", "--history", "--yes")
    assert ran.exit_code == 65
    assert str(link) in ran.stderr
    assert str(elsewhere) in ran.stderr
    assert left(used) == before
    assert (elsewhere / "precious").read_text() == "kept"


@pytest.mark.parametrize("calls", [("listdir", "scandir"), ("lstat", "stat")])
def test_what_may_not_be_looked_into_is_told_and_nothing_goes(
    tidectl: Tidectl, used: Path, monkeypatch: pytest.MonkeyPatch, calls: Sequence[str]
) -> None:
    """As for another's directory; root, who may run this, is refused nowhere."""
    closed, before = used / "cache" / "rank-1" / "parked", left(used)
    refuse(monkeypatch, closed, *calls)
    ran = tidectl("purge", "--yes")
    assert ran.exit_code == 77, ran.stderr
    assert str(closed) in ran.stderr
    assert "nothing to remove" not in ran.stderr
    monkeypatch.undo()
    assert left(used) == before


def refuse(monkeypatch: pytest.MonkeyPatch, closed: Path, *calls: str) -> None:
    def wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(path: Any = ".", *rest: Any, **named: Any) -> Any:
            if not isinstance(path, int) and os.fspath(path) == str(closed):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return plain(path, *rest, **named)

        return refusing

    for call in calls:
        monkeypatch.setattr(os, call, wrapped(getattr(os, call)))


def test_who_is_asked_has_seen_what_goes(tidectl: Tidectl, used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(purge, "_confirm", asked.append)
    ran = tidectl("purge", "--json")
    assert asked == [used]
    assert "kept prompts and parked contexts: 2 files" in ran.stderr
    assert json.loads(ran.stdout)["removed"]["cache"] == {"files": 2, "bytes": 1000}


CLAIM = """
import sys
from pathlib import Path
from tided.control.state import Claim
Claim(Path(sys.argv[1]), int(sys.argv[2]), "a rank")
"""


def claim(state: Path, rank: int) -> str:
    """What another process is told that would be this rank; "" where it may."""
    command = [sys.executable, "-c", CLAIM, str(state), str(rank)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


def test_no_rank_starts_meanwhile_that_was_never_here(used: Path) -> None:
    (used / "rank-0.bak.lock").touch()  # somebody's own
    before = left(used)
    with runner.at_rest(used, "tidectl purge"):
        for rank in (0, 1, MOST_RANKS - 1):
            assert f"rank {rank} runs here already (tidectl purge" in claim(used, rank)
    assert left(used) == before
    assert claim(used, 1) == ""


def test_a_lock_that_is_removed_while_a_rank_takes_it_holds_nobody(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, path = state_file.fcntl.lockf, used / "rank-1.lock"

    def removed_first(fd: int, operation: int) -> None:
        monkeypatch.undo()
        path.unlink()
        plain(fd, operation)

    monkeypatch.setattr(state_file.fcntl, "lockf", removed_first)
    held = Claim(used, 1, "the first")
    assert "rank 1 runs here already (the first" in claim(used, 1)
    held.release()


def test_a_full_disk_can_be_purged(tidectl: Tidectl, used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def full(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT and not os.path.lexists(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return plain(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", full)
    ran = tidectl("purge", "--yes")
    assert ran.exit_code == 0, ran.exception
    assert left(used) == {*STAYS, *LEARNED}
