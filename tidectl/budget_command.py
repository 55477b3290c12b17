"""`tidectl budget`: its options."""

from typing import Annotated

import typer

from tidectl.options import Json


def budget(
    amount: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="AMOUNT",
            help="70G (bytes of residents on each rank), 10000 experts, or a change: +5G, -200 experts.  "
            "[default: show how it stands]",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Change how many experts are in memory, while it serves.

    What the change would mean is shown first: experts that leave or come, bytes on each rank, and how much of what
    the next tokens are expected to want is in memory. It begins with one of the next steps, on all ranks. Fewer: those
    of least worth leave at once, and their memory goes back to the system. More: the most wanted are read while answers
    go on. It lasts until the ranks end: a start begins with the profile's experts.resident.

    \b
      tidectl budget
      tidectl budget 70G
      tidectl budget 10000 experts --yes
      tidectl budget +5G
    """
    from tidectl import budget as budgets

    budgets.run(" ".join(amount or []), yes, json)
