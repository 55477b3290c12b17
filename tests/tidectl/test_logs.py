"""Log files as a supervisor leaves them: growing, rotated, emptied, cut in the middle of a line."""

from pathlib import Path

import pytest

from tidectl import logs


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
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text("a\n")
    path.with_name("rank-0.log.1").write_text("old\n")
    path.with_name("supervisor.log").write_text("s\n")
    logs.show(tmp_path, None, 10, follow=False, as_json=False, alive=lambda: False)
    assert capsys.readouterr().out == "a\n"


def test_following_ends_with_the_ranks_and_loses_nothing(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "POLL_S", 0)
    path.write_text("a\n")
    answers = iter([True, True, False, False])

    def alive() -> bool:
        answer = next(answers)
        append(path, f"alive {answer}\n" if answer else "last word")
        return answer

    logs.show(tmp_path, 0, 10, follow=True, as_json=False, alive=alive)
    captured = capsys.readouterr()
    assert captured.out == "a\nalive True\nalive True\nlast word\n"
    assert captured.err == "the ranks have ended\n"


def test_the_end_of_a_log_for_a_message(path: Path, tmp_path: Path) -> None:
    assert logs.tail_of(tmp_path, 0, 2) == []
    path.write_text("a\nb\nc")
    assert logs.tail_of(tmp_path, 0, 2) == ["b", "c"]


def test_the_end_of_one_run_only(path: Path, tmp_path: Path) -> None:
    path.write_text("earlier run\n")
    before = logs.sizes(tmp_path)
    assert before == {0: 12}
    append(path, "this run\n")
    assert logs.tail_of(tmp_path, 0, 9, before[0]) == ["this run"]
    path.write_text("rotated\n")
    assert logs.tail_of(tmp_path, 0, 9, before[0]) == ["rotated"]
