"""`tidectl tide show`: what was learned, as a person sees it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tidectl.output import console, emit, plain
from tidectl.tide.facts import facts
from tidectl.tide.model import model_of

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(profile: Path | None, as_json: bool) -> None:
    model = model_of(profile)
    known = facts(model)
    if as_json:
        emit("tide.show/1", known)
        return
    screen = console(sys.stdout)
    screen.print(_summary(known))
    screen.print()
    screen.print(_layers(known))
    if known["movers"]:
        screen.print()
        screen.print(_movers(known["movers"]))


def _summary(known: dict[str, Any]) -> "RenderableType":
    from rich.table import Table

    half_life = known["half_life_requests"]
    seen = f"{known['requests']} requests, worth {known['votes']:.1f} votes now"
    aging = f"{known['sensitivity']}: half after {half_life:.1f} more" if half_life else _off(known["hot_ring_slots"])
    prior = f"{known['prior']['votes']:g} votes of {known['prior']['seed'] or 'an even spread'}"
    topic, share = next(iter(known["coverage_by_topic"].items()), ("", 0.0))
    rows = [
        ("profile", known["profile"]),
        ("history", known["history"] if known["recorded"] else f"none yet ({known['history']})"),
        ("trouble", known["note"]),
        ("learned", seen),
        ("aging", aging),
        ("weight", f"{100 * known['history_weight']:.1f} % history, the rest {prior}"),
        ("recorded", _recorded(known["coverage_by_layer"])),
        ("sizes", _sizes(known["bytes"], sum(known["start_by_layer"]))),
        ("topics", f"a start would hold {100 * share:.1f} % of what {topic} wants, the least of them" if topic else ""),
    ]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for label, text in rows:
        if text:
            grid.add_row(label, plain(text, "red" if label == "trouble" else ""))
    return grid


def _off(ring_slots: int) -> str:
    """Plans end with the sensitivity; hot reads do not."""
    moves = "the ring still exchanges residents for what it read" if ring_slots else "the set stands"
    return f"off: no plans and no aging, {moves}"


def _recorded(coverage: list[float] | None) -> str:
    """Not what was measured while it served, which is `tidectl top`'s coverage."""
    if not coverage:
        return ""
    return (
        f"a start would hold {100 * np.mean(coverage):.1f} % of it, of the weakest layer's {100 * min(coverage):.1f} %"
    )


def _sizes(known: dict[str, Any] | None, start: int) -> str:
    """Of experts that differ in size: what a start keeps of their bytes, and of each size."""
    if known is None:
        return ""
    each = ", ".join(f"{one['start']} of the {one['experts']} of {one['bytes'] / 1e6:.3g} MB" for one in known["sizes"])
    return f"{100 * known['start'] / known['experts']:.1f} % of all bytes at a start, {start} experts: {each}"


def _layers(known: dict[str, Any]) -> "RenderableType":
    """A layer a row; columns that nothing is known for are left out."""
    start, coverage, of_bytes = known["start_by_layer"], known["coverage_by_layer"], known["bytes"]
    columns: dict[str, Sequence[str]] = {
        "layer": [str(layer) for layer in range(len(start))],
        "resident": [str(count) for count in known["resident_by_layer"]] if known["running"] else [],
        "at a start": [str(count) for count in start],
        "of its bytes": _percents(of_bytes["start_share_by_layer"] if of_bytes else []),
        "of its demand": _percents(coverage or []),
    }
    there = {head: cells for head, cells in columns.items() if cells}
    return _table(tuple(there), list(zip(*there.values(), strict=True)))


def _percents(shares: Sequence[float]) -> list[str]:
    return [f"{100 * share:.1f} %" for share in shares]


def _movers(movers: list[dict[str, Any]]) -> "RenderableType":
    rows = [
        (
            str(one["layer"]),
            str(one["expert"]),
            f"{100 * one['seed_share']:.2f} %",
            f"{100 * one['share']:.2f} %",
            "kept" if one["kept"] else "",
        )
        for one in movers
    ]
    return _table(("layer", "expert", "seed", "now", ""), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head, justify="right" if head else "left")
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    return table
