"""`tidectl top`: its options."""

from typing import Annotated

import typer

from tidectl.options import Json


def top(
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The server.  [default: what runs here, else http://127.0.0.1:8000]"),
    ] = None,
    every: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, max=60, help="Between two looks; fewer take less of a slow line."),
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Show what is now, and end; so does output to a file.")] = False,
    json: Json = False,
) -> None:
    """Watch the experts and the tide as they move. The page of /expert-map, for a terminal.

    Coverage is measured: the share of the routing weight that found its expert in memory, in the newest minute in which
    anything was asked; "expected next" is what it is thought to be of the next tokens. The figure behind a row of the
    map is how much of the layer is resident, whoever wants it. A sign of the map stands for one expert, or, where there
    are more than fit, for a few of a few layers.

    \b
    Keys: q ends, o orders the experts of a layer by number or by heat, s changes the span of the tide.

    \b
      tidectl top
      tidectl top --every 2 --url http://spark-1:8000
      tidectl top --once
    """
    from tidectl.live import top

    top.run(url, every, once, json)
