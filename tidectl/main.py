"""`tidectl`: the commands and their options. What they do is imported when it is run, so that help comes at once."""

import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tidectl.profiles import names as profile_names

HELP = """Serve a mixture-of-experts model that is larger than memory.

Data goes to stdout, words go to stderr. A PROFILE is a TOML file or the name of a bundled profile
(tidectl profile list).
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
Environment:
  TIDE_STATE_DIR  state directory; else /var/lib/tidelm (root, where it exists),
                  else $XDG_STATE_HOME/tidelm or ~/.local/state/tidelm
  TIDE_API_KEY    key for a server that wants one
  NO_COLOR        no colours
"""


class Commands(TyperGroup):
    """An error of ours ends a command with its text on stderr and its own exit code, never with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        from tided.errors import TideError

        try:
            return super().invoke(ctx)
        except TideError as error:
            from tidectl.output import report

            report(error)
            raise typer.Exit(error.exit_code) from error


app = typer.Typer(
    cls=Commands,
    help=HELP,
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
profile = typer.Typer(help="Check, list and explain profiles.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(profile, name="profile")

Profile = Annotated[str, typer.Argument(metavar="PROFILE", autocompletion=profile_names, help="File or bundled name.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Timeout = Annotated[float, typer.Option(min=1, help="Longest wait in seconds.")]


@app.command()
def start(profile: Profile, timeout: Timeout = 600, json: Json = False) -> None:
    """Start the ranks of a profile and wait until they serve."""
    from tidectl import lifecycle, profiles

    lifecycle.start(profiles.find(profile), timeout, json)


@app.command()
def stop(
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Seconds until the ranks are killed; else server.drain_s and 20.")
    ] = None,
    json: Json = False,
) -> None:
    """Stop what runs; running requests may finish first."""
    from tidectl import lifecycle

    lifecycle.stop(timeout, json)


@app.command()
def restart(
    profile: Annotated[
        str | None,
        typer.Argument(
            metavar="PROFILE", autocompletion=profile_names, help="Another profile; else the one that runs."
        ),
    ] = None,
    timeout: Timeout = 600,
    json: Json = False,
) -> None:
    """Stop what runs and start it, or another profile, again."""
    from tidectl import lifecycle, profiles

    lifecycle.restart(profiles.find(profile) if profile else None, timeout, json)


@app.command()
def status(json: Json = False) -> None:
    """What runs: ranks, model, residents, lanes. Exits with 3 when nothing runs, with 4 when it is not well."""
    from tidectl import status

    raise typer.Exit(status.show(json))


@app.command()
def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until the ranks end.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank's log.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log to begin with.")] = 50,
    json: Annotated[bool, typer.Option("--json", help="One JSON object; with --follow one a line.")] = False,
) -> None:
    """Show the logs of the ranks."""
    from tidectl import logs, state, supervisor

    directory = state.state_dir()
    logs.show(directory, rank, lines, follow, json, lambda: supervisor.is_locked(directory))


@app.command()
def chat(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The question; without one: a conversation, or standard input."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="The server; else what runs here, else http://127.0.0.1:8000.")
    ] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0: always the likeliest token.")] = None,
    thinking: Annotated[
        bool | None, typer.Option(help="Whether the model thinks first; else the server decides.")
    ] = None,
    stream: Annotated[bool, typer.Option(help="Show the answer while it is made.")] = True,
    json: Json = False,
) -> None:
    """Ask the model. The answer goes to stdout; thinking and statistics go to stderr."""
    from tidectl import chat

    chat.run(prompt, url, chat.Options(system, max_tokens, temperature, thinking, stream), json)


@app.command()
def logits(
    tokens: Annotated[Path, typer.Option(help="JSON file: an array of token ids.")],
    out: Annotated[Path, typer.Option(help="File to write: safetensors, fp32 [tokens, vocabulary] under 'logits'.")],
    profile: Annotated[
        str | None, typer.Argument(metavar="PROFILE", autocompletion=profile_names, help="File or bundled name.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A checkpoint directory instead of a profile.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Tokens computed at once.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Local ranks that share the model.")] = None,
    resident: Annotated[int | None, typer.Option(min=1, help="Resident experts; else all of them.")] = None,
    decode: Annotated[int, typer.Option(min=0, help="Compute the last N tokens one at a time.")] = 0,
    json: Json = False,
) -> None:
    """Teacher-forced logits of a list of token ids.

    They come from the engine itself, to be held against another implementation.
    """
    from tidectl import logits, profiles

    source = profiles.find(profile) if profile else None
    logits.run(source, checkpoint, tokens, out, logits.Options(chunk, ranks, resident, decode), json)


@app.command()
def version(json: Json = False) -> None:
    """Versions of TideLM and of what it computes with."""
    from tidectl import about

    about.show(json)


@profile.command("check")
def profile_check(file: Profile, json: Json = False) -> None:
    """Everything wrong with a profile at once. Exits with 78 on an error; notes say what a start would refuse."""
    from tidectl import profile_commands, profiles

    raise typer.Exit(profile_commands.check(profiles.find(file), json))


@profile.command("list")
def profile_list(json: Json = False) -> None:
    """The profiles that come with TideLM."""
    from tidectl import profile_commands

    profile_commands.list_bundled(json)


@profile.command("show")
def profile_show(file: Profile, json: Json = False) -> None:
    """Every key of a profile with its resolved value, what it does and what it affects."""
    from tidectl import profile_commands, profiles

    profile_commands.show(profiles.find(file), json)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that cannot be shown must not end an answer
    app()


if __name__ == "__main__":
    main()
