"""`tidectl purge`: its options."""

from typing import Annotated

import typer

from tidectl.options import Json


def purge(
    history: Annotated[
        bool,
        typer.Option("--history", help="The histories too, their backups and what was set aside: what it learned."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove what requests left on this machine's disk.

    Kept prompts, parked contexts, logs and flight recorders; what goes is shown first. Refused while something runs
    with this state directory. Keys, node.toml and the record of the last run stay; so do the histories, which hold
    counts and no text. Other nodes keep theirs until it is run there; lines that the service wrote are the journal's.

    \b
      tidectl purge
      tidectl purge --history --yes
    """
    from tidectl import purge as purges

    purges.run(history, yes, json)
