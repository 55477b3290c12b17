"""Whether a file can be written is tried before a command begins, and nothing is changed by it."""

import os
from pathlib import Path

import pytest

from tidectl.writable import refuse_unwritable
from tided.control.files import write_private
from tided.errors import UnavailableError


def test_what_it_did_not_make_it_does_not_remove(tmp_path: Path) -> None:
    there = tmp_path / f".out.json.{os.getpid()}.tmp"
    there.write_text("somebody's")
    with pytest.raises(UnavailableError, match="is in the way") as refused:
        refuse_unwritable(tmp_path / "out.json", "--out")
    assert refused.value.where == str(there)
    assert there.read_text() == "somebody's"


def test_nothing_stays_of_it(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "out.json", "--out")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_too_long_to_be_written_is_refused_before(tmp_path: Path) -> None:
    """At every length: who passes can be written."""
    longest = os.pathconf(tmp_path, "PC_NAME_MAX")
    refused = 0
    for length in range(longest - 20, longest + 1):
        file = tmp_path / ("x" * length)
        try:
            refuse_unwritable(file, "--out")
        except UnavailableError:
            refused += 1
        else:
            write_private(file, b"")
    assert 0 < refused < 20
