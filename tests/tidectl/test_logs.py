"""Log files as a supervisor leaves them: growing, rotated, emptied, cut in the middle of a line."""

from pathlib import Path

import pytest

from tidectl import all_logs, logs, runner, supervise, supervisor
from tidectl.processes import Identity
from tidectl.supervisor import Child, Ended, EndedRank, Run, Status
from tided.errors import UsageError

NOTHING = Status(False, None, [], None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    directory.mkdir()
    return directory / "rank-0.log"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def added(log: logs.Log) -> list[str]:
    return [text for _, text in log.added()]


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, ["c"]), (2, ["b", "c"]), (9, ["a", "b", "c"])])
def test_the_last_lines(path: Path, count: int, expected: list[str]) -> None:
    path.write_text("a\nb\nc\nunfini")
    assert logs.Log(0, path).last(count) == [(0, text) for text in expected]


def test_what_is_added_comes_in_whole_lines(path: Path) -> None:
    path.write_text("a\nb")
    log = logs.Log(0, path)
    log.last(5)
    assert added(log) == []
    append(path, "c\nd")
    assert added(log) == ["bc"]
    append(path, "\n")
    assert added(log) == ["d"]
    append(path, "end")
    assert added(log) == []
    assert log.rest() == [(0, "end")]


def test_a_rotated_log_is_followed_without_loss(path: Path) -> None:
    path.write_text("a\n")
    log = logs.Log(0, path)
    log.last(5)
    append(path, "b\n")
    path.replace(path.with_name("rank-0.log.1"))
    assert added(log) == ["b"]  # the new file is not made yet
    path.write_text("c\n")
    assert added(log) == ["c"]
    append(path, "d\n")
    assert added(log) == ["d"]


def test_an_emptied_log_is_read_from_its_start(path: Path) -> None:
    path.write_text("a long first line\nb")
    log = logs.Log(0, path)
    log.last(5)
    path.write_text("c\n")
    assert added(log) == ["c"]


def test_a_long_log_is_read_from_its_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "TAIL_BYTES", 12)
    path.write_text("".join(f"line {number}\n" for number in range(100)))
    assert logs.Log(0, path).last(50) == [(0, "line 99")]


def test_bytes_that_are_no_text(path: Path) -> None:
    path.write_bytes(b"a\xff\r\n")
    assert logs.Log(0, path).last(1) == [(0, "a\ufffd")]


def test_rotated_files_are_no_ranks_of_their_own(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text("a\n")
    path.with_name("rank-0.log.1").write_text("old\n")
    path.with_name("supervisor.log").write_text("s\n")
    assert logs.choose(logs.found(tmp_path / "logs"), None, False, NOTHING) == [0]
    monkeypatch.setenv("TIDE_STATE_DIR", str(tmp_path))
    all_logs.show(None, 10, follow=False, all_runs=False, as_json=False)
    assert capsys.readouterr().out == "a\n"


def test_following_ends_with_the_ranks_and_loses_nothing(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_logs, "POLL_S", 0)
    monkeypatch.setenv("TIDE_STATE_DIR", str(tmp_path))
    path.write_text("a\n")
    answers = iter([True, True, False, False])

    def alive(_: Path) -> bool:
        answer = next(answers)
        append(path, f"alive {answer}\n" if answer else "last word")
        return answer

    monkeypatch.setattr(supervisor, "is_locked", alive)
    monkeypatch.setattr(supervisor, "status", lambda _: NOTHING)
    all_logs.show(None, 10, follow=True, all_runs=False, as_json=False)
    captured = capsys.readouterr()
    assert captured.out == "a\nalive True\nalive True\nlast word\n"
    assert captured.err == "the ranks have ended\n"


def test_the_end_of_a_log_for_a_message(path: Path, tmp_path: Path) -> None:
    assert runner.tail_of(tmp_path, 0, 2) == []
    path.write_text("a\nb\nc")
    assert runner.tail_of(tmp_path, 0, 2) == ["b", "c"]


def test_the_last_run_alone_unless_all_are_asked_for(path: Path, tmp_path: Path) -> None:
    log = supervise.Log(path)
    for run in ("first", "second"):
        log.mark(logs.run_mark(Path("/p.toml")))
        log.write(f"{run} run\ncut".encode())
    log.close()
    assert logs.Log(0, path).last(9) == [(0, "second run")]
    assert runner.tail_of(tmp_path, 0, 9) == ["second run", "cut"]
    shown = [text for _, text in logs.Log(0, path).last(9, all_runs=True)]
    assert shown[1::2] == ["first run", shown[3]]
    assert shown[2] == "cut"
    assert "start of /p.toml" in shown[0]
    assert shown[4] == "second run"


def test_a_line_end_is_no_part_of_the_mark_after_it(path: Path) -> None:
    path.write_text("whole\n")
    supervise.Log(path).mark("mark\n")
    assert path.read_text() == "whole\nmark\n"


def state_of(running: list[int], last: list[int]) -> Status:
    me = Identity(1, 1)
    run = Run("p", me, 0.0, len(running), [Child(rank, me) for rank in running]) if running else None
    ended = Ended("p", 0.0, None, [EndedRank(rank, 0, "") for rank in last]) if last else None
    return Status(bool(running), run, [], ended)


def test_the_ranks_of_this_run_or_the_last(path: Path, tmp_path: Path) -> None:
    for rank in (0, 1, 2, 10):
        path.with_name(f"rank-{rank}.log").write_text("x\n")
    assert logs.choose(logs.found(tmp_path / "logs"), None, False, state_of([0, 1], [])) == [0, 1]
    assert logs.choose(logs.found(tmp_path / "logs"), None, False, state_of([], [2, 1])) == [1, 2]
    assert logs.choose(logs.found(tmp_path / "logs"), None, True, state_of([0, 1], [])) == [0, 1, 2, 10]
    assert logs.choose(logs.found(tmp_path / "logs"), 10, True, state_of([0, 1], [])) == [10]


@pytest.mark.parametrize(
    ("running", "last", "rank", "words"),
    [
        ([0, 1], [], 5, "there is no rank 5: ranks 0 and 1 run here"),
        ([1], [], 0, "there is no rank 0: rank 1 runs here\n  --all"),
        ([], [0, 1, 2], 5, "there is no rank 5: ranks 0, 1 and 2 ran last"),
    ],
)
def test_a_rank_that_is_not_there(
    path: Path, tmp_path: Path, running: list[int], last: list[int], rank: int, words: str
) -> None:
    for number in (0, 1, 2):
        path.with_name(f"rank-{number}.log").write_text("x\n")
    with pytest.raises(UsageError) as caught:
        logs.choose(logs.found(tmp_path / "logs"), rank, False, state_of(running, last))
    assert str(caught.value).startswith(words)


def test_lines_of_ranks_are_merged_by_their_times() -> None:
    merge = all_logs.Merge()
    first = [
        (0, "2026-01-02 03:04:05,100 INFO a"),
        (0, "2026-01-02 03:04:05,300 ERROR c"),
        (0, "Traceback"),
        (1, "2026-01-02 03:04:05,200 INFO b"),
        (1, "2026-01-02 03:04:05,400 INFO d"),
    ]
    assert [text.split()[-1] for _, text in merge(first)] == ["a", "b", "c", "Traceback", "d"]
    then = [(1, "no time"), (0, "2026-01-02 03:04:05,350 INFO e")]  # rank 1 stands at 400
    assert [text.split()[-1] for _, text in merge(then)] == ["e", "time"]
