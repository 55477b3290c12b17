"""Whether a file can be written is tried before a command begins, and nothing is changed by it."""

import os
from pathlib import Path

from tidectl.writable import refuse_unwritable
from tided.errors import UnavailableError
from tided.files import write_private


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
