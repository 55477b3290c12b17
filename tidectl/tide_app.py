"""`tidectl tide`: its commands and their options."""

from pathlib import Path
from typing import Annotated

import typer

from tidectl.options import Json
from tidectl.profiles import names as profile_names

HELP = """What the server has learned of its traffic.

\b
  tidectl tide show
  tidectl tide export learned.json
  tidectl tide reset mini-deepseek
"""
tide = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)

TIDE_PROFILE_HELP = "Whose history.  [default: that of the profile that runs, or ran last]"
TideProfile = Annotated[
    str | None, typer.Argument(metavar="PROFILE", autocompletion=profile_names, help=TIDE_PROFILE_HELP)
]


@tide.command("show")
def tide_show(profile: TideProfile = None, json: Json = False) -> None:
    """Show what was learned. Requests, their weight against the seed, residents by layer, what moved most.

    Recorded: the share of the history's demand that is for experts which a start would keep; topics: of the demand of
    each topic of the seed. Neither was measured while it served: that is the coverage of `tidectl top`. "at a start"
    and "of its bytes" are how much of a layer is kept, whoever wants it.
    """
    from tidectl import profiles
    from tidectl.tide.show import show

    show(profiles.find(profile) if profile else None, json)


@tide.command("export")
def tide_export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To write; JSON.")],
    profile: TideProfile = None,
    json: Json = False,
) -> None:
    """Write a history to a file, for `tidectl tide import`. Counts of picks over all requests, no text. The daemon may
    be running."""
    from tidectl import profiles
    from tidectl.tide import histories

    histories.export(file, profiles.find(profile) if profile else None, json)


@tide.command("import")
def tide_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `tidectl tide export` wrote.")],
    profile: TideProfile = None,
    merge: Annotated[bool, typer.Option("--merge", help="Add its votes to those of the history.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Set the history aside, begin with the file.")] = False,
    json: Json = False,
) -> None:
    """Take over an exported history of the same model. Refused while a daemon records.

    \b
      tidectl tide export learned.json
      tidectl tide import learned.json mini-deepseek --merge
    """
    from tidectl import profiles
    from tidectl.tide import histories

    histories.import_(file, profiles.find(profile) if profile else None, merge, replace, json)


@tide.command("merge")
def tide_merge(
    one: Annotated[Path, typer.Argument(metavar="A", help="An exported history.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another one, of the same model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="To write: the votes of both.")],
    json: Json = False,
) -> None:
    """Add two exported histories of one model."""
    from tidectl.tide import histories

    histories.merge(one, other, out, json)


@tide.command("reset")
def tide_reset(
    profile: TideProfile = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Forget what was learned. The history is set aside under another name, and the next start begins with the seed.

    Refused while a daemon records.
    """
    from tidectl import profiles
    from tidectl.tide import histories

    histories.reset(profiles.find(profile) if profile else None, yes, json)


@tide.command("simulate")
def tide_simulate(
    traffic: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="mixed or switching; may be given twice.  [default: both]"),
    ] = None,
    share: Annotated[
        list[float] | None,
        typer.Option(
            metavar="SHARE",
            min=0.05,
            max=1,
            help="Of all experts, those in memory; may be given again.  [default: 0.25, 0.4, 0.65]",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Runs of each, with seeds 0 to N - 1.")] = 5,
    layers: Annotated[
        int, typer.Option(metavar="N", min=1, max=40, help="Layers of the simulated model; the real one has 40.")
    ] = 8,
    control: Annotated[
        bool, typer.Option(help="Add the control: traffic without popularity or memory, where no policy can gain.")
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Routing that bench/record_routing.py recorded, instead of simulated traffic."
        ),
    ] = None,
    rest: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=3600,
            help="That nobody asks behind each request; without, the next one always waits already.",
        ),
    ] = 0.0,
    json: Json = False,
) -> None:
    """Compare policies of what to keep in memory. On simulated traffic.

    Ours is the code that serves: planner, pilot, hot reads, and what the engine asks of them when. All policies have
    the same memory and the same disks. Exits with 1 when a policy missed less than ours, or read less, or when the
    control shows a gain.

    \b
      tidectl tide simulate
      tidectl tide simulate --traffic switching --share 0.4 --seeds 1
      tidectl tide simulate --trace bench/data/mini-routing.safetensors
    """
    from tidectl import simulate

    options = simulate.Options(traffic or [], share or [], seeds, layers, control, trace, rest)
    raise typer.Exit(simulate.run(options, json))
