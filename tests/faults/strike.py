"""A fault that waits in one rank until the rank is at a stage, and how the parent and the rank tell each other of it.

STATE_DIR/strike-N.json   arms rank N, at any time
STATE_DIR/struck-N        it has struck: seconds of the machine's monotonic clock
STATE_DIR/go-N            a rank that was told to hold goes on
"""

from pathlib import Path
from typing import Literal

import msgspec

from tided.files import write_private

Stage = Literal["boot", "prefill", "decode", "swap", "snapshot", "shutdown"]
STAGES: tuple[Stage, ...] = ("boot", "prefill", "decode", "swap", "snapshot", "shutdown")
Deed = Literal["kill", "stop", "eio", "short", "corrupt", "full", "clock", "memory", "short of memory", "hold"]


class Strike(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """At the `after`th time that the rank is at `stage`, after `jitter_s` where the deed ends or halts the process.
    `amount`: reads that are struck, or seconds that the clock jumps."""

    number: int
    deed: Deed
    stage: Stage
    after: int = 1
    jitter_s: float = 0.0
    amount: int = 1


def arm(state_dir: Path, rank: int, strike: Strike) -> None:
    struck_at(state_dir, rank).unlink(missing_ok=True)
    go(state_dir, rank).unlink(missing_ok=True)
    write_private(armed_at(state_dir, rank), msgspec.json.encode(strike), durable=False)


def disarm(state_dir: Path, rank: int) -> None:
    for path in (armed_at(state_dir, rank), struck_at(state_dir, rank), go(state_dir, rank)):
        path.unlink(missing_ok=True)


def when_struck(state_dir: Path, rank: int) -> float | None:
    try:
        return float(struck_at(state_dir, rank).read_text())
    except (FileNotFoundError, ValueError):
        return None


def armed_at(state_dir: Path, rank: int) -> Path:
    return state_dir / f"strike-{rank}.json"


def struck_at(state_dir: Path, rank: int) -> Path:
    return state_dir / f"struck-{rank}"


def go(state_dir: Path, rank: int) -> Path:
    return state_dir / f"go-{rank}"
