"""`tidectl`: the commands and their options. What they do is imported when it is run, so that help comes at once."""

import io
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from tidectl.audit_command import audit
from tidectl.bench_command import bench
from tidectl.budget_command import budget
from tidectl.doctor_command import doctor
from tidectl.eval_command import evaluate
from tidectl.fetch_command import fetch
from tidectl.group import Commands
from tidectl.guard_command import guard
from tidectl.options import PROFILE_HELP, Here, Json, Profile, Timeout
from tidectl.plan_command import plan
from tidectl.profile_app import profile
from tidectl.profiles import names as profile_names
from tidectl.service_app import service
from tidectl.tide_app import tide
from tidectl.top_command import top

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


app.add_typer(profile, name="profile")
app.add_typer(tide, name="tide")
app.add_typer(service, name="service")
app.add_typer(bench, name="bench")
app.command()(doctor)
app.command()(fetch)
app.command()(plan)
app.command()(top)
app.command("eval")(evaluate)
app.command()(audit)
app.command()(guard)
app.command(context_settings={"ignore_unknown_options": True})(budget)


@app.command()
def start(profile: Profile, timeout: Timeout = 600, here: Here = False, json: Json = False) -> None:
    """Start the ranks of a profile on all its nodes and wait until they serve.

    On rank 0's machine; the others of parallel.hosts are reached by ssh, which must not ask for anything. They get
    the profile and the keys; a file node.toml in their state directory may set paths and adapters of their own.

    What can be refused is refused first: an error in the profile, a missing checkpoint, a port in use, another build.
    When one rank ends, all end. A start that takes longer than the timeout goes on; Ctrl-C ends it.

    \b
      tidectl start mini-deepseek
      tidectl start my-profile.toml --timeout 1800
    """
    from tidectl import profiles

    source = profiles.find(profile)  # a name that means nothing is told before anything is loaded
    from tidectl import lifecycle

    lifecycle.start(source, timeout, json, here)


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
    """Stop what runs, on all its nodes, once the running requests have finished.

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


@app.command()
def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again every second, until interrupted.")] = False,
    json: Json = False,
) -> None:
    """Show what runs: model, residents, lanes, speed, memory, the ranks of all nodes.

    Exits with 0 when it serves, with 3 when nothing runs, with 4 when it is starting, stopping or in trouble.
    """
    from tidectl import status

    raise typer.Exit(status.watch(json) if watch else status.show(json))


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
    """Show the logs of the ranks on all nodes, by time: of the run that is under way, else of the last one.

    \b
      tidectl logs -f
      tidectl logs --all -n 1000
      tidectl logs --rank 1 -n 500
    """
    from tidectl import all_logs

    all_logs.show(rank, lines, follow, all_runs, json)


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
    fidelity: Annotated[
        Literal["fast", "balanced", "exact"] | None,
        typer.Option(
            help="What becomes of missing experts: substituted, read if heavy, read.  [default: the server's]"
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="An image that goes with the question; may be given again."),
    ] = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="For servers of many models; TideLM needs none.")] = "",
    stream: Annotated[bool, typer.Option(help="Show the answer while it is made.")] = True,
    markdown: Annotated[bool, typer.Option(help="On a terminal: draw markdown, fold the thinking.")] = True,
    json: Json = False,
) -> None:
    """Ask the model a question, or talk with it.

    The answer goes to stdout; thinking and statistics go to stderr. On a terminal markdown is drawn and the thinking is
    folded; in a conversation /help tells what else there is. Any server of OpenAI's API will do.

    \b
      tidectl chat "How many legs does a spider have?"
      tidectl chat --image cat.png "What is this?"
      tidectl chat --no-thinking --max-tokens 200 < question.txt > answer.txt
      tidectl chat
    """
    from tidectl import chat

    images = tuple(image or ())
    options = chat.Options(system, max_tokens, temperature, thinking, stream, model, fidelity or "", images, markdown)
    chat.run(prompt, url, options, json)


@app.command()
def why(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The id of an answer (chatcmpl-...).  [default: the newest]")
    ] = "latest",
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The server.  [default: what runs here, else http://127.0.0.1:8000]"),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Experts to show, those missed most first.")] = 20,
    json: Json = False,
) -> None:
    """Tell which experts a request wanted, missed and got, and when.

    The server keeps this of its newest requests: numbers alone, no text.

    \b
    Why it moved: "prompt", by a plan behind a prompt or a part of it; "decode" and "urgent", by one during an
    answer (urgent: it missed badly); "idle", by one between requests; "hot read", for a missed pick at once.
    "for L/E" names the expert that gave way to it, E of layer L.

    \b
      tidectl why
      tidectl why chatcmpl-0uS4GkMYd0dUqhTxYR8zTqzq --top 50
    """
    from tidectl import why

    why.run(request, url, top, json)


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
def render(
    profile: Annotated[
        str | None,
        typer.Argument(
            metavar="PROFILE", autocompletion=profile_names, help="Whose model family, tokenizer and defaults count."
        ),
    ] = None,
    family: Annotated[
        Literal["deepseek-v41", "glm53"] | None,
        typer.Option(help="The model family whose prompt format is used.  [default: the profile's]"),
    ] = None,
    api: Annotated[
        Literal["openai", "anthropic"], typer.Option(help="Whose body comes in: chat completions, or messages.")
    ] = "openai",
    ids: Annotated[bool, typer.Option("--ids", help="Print the token ids, one JSON array; needs PROFILE.")] = False,
) -> None:
    """Print the prompt that a request becomes, and nothing else: no line end is added.

    The request is one JSON object on stdin: the body of an API call, or an object of "messages", "tools" and "options".

    \b
      tidectl render --family deepseek-v41 < body.json
      tidectl render --family glm53 --api anthropic < body.json
      tidectl render mini-deepseek --ids < body.json
    """
    from tidectl import profiles
    from tided.errors import UsageError

    source = profiles.find(profile) if profile else None
    if ids and source is None:
        raise UsageError("--ids needs a profile, for its tokenizer", hint="tidectl render PROFILE --ids")
    if family is None and source is None:
        hint = "tidectl render PROFILE, or tidectl render --family deepseek-v41"
        raise UsageError("name a profile or a family: whose prompt format is it?", hint=hint)
    from tidectl import render

    render.run(family, api, source, ids)


@app.command()
def parse(
    family: Annotated[
        Literal["deepseek-v41", "glm53"], typer.Option(help="The model family whose output format is read.")
    ],
    options: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="thinking, backend_finish (stop or length), stop, tools_enabled, starts_inside_calls_block.",
        ),
    ] = "{}",
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON: the request's tools, an array as OpenAI takes it.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Characters fed at once.  [default: all]")
    ] = None,
) -> None:
    """Read what a model wrote, and print the message that clients get: one JSON object.

    The generated text comes on stdin, markers as they are spelled, and is never changed by how it is fed.

    \b
      tidectl parse --family deepseek-v41 < output.txt
      tidectl parse --family glm53 --tools tools.json --chunk 3 < output.txt
    """
    from tidectl import parse

    parse.run(family, options, tools, chunk)


@app.command()
def pack(
    profile: Annotated[
        str | None, typer.Argument(metavar="PROFILE", autocompletion=profile_names, help=PROFILE_HELP)
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkpoint instead of a profile; needs --ranks and --out.")
    ] = None,
    exl3: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The same, whose experts must be EXL3; --out is DIR-packs where not given."),
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
      tidectl pack --exl3 /models/GLM-5.3-exl3 --rank 0 --ranks 2
      tidectl pack --verify /var/lib/tidelm/packs/experts-rank-0-of-2.mxfp4
    """
    from tidectl import pack, profiles

    source = profiles.find(profile) if profile else None
    pack.run(source, checkpoint, verify, pack.Options(ranks, rank, out, exl3), json)


@app.command()
def fit(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A directory, or owner/model[@revision] of a hub.")],
    edited: Annotated[str, typer.Argument(metavar="EDITED", help="The same checkpoint, edited.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the directions go.")],
    layers: Annotated[str, typer.Option(metavar="A-B", help="Only these layers.  [default: all]")] = "",
    json: Json = False,
) -> None:
    """Recover the directions that an abliterated checkpoint took out, for model.ablation.

    Reads both checkpoints a tensor at a time, of a hub by ranges of bytes, and keeps nothing but FILE. A layer whose
    edit is not that of one direction ends it. What is ended goes on where it stopped when it is run again. HF_TOKEN
    and HF_ENDPOINT count.

    \b
      tidectl fit zai-org/GLM-5.3-BF16 owner/GLM-5.3-abliterated --out glm53.ablation.safetensors
    """
    from tidectl import fit as fitting

    fitting.run(base, edited, out, layers, json)


@app.command()
def synth(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory, or an unfinished one of the same kind.")],
    like: Annotated[str, typer.Option(metavar="NAME", help="Whose shapes: ds41 or glm53.")] = "ds41",
    layers: Annotated[int | None, typer.Option(metavar="N", help="Its first layers.  [default: all]")] = None,
    experts: Annotated[int | None, typer.Option(metavar="N", help="Routed experts of a layer.  [default: all]")] = None,
    engram_vocabulary: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=200, help="Rows of an Engram table for each of its 24 hash heads.  [default: 16,000,000]"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Other numbers.")] = 0,
    in_memory: Annotated[
        bool, typer.Option("--in-memory", help="Write headers alone; the numbers are made as the engine reads them.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a checkpoint of made-up weights in a released model's shapes, to try what a machine can hold and how fast.

    Names, formats and shards are the released model's; answers are noise. What is ended goes on where it stopped when
    it is run again.

    \b
      tidectl synth /tmp/ds41 --in-memory
      tidectl synth /tmp/glm53 --like glm53 --in-memory
      tidectl synth /data/ds41-small --layers 4 --experts 32 --engram-vocabulary 100000
    """
    from tidectl import synth

    synth.run(out, like, layers, experts, engram_vocabulary, seed, in_memory, json)


@app.command()
def version(json: Json = False) -> None:
    """Show the versions of TideLM and of what it computes with."""
    from tidectl import about

    about.show(json)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: a start is ended, a terminal put right
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that cannot be shown must not end an answer
    app()


if __name__ == "__main__":
    main()
