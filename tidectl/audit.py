"""`tidectl audit`: asks the server that runs, waits, and shows what it found."""

import os
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tidectl import http
from tidectl.output import console, emit, plain, say
from tidectl.running import server_url
from tidectl.waiting import Item, waiting

if TYPE_CHECKING:
    from rich.console import RenderableType

HINT = (
    "ask something first, or name the id of an answer; answers are remembered where the profile sets "
    "audit.remember_tokens, the newest longest; experts are read into tide.sync_slots"
)
COLUMNS = ("token", "answer", "with every expert", "rank", "log probability")


def run(request_id: str, top: int, url: str | None, as_json: bool) -> None:
    server, key = server_url(url), os.environ.get("TIDE_API_KEY", "")
    with waiting() as show:
        show([Item("audit", "waiting for a quiet moment, then scoring")])
        try:
            found = http.post(server, key, f"/v1/requests/{quote(request_id, safe='')}/audit", {})
        except http.RequestFailed as error:
            raise http.RequestFailed(error.what, where=server, hint=HINT) from error
    if as_json:
        emit("audit/1", found)
        return
    for line in summary(found):
        say(line)
    if found["differences"] and top:
        console(sys.stdout).print(table(found["differences"][:top]))
        if left := (found["differ"] or 0) - min(top, len(found["differences"])):
            say(f"{left} more; --top N shows more of them, --json the first 1,000", "dim")


def summary(found: dict[str, Any]) -> list[str]:
    share = found["substituted_weight_share"]
    substituted = "" if share is None else f", {100 * share:.1f} % of the routing weight substituted"
    lines = [
        f"{found['request_id']} ({found['fidelity']}): {found['tokens']} tokens, {differing(found)}",
        f"loss {found['exact_loss']:.4f} nats a token with every expert, {found['resident_loss']:.4f} with those that "
        f"are resident now ({found['residency_loss']:+.4f}{substituted})",
        f"{found['reads']} experts read, {found['read_bytes'] / 1e6:,.0f} MB, {found['seconds']:.1f} s",
    ]
    if found["ends_alike"] is False:
        lines.insert(1, "with every expert it would go on where it ended")
    return lines


def differing(found: dict[str, Any]) -> str:
    if found["differ"] is None:
        return "held to a grammar: what would have been drawn is not known"
    return f"{found['differ']} would be others with every expert" if found["differ"] else "all as with every expert"


def table(differences: list[dict[str, Any]]) -> "RenderableType":
    from rich.table import Table

    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        made.add_column(name, justify="left" if name in COLUMNS[1:3] else "right", overflow="fold")
    for one in differences:
        said = (one["at"], repr(one["text"]), repr(one["exact_text"]), one["rank"], f"{one['logprob']:.3f}")
        made.add_row(*(plain(str(cell)) for cell in said))
    return made
