"""Options and arguments that several commands share."""

from typing import Annotated

import typer

from tidectl.profiles import names as profile_names

PROFILE_HELP = "A TOML file, or a name of `tidectl profile list`."
Profile = Annotated[str, typer.Argument(metavar="PROFILE", autocompletion=profile_names, help=PROFILE_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=1, help="How long to wait until the ranks serve.")]
Here = Annotated[bool, typer.Option("--here", help="Only the ranks of this machine; other nodes are left alone.")]
