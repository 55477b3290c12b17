"""What another node says over ssh: that it answers, and its clock."""

import time
from typing import NamedTuple

from tidectl import peers
from tidectl.doctor.machine import Machine

SSH = (*peers.SSH, "--")
ASK_S = 8.0


class Peer(NamedTuple):
    """`fault` empty: it answered within `trip_s`, and its clock is `ahead_s` before ours, give or take half of that."""

    host: str
    fault: str
    trip_s: float = 0.0
    ahead_s: float = 0.0


def ask(machine: Machine, host: str) -> Peer:
    began_s = time.time()
    ran = machine.run([*SSH, host, "date +%s.%N"], ASK_S)
    trip_s = time.time() - began_s
    if ran is None:
        return Peer(host, "there is no ssh here")
    if ran.code is None:
        return Peer(host, f"no answer in {ASK_S:.0f} s")
    words = ran.out.split()
    try:
        if ran.code == 0 and words:  # a login shell may say something first
            return Peer(host, "", trip_s, float(words[-1]) - began_s - trip_s / 2)
    except ValueError:
        return Peer(host, f"no time in its answer: {ran.out.strip()[:80]}")
    return Peer(host, (ran.err.strip().splitlines() or [f"ssh ended with {ran.code}"])[-1][:200])
