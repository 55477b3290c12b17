"""docs/failures.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def missing(text: str) -> list[str]:
    """The tests that a page names and that nobody has written."""
    return [f"{path}::{name}" for path, name in NAMED.findall(text) if not exists(path, name)]


def exists(path: str, name: str) -> bool:
    return (ROOT / path).is_file() and f"def {name}(" in (ROOT / path).read_text()


def test_every_row_names_a_test_that_exists():
    page = (ROOT / "docs/failures.md").read_text()
    assert missing(page) == []
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| failure")]
    assert len(rows) > 40
    assert all(NAMED.search(row) for row in rows)


def test_a_test_that_was_renamed_is_seen():
    assert missing("`tests/house/test_failures.py::test_gone`, `tests/nowhere.py::test_x`") == [
        "tests/house/test_failures.py::test_gone",
        "tests/nowhere.py::test_x",
    ]
