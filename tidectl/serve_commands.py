"""`tidectl start`, `stop`, `restart`, `status`, `logs`: their arguments and options."""

from typing import Annotated

import typer

from tidectl.options import Here, Json, Profile, Timeout
from tidectl.profiles import names as profile_names


def start(profile: Profile, timeout: Timeout = 600, here: Here = False, json: Json = False) -> None:
    """Start a profile on all its nodes, and wait until it serves.

    On rank 0's machine; the others of parallel.hosts are reached by ssh, which must not ask for anything. They get
    the profile and the keys; a file node.toml in their state directory may set paths and adapters of their own.

    What can be refused is refused first: an error in the profile, a missing checkpoint, a port in use, another build.
    When one rank ends, all end. A start that takes longer than the timeout goes on; Ctrl-C ends it. Once it serves:
    `tidectl chat`, `tidectl top`, and `tidectl stop`.

    \b
      tidectl start mini-deepseek
      tidectl start my-profile.toml --timeout 1800
    """
    from tidectl import profiles

    source = profiles.find(profile)  # a name that means nothing is told before anything is loaded
    from tidectl import lifecycle

    lifecycle.start(source, timeout, json, here)


def stop(
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="When to kill what still runs.  [default: the profile's server.drain_s + 20]"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Stop what runs, on all its nodes. Running requests finish first.

    New requests are refused at once. What has not ended after the timeout is killed, and the requests that were cut are
    counted.
    """
    from tidectl import lifecycle

    lifecycle.stop(timeout, json)


def restart(
    profile: Annotated[
        str | None,
        typer.Argument(
            metavar="PROFILE",
            autocompletion=profile_names,
            help="Another profile.  [default: the one that runs, or ran last]",
        ),
    ] = None,
    timeout: Timeout = 600,
    here: Here = False,
    json: Json = False,
) -> None:
    """Stop what runs and start it again, or another profile.

    The profile is checked first, on every node and against its checkpoint, and the nodes are compared: a mistake leaves
    running what runs. Memory alone cannot be judged while the old one holds it.
    """
    from tidectl import profiles

    source = profiles.find(profile) if profile else None
    from tidectl import lifecycle

    lifecycle.restart(source, timeout, json, here)


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again every second, until interrupted.")] = False,
    json: Json = False,
) -> None:
    """Show what runs: model, residents, lanes, speed, memory, ranks. Of all nodes.

    The share beside the residents says how much of the experts is in memory, not how well that serves: `tidectl top`
    measures the coverage.

    Exits with 0 when it serves, with 3 when nothing runs, with 4 when it is starting, stopping or in trouble.
    """
    from tidectl import status

    raise typer.Exit(status.watch(json) if watch else status.show(json))


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until the ranks end.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="RANK", min=0, help="Only the log of this rank.")] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="Begin with the last N lines of each log.")
    ] = 50,
    all_runs: Annotated[bool, typer.Option("--all", help="Earlier runs too, not the current or last alone.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; with --follow one a line.")] = False,
) -> None:
    """Show the logs of the ranks on all nodes, by time. Of the run that is under way, else of the last one.

    \b
      tidectl logs -f
      tidectl logs --all -n 1000
      tidectl logs --rank 1 -n 500
    """
    from tidectl import all_logs

    all_logs.show(rank, lines, follow, all_runs, json)
