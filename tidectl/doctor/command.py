"""`tidectl doctor`: looks at this machine, and changes nothing."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tidectl import profiles
from tidectl.doctor.check import View
from tidectl.doctor.engine import Engine, Examined
from tidectl.doctor.examine import Result, results
from tidectl.doctor.machine import Machine
from tidectl.doctor.remote import Remote
from tidectl.doctor.screen import draw
from tidectl.doctor.table import CHECKS
from tidectl.doctor.weights import deep_bytes
from tidectl.nodes import local_ranks
from tidectl.output import emit
from tidectl.running import Snapshot, look
from tidectl.sent import adapted
from tidectl.state import chosen_dir
from tidectl.waiting import Item, waiting
from tided.errors import TideError
from tided.profile import load

MAX_PROFILE_BYTES = 1 << 20


Groups = dict[str, list[Result]]  # by node; "": this one


def run(profile: str | None, deep: bool, here_alone: bool, as_json: bool) -> int:
    """The exit code: 0 where nothing fails, else 1."""
    with _named(profile) as path:
        view = view_of(path)
        view.alone = here_alone
        with closing(view.engine):
            found = _everywhere(view, deep)
    failed = [one for results in found.values() for one in results if one.finding.verdict == "fail"]
    if as_json:
        rows = [_row(node, one) for node, results in found.items() for one in results]
        emit("doctor/1", {"profile": str(view.profile or ""), "ok": not failed, "checks": rows})
    else:
        draw(found)
    return 1 if failed else 0


@contextmanager
def _named(profile: str | None) -> Iterator[Path | None]:
    """ "-": a profile that comes on stdin, as it counts on this node. Raises UsageError for a name that is none."""
    if profile != "-":
        yield profiles.find(profile) if profile else None
        return
    text = sys.stdin.buffer.read(MAX_PROFILE_BYTES).decode(errors="replace")
    with TemporaryDirectory(prefix="tidelm-doctor-") as folder:
        path = Path(folder) / "profile.toml"
        path.write_text(adapted(text, chosen_dir()))
        yield path


def view_of(path: Path | None) -> View:
    """Of this profile, else of that which runs or ran last."""
    state_dir = chosen_dir()
    running = _running(state_dir)
    path = path or _last(running)
    view = View(Machine(), state_dir, running, path)
    if path is None:
        return view
    try:
        view.settings = load(path)
    except TideError as error:
        view.wrong = error.what
        return view
    view.engine = _engine(path, view)
    return view


def _everywhere(view: View, deep: bool) -> Groups:
    """This node, and those of the other ranks at the same time."""
    others = [] if view.alone or view.settings is None else view.peers
    remote = [Remote(view.machine, host, view.settings, deep) for host in others if view.settings]
    found = {"": _examined(view, deep)}
    with waiting() as show:
        for one in remote:
            show([Item("waiting for", one.host)])
            found[one.host] = one.results()
    return found


def _row(node: str, one: Result) -> dict[str, Any]:
    return {"node": node, "id": one.id, **one.finding._asdict(), "seconds": round(one.seconds, 3)}


def _engine(path: Path, view: View) -> Engine:
    assert view.settings is not None
    return Examined(path, local_ranks(view.settings.parallel) or [0], at_rest=not view.is_busy)


def _examined(view: View, deep: bool) -> list[Result]:
    total, read, current = (deep_bytes(view) if deep and view.settings else 0), 0, ""
    with waiting() as show:

        def tell() -> None:
            if read:
                show(
                    [
                        Item(
                            "reading",
                            current,
                            detail=f"{read / 1e9:.1f} of {total / 1e9:.1f} GB",
                            done=read >> 20,
                            total=total >> 20,
                        )
                    ]
                )
            else:
                show([Item("looking", detail=current)])

        def begins(name: str) -> None:
            nonlocal current
            current = name
            tell()

        def more(nbytes: int) -> None:
            nonlocal read
            read += nbytes
            tell()

        view.read = more
        return list(results([check for check in CHECKS if deep or not check.deep], view, begins))


def _running(state_dir: Path) -> Snapshot:
    """Of a state directory that is not there nothing runs; none is made."""
    if not state_dir.is_dir() or not os.access(state_dir, os.R_OK | os.X_OK):
        return Snapshot("stopped", "", "", 0.0, [], None, [], None)
    return look(state_dir)


def _last(running: Snapshot) -> Path | None:
    name = running.profile or (running.last.profile if running.last else "")
    return Path(name) if name and Path(name).is_file() else None
