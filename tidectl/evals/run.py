"""`tidectl eval`: draws the texts, has them scored in every case, and compares with the reference."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tidectl.evals import figures, points, show
from tidectl.evals.answers import Checks, check_answers
from tidectl.evals.drawing import Drawn, draw, shortages
from tidectl.evals.figures import Judged, judge
from tidectl.evals.targets import Held, Offline, Scored, Scorer, Server, Start, Target, stock
from tidectl.evals.texts import FILE, Text, read
from tidectl.output import emit, say
from tidectl.running import server_url
from tidectl.waiting import Item, Show, waiting
from tidectl.writable import refuse_unwritable
from tided.engine.types import Fidelity
from tided.errors import DataError, UsageError


class Options(NamedTuple):
    """`budgets`: experts resident, in percent. `top`: likeliest tokens that distributions are compared by. `answers`:
    free ones that are looked at for degeneration, of `answer_tokens` each."""

    budgets: Sequence[float] = ()
    fidelities: Sequence[Fidelity] = ()
    domains: Sequence[str] = ()
    data: Path | None = None
    overlay: Path | None = None
    texts: int = 6
    longest: int = 512
    seed: int = 1
    top: int = 50
    answers: int = 0
    answer_tokens: int = 4096
    tokenizer: Path | None = None
    plot: Path | None = None
    points: Path | None = None


class Case(NamedTuple):
    label: str
    fidelity: Fidelity
    start: Start


def run(profile: Path | None, url: str | None, options: Options, as_json: bool) -> None:
    _refuse_unwritable(options)
    with waiting() as progress:
        target, reference, cases = _server(url, options) if profile is None else _offline(profile, options)
        drawn = chosen(target, options)
        texts = [text for one in drawn.values() for text in one.texts]
        rows = measured(target, texts, reference, cases, options.top, progress)
        checks = _checks(target, cases, options, progress)
    key = hashlib.blake2b("".join(text.key for text in texts).encode(), digest_size=8).hexdigest()
    alike = {"model": target.name, "texts": key, "top": options.top, "reference": reference.label}
    rows = [alike | row for row in rows]
    shown = points.kept(options.points, rows) if options.points else rows
    if options.plot:
        from tidectl.evals import plot

        plot.draw(options.plot, plot.series(shown), f"{target.name}: loss by budget")
    report = {
        "target": target.name,
        "texts": {
            "file": str(options.data or FILE),
            "key": key,
            "count": len(texts),
            "seed": options.seed,
            "domains": {domain: one.as_data() for domain, one in drawn.items()},
        },
        "top": options.top,
        "reference": reference.label,
        "rows": shown,
        "answers": None if checks is None else checks.report(),
        "plot": None if options.plot is None else str(options.plot),
    }
    if as_json:
        emit("eval/1", report)
    else:
        show.show(report)


def _refuse_unwritable(options: Options) -> None:
    """Before minutes are spent. Raises TideError."""
    if options.points:
        points.refuse(options.points)
    if options.plot:
        if options.plot.suffix.lower() != ".png":
            raise UsageError("a plot is a PNG", where=str(options.plot), hint="--plot FILE.png")
        refuse_unwritable(options.plot, "--plot")


def _server(url: str | None, options: Options) -> tuple[Target, Case, list[Case]]:
    """The reference is `exact`: what all experts would say, at any budget."""
    if options.budgets or options.overlay:
        what = "--budget" if options.budgets else "--overlay"
        hint = "tidectl eval PROFILE starts the engine for each; or start the server anew and add to one --points FILE"
        raise UsageError(f"{what}: a server that runs has its budget and its weights", hint=hint)
    target = Server(server_url(url), os.environ.get("TIDE_API_KEY", ""), options.tokenizer, options.top)
    cases = [Case(one, one, Start()) for one in options.fidelities or ("fast", "balanced")]
    return target, Case("exact", "exact", Start()), [one for one in cases if one.fidelity != "exact"]


def _offline(profile: Path, options: Options) -> tuple[Target, Case, list[Case]]:
    """The reference is the model without edits, with all experts resident."""
    from tided.profile import load_for_start

    if options.answers:
        raise UsageError(
            "--answers needs a server that runs", hint="tidectl start PROFILE, then tidectl eval --answers N"
        )
    target = Offline(stock(load_for_start(profile)), options.longest, options.top)
    edit = str(options.overlay.absolute()) if options.overlay else ""
    reference = Case("all resident", "fast", Start(100.0))
    if edit:
        return target, reference, [Case("edited", "fast", Start(100.0, edit))]
    budgets = options.budgets or (80.0, 65.0, 50.0, 35.0)
    return (
        target,
        reference,
        [Case(fidelity, fidelity, Start(share)) for share in budgets for fidelity in options.fidelities or ("fast",)],
    )


def chosen(target: Target, options: Options) -> dict[str, Drawn]:
    """By domain. What is short of texts is said: else a domain would be missing from every figure, and nobody told."""
    most, file = min(options.longest, target.context_tokens), options.data or FILE
    found = read(target.tokenizer, 1 << 30, file)
    if unknown := set(options.domains) - found.keys():
        raise UsageError(f"no texts of {', '.join(sorted(unknown))}", hint=f"there are {', '.join(found)}")
    wanted = {domain: texts for domain, texts in found.items() if not options.domains or domain in options.domains}
    drawn = draw(wanted, options.texts, most, options.seed)
    for line in shortages(drawn, options.texts, most):
        say(line, "yellow")
    if not any(one.texts for one in drawn.values()):
        raise DataError("no text is left", where=str(file), hint=f"--longest {most} tokens: raise it")
    return drawn


def measured(
    target: Target, texts: Sequence[Text], reference: Case, cases: Sequence[Case], top: int, progress: Show
) -> list[dict[str, Any]]:
    """A row for the reference, and one for each case. What is started once serves all cases that start like it."""
    whole: list[Scored] = []
    first: list[Judged] = []
    rows: list[dict[str, Any]] = []
    everything = [reference, *cases]
    for start in dict.fromkeys(case.start for case in everything):
        with target.started(start, progress) as scorer:
            for case in (one for one in everything if one.start == start):
                before = scorer.held()
                scored = _scored(scorer, texts, case, progress)
                whole = whole or scored
                judged = [
                    judge(text.domain, text.row, answer(text, one), answer(text, other), one.substituted)
                    for text, one, other in zip(texts, scored, whole, strict=True)
                ]
                first = first or judged
                rows.append(_row(case, judged, first, before, scorer.held()))
    return rows


def answer(text: Text, scored: Scored) -> list[Any]:
    """What was said of the answer's tokens: of the first token of all nothing is said."""
    return scored.told[text.prompt_tokens - 1 :]


def _scored(scorer: Scorer, texts: Sequence[Text], case: Case, progress: Show) -> list[Scored]:
    found = []
    name = case.label if case.start.share is None else f"{case.label}, {case.start.share:g} %"
    for at, text in enumerate(texts):
        progress([Item(f"scoring {name}", f"text {at + 1} of {len(texts)}", done=at, total=len(texts))])
        found.append(scorer.score(text.ids, case.fidelity))
    return found


def _row(case: Case, judged: list[Judged], first: list[Judged], before: Held, after: Held) -> dict[str, Any]:
    if before != after:
        say(f"{case.label}: the resident experts moved while it was measured (somebody else asked, or a plan at rest)")
    return {
        "case": case.label,
        "fidelity": case.fidelity,
        "overlay": after.overlay,
        "residents": after.residents,
        "experts": after.experts,
        "share": after.share,
        "moved": before != after,
        **figures.summary(judged),
        "rise": figures.rise(judged, first),
    }


def _checks(target: Target, cases: Sequence[Case], options: Options, progress: Show) -> Checks | None:
    """Free answers need a server: they are drawn, parsed and ended as everybody's are."""
    if not options.answers or not isinstance(target, Server):
        return None
    fidelities = dict.fromkeys(case.fidelity for case in cases)
    return check_answers(target, list(fidelities), options.answers, options.answer_tokens, options.seed, progress)
