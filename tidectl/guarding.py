"""`tidectl guard`: a table of what differs between the ranks of a profile, and of nodes that refuse it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidectl import profiles
from tidectl.differing import Rank, declared
from tidectl.nodes import nodes_of
from tidectl.output import console, emit, plain, report, say
from tidectl.peers import is_late
from tidectl.preflight import check_profile
from tidectl.waiting import Item, waiting
from tided import guard
from tided.errors import GuardError

if TYPE_CHECKING:
    from rich.table import Table

Row = tuple[str, list[str]]
"""A fact, and its value by rank."""


def show(profile: Path, here_alone: bool, as_json: bool) -> int:
    """The exit code."""
    settings = check_profile(profile)
    nodes = [node for node in nodes_of(settings.parallel) if node.here or not here_alone]
    with waiting() as tell:
        tell([Item("opening the checkpoint", f"on {len(nodes)} nodes" if len(nodes) > 1 else "")])
        ranks = declared(settings, nodes)
    found, clocks = differences(ranks), late_clocks(ranks)
    errors = _by_node(ranks)
    code = next((rank.error.exit_code for rank in errors if rank.error), GuardError.exit_code if found else 0)
    if as_json:
        emit("guard/1", _as_data(profile, ranks, found, clocks, code))
        return code
    for rank in errors:
        if rank.error:
            report(rank.error)
    if found:
        say("the ranks differ, so they would refuse to serve together:")
        console(sys.stdout).print(table(ranks, found))
    for rank in clocks:
        say(f"the clock of {rank.node} is {rank.skew_s[0]:+.1f} s against this one's: set both by NTP")
    if not code:
        count = len(ranks[0].facts)
        where = f" on {len(nodes)} nodes" if len(nodes) > 1 else ", all on this machine"
        say(f"{profiles.name_of(str(profile))}: {len(ranks)} ranks{where} agree in {count} facts")
    return code


def differences(ranks: Sequence[Rank]) -> list[Row]:
    """Facts that are not the same on all ranks that declared any, as the boot guard compares them with rank 0's."""
    known = [rank for rank in ranks if rank.error is None]
    names = {name for rank in known[1:] for name, _, _ in guard.compare(known[0].facts, rank.facts)}
    return [(name, [rank.facts.get(name, guard.ABSENT) for rank in known]) for name in sorted(names)]


def late_clocks(ranks: Sequence[Rank]) -> list[Rank]:
    """One rank a node whose clock is surely off."""
    return [rank for rank in _by_node(ranks) if is_late(rank.skew_s)]


def _by_node(ranks: Sequence[Rank]) -> list[Rank]:
    return list({rank.node: rank for rank in reversed(ranks)}.values())[::-1]


def table(ranks: Sequence[Rank], rows: Sequence[Row]) -> "Table":
    from rich.table import Table

    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    made.add_column("fact")
    for rank in ranks:
        if rank.error is None:
            made.add_column(f"rank {rank.rank}" + (f" ({rank.node})" if rank.node.host else ""), overflow="fold")
    for name, values in rows:
        made.add_row(plain(name), *(plain(value or '""') for value in values))
    return made


def _as_data(
    profile: Path, ranks: Sequence[Rank], rows: Sequence[Row], clocks: Sequence[Rank], code: int
) -> dict[str, object]:
    known = [rank.rank for rank in ranks if rank.error is None]
    return {
        "profile": str(profile),
        "agree": code == 0,
        "ranks": [
            {
                "rank": rank.rank,
                "node": rank.node.host,
                "facts": rank.facts,
                "error": _error(rank),
                "clock_skew_s": round(rank.skew_s[0], 3),
                "clock_uncertain_s": round(rank.skew_s[1], 3),
            }
            for rank in ranks
        ],
        "differences": [{"fact": name, "values": dict(zip(known, values, strict=True))} for name, values in rows],
        "late_clocks": [rank.node.host for rank in clocks],
        "exit_code": code,
    }


def _error(rank: Rank) -> dict[str, object] | None:
    error = rank.error
    if error is None:
        return None
    return {"what": error.what, "where": error.where, "hint": error.hint, "exit_code": error.exit_code}
