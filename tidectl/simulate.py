"""`tidectl tide simulate`: the policies on simulated demand, as tables or as one JSON object."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tidectl.output import console, emit, plain, say
from tidectl.waiting import Item, waiting
from tided.errors import UsageError
from tided.sim import study, trace
from tided.sim.compare import BOUND, OURS, Row, Table
from tided.sim.machine import Machine

if TYPE_CHECKING:
    from rich.console import Console

FAILED, BEATEN = 1, 0


@dataclass(frozen=True)
class Options:
    """`shares`: of all experts that have a slot. `trace`: a recorded one instead of synthetic `traffics`. Empty: the
    study's own. `rest_s`: for which nobody asks behind each request."""

    traffics: Sequence[str]
    shares: Sequence[float]
    seeds: int
    layers: int
    control: bool
    trace: Path | None
    rest_s: float = 0.0


def run(options: Options, json: bool) -> int:
    """Prints the comparison. The exit code tells whether ours was better than every rival, and the control silent."""
    try:
        with waiting() as show:
            show([Item("simulating")])
            result = _studied(options, lambda words: show([Item("simulating", detail=words)]))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if json:
        beaten = [{"traffic": table.traffic, "share": table.share, "beaten": table.beaten} for table in result.tables]
        emit("tide.simulate/1", {"study": msgspec.to_builtins(result), "beaten": beaten, "unbeaten": result.unbeaten})
    else:
        _show(result)
    return FAILED if result.unbeaten or result.control_gain > study.CONTROL_GAIN else BEATEN


def _studied(options: Options, progress: Callable[[str], None]) -> study.Study:
    seeds, shares, machine = list(range(options.seeds)), options.shares or study.SHARES, Machine()
    if options.trace is not None:
        return study.recorded(trace.load(options.trace), shares, seeds, machine, progress, options.rest_s)
    names = options.traffics or list(study.TRAFFICS)
    return study.synthetic(names, shares, seeds, options.layers, options.control, machine, progress, options.rest_s)


def _show(result: study.Study) -> None:
    out = console(sys.stdout)
    for one in result.likeness:
        say(
            f"demand like the real model's, {one.share:.0%} of the experts: static {one.static:.3f} "
            f"({one.real_static:.3f}), LRU {one.lru:.3f} ({one.real_lru:.3f}), in blocks of six "
            f"{one.lru_block:.3f} ({one.real_lru_block:.3f})"
        )
    for table in result.tables:
        _show_table(out, table)
        ratio = f"{table.regret_of_lfu:.0%} of LFU's"
        say(f"  beaten: {', '.join(table.beaten) or 'none'}; regret against the {BOUND} {ratio}")
    if result.control is not None:
        _show_table(out, result.control)
        say(f"  control: nothing to learn; ours gains {result.control_gain:.2%} over a static set")
    for words in result.unbeaten:
        say(f"not beaten: {words}", "red")


def _show_table(out: "Console", table: Table) -> None:
    from rich import box
    from rich.table import Table as Drawn

    drawn = Drawn(
        box=box.SIMPLE_HEAD, title=f"{table.traffic} traffic, {table.share:.0%} resident", title_justify="left"
    )
    drawn.add_column("policy")
    for name in ("covered %", "missed %", "MB a token", "swaps", "worst %", "regret %"):
        drawn.add_column(name, justify="right")
    for row in table.rows:
        drawn.add_row(*(plain(cell, "bold" if row.policy == OURS else "") for cell in _cells(row)))
    out.print(drawn)


def _cells(row: Row) -> list[str]:
    return [
        row.policy,
        f"{100 * row.covered:.2f}",
        f"{100 * row.missed:.2f}",
        f"{row.bytes_per_token / 1e6:.1f}",
        f"{row.swaps:.0f}",
        f"{100 * row.worst:.2f}",
        f"{100 * row.regret:.2f}",
    ]
