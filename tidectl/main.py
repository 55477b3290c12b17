"""`tidectl`: the commands and their options. What they do is imported when it is run, so that help comes at once."""

import io
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from tidectl.profiles import names as profile_names

HELP = """Serve a mixture-of-experts model that is larger than memory.

\b
  tidectl profile list          the profiles that come with TideLM
  tidectl start mini-deepseek   start one, and wait until it serves
  tidectl status                what runs, and how it is doing
  tidectl chat "How many legs does a spider have?"
  tidectl stop

A PROFILE is a TOML file, or the name of a bundled one. Data goes to stdout, words go to stderr.
"""

EPILOG = """\b
Exit codes:
  0    ok
  1    failed
  2    wrong usage
  3    not running
  4    running, but not serving: starting, stopping, or in trouble
  65   a checkpoint or another file is missing or damaged
  69   something needed is not available: a port, a device, time
  70   the ranks failed
  77   not permitted
  78   a profile is wrong
  130  interrupted

\b
With --json stdout holds one object, of a failure too:
  {"schema": "tidectl.error/1", "error": {"what", "where", "hint", "exit_code"}}

\b
Environment:
  TIDE_STATE_DIR  state directory; else /var/lib/tidelm (root, where it exists),
                  else $XDG_STATE_HOME/tidelm or ~/.local/state/tidelm.
                  A relative one counts from where the command is run
  TIDE_API_KEY    key for a server that wants one
  NO_COLOR        no colours
"""


AS_JSON = "tidectl.json"


class Commands(TyperGroup):
    """An error of ours ends a command with its text on stderr and its own exit code, never with a traceback. With
    --json whatever ends it early is an object on stdout as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[AS_JSON] = "--json" in args[: args.index("--") if "--" in args else None]
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def invoke(self, ctx: Any) -> Any:
        from tided.errors import TideError

        try:
            return super().invoke(ctx)
        except TideError as error:
            from tidectl.output import report

            report(error)
            _tell(ctx, error.what, error.where, error.hint, error.exit_code)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt:
            _tell(ctx, "interrupted", "", "", 130)
            raise
        except Exception as error:
            if hasattr(error, "format_message"):  # a wrong call, for which typer has no public class; it is on stderr
                _tell(ctx, error.format_message(), "", "see --help", getattr(error, "exit_code", 2))
            raise


def _tell(ctx: Any, what: str, where: str, hint: str, exit_code: int) -> None:
    if ctx.meta.get(AS_JSON):
        from tidectl.output import emit

        emit("error/1", {"error": {"what": what, "where": where, "hint": hint, "exit_code": exit_code}})


app = typer.Typer(
    cls=Commands,
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(asked: bool) -> None:
    if asked:
        from tidectl import about

        print(about.line())
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


profile = typer.Typer(help="Check, list and explain profiles.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(profile, name="profile")
tide = typer.Typer(help="What the server has learned of its traffic.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(tide, name="tide")

PROFILE_HELP = "A TOML file, or a name of `tidectl profile list`."
Profile = Annotated[str, typer.Argument(metavar="PROFILE", autocompletion=profile_names, help=PROFILE_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=1, help="How long to wait until the ranks serve.")]


@app.command()
def start(profile: Profile, timeout: Timeout = 600, json: Json = False) -> None:
    """Start the ranks of a profile and wait until they serve.

    What can be refused is refused first: an error in the profile, a missing checkpoint, a port in use. A start that
    takes longer than the timeout goes on; Ctrl-C ends it.

    \b
      tidectl start mini-deepseek
      tidectl start my-profile.toml --timeout 1800
    """
    from tidectl import lifecycle, profiles

    lifecycle.start(profiles.find(profile), timeout, json)


@app.command()
def stop(
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="When to kill what still runs.  [default: the profile's server.drain_s + 20]"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Stop what runs, once the running requests have finished.

    New requests are refused at once. What has not ended after the timeout is killed, and the requests that were cut are
    counted.
    """
    from tidectl import lifecycle

    lifecycle.stop(timeout, json)


@app.command()
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
    json: Json = False,
) -> None:
    """Stop what runs and start it again, or another profile.

    The profile is checked first: a mistake in it leaves running what runs.
    """
    from tidectl import lifecycle, profiles

    lifecycle.restart(profiles.find(profile) if profile else None, timeout, json)


@app.command()
def status(json: Json = False) -> None:
    """Show what runs: model, residents, lanes, speed, ranks.

    Exits with 0 when it serves, with 3 when nothing runs, with 4 when it is starting, stopping or in trouble.
    """
    from tidectl import status

    raise typer.Exit(status.show(json))


@app.command()
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until the ranks end.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="RANK", min=0, help="Only the log of this rank.")] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="Begin with the last N lines of each log.")
    ] = 50,
    all_runs: Annotated[bool, typer.Option("--all", help="Earlier runs too, not the current or last alone.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; with --follow one a line.")] = False,
) -> None:
    """Show the logs of the ranks: of the run that is under way, else of the last one.

    \b
      tidectl logs -f
      tidectl logs --all -n 1000
      tidectl logs --rank 1 -n 500
    """
    from tidectl import logs, state, supervisor

    directory = state.state_dir()
    ranks = logs.choose(directory, rank, all_runs, supervisor.status(directory))
    logs.show(directory, ranks, lines, follow, all_runs, json, lambda: supervisor.is_locked(directory))


@app.command()
def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="The question. Without one: standard input, or a conversation on a terminal."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The server.  [default: what runs here, else http://127.0.0.1:8000]"),
    ] = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="A system prompt.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Longest answer, thinking included.  [default: the server's]")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="T", min=0, max=2, help="0: always the likeliest token.  [default: the server's]"),
    ] = None,
    thinking: Annotated[
        bool | None, typer.Option(help="Whether the model thinks first.  [default: the server's]")
    ] = None,
    stream: Annotated[bool, typer.Option(help="Show the answer while it is made.")] = True,
    json: Json = False,
) -> None:
    """Ask the model a question, or talk with it.

    The answer goes to stdout; thinking and statistics go to stderr.

    \b
      tidectl chat "How many legs does a spider have?"
      tidectl chat --no-thinking --max-tokens 200 < question.txt > answer.txt
      tidectl chat
    """
    from tidectl import chat

    chat.run(prompt, url, chat.Options(system, max_tokens, temperature, thinking, stream), json)


@app.command()
def logits(
    tokens: Annotated[Path, typer.Option(metavar="FILE", help="JSON: an array of token ids.")],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="safetensors to write: fp32 [tokens, vocabulary] under 'logits'.")
    ],
    profile: Annotated[
        str | None, typer.Argument(metavar="PROFILE", autocompletion=profile_names, help=PROFILE_HELP)
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A checkpoint instead of a profile: one rank, all experts resident."),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens computed at once.  [default: the profile's]")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Local ranks that share the model.  [default: the profile's]")
    ] = None,
    resident: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Resident experts.  [default: the profile's]")
    ] = None,
    decode: Annotated[
        int, typer.Option(metavar="N", min=0, help="Compute the last N tokens one at a time, as decoding does.")
    ] = 0,
    numerics: Annotated[
        Literal["native", "fp32"] | None,
        typer.Option(
            help="native: rounding as the model was made for; fp32: none.  [default: the profile's, else native]"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write the logits of a list of token ids to a file.

    Teacher-forced, by the engine itself: to be held against another implementation.

    \b
      echo "[0, 17, 42]" > ids.json
      tidectl logits mini-deepseek --tokens ids.json --out logits.safetensors
    """
    from tidectl import logits, profiles

    source = profiles.find(profile) if profile else None
    logits.run(source, checkpoint, tokens, out, logits.Options(chunk, ranks, resident, decode, numerics), json)


@app.command()
def pack(
    profile: Annotated[
        str | None, typer.Argument(metavar="PROFILE", autocompletion=profile_names, help=PROFILE_HELP)
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkpoint instead of a profile; needs --ranks and --out.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=64, help="Ranks that share an expert.  [default: the profile's]"),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(metavar="RANK", min=0, help="Only the pack of this rank.  [default: of all]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the packs go.  [default: the profile's experts.pack_dir]"),
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read a pack and check every byte; nothing is written.")
    ] = None,
    json: Json = False,
) -> None:
    """Write the routed experts of a checkpoint as packs, one file a rank.

    From a pack an expert is one read of its rank's share alone. A profile uses packs with experts.source = "pack" and
    experts.pack_dir. What is ended goes on where it stopped when it is run again; a pack that is there stays.

    \b
      tidectl pack ds41-mxfp4 --out /var/lib/tidelm/packs
      tidectl pack ds41-mxfp4 --rank 1 --out /var/lib/tidelm/packs
      tidectl pack --verify /var/lib/tidelm/packs/experts-rank-0-of-2.mxfp4
    """
    from tidectl import pack, profiles

    source = profiles.find(profile) if profile else None
    pack.run(source, checkpoint, verify, pack.Options(ranks, rank, out), json)


@app.command()
def version(json: Json = False) -> None:
    """Show the versions of TideLM and of what it computes with."""
    from tidectl import about

    about.show(json)


@profile.command("check")
def profile_check(file: Profile, json: Json = False) -> None:
    """Tell everything that is wrong with a profile.

    Its keys and values, and whether its checkpoint can do what it asks for. Exits with 78 on an error. A note is none;
    it tells what else a start here and now would refuse: a missing checkpoint, a port in use, a key that this build
    does not act on.
    """
    from tidectl import profile_commands, profiles

    raise typer.Exit(profile_commands.check(profiles.find(file), json))


@profile.command("list")
def profile_list(json: Json = False) -> None:
    """List the profiles that come with TideLM, and what keeps this build from starting one here."""
    from tidectl import profile_commands

    profile_commands.list_bundled(json)


@profile.command("show")
def profile_show(file: Profile, json: Json = False) -> None:
    """Show every key of a profile: its resolved value, what it does, what it affects."""
    from tidectl import profile_commands, profiles

    profile_commands.show(profiles.find(file), json)


TIDE_PROFILE_HELP = "Whose history.  [default: that of the profile that runs, or ran last]"
TideProfile = Annotated[
    str | None, typer.Argument(metavar="PROFILE", autocompletion=profile_names, help=TIDE_PROFILE_HELP)
]


@tide.command("show")
def tide_show(profile: TideProfile = None, json: Json = False) -> None:
    """Show what was learned: requests, their weight against the seed, residents by layer, what moved most.

    Coverage is the share of the recorded demand that the experts take which a start would keep.
    """
    from tidectl import profiles, tide

    tide.show(profiles.find(profile) if profile else None, json)


@tide.command("export")
def tide_export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="To write; JSON.")],
    profile: TideProfile = None,
    json: Json = False,
) -> None:
    """Write a history to a file: counts of picks over all requests, no text. The daemon may be running."""
    from tidectl import profiles, tide

    tide.export(file, profiles.find(profile) if profile else None, json)


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
    from tidectl import profiles, tide

    tide.import_(file, profiles.find(profile) if profile else None, merge, replace, json)


@tide.command("merge")
def tide_merge(
    one: Annotated[Path, typer.Argument(metavar="A", help="An exported history.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another one, of the same model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="To write: the votes of both.")],
    json: Json = False,
) -> None:
    """Add two exported histories of one model."""
    from tidectl import tide

    tide.merge(one, other, out, json)


@tide.command("reset")
def tide_reset(
    profile: TideProfile = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Forget what was learned: the history is set aside under another name, and the next start begins with the seed.

    Refused while a daemon records.
    """
    from tidectl import profiles, tide

    tide.reset(profiles.find(profile) if profile else None, yes, json)


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
        Path | None, typer.Option(metavar="FILE", help="A recorded trace instead of simulated traffic.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare policies for what to keep in memory, on simulated traffic.

    Ours is the code that serves: planner, pilot and hot reads. All policies have the same memory and may read as
    much. Exits with 1 when a policy missed less than ours, or read less, or when the control shows a gain.

    \b
      tidectl tide simulate
      tidectl tide simulate --traffic switching --share 0.4 --seeds 1
      tidectl tide simulate --trace bench/data/mini-routing.safetensors
    """
    from tidectl import simulate

    options = simulate.Options(traffic or [], share or [], seeds, layers, control, trace)
    raise typer.Exit(simulate.run(options, json))


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that cannot be shown must not end an answer
    app()


if __name__ == "__main__":
    main()
