"""Files are replaced as a whole, by nobody's name but the writer's own; what killed writers left goes, nothing else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tided import files
from tided.files import sweep, whole, write_private

HALF = """
import sys, time
from pathlib import Path
from tided.files import whole
with whole(Path(sys.argv[1])) as file:
    file.write(b"half of it")
    file.flush()
    print("written", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def half_written(path: Path, error: BaseException) -> None:
    with whole(path) as file:
        file.write(b"half of it")
        raise error


def test_a_file_is_replaced_when_its_writer_is_done(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with whole(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert (path.read_bytes(), names(tmp_path)) == (b"new", ["file"])
    write_private(path, b"mine")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        half_written(path, KeyboardInterrupt())
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["file"])


def test_writers_of_one_file_leave_each_other_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes in containers may have one number: they share a folder, not the numbers."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    path = tmp_path / "file"
    with whole(path) as one:
        one.write(b"one")
        with pytest.raises(OSError, match="full"):
            half_written(path, OSError("full"))
    assert (path.read_bytes(), names(tmp_path)) == (b"one", ["file"])


def test_what_a_killed_writer_left_goes_and_nothing_else(tmp_path: Path) -> None:
    for name in (".hidden", "x.tmp", ".vimrc.tmp", ".file.12345678.tmpx"):
        (tmp_path / name).touch()
    before = names(tmp_path)
    with subprocess.Popen([sys.executable, "-c", HALF, tmp_path / "file"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        sweep(tmp_path)
        assert len(names(tmp_path)) == len(before) + 1  # it lives, and writes
        writer.send_signal(signal.SIGKILL)
    assert len(names(tmp_path)) == len(before) + 1
    sweep(tmp_path)
    assert names(tmp_path) == before


def test_a_writer_whose_file_is_swept_before_it_is_locked_takes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept, held = [], files._held

    def late(fd: int) -> bool:
        if not swept:
            swept.extend(names(tmp_path))
            sweep(tmp_path)
        return held(fd)

    monkeypatch.setattr(files, "_held", late)
    write_private(tmp_path / "file", b"whole")
    assert len(swept) == 1
    assert ((tmp_path / "file").read_bytes(), names(tmp_path)) == (b"whole", ["file"])
