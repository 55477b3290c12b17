"""A receipt as a table: on a terminal, and as the rows of a Markdown page."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tidectl.bench.cases import BY_NAME
from tidectl.bench.receipt import CaseResult, Measured, Receipt, Spread, part_of
from tidectl.output import console, plain, say

COLUMNS = ("case", "tok/s", "all tok/s", "first token", "prompt tok/s", "prompt", "answer", "substituted", "accepted")
HEADLINES = {"tok_s": 1, "total_tok_s": 2, "ttft_s": 3}


def show(receipt: Receipt) -> None:
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD)
    found = [(case, index, cells) for case in receipt.cases for index, cells in enumerate(rows(case))]
    told = [place for place in range(len(COLUMNS)) if any(cells[place] for _, _, cells in found)]
    for place in told:
        drawn.add_column(COLUMNS[place], justify="left" if place == 0 else "right")
    for case, index, cells in found:
        bold = HEADLINES[BY_NAME[case.name].headline] if index == 0 else -1
        drawn.add_row(*(plain(cells[place], "bold" if place == bold else "") for place in told))
    console(sys.stdout).print(drawn)
    say(f"medians (least to most) of {receipt.settings.repetitions}; {_settings(receipt)}", "dim")
    if any(not request.counted for case in receipt.cases for request in _requests(case)):
        say("this server does not count tokens: its chunks were counted, one a token", "yellow")


def markdown(receipts: Sequence[tuple[str, Receipt]]) -> str:
    """One table of several receipts by the names of their files, as docs/results.md has it."""
    lines = ["| " + " | ".join(("receipt", *COLUMNS)) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for name, receipt in receipts:
        lines += [f"| {name} | " + " | ".join(cells) + " |" for case in receipt.cases for cells in rows(case)]
    return "\n".join(lines) + "\n"


def rows(case: CaseResult) -> Iterator[list[str]]:
    """A row a group: the prompt that comes again, the answer behind a change of domain."""
    for place in range(len(case.repetitions[0])):
        suffix = f"_{place + 1}" if place else ""
        requests = [request for groups in case.repetitions for request in groups[place].requests]
        yield [
            f"{case.name} {place + 1}" if len(case.repetitions[0]) > 1 else case.name,
            _spread(case.summary[f"tok_s{suffix}"], 1),
            _spread(case.summary[f"total_tok_s{suffix}"], 1) if len(case.repetitions[0][place].requests) > 1 else "",
            _spread(case.summary[f"ttft_s{suffix}"], 3, " s"),
            _spread(case.summary[f"prompt_tok_s{suffix}"], 0) if _computes(requests) else "cached",
            _range([request.prompt_tokens for request in requests]),
            _range([request.tokens for request in requests]),
            _share([request.stats.get("substituted_weight_share") for request in requests]),
            _mean([part_of(request.stats, "spec").get("accept_len_mean") for request in requests]),
        ]


def _computes(requests: list[Measured]) -> bool:
    """More than the last tokens of a prompt, which are computed in any case."""
    return any(request.prompt_tokens - request.cached_tokens > 16 for request in requests)


def _spread(found: Spread, digits: int, unit: str = "") -> str:
    return f"{found.median:,.{digits}f}{unit} ({found.least:,.{digits}f} to {found.most:,.{digits}f})"


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _share(values: list[Any]) -> str:
    known = [value for value in values if isinstance(value, int | float)]
    return f"{100 * sum(known) / len(known):.2f} %" if known else ""


def _mean(values: list[Any]) -> str:
    known = [value for value in values if isinstance(value, int | float)]
    return f"{sum(known) / len(known):.2f}" if known else ""


def _settings(receipt: Receipt) -> str:
    settings, model = receipt.settings, str(receipt.server.before.get("model", ""))
    parts = [f"temperature {settings.temperature:g}", f"seed {settings.seed}", *([model] if model else [])]
    return ", ".join(parts)


def _requests(case: CaseResult) -> Iterator[Any]:
    return (request for groups in case.repetitions for group in groups for request in group.requests)
