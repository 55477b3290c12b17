"""`tidectl`: the commands and their options. What they do is imported when it is run, so that help comes at once."""

import io
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from tidectl.audit_command import audit
from tidectl.bench_command import bench
from tidectl.budget_command import budget
from tidectl.doctor_command import doctor
from tidectl.eval_command import evaluate
from tidectl.fetch_command import fetch
from tidectl.group import Commands
from tidectl.guard_command import guard
from tidectl.model_commands import fit, logits, pack, parse, render, synth
from tidectl.options import Json
from tidectl.plan_command import plan
from tidectl.profile_app import profile
from tidectl.purge_command import purge
from tidectl.serve_commands import logs, restart, start, status, stop
from tidectl.service_app import service
from tidectl.talk_commands import chat, why
from tidectl.tide_app import tide
from tidectl.top_command import top

HELP = """Serve a mixture-of-experts model that is larger than memory.

\b
  tidectl profile list          the profiles that have a name
  tidectl start mini-deepseek   start one, and wait until it serves
  tidectl status                what runs, and how it is doing
  tidectl chat "How many legs does a spider have?"
  tidectl stop

A PROFILE is a TOML file, or a name: of a bundled one, or of this node's own (/etc/tidelm/NAME.toml). Before a large
model: `tidectl fetch`, `plan` and `doctor`. When something is wrong: `tidectl status`, `logs` and `doctor`. Data goes
to stdout, words go to stderr.
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
  HF_TOKEN        key for a hub that wants one, of `fetch` and `fit`
  HF_ENDPOINT     another hub
  NO_COLOR        no colours
"""

Command = Callable[..., None]

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


def version(json: Json = False) -> None:
    """Show the versions of TideLM and of what it computes with."""
    from tidectl import about

    about.show(json)


SERVING: tuple[Command, ...] = (start, stop, restart, status, top, logs, chat, why, audit)
OTHERS: tuple[Command, ...] = (plan, doctor, guard, fetch, pack, fit, synth, render, parse, logits, purge, version)

for _command in SERVING:
    app.command()(_command)
app.command("eval")(evaluate)
app.command(context_settings={"ignore_unknown_options": True})(budget)  # `-5G` is an amount
for _command in OTHERS:
    app.command()(_command)
for _name, _group in (("profile", profile), ("tide", tide), ("bench", bench), ("service", service)):
    app.add_typer(_group, name=_name)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: a start is ended, a terminal put right
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that cannot be shown must not end an answer
    app()


if __name__ == "__main__":
    main()
