"""The same checks on the other nodes of a profile: each runs `tidectl doctor` itself, over ssh, by the same
installation path, and gets the profile on its stdin."""

import shlex
import sys
import threading
from collections.abc import Sequence

import msgspec

from tidectl.doctor.check import Finding, Verdict, fail
from tidectl.doctor.examine import Result
from tidectl.doctor.machine import Machine, Ran
from tidectl.doctor.peers import SSH
from tidectl.sent import text_for_peer
from tided.settings import Settings

LIMIT_S, DEEP_LIMIT_S = 300.0, 6 * 3600.0


class _Row(msgspec.Struct):
    id: str
    verdict: Verdict
    evidence: str
    fix: str = ""
    seconds: float = 0.0


class _Told(msgspec.Struct):
    checks: list[_Row]


class Remote:
    """One node's doctor; it begins at once, and is waited for at the end."""

    def __init__(self, machine: Machine, host: str, settings: Settings, deep: bool) -> None:
        self.host, self._limit_s = host, DEEP_LIMIT_S if deep else LIMIT_S
        words = [sys.executable, "-P", "-m", "tidectl.main", "doctor", "-", "--here", "--json", *["--deep"] * deep]
        self._ran: Ran | None = None
        text = text_for_peer(settings).encode()

        def run() -> None:
            self._ran = machine.run([*SSH, host, shlex.join(words)], self._limit_s, text)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def results(self) -> list[Result]:
        """One finding that says why, where it tells nothing."""
        self._thread.join(self._limit_s)
        ran = self._ran
        lines = ran.out.strip().splitlines() if ran else []
        try:
            told = msgspec.json.decode(lines[-1], type=_Told)  # what a login shell says comes before
        except (IndexError, msgspec.DecodeError):
            return [Result("node.doctor", _silent(ran), 0.0)]
        return [Result(row.id, Finding(row.verdict, row.evidence, row.fix), row.seconds) for row in told.checks]


def _silent(ran: Ran | None) -> Finding:
    said: Sequence[str] = ran.err.strip().splitlines() if ran else []
    if ran is None or ran.code is None:
        return fail("no answer in time" if ran else "there is no ssh here", "see node.ssh")
    if ran.code == 127 or any("No module named" in line for line in said):
        return fail(f"there is no TideLM at {sys.executable}", "install it at the same path on all nodes")
    return fail((said or [f"ended with {ran.code}"])[-1][:200], "see node.ssh")
