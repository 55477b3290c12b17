"""The table of docs/results.md: faults by stages, each cell what came of it, or why it cannot come to it."""

from collections import defaultdict
from pathlib import Path

from tests.faults.grid import FAULTS, Fault, Layout, Stage
from tests.faults.run import LIMIT_S, Outcome
from tests.faults.strike import STAGES

BEGIN, END = "<!-- faults: written by make faults -->", "<!-- faults: end -->"


def write_table(path: Path, outcomes: list[Outcome], skipped: dict[Layout, str]) -> None:
    """Raises ValueError where the file has no place for it."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}")
    body = render(outcomes, skipped)
    path.write_text(f"{before}{begin}\n{body}\n{end}{after}")


def render(outcomes: list[Outcome], skipped: dict[Layout, str]) -> str:
    cells = defaultdict(list)
    for outcome in outcomes:
        cells[outcome.case.fault.name, outcome.case.stage].append(outcome)
    lines = [lead(outcomes), "", "| fault | " + " | ".join(STAGES) + " |"]
    lines.append("|---" * (1 + len(STAGES)) + "|")
    for fault in FAULTS:
        told = [cell(fault, stage, cells[fault.name, stage], skipped) for stage in STAGES]
        lines.append(f"| {fault.name} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def lead(outcomes: list[Outcome]) -> str:
    ended = [outcome.seconds for outcome in outcomes if outcome.ended]
    wrong = sum(bool(outcome.faults) for outcome in outcomes)
    late = sum(seconds > LIMIT_S for seconds in ended)
    return (
        f"{len(outcomes)} runs, {sum(outcome.compared for outcome in outcomes)} answers and beginnings of answers "
        f"compared with those of a clean run, {wrong} runs with anything wrong. {len(ended)} times both ranks ended, "
        f"{min(ended, default=0.0):.1f} to {max(ended, default=0.0):.1f} s after the strike, {late} times after "
        f"more than {LIMIT_S:g} s, and a new start served."
    )


def cell(fault: Fault, stage: Stage, outcomes: list[Outcome], skipped: dict[Layout, str]) -> str:
    if stage in fault.cannot:
        return f"cannot happen: {fault.cannot[stage]}"
    if not outcomes:
        return f"not run: {skipped[fault.layout]}" if fault.layout in skipped else "not run"
    return "; ".join(sorted({told(outcome) for outcome in outcomes}))


def told(outcome: Outcome) -> str:
    if outcome.faults:
        return f"**WRONG (seed {outcome.case.seed})**"
    broken = f", {outcome.broken} of {outcome.broken + outcome.whole} requests ended" if outcome.broken else ""
    if not outcome.ended:
        return f"goes on, silent for {outcome.seconds:.1f} s{broken}"
    codes = ", ".join("?" if code is None else str(code) for code in outcome.codes)
    lost = f", {outcome.lost} votes that could not be written" if outcome.lost else ""
    return f"{outcome.what} in {outcome.seconds:.1f} s ({codes}){lost}"
