"""`tidectl eval`: its options."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidectl.options import Json
from tidectl.profiles import names as profile_names
from tided.errors import UsageError

if TYPE_CHECKING:
    from tided.engine.types import Fidelity

FIDELITY_HELP = "fast, balanced or exact; may be given again.  [default: fast and balanced of a server, else fast]"

InProcess = Annotated[
    str | None,
    typer.Argument(
        metavar="PROFILE",
        autocompletion=profile_names,
        help="Whose model to load in this process, for each budget anew.  [default: the server that runs]",
    ),
]
Budgets = Annotated[
    list[float] | None,
    typer.Option(
        metavar="PERCENT",
        min=1,
        max=100,
        help="Of all experts, those resident; may be given again.  [default with a profile: 80, 65, 50, 35]",
    ),
]
Fidelities = Annotated[list[str] | None, typer.Option(metavar="NAME", help=FIDELITY_HELP)]
Edit = Annotated[
    Path | None, typer.Option(metavar="FILE", help="An edit of the weights, compared with the model without it.")
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='Texts of your own, a line each: {"text": ...} or {"messages": [...]}.  [default: bundled]',
    ),
]
Domains = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Texts of this domain alone; may be given again.  [default: all]"),
]
Texts = Annotated[int, typer.Option(metavar="N", min=1, help="Of each domain; where there are fewer, that is said.")]
Longest = Annotated[
    int,
    typer.Option(
        metavar="TOKENS", min=64, help="A longer text loses its end; one whose prompt alone is longer is left out."
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Draws texts, and free answers.")]
Top = Annotated[
    int, typer.Option(metavar="N", min=1, max=100, help="Likeliest tokens that distributions are compared by.")
]
Answers = Annotated[
    int, typer.Option(metavar="N", min=0, help="Free answers of a server too, looked at for loops and open tags.")
]
AnswerTokens = Annotated[int, typer.Option(metavar="N", min=16, help="Most of each of them.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw loss by budget, as PNG.")]
Points = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keep the figures there, and show those of other starts too.")
]
Url = Annotated[
    str | None, typer.Option(metavar="URL", help="The server.  [default: what runs here, else http://127.0.0.1:8000]")
]
Tokenizer = Annotated[
    Path | None, typer.Option(metavar="DIR", help="tokenizer.json and config.json of a server elsewhere.")
]


def evaluate(
    profile: InProcess = None,
    budget: Budgets = None,
    fidelity: Fidelities = None,
    overlay: Edit = None,
    data: Data = None,
    domain: Domains = None,
    texts: Texts = 6,
    longest: Longest = 512,
    seed: Seed = 1,
    top: Top = 50,
    answers: Answers = 0,
    answer_tokens: AnswerTokens = 4096,
    plot: Plot = None,
    points: Points = None,
    url: Url = None,
    tokenizer: Tokenizer = None,
    json: Json = False,
) -> None:
    """Measure what residency costs, on texts whose tokens are known. In loss, likeliest token and divergence.

    Of the server that runs, each fidelity is compared with `exact`, which reads every expert it misses: the server
    needs slots for that (tide.sync_slots), and no expert moves for what is asked. With a profile the engine runs in
    this process, on one rank, and is compared with all experts resident: for models that fit here, as the minis do. A
    curve of a large model comes from several starts that keep their figures in one --points file.

    \b
      tidectl eval
      tidectl eval mini-deepseek --budget 65 --budget 40 --fidelity fast --fidelity balanced --plot loss.png
      tidectl eval mini-deepseek --overlay edited.safetensors
      tidectl eval --data mine.jsonl --answers 6 --points ds41.jsonl
    """
    from tidectl import profiles
    from tidectl.evals.run import Options, run

    options = Options(
        budgets=budget or (),
        fidelities=[_fidelity(name) for name in fidelity or ()],
        domains=domain or (),
        data=data,
        overlay=overlay,
        texts=texts,
        longest=longest,
        seed=seed,
        top=top,
        answers=answers,
        answer_tokens=answer_tokens,
        tokenizer=tokenizer,
        plot=plot,
        points=points,
    )
    run(profiles.find(profile) if profile else None, url, options, json)


def _fidelity(name: str) -> "Fidelity":
    known: dict[str, Fidelity] = {"fast": "fast", "balanced": "balanced", "exact": "exact"}
    if name not in known:
        raise UsageError(f"there is no fidelity '{name}'", hint="fast, balanced or exact")
    return known[name]
