"""`tidectl status`: one screen, or one object."""

import shlex
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from tidectl import profiles, supervisor
from tidectl.output import console, emit, is_terminal, plain, say
from tidectl.running import Machine, Rank, Snapshot, headline
from tidectl.seeing import Watch, look_everywhere
from tidectl.state import state_dir

if TYPE_CHECKING:
    from rich.console import RenderableType

STYLES = {"serving": "green", "starting": "yellow", "stopping": "yellow", "degraded": "bold red", "stopped": "dim"}
EXIT_CODES = {"serving": 0, "starting": 4, "stopping": 4, "degraded": 4, "stopped": 3}
KILLED = "by somebody, or by the kernel for want of memory: `dmesg` tells"
MOMENTS = {
    "chunk": "within a prompt",
    "prompt": "after a prompt",
    "decode": "within an answer",
    "urgent": "an answer missed badly",
    "idle": "between requests",
}
LABEL_COLUMNS = 9  # the longest label, known or not: the screen keeps its form
WATCH_S = 1.0


def show(as_json: bool) -> int:
    """The exit code: 0 serving, 3 nothing runs, 4 anything between."""
    return _tell(look_everywhere(state_dir()), as_json)


def _tell(now: Snapshot, as_json: bool) -> int:
    if as_json:
        emit("status/1", _as_data(now))
    elif now.state == "stopped":
        say("\n".join(["nothing is running", *last_lines(now)]))
    else:
        _draw(now)
    return EXIT_CODES[now.state]


def watch(as_json: bool) -> int:
    """The same again and again, until interrupted: on a terminal in place, else one after the other."""
    with Watch(state_dir()) as looking:
        if as_json or not is_terminal(sys.stdout):
            while True:
                _tell(looking.look(), as_json)
                time.sleep(WATCH_S)
        from rich.live import Live

        with Live(console=console(sys.stdout), screen=True, auto_refresh=False) as live:
            while True:
                live.update(_screen(looking.look()), refresh=True)
                time.sleep(WATCH_S)


def _as_data(now: Snapshot) -> dict[str, Any]:
    last = None if now.last is None else msgspec.to_builtins(now.last)
    ranks, machines = ([one._asdict() for one in many] for many in (now.ranks, now.machines))
    return {**now._asdict(), "ranks": ranks, "machines": machines, "last": last}


def _screen(now: Snapshot) -> "RenderableType":
    from rich.console import Group

    time_s = time.time()
    below = ["", ranks_table(now.ranks, time_s)] if now.ranks else []
    last = [plain(line) for line in last_lines(now)] if now.state == "stopped" else []
    return Group(facts(now, time_s), *below, *last)


def _draw(now: Snapshot) -> None:
    screen = console(sys.stdout)
    with screen.capture() as drawn:
        screen.print(_screen(now))
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

    rows = [rank_cells(rank, time_s) for rank in ranks]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(plain(row[name]) for name in names))
    return table


def rank_cells(rank: Rank, time_s: float) -> dict[str, str]:
    """What nobody knows is empty, and a column of that is left out."""
    return {
        "rank": str(rank.rank),
        "node": rank.host,
        "phase": rank.phase,
        "for": duration(time_s - rank.since) if rank.since else "",
        "process": str(rank.pid) if rank.pid else "",
        "memory": f"{rank.memory_bytes / 1e9:.1f} GB" if rank.memory_bytes else "",
        "reads": "" if rank.read_bytes_s is None else f"{rank.read_bytes_s / 1e6:.0f} MB/s",
        "message": headline(rank.message),
    }


def _known(now: Snapshot, time_s: float) -> list[tuple[str, str]]:
    uptime = duration(time_s - now.started) if now.started else ""
    rows = [("profile", now.profile), ("uptime", uptime), ("url", now.url), *health_rows(now.health or {})]
    rows += [("policy", policy_line(now)), *(("memory", memory_line(one, len(now.machines))) for one in now.machines)]
    return [(label, text) for label, text in rows if text]


def health_rows(health: dict[str, Any]) -> list[tuple[str, str]]:
    lanes = health.get("lanes")
    speed, overlay = health.get("decode_tok_s"), health.get("overlay")
    edit = overlay if isinstance(overlay, dict) else {}
    return [
        ("model", str(health.get("model") or "")),
        ("edited", str(edit.get("changes") or "")),
        ("residents", residents_line(health)),
        ("budget", budget_line(health)),
        ("tide", tide_line(health.get("tide"))),
        ("lanes", lanes_line(lanes, health.get("queue")) if isinstance(lanes, dict) else ""),
        ("speed", f"{speed:.1f} tok/s" if isinstance(speed, int | float) else ""),
    ]


def budget_line(health: dict[str, Any]) -> str:
    """Where it is another than the profile's."""
    budget = health.get("budget")
    if not isinstance(budget, dict) or budget.get("resident") == budget.get("resident_of_profile"):
        return ""
    return f"{budget.get('resident')} experts until it ends; the profile's: {budget.get('resident_of_profile')}"


def tide_line(tide: object) -> str:
    """Whether experts move now, and what the newest plan exchanged."""
    if not isinstance(tide, dict):
        return ""
    plan = tide.get("last_plan")
    state = "moves" if tide.get("moving") else "at rest"
    if not isinstance(plan, dict):
        return f"{state}; no plan has exchanged anything since the start"
    when = MOMENTS.get(str(plan.get("reason")), str(plan.get("reason")))
    how = f"{plan.get('done')} of {plan.get('swaps')} experts exchanged"
    return f"{state}; the newest plan ({when}, {duration(plan.get('age_s') or 0)} ago): {how}"


def residents_line(health: dict[str, Any]) -> str:
    residents, total = health.get("residents"), health.get("experts")
    if not isinstance(residents, int) or not isinstance(total, int) or not total:
        return ""
    plan = f", plan {health['generation']}" if "generation" in health else ""
    of_bytes = health.get("residents_bytes_share")  # where experts differ in size, their number says little
    share = (
        f"{100 * of_bytes:.1f} % of their bytes"
        if isinstance(of_bytes, float)
        else f"{100 * residents / total:.1f} % of them"
    )
    return f"{residents} of {total} experts ({share}){plan}"


def policy_line(now: Snapshot) -> str:
    """How the residents are to follow the traffic, by what runs."""
    policy = (now.health or {}).get("engine_policy")
    tide = policy.get("tide") if isinstance(policy, dict) else None
    if not isinstance(tide, dict):
        return ""
    slots, sensitivity = tide.get("hot_ring_slots"), tide.get("sensitivity")
    ring = f"hot ring of {slots} slots" if slots else "no hot ring"
    plans = ", so no plans but the first" if sensitivity == "off" else ""
    return f"sensitivity {sensitivity}{plans}, {ring}"


def memory_line(machine: Machine, machines: int) -> str:
    if not machine.total_bytes:
        return ""
    where = f"{machine.host}: " if machines > 1 else ""
    return f"{where}{machine.available_bytes / 1e9:.1f} of {machine.total_bytes / 1e9:.1f} GB available"


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
