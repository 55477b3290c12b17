"""`tidectl status`: one screen, or one object."""

import shlex
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from tidectl import profiles, supervisor
from tidectl.output import console, emit, is_terminal, plain, say
from tidectl.running import Rank, Snapshot, headline, look

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {"serving": "green", "starting": "yellow", "stopping": "yellow", "degraded": "bold red", "stopped": "dim"}
EXIT_CODES = {"serving": 0, "starting": 4, "stopping": 4, "degraded": 4, "stopped": 3}
KILLED = "by somebody, or by the kernel for want of memory: `dmesg` tells"
LABEL_COLUMNS = 9  # the longest label, known or not: the screen keeps its form
RANK_COLUMNS = ("rank", "phase", "for", "process", "message")


def show(as_json: bool) -> int:
    """The exit code: 0 serving, 3 nothing runs, 4 anything between."""
    now = look()
    if as_json:
        last = None if now.last is None else msgspec.to_builtins(now.last)
        emit("status/1", {**now._asdict(), "ranks": [rank._asdict() for rank in now.ranks], "last": last})
    elif now.state == "stopped":
        say("\n".join(["nothing is running", *last_lines(now)]))
    else:
        _draw(now)
    return EXIT_CODES[now.state]


def _draw(now: Snapshot) -> None:
    screen, time_s = console(sys.stdout), time.time()
    with screen.capture() as drawn:
        screen.print(facts(now, time_s))
        if now.ranks:
            screen.print()
            screen.print(ranks_table(now.ranks, time_s))
    lines = drawn.get().splitlines()
    print("\n".join(lines if is_terminal(sys.stdout) else (line.rstrip() for line in lines)))


def facts(now: Snapshot, time_s: float) -> "RenderableType":
    """A label and a fact a line; facts that nobody knows are left out."""
    from rich.table import Table

    rows: list[tuple[str, str, str]] = [("state", now.state, STYLES[now.state])]
    rows += [("trouble", text, "red") for text in now.trouble]
    rows += [(label, text, "") for label, text in _known(now, time_s)]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=LABEL_COLUMNS)
    grid.add_column(overflow="fold")
    for label, text, style in rows:
        grid.add_row(label, plain(text, style))
    return grid


def ranks_table(ranks: list[Rank], time_s: float) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in RANK_COLUMNS:
        table.add_column(name, overflow="fold")
    for rank in ranks:
        table.add_row(*(plain(text) for text in rank_cells(rank, time_s)))
    return table


def rank_cells(rank: Rank, time_s: float) -> tuple[str, ...]:
    since = duration(time_s - rank.since) if rank.since else ""
    return str(rank.rank), rank.phase, since, str(rank.pid), headline(rank.message)


def _known(now: Snapshot, time_s: float) -> list[tuple[str, str]]:
    uptime = duration(time_s - now.started) if now.started else ""
    rows = [("profile", now.profile), ("uptime", uptime), ("url", now.url), *health_rows(now.health or {})]
    return [(label, text) for label, text in rows if text]


def health_rows(health: dict[str, Any]) -> list[tuple[str, str]]:
    lanes = health.get("lanes")
    speed, overlay = health.get("decode_tok_s"), health.get("overlay")
    edit = overlay if isinstance(overlay, dict) else {}
    return [
        ("model", str(health.get("model") or "")),
        ("edited", str(edit.get("changes") or "")),
        ("residents", residents_line(health)),
        ("lanes", lanes_line(lanes, health.get("queue")) if isinstance(lanes, dict) else ""),
        ("speed", f"{speed:.1f} tok/s" if isinstance(speed, int | float) else ""),
    ]


def residents_line(health: dict[str, Any]) -> str:
    residents, total = health.get("residents"), health.get("experts")
    if not isinstance(residents, int) or not isinstance(total, int) or not total:
        return ""
    plan = f", plan {health['generation']}" if "generation" in health else ""
    of_bytes = health.get("residents_bytes_share")  # where experts differ in size, their number says little
    share = (
        f"{100 * of_bytes:.1f} % of their bytes" if isinstance(of_bytes, float) else f"{100 * residents / total:.1f} %"
    )
    return f"{residents} of {total} experts ({share}){plan}"


def lanes_line(lanes: dict[str, Any], queue: object) -> str:
    waiting = f", {queue} waiting" if isinstance(queue, int) else ""
    return f"{lanes.get('busy', '?')} of {lanes.get('total', '?')} busy{waiting}"


def last_lines(now: Snapshot) -> list[str]:
    """How the last run ended, when it did not end by request, and the next step."""
    found = supervisor.culprit(now.last) if now.last else None
    if now.last is None or found is None:
        return []
    name, ended = profiles.name_of(now.last.profile), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now.last.ended))
    # What a person can mend is told whole; of a run that broke the rest is in the log.
    said = found.message if found.exit_code in supervisor.KINDS else headline(found.message)
    how = f"rank {found.rank} {supervisor.how_ended(found.exit_code)}" + (f": {said}" if said else "")
    return [
        f"{name} ended on {ended}: {how}",
        *([KILLED] if found.exit_code == supervisor.SIGNAL_CODES + signal.SIGKILL else []),
        f"its log: tidectl logs --rank {found.rank}; again: tidectl start {shlex.quote(name)}",
    ]


def duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    for size, unit, smaller, name in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole} s"
