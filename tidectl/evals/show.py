"""What a person sees of an evaluation: a table, a curve, what the answers look like."""

import sys
from typing import TYPE_CHECKING, Any

from tidectl.evals import plot
from tidectl.output import console, plain, say

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("case", "held", "loss", "top-1", "rise over the reference (95 %)", "KL", "other token", "substituted")


def show(report: dict[str, Any]) -> None:
    texts, rows = report["texts"], report["rows"]
    tokens = rows[0]["mean"]["tokens"]
    say(f"{report['target']}: {texts['count']} texts, {tokens} tokens of answers, seed {texts['seed']}")
    console(sys.stdout).print(table(rows))
    for line in domains(rows):
        say(line, "dim")
    curves = plot.series(rows)
    if any(len(points) > 1 for points in curves.values()):
        print("\n".join(plot.terminal(curves)))
    if report["plot"]:
        say(f"{report['plot']}: loss by budget")
    if report["answers"]:
        console(sys.stdout).print(answers_table(report["answers"]["rows"]))
    references = " or ".join(dict.fromkeys(row["reference"] for row in rows))
    say(
        f"Loss and KL in nats a token, domains weighing alike. KL is from {references}, over the "
        f"{report['top']} likeliest tokens, all others as one: the whole one is not less.",
        "dim",
    )


def table(rows: list[dict[str, Any]]) -> "RenderableType":
    from rich.table import Table

    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name == COLUMNS[0] else "right")
    for row in rows:
        mean, rise, share = row["mean"], row["rise"], row["substituted_weight_share"]
        name = row["case"] + (f" {row['overlay'][:12]}" if row["overlay"] else "")
        cells = (
            name,
            f"{row['share']:.0f} %",
            f"{mean['loss']:.4f}",
            f"{100 * mean['top1']:.1f} %",
            f"{rise['mean']:+.4f} ({interval(rise)})",
            f"{mean['kl']:.4f}",
            f"{100 * mean['other']:.1f} %",
            "" if share is None else f"{100 * share:.1f} %",
        )
        made.add_row(*map(plain, cells))
    return made


def interval(rise: dict[str, float | None]) -> str:
    low, high = rise["low"], rise["high"]
    return "–" if low is None or high is None else f"{low:+.4f} to {high:+.4f}"


def domains(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each domain: its loss in every case."""
    return [
        f"{name}: "
        + ", ".join(f"{row['case']} at {row['share']:.0f} % {row['domains'][name]['loss']:.3f}" for row in rows)
        for name in rows[0]["domains"]
        if all(name in row["domains"] for row in rows)
    ]


def answers_table(rows: list[dict[str, Any]]) -> "RenderableType":
    from rich.table import Table

    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", title="free answers", title_justify="left")
    names = ("fidelity", "answers", "tokens", "distinct 1-grams", "2", "3", "4", "went round", "unbalanced", "ended")
    for name in names:
        made.add_column(name, justify="left" if name == names[0] else "right")
    for row in rows:
        distinct = [f"{100 * row['distinct'][str(n)]:.0f} %" for n in range(1, 5)]
        cells = (row["fidelity"], row["answers"], row["tokens"], *distinct)
        made.add_row(*(plain(str(cell)) for cell in (*cells, row["loops"], row["unbalanced"], row["ended"])))
    return made
