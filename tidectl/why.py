"""`tidectl why`: which experts a request wanted, which were not there, and what was read for them when."""

import os
import sys
from typing import TYPE_CHECKING, Any

from tidectl import http
from tidectl.output import console, emit, plain, say
from tidectl.running import server_url

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("layer", "expert", "picks", "missed weight", "read before use", "what happened")
WORDS = {
    "asked": "read began",
    "routable": "routable",
    "promoted": "promoted",
    "left": "left",
    "not read": "could not be read",
}


def run(request_id: str, url: str | None, top: int, as_json: bool) -> None:
    found = http.trace(server_url(url), os.environ.get("TIDE_API_KEY", ""), request_id)
    if as_json:
        emit("why/1", found)
    else:
        show(found, top)


def show(found: dict[str, Any], top: int) -> None:
    say(summary(found))
    console(sys.stdout).print(pairs_table(found, top))
    left = found["pairs_wanted"] - min(top, len(found["pairs"]))
    if left > 0:
        say(f"{left} more; --top N shows more of them, --json all that are kept", "dim")


def summary(found: dict[str, Any]) -> str:
    """Three lines: how much was missed, what a layer waited for, and what moved beside the steps meanwhile."""
    asked = sum(one["what"] == "asked" for one in found["movements"])
    return (
        f"{found['request_id']} ({found['ended']}): steps {found['first_step']} to {found['last_step']}, "
        f"{found['ms'] / 1000:.1f} s\n"
        f"{found['pairs_wanted']} experts wanted, {found['pairs_missed']} of them missed at least once "
        f"(routing weight {found['missed_weight']:.1f}), {found['pairs_read']} read before use "
        f"({found['read_weight']:.1f} of that weight)\n"
        f"beside the steps: {asked} {'read' if asked == 1 else 'reads'} of them began; "
        f"{found['movements_of_others']} movements of experts that it did not want"
    )


def pairs_table(found: dict[str, Any], top: int) -> "RenderableType":
    """The `top` pairs with the most missed weight, and what became of each."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        table.add_column(name, overflow="fold", justify="left" if name == COLUMNS[-1] else "right")
    for pair in found["pairs"][:top]:
        moved = [one for one in found["movements"] if (one["layer"], one["expert"]) == (pair["layer"], pair["expert"])]
        cells = (pair["layer"], pair["expert"], pair["picks"], weight(pair["missed_weight"]))
        table.add_row(
            *(plain(str(cell)) for cell in cells),
            plain(weight(pair["read_weight"])),
            plain("; ".join(told(one) for one in moved)),
        )
    return table


def weight(value: float) -> str:
    return f"{value:.2f}" if value else ""


def told(one: dict[str, Any]) -> str:
    """`read began at 1.20 s, step 14 (prompt, for 3/17)`."""
    place = f", for {one['out'][0]}/{one['out'][1]}" if one["out"] else ""
    return f"{WORDS[one['what']]} at {one['ms'] / 1000:.2f} s, step {one['step']} ({one['why']}{place})"
