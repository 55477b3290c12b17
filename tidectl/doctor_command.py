"""`tidectl doctor`: its arguments and options."""

from typing import Annotated

import typer

from tidectl.options import Json
from tidectl.profiles import names as profile_names


def doctor(
    profile: Annotated[
        str | None,
        typer.Argument(
            metavar="PROFILE",
            autocompletion=profile_names,
            help="What is to be served; -: a profile on stdin.  [default: what runs, or ran last]",
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte of checkpoint and packs too, which can take an hour.")
    ] = False,
    here: Annotated[bool, typer.Option("--here", help="Only this node; others are not asked.")] = False,
    json: Json = False,
) -> None:
    """Look for what would keep a profile from serving, or slow it. On all of its nodes.

    Memory and who holds it, disks, the link between the nodes, driver, ports, weights. Changes nothing, and works with
    nothing running and beside what runs; then it measures nothing that would slow it. Other nodes look at themselves,
    over ssh. Each line says ok, warn, fail or skip, what was seen, and what to do. Exits with 1 where something fails.

    \b
      tidectl doctor ds41-mxfp4
      tidectl doctor ds41-mxfp4 --deep
      tidectl doctor --json
    """
    from tidectl.doctor import command

    raise typer.Exit(command.run(profile, deep, here, json))
