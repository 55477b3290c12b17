"""`tidectl tide show | export | import | merge | reset`: what was learned, as a person and as a program see it.

A history belongs to the daemon that records into it: reading makes a copy, changing waits for nobody and is refused.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from packers.exl3_sizes import whole_sizes
from packers.joined import identity_of
from packers.overlay import digest_of, identity_under
from packers.shards import Checkpoint
from tidectl import fits, profiles, runner, running
from tidectl.output import console, emit, plain, say
from tidectl.state import as_owner, state_dir
from tided.control.files import write_private
from tided.errors import DataError, NotRunningError, UnavailableError, UsageError
from tided.profile import load
from tided.settings import Settings
from tided.tide.demand import Grid, RouterShape, blended, observed_weight, per_layer
from tided.tide.export import Export, added, encoded, export_of, load_export, merged
from tided.tide.history import History, path_of, set_aside
from tided.tide.kinds import Kinds, kinds_of
from tided.tide.pilot import Pilot
from tided.tide.seed import Seed, load_seed

if TYPE_CHECKING:
    from rich.console import RenderableType

MOVERS = 8


class Model(NamedTuple):
    """Whose history it is. `kinds`: of its experts, where their records differ in size."""

    profile: Path
    settings: Settings
    identity: str
    family: str
    shape: RouterShape
    kinds: Kinds | None

    @property
    def history(self) -> Path:
        return path_of(_directory(), self.identity, self.shape)

    @property
    def seed(self) -> Seed | None:
        file = self.settings.tide.seed
        return load_seed(Path(file), self.family, self.shape) if file else None


def show(profile: Path | None, as_json: bool) -> None:
    model = _model(profile)
    known = facts(model)
    if as_json:
        emit("tide.show/1", known)
        return
    screen = console(sys.stdout)
    screen.print(_summary(known))
    screen.print()
    screen.print(_layers(known))
    if known["movers"]:
        screen.print()
        screen.print(_movers(known["movers"]))


def export(file: Path, profile: Path | None, as_json: bool) -> None:
    model = _model(profile)
    history = _read(model)
    if history.note or not model.history.exists():
        raise DataError(history.note or "nothing was recorded of this model yet", where=str(model.history))
    _write(file, export_of(history.demand, model.identity, model.family, model.shape))
    _done("export", as_json, f"{history.demand.requests} requests", {"file": str(file)}, history.demand.requests)


def import_(file: Path, profile: Path | None, merge: bool, replace: bool, as_json: bool) -> None:
    if merge and replace:
        raise UsageError("--merge and --replace exclude each other")
    model, new = _model(profile), load_export(file)
    mine = export_of(new.demand, model.identity, model.family, model.shape)
    if (new.identity, new.shape) != (mine.identity, mine.shape):
        raise DataError(f"is a history of {new.name}; the profile's model is {mine.name}", where=str(file))
    before = _read(model).demand
    if before.requests and not (merge or replace):
        raise UsageError(
            f"there is a history of {before.requests} requests already",
            hint="--merge adds the file's votes to it, --replace sets it aside first",
        )
    kept, directory = model.history, state_dir()
    with as_owner(directory):
        aside = set_aside(kept) if replace else None
        history = History.open(kept.parent, model.identity, model.shape, record=True)
        try:
            history.replace(added(history.demand, new.demand))
        finally:
            history.close()
    if history.note or aside:
        say(history.note or f"the history so far is now {aside}")
    _done("import", as_json, f"{history.demand.requests} requests", {"aside": _text(aside)}, history.demand.requests)


def merge(one: Path, other: Path, out: Path, as_json: bool) -> None:
    try:
        both = merged(load_export(one), load_export(other))
    except ValueError as error:
        raise DataError(f"two models do not mix: {error}", where=f"{one}, {other}") from error
    _write(out, both)
    _done("merge", as_json, f"{both.requests} requests", {"file": str(out)}, both.requests)


def reset(profile: Path | None, yes: bool, as_json: bool) -> None:
    model = _model(profile)
    requests = _read(model).demand.requests
    if model.history.exists() and not yes:
        _confirm(f"forget what {requests} requests taught of {profiles.name_of(str(model.profile))}?")
    file, directory = model.history, state_dir()
    with as_owner(directory):
        aside = set_aside(file)
    words = f"set aside as {aside}" if aside else "there was no history"
    _done("reset", as_json, words, {"aside": _text(aside)}, requests)


def facts(model: Model) -> dict[str, Any]:
    """Everything that `show` shows. What a start would keep is asked of the pilot itself."""
    settings, tide = model.settings, model.settings.tide
    history, seed = _read(model), model.seed
    pilot = Pilot(history, seed, tide, model.shape, settings.experts.resident, model.kinds)
    kept = np.zeros((model.shape.layers, model.shape.experts), dtype=bool)
    kept[tuple(np.array(pilot.boot_pairs()).T)] = True
    demand, prior = history.demand, per_layer(seed.prior if seed else np.ones(kept.shape))
    scores = blended(demand, prior, tide.prior_votes)
    live = _live(model)
    return {
        "profile": profiles.name_of(str(model.profile)),
        "history": str(model.history),
        "recorded": model.history.exists(),
        "note": history.note,
        "model": {"family": model.family, "identity": model.identity, **model.shape._asdict()},
        "requests": demand.requests,
        "votes": round(float(demand.mass.sum(axis=1).mean()), 3),
        "sensitivity": tide.sensitivity,
        "half_life_requests": pilot.sensitivity.half_life if pilot.sensitivity.adapts else None,
        "hot_ring_slots": tide.hot_ring_slots,
        "history_weight": round(float(observed_weight(demand, tide.prior_votes).mean()), 4),
        "prior": {"seed": tide.seed, "votes": tide.prior_votes},
        "running": live is not None,
        "resident_by_layer": live or kept.sum(axis=1).tolist(),
        "start_by_layer": kept.sum(axis=1).tolist(),
        "bytes": None if model.kinds is None else _bytes(kept, model.kinds),
        "coverage_by_layer": _coverage(kept, demand.mass),
        "coverage_by_topic": {} if seed is None else _topics(kept, seed.topics),
        "movers": _moved(scores, prior, kept) if demand.requests else [],
    }


def _bytes(kept: Grid, kinds: Kinds) -> dict[str, Any]:
    """Of whole experts that differ in size: how many of each size a start would keep, what of each layer's bytes."""
    sizes, count = kinds.sizes, len(kinds.whole)
    every, held = (np.bincount(of.ravel(), minlength=count).tolist() for of in (kinds.of, kinds.of[kept]))
    return {
        "experts": int(sizes.sum()),
        "start": int(sizes[kept].sum()),
        "start_share_by_layer": [round(float(share), 4) for share in (sizes * kept).sum(axis=1) / sizes.sum(axis=1)],
        "sizes": [
            {"bytes": nbytes, "experts": of, "start": own}
            for nbytes, of, own in zip(kinds.whole, every, held, strict=True)
        ],
    }


def _coverage(kept: Grid, mass: Grid) -> list[float] | None:
    """Of each layer's demand, what the experts take that a start would keep; None while nothing is known."""
    if not mass.any():
        return None
    return [round(float(share), 4) for share in (per_layer(mass) * kept).sum(axis=1)]


def _topics(kept: Grid, topics: Mapping[str, Grid]) -> dict[str, float]:
    """Of each topic of the seed, the same, over all layers; the least first."""
    shares = {name: round(float((share * kept).sum(axis=1).mean()), 4) for name, share in topics.items()}
    return dict(sorted(shares.items(), key=lambda item: (item[1], item[0])))


def _moved(scores: Grid, prior: Grid, kept: Grid) -> list[dict[str, Any]]:
    """Experts whose share of their layer's demand traffic has changed most, against the seed's."""
    change = scores - prior
    order = np.argsort(-np.abs(change), axis=None, kind="stable")[:MOVERS]
    return [
        {
            "layer": int(layer),
            "expert": int(expert),
            "seed_share": round(float(prior[layer, expert]), 5),
            "share": round(float(scores[layer, expert]), 5),
            "kept": bool(kept[layer, expert]),
        }
        for layer, expert in (np.unravel_index(index, change.shape) for index in order)
        if change[layer, expert]
    ]


def _off(ring_slots: int) -> str:
    """Plans end with the sensitivity; hot reads do not."""
    moves = "the ring still exchanges residents for what it read" if ring_slots else "the set stands"
    return f"off: no plans and no aging, {moves}"


def _summary(known: dict[str, Any]) -> "RenderableType":
    from rich.table import Table

    half_life = known["half_life_requests"]
    seen = f"{known['requests']} requests, worth {known['votes']:.1f} votes now"
    aging = f"{known['sensitivity']}: half after {half_life:.1f} more" if half_life else _off(known["hot_ring_slots"])
    prior = f"{known['prior']['votes']:g} votes of {known['prior']['seed'] or 'an even spread'}"
    topic, share = next(iter(known["coverage_by_topic"].items()), ("", 0.0))
    rows = [
        ("profile", known["profile"]),
        ("history", known["history"] if known["recorded"] else f"none yet ({known['history']})"),
        ("trouble", known["note"]),
        ("learned", seen),
        ("aging", aging),
        ("weight", f"{100 * known['history_weight']:.1f} % history, the rest {prior}"),
        ("recorded", _recorded(known["coverage_by_layer"])),
        ("sizes", _sizes(known["bytes"], sum(known["start_by_layer"]))),
        ("topics", f"a start would hold {100 * share:.1f} % of what {topic} wants, the least of them" if topic else ""),
    ]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for label, text in rows:
        if text:
            grid.add_row(label, plain(text, "red" if label == "trouble" else ""))
    return grid


def _recorded(coverage: list[float] | None) -> str:
    """Not what was measured while it served, which is `tidectl top`'s coverage."""
    if not coverage:
        return ""
    return (
        f"a start would hold {100 * np.mean(coverage):.1f} % of it, of the weakest layer's {100 * min(coverage):.1f} %"
    )


def _sizes(known: dict[str, Any] | None, start: int) -> str:
    """Of experts that differ in size: what a start keeps of their bytes, and of each size."""
    if known is None:
        return ""
    each = ", ".join(f"{one['start']} of the {one['experts']} of {one['bytes'] / 1e6:.3g} MB" for one in known["sizes"])
    return f"{100 * known['start'] / known['experts']:.1f} % of all bytes at a start, {start} experts: {each}"


def _layers(known: dict[str, Any]) -> "RenderableType":
    """A layer a row; columns that nothing is known for are left out."""
    start, coverage, of_bytes = known["start_by_layer"], known["coverage_by_layer"], known["bytes"]
    columns: dict[str, Sequence[str]] = {
        "layer": [str(layer) for layer in range(len(start))],
        "resident": [str(count) for count in known["resident_by_layer"]] if known["running"] else [],
        "at a start": [str(count) for count in start],
        "of its bytes": _percents(of_bytes["start_share_by_layer"] if of_bytes else []),
        "of its demand": _percents(coverage or []),
    }
    there = {head: cells for head, cells in columns.items() if cells}
    return _table(tuple(there), list(zip(*there.values(), strict=True)))


def _percents(shares: Sequence[float]) -> list[str]:
    return [f"{100 * share:.1f} %" for share in shares]


def _movers(movers: list[dict[str, Any]]) -> "RenderableType":
    rows = [
        (
            str(one["layer"]),
            str(one["expert"]),
            f"{100 * one['seed_share']:.2f} %",
            f"{100 * one['share']:.2f} %",
            "kept" if one["kept"] else "",
        )
        for one in movers
    ]
    return _table(("layer", "expert", "seed", "now", ""), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head, justify="right" if head else "left")
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    return table


def _model(profile: Path | None) -> Model:
    path = profile or _ran()
    settings = load(path)
    checkpoint = Checkpoint.open(settings.model.path)
    identity = checkpoint.identity()
    if settings.model.dense:
        identity = identity_of(identity, Checkpoint.open(settings.model.dense).identity())
    found = fits.dimensions(Path(settings.model.path))
    if found is None:
        raise DataError("is no checkpoint of a family that this build knows", where=settings.model.path)
    sizes = whole_sizes(checkpoint, found.mixed) if found.mixed else None
    return Model(
        path,
        settings,
        identity_under(identity, digest_of(settings.model.overlay or settings.model.ablation)),
        str(checkpoint.config["model_type"]),
        RouterShape(found.layers, found.experts, found.top_k),
        None if sizes is None else kinds_of(sizes, settings.experts.spare_slots, settings.tide.hot_ring_slots),
    )


def _ran() -> Path:
    now = runner.status(state_dir())
    ran = now.run or now.last
    if ran is None:
        raise NotRunningError("nothing runs, and nothing ran here before", hint="name a PROFILE")
    return Path(ran.profile)


def _live(model: Model) -> list[int] | None:
    """Residents by layer as the daemon of this profile says; None where it does not run."""
    now = running.look()
    if not now.health or Path(now.profile).resolve() != model.profile.resolve():
        return None
    said = now.health.get("residents_by_layer")
    return said if isinstance(said, list) and len(said) == model.shape.layers else None


def _read(model: Model) -> History:
    return History.open(_directory(), model.identity, model.shape, record=False)


def _directory() -> Path:
    return state_dir() / "history"


def _write(file: Path, content: Export) -> None:
    if file.exists():
        raise UsageError(f"{file} is there already", hint="choose another name, or remove it")
    try:
        write_private(file, encoded(content))
    except OSError as error:
        raise UnavailableError(f"cannot be written: {error.strerror}", where=str(file)) from error


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError("this asks before it forgets", hint="off a terminal, say --yes")
    import typer

    typer.confirm(question, abort=True, err=True)


def _done(command: str, as_json: bool, words: str, more: dict[str, Any], requests: int) -> None:
    if as_json:
        emit(f"tide.{command}/1", {"requests": requests, **more})
    else:
        say(words)


def _text(path: Path | None) -> str | None:
    return str(path) if path else None
