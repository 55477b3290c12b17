"""`tidectl status`: one screen, or one object."""

import sys
import time
from typing import Any

import msgspec

from tidectl.output import emit, say, styled
from tidectl.running import Rank, Snapshot, look

COLOURS = {"serving": "32", "starting": "33", "draining": "33", "degraded": "31", "stopped": "2"}
EXIT_CODES = {"serving": 0, "starting": 4, "draining": 4, "degraded": 4, "stopped": 3}


def show(as_json: bool) -> int:
    """The exit code: 0 serving, 3 nothing runs, 4 anything between."""
    now = look()
    if as_json:
        last = None if now.last is None else msgspec.to_builtins(now.last)
        emit("status/1", {**now._asdict(), "ranks": [rank._asdict() for rank in now.ranks], "last": last})
    elif now.state == "stopped":
        say("\n".join(["nothing is running", *last_lines(now)]))
    else:
        print("\n".join(screen(now, time.time())))
    return EXIT_CODES[now.state]


def screen(now: Snapshot, time_s: float) -> list[str]:
    """A label and a fact a line; facts that nobody knows are left out."""
    state = styled(now.state, COLOURS[now.state], sys.stdout)
    age = f" for {duration(time_s - now.started)}" if now.started else ""
    rows = [("state", f"{state}{age}"), ("profile", now.profile), ("url", now.url)]
    rows += health_rows(now.health or {})
    rows += [(f"rank {rank.rank}", rank_line(rank, time_s)) for rank in now.ranks]
    rows += [("trouble", text) for text in now.trouble]
    return [f"{label:<10} {text}" for label, text in rows if text]


def health_rows(health: dict[str, Any]) -> list[tuple[str, str]]:
    lanes = health.get("lanes")
    speed = health.get("decode_tok_s")
    return [
        ("model", str(health.get("model") or "")),
        ("residents", residents_line(health)),
        ("lanes", lanes_line(lanes, health.get("queue")) if isinstance(lanes, dict) else ""),
        ("speed", f"{speed:.1f} tok/s" if isinstance(speed, int | float) else ""),
    ]


def residents_line(health: dict[str, Any]) -> str:
    residents, total = health.get("residents"), health.get("experts")
    if not isinstance(residents, int) or not isinstance(total, int) or not total:
        return ""
    plan = f", plan {health['generation']}" if "generation" in health else ""
    return f"{residents} of {total} experts ({100 * residents / total:.1f} %){plan}"


def lanes_line(lanes: dict[str, Any], queue: object) -> str:
    waiting = f", {queue} waiting" if isinstance(queue, int) else ""
    return f"{lanes.get('busy', '?')} of {lanes.get('total', '?')} busy{waiting}"


def rank_line(rank: Rank, time_s: float) -> str:
    since = f" for {duration(time_s - rank.since)}" if rank.since else ""
    message = f": {rank.message.splitlines()[0]}" if rank.message else ""
    return f"{rank.phase}{since}, process {rank.pid}{message}"


def last_lines(now: Snapshot) -> list[str]:
    """How the last run ended, when it did not end by request."""
    if now.last is None or now.last.first is None:
        return []
    first = next((rank for rank in now.last.ranks if rank.rank == now.last.first), None)
    if first is None:
        return []
    ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now.last.ended))
    said = f": {first.message}" if first.message else ""
    return [
        f"{now.last.profile} ended on {ended}: rank {first.rank} with exit code {first.exit_code}{said}",
        f"its log: tidectl logs --rank {first.rank}",
    ]


def duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    for size, unit, smaller, name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole} s"
