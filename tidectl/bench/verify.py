"""`tidectl bench verify`: a receipt read strictly, and its runs made again."""

import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidectl.bench import measure, run
from tidectl.bench.cases import BY_NAME
from tidectl.bench.receipt import CaseResult, Receipt, Spread, part_of, read
from tidectl.output import console, emit, plain, say

LOWER_IS_BETTER = {"ttft_s"}
RESOLUTION = 1e-4  # of a median
MEASURED = ("expert_reads", "data_plane")  # of engine_config: by each start anew


class Verdict(NamedTuple):
    """`slower`: how much more time it takes than the receipt's median, by the headline figure; below 0: less. `same`:
    answers with the text of the receipt's."""

    case: str
    figure: str
    receipt: Spread
    now: Spread
    slower: float
    same: int
    answers: int


def verify(path: Path, target: measure.Target | None, tolerance: float, as_json: bool) -> int:
    """0: it is whole, and what was run again is at most `tolerance` slower; else 1. Without a target nothing is run."""
    receipt = read(path)
    if target is None:
        names = ", ".join(case.name for case in receipt.cases)
        say(f"{path}: whole; the figures of {names}, {receipt.made}, follow from their runs")
        if as_json:
            emit("bench.verify/1", {"receipt": str(path), "digest": receipt.digest, "verdicts": []})
        return 0
    now = run.measured(asked_again(receipt, target), options_of(receipt))
    verdicts = [judge(old, new) for old, new in zip(receipt.cases, now.cases, strict=True)]
    differing = differences(receipt, now)
    if as_json:
        rows = [
            verdict._asdict() | {"receipt": _dict(verdict.receipt), "now": _dict(verdict.now)} for verdict in verdicts
        ]
        emit("bench.verify/1", {"receipt": str(path), "differs": differing, "verdicts": rows, "tolerance": tolerance})
    else:
        _show(verdicts, differing)
    for found in verdicts:
        if found.slower > tolerance:
            say(
                f"{found.case}: takes {found.slower:.0%} longer than the receipt says, {tolerance:.0%} is no failure; "
                f"load now {now.machine.load:g}, then {receipt.machine.load:g}",
                "red",
            )
    return int(any(verdict.slower > tolerance for verdict in verdicts))


def asked_again(receipt: Receipt, target: measure.Target) -> measure.Target:
    """The receipt's way of asking, at this server."""
    names = ("model", "temperature", "fidelity", "thinking")
    return target._replace(**{name: getattr(receipt.settings, name) for name in names})


def options_of(receipt: Receipt) -> run.Options:
    return run.Options(receipt.settings.cases, receipt.settings.sizes, receipt.settings.repetitions, None)


def judge(old: CaseResult, new: CaseResult) -> Verdict:
    figure = BY_NAME[old.name].headline
    before, now = old.summary[figure], new.summary[figure]
    then_is, now_is = max(before.median, RESOLUTION), max(now.median, RESOLUTION)
    slower = (now_is / then_is if figure in LOWER_IS_BETTER else then_is / now_is) - 1
    texts = [(mine, other) for mine, other in zip(_texts(old), _texts(new), strict=True)]
    return Verdict(old.name, figure, before, now, round(slower, 4), sum(a == b for a, b in texts), len(texts))


def differences(old: Receipt, new: Receipt) -> list[str]:
    """What was different about the server or the client: where something is, figures and texts may differ rightly."""
    one, other = _told(old), _told(new)
    return [name for name in one if one[name] != other[name]]


def _told(receipt: Receipt) -> dict[str, object]:
    """Build and machine are the server's where it tells them, else only the client's are known."""
    server, client = receipt.server.before, msgspec.structs.replace(receipt.machine, load=0.0)
    return {
        "build": server.get("build") or receipt.build,
        "machine": server.get("machine") or client,
        "client": (receipt.build, client),
        "model": server.get("model"),
        "checkpoint": (server.get("checkpoint"), server.get("overlay")),
        "settings": {name: told for name, told in part_of(server, "engine_config").items() if name not in MEASURED},
        "policy": server.get("engine_policy"),
    }


def _texts(case: CaseResult) -> list[str]:
    return [request.sha256 for groups in case.repetitions for group in groups for request in group.requests]


def _dict(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "least": spread.least, "most": spread.most}


def _show(verdicts: list[Verdict], differing: list[str]) -> None:
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD)
    for name in ("case", "figure", "receipt", "now", "time", "same text"):
        drawn.add_column(name)
    for found in verdicts:
        cells = (
            found.case, found.figure, f"{found.receipt.median:g}", f"{found.now.median:g}", f"{found.slower:+.1%}",
            f"{found.same} of {found.answers}",
        )  # fmt: skip
        drawn.add_row(*map(plain, cells))
    console(sys.stdout).print(drawn)
    if differing:
        say(f"not the same as then: {', '.join(differing)}", "yellow")
