"""`tidectl bench`: its options."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidectl.options import Json

if TYPE_CHECKING:
    from tidectl.bench.measure import Target

NAMES = ("prose", "code", "long-prompt", "streams", "prefix", "switch")

bench = typer.Typer(rich_markup_mode=None)

Url = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Any server with OpenAI's chat API.  [default: what runs here]"),
]
ApiKey = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Its key.  [default: $TIDE_API_KEY]")]


@bench.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Of {', '.join(NAMES)}; may be repeated.  [default: the first three]"),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="The model to ask for.  [default: the server's]")] = "",
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Tokens of an answer.  [default: 1024, less in a small context]"),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=16, help="Tokens of a long prompt.  [default: 8192, less in a small context]"),
    ] = None,
    streams: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Answers at once, in `streams`.")] = 4,
    repeat: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Runs of each case.")] = 3,
    temperature: Annotated[float, typer.Option(metavar="T", min=0, max=2, help="Of the draws.")] = 0.6,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of prompts and answers.")] = 1,
    fidelity: Annotated[str, typer.Option(metavar="NAME", help="fast, balanced or exact, of a TideLM server.")] = "",
    thinking: Annotated[bool | None, typer.Option(help="Whether the model thinks first.")] = None,
    receipt: Annotated[Path | None, typer.Option(metavar="FILE", help="To write; a new file.")] = None,
    json: Json = False,
) -> None:
    """Measure how fast a server is. An answer in prose and in code, the first token of a long prompt.

    Medians of three runs after a warm-up, 1,024 tokens each at temperature 0.6. The receipt is a file with all that the
    figures depend on, which `tidectl bench verify` adds up again and replays. It holds no text.

    A server learns from these requests as from any: to keep its history out of it, start it with tide.record = false.
    A long prompt's answer is short: an eighth of the others'.

    \b
      tidectl bench --receipt today.json
      tidectl bench --case streams --case switch --tokens 256
      tidectl bench --url http://other:8000 --api-key KEY
      tidectl bench verify today.json
    """
    if context.invoked_subcommand:
        return
    from tidectl.bench import run as runs
    from tidectl.bench.cases import Sizes

    given = {"answer_tokens": tokens, "prompt_tokens": prompt_tokens}
    sizes = Sizes(streams=streams, seed=seed)._replace(**{name: n for name, n in given.items() if n is not None})
    asked = _target(url, api_key)._replace(
        model=model, temperature=temperature, fidelity=_fidelity(fidelity), thinking=thinking
    )
    chosen = {name for name, n in {"tokens": tokens, "prompt_tokens": prompt_tokens}.items() if n is not None}
    runs.run(asked, runs.Options(_cases(case), runs.fitting(asked, sizes, chosen), repeat, receipt), json)


@bench.command("verify")
def verify(
    receipt: Annotated[Path, typer.Argument(metavar="RECEIPT", help="What `tidectl bench --receipt` wrote.")],
    replay: Annotated[bool, typer.Option(help="Run its cases again.")] = True,
    url: Url = None,
    api_key: ApiKey = None,
    tolerance: Annotated[
        float, typer.Option(metavar="SHARE", min=0, help="How much slower than the receipt is no failure.")
    ] = 0.15,
    json: Json = False,
) -> None:
    """Check a receipt, and make its runs again. It must be whole, and add up.

    Says how many answers have the same text; not all do where the resident experts have moved since. Exits with 1 if
    something is slower than the tolerance.
    """
    from tidectl.bench import verify as verifies

    raise typer.Exit(verifies.verify(receipt, _target(url, api_key) if replay else None, tolerance, json))


@bench.command("table")
def table(
    receipts: Annotated[list[Path], typer.Argument(metavar="RECEIPT...", help="What `tidectl bench` wrote.")],
) -> None:
    """Print receipts as one table in Markdown."""
    from tidectl.bench.receipt import read
    from tidectl.bench.table import markdown

    print(markdown([(path.stem, read(path)) for path in receipts]), end="")


def _cases(names: list[str] | None) -> list[str]:
    from tidectl.bench.cases import BY_NAME, USUAL
    from tided.errors import UsageError

    if unknown := [name for name in names or () if name not in BY_NAME]:
        raise UsageError(f"there is no case {unknown[0]}", where="--case", hint=f"one of {', '.join(BY_NAME)}")
    return list(dict.fromkeys(names or USUAL))


def _fidelity(name: str) -> str:
    from tided.errors import UsageError

    if name not in ("", "fast", "balanced", "exact"):
        raise UsageError(f"there is no fidelity {name}", where="--fidelity", hint="one of fast, balanced, exact")
    return name


def _target(url: str | None, api_key: str | None) -> "Target":
    import os

    from tidectl.bench.measure import Target
    from tidectl.running import server_url

    return Target(server_url(url), os.environ.get("TIDE_API_KEY", "") if api_key is None else api_key)
