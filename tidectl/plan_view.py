"""What `tidectl plan` draws."""

import sys
from typing import TYPE_CHECKING, Any

from tidectl.output import console, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

BAR_COLUMNS = 40
EXPLAINED = {
    "load": "all that stays, and the reserve",
    "serve": "all that stays, a prefill chunk, and what the watch ends the ranks below",
}


def draw(known: dict[str, Any]) -> None:
    screen = console(sys.stdout)
    screen.print(_classes(known))
    screen.print()
    screen.print(_gates(known))
    screen.print()
    for line in words(known):
        screen.print(plain(line))
    if known["coverage"]["points"]:
        screen.print()
        screen.print(plain(f"of the demand in {known['coverage']['of']}, what the best set of each budget holds:"))
        for line in bars(known):
            screen.print(plain(line))


def _classes(known: dict[str, Any]) -> "RenderableType":
    """A row a class, a column a rank."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("of a rank")
    for rank in known["ranks"]:
        table.add_column(f"rank {rank['rank']}" + (f" ({rank['host']})" if rank["host"] else ""), justify="right")
    table.add_column("by")
    rows: dict[str, tuple[str, list[str]]] = {}
    for number, rank in enumerate(known["ranks"]):
        for one in rank["classes"]:
            _, cells = rows.setdefault(one["what"], (one["setting"], [""] * len(known["ranks"])))
            cells[number] = ("about " if one["estimate"] else "") + size(one["bytes"])
    for what, (setting, cells) in rows.items():
        table.add_row(plain(what), *map(plain, cells), plain(setting, "dim"))
    totals = [size(rank["total_bytes"]) for rank in known["ranks"]]
    table.add_row(plain("all that stays", "bold"), *(plain(total, "bold") for total in totals), plain(""))
    table.add_row(
        plain("a prefill chunk"),
        *(plain("about " + size(known["passing_bytes"])) for _ in known["ranks"]),
        plain("model.prefill_chunk_tokens, in passing", "dim"),
    )
    return table


def _gates(known: dict[str, Any]) -> "RenderableType":
    """Those of the first rank of each node: its others have the same."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in (("gate", "left"), ("asks", "right"), ("free", "right"), ("", "left"), ("for", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    seen = set[str]()
    for rank in known["ranks"]:
        if rank["host"] in seen and not known["free"]["apart"]:
            continue
        seen.add(rank["host"])
        for gate in rank["gates"]:
            missing = gate["missing_bytes"]
            verdict = plain(f"{size(missing)} too little", "bold red") if missing else plain("fits", "green")
            table.add_row(
                plain(f"{gate['gate']}, rank {rank['rank']}"),
                plain(size(gate["asked_bytes"])),
                plain(size(gate["free_bytes"])),
                verdict,
                plain(EXPLAINED[gate["gate"].partition(",")[0]], "dim"),
            )
    return table


def words(known: dict[str, Any]) -> list[str]:
    resident, most, largest = known["resident"], known["experts"], known["largest_resident"]
    lines = [f"experts.resident = {resident} of {most} ({resident / most:.1%})"]
    if largest is None:
        lines.append(f"no budget fits: the least is {known['least']} experts")
    else:
        lines.append(f"the largest that fits: {largest} ({largest / most:.1%})")
    a_gb = known["a_gb"]
    lines.append(f"1 GB holds {a_gb['experts']:.0f} experts of a rank, or {a_gb['context_tokens']:,} tokens of context")
    if not known["coverage"]["points"]:
        lines.append("what of the demand a budget holds is not known yet: nothing was learned of this model's experts")
    return lines


def bars(known: dict[str, Any]) -> list[str]:
    """The curve, a budget a line."""
    lines = []
    for point in known["coverage"]["points"]:
        full = round(BAR_COLUMNS * point["covered"])
        marks = [
            said
            for said, budget in (("the profile's", known["resident"]), ("the largest", known["largest_resident"]))
            if budget == point["resident"]
        ]
        bar = "█" * full + "·" * (BAR_COLUMNS - full)
        line = f"{point['resident']:>7,} {size(point['bytes']):>10} {bar} {point['covered']:7.2%}"
        lines.append(line + (f"  {', '.join(marks)}" if marks else ""))
    return lines


def size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 100_000_000 else f"{nbytes / 1e6:,.2f} MB"
