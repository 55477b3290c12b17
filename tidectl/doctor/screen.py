"""What `tidectl doctor` shows: a line a check, and under it what to do. Words say what colours and signs say too."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from tidectl.doctor.check import Verdict, skip
from tidectl.doctor.engine import NO_PROFILE
from tidectl.doctor.examine import Result
from tidectl.output import console, is_terminal, plain, styled

SIGNS: dict[Verdict, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "bold red"),
    "skip": ("-", "dim"),
}


def draw(groups: Mapping[str, Sequence[Result]]) -> None:
    """By node; "": this one."""
    for node, results in groups.items():
        if len(groups) > 1:
            print(styled(node or "this node", "bold", sys.stdout))
        print(_table(_rows(results)), "\n", sep="")
    print(summary([one for results in groups.values() for one in results]), flush=True)


def _rows(results: Sequence[Result]) -> list[Result]:
    """What wants a profile, where there is none, is one row."""
    wanting = [one for one in results if one.finding == skip(NO_PROFILE)]
    rest = [one for one in results if one.finding != skip(NO_PROFILE)]
    if not wanting:
        return rest
    words = "ports, nodes and their link, disks, weights, with a profile: `tidectl doctor PROFILE`"
    return [*rest, Result(f"{len(wanting)} more", skip(words), 0.0)]


def _table(results: Sequence[Result]) -> str:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for fold in (False, False, True):
        table.add_column(overflow="fold", no_wrap=not fold)
    for result in results:
        verdict, evidence, fix = result.finding
        sign, style = SIGNS[verdict]
        table.add_row(
            plain(f"{sign} {verdict}", style), plain(result.id), plain(evidence, "dim" if verdict == "skip" else "")
        )
        if fix:
            table.add_row("", "", plain(f"-> {fix}", style))
    screen = console(sys.stdout)
    with screen.capture() as drawn:
        screen.print(table)
    lines = drawn.get().splitlines()
    return "\n".join(lines if is_terminal(sys.stdout) else (line.rstrip() for line in lines))


def summary(results: Sequence[Result]) -> str:
    counts = Counter(result.finding.verdict for result in results)
    parts = [styled(f"{counts[v]} {v}", SIGNS[v][1], sys.stdout) for v in ("ok", "warn", "fail", "skip") if counts[v]]
    return ", ".join(parts)
