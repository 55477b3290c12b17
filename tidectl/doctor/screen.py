"""What `tidectl doctor` shows: a line a check, and under it what to do. Words say what colours and signs say too."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from tidectl.doctor.check import Verdict
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
        print(_table(results), "\n", sep="")
    print(summary([one for results in groups.values() for one in results]), flush=True)


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
