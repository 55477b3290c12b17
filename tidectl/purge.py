"""`tidectl purge`: what requests left in a state directory, removed while nothing runs with it.

Nothing outside the directory is touched: a link that leads elsewhere is refused by name. Blocks of a disk are not
overwritten, which on flash would promise what no program can keep (SECURITY.md).
"""

import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tidectl import record, runner
from tidectl.output import emit, say
from tidectl.state import as_owner, state_dir
from tided.errors import DataError, PermissionError_, UsageError
from tided.files import sweep

ROOMS = {"cache": "kept prompts and parked contexts", "logs": "logs", "history": "histories"}
FLIGHTS = "flight-*.jsonl"


class Found(NamedTuple):
    """`paths`: what is removed, whole directories too. `nbytes`: of the files in them."""

    name: str
    words: str
    paths: list[Path]
    files: int
    nbytes: int


def run(history: bool, yes: bool, as_json: bool) -> None:
    directory = state_dir()
    others = [node.host for node in record.nodes_here(directory) if not node.here]
    with as_owner(directory), runner.at_rest(directory, "tidectl purge"):
        found = list(_found(directory, history))
        if found:
            say("\n".join(f"{one.words}: {one.files} files, {one.nbytes / 1e6:.1f} MB" for one in found))
        if found and not yes:
            _confirm(directory)
        for one in found:
            _remove(one.paths)
        sweep(directory)
    if as_json:
        removed = {one.name: {"files": one.files, "bytes": one.nbytes} for one in found}
        emit("purge/1", {"state_dir": str(directory), "removed": removed, "other_nodes": others})
    else:
        say("removed" if found else f"there is nothing to remove in {directory}")
        if others:
            say(f"{', '.join(others)} keep theirs: run it there too", "dim")


def _found(directory: Path, history: bool) -> Iterator[Found]:
    for name, words in ROOMS.items():
        if name != "history" or history:
            yield from _sized(name, words, [directory / name])
    yield from _sized("flight", "flight recorders", sorted(directory.glob(FLIGHTS)))


def _sized(name: str, words: str, paths: Sequence[Path]) -> Iterator[Found]:
    """Raises PermissionError_ for what this user may not see: it would stay, and nobody would know."""
    there = [path for path in paths if os.path.lexists(path)]
    try:
        sizes = [size for path in there for size in _sizes(path)]
    except PermissionError as error:
        hint = "run it as the user that the server runs as"
        raise PermissionError_("this user may not look into it", where=str(error.filename), hint=hint) from error
    if sizes:
        yield Found(name, words, there, len(sizes), sum(sizes))


def _sizes(path: Path) -> Iterator[int]:
    """Of the file, or of all files below. Raises OSError, and DataError for a link."""
    for entry in _entries(path):
        found = entry.lstat()
        if stat.S_ISLNK(found.st_mode):
            hint = f"nothing outside the state directory is removed: empty {entry.readlink()} yourself, then the link"
            raise DataError("is a link", where=str(entry), hint=hint)
        if not stat.S_ISDIR(found.st_mode):
            yield found.st_size


def _entries(path: Path) -> Iterator[Path]:
    """`path`, and what is below it. Path's own walks are silent where a directory may not be listed."""
    yield path
    if path.is_dir():
        for directory, directories, files in os.walk(path, onerror=_refused):
            yield from (Path(directory, name) for name in (*directories, *files))


def _refused(error: OSError) -> None:
    raise error


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            where = str(error.filename or path)
            raise DataError(f"cannot be removed: {error.strerror}", where=where, hint="run it again") from error


def _confirm(directory: Path) -> None:
    if not sys.stdin.isatty():
        raise UsageError("this asks before it removes", where=str(directory), hint="off a terminal, say --yes")
    import typer

    typer.confirm(f"remove them from {directory}?", abort=True, err=True)
