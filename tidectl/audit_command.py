"""`tidectl audit`: its options."""

from typing import Annotated

import typer

from tidectl.options import Json


def audit(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The answer's id (chatcmpl-...), or `latest`.")
    ] = "latest",
    top: Annotated[int, typer.Option(metavar="N", min=0, help="Show so many of the tokens that differ.")] = 20,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The server.  [default: what runs here, else http://127.0.0.1:8000]"),
    ] = None,
    json: Json = False,
) -> None:
    """Score a finished answer again with every expert. Tells which tokens would be others, and what residency cost.

    The server must remember answers (audit.remember_tokens) and have slots to read experts into (tide.sync_slots). It
    waits until nobody asks, and gives way to whoever does. The audit votes like a request: with the demand that every
    expert brings, not that of substituted ones.

    \b
      tidectl audit latest
      tidectl audit chatcmpl-5tSGs1 --json
    """
    from tidectl import audit

    audit.run(request_id, top, url, json)
