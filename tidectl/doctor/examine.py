"""Runs checks one after the other, each within its time. One that crashes or hangs is a finding, and hides no other."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tidectl.doctor.check import Check, Finding, View, fail, skip, unmet
from tided.errors import TideError

REPORT = "a mistake of ours, or a machine that nobody thought of: please report it with this line"


class Result(NamedTuple):
    id: str
    finding: Finding
    seconds: float


def results(checks: Iterable[Check], view: View, begins: Callable[[str], None]) -> Iterator[Result]:
    """`begins` hears of each."""
    for check in checks:
        begins(check.id)
        began_s = time.monotonic()
        finding = examined(check, view)
        yield Result(check.id, finding, time.monotonic() - began_s)


def examined(check: Check, view: View) -> Finding:
    if why := unmet(check, view):
        return skip(why)
    found: list[Finding] = []

    def look() -> None:
        found.append(_looked(check, view))

    thread = threading.Thread(target=look, name=check.id, daemon=True)  # which an end of the program does not wait for
    thread.start()
    thread.join(check.limit_s)
    return (
        found[0] if found else fail(f"no answer in {check.limit_s:g} s", "what it looks at hangs: `dmesg` may tell why")
    )


def _looked(check: Check, view: View) -> Finding:
    try:
        return check.look(view)
    except TideError as error:
        return fail(f"{error.where}: {error.what}" if error.where else error.what, error.hint)
    except Exception as error:
        return fail(f"the check crashed: {type(error).__name__}: {error}", REPORT)
