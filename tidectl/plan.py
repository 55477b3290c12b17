"""`tidectl plan`: what a profile needs of memory, whether it fits, and what another budget would be worth."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from tidectl import profiles, running
from tidectl.output import emit, say
from tidectl.state import state_dir
from tidectl.status import budget_line
from tidectl.waiting import Item, waiting
from tided.errors import DataError, TideError, UnavailableError, UsageError
from tided.profile import load
from tided.settings import Settings

if TYPE_CHECKING:
    from tided.engine.build import OpenedModel
    from tided.engine.memory import Gate, Need, Node
    from tided.tide.demand import Grid

LIKE_OF = {
    "ds41-mxfp4": "ds41",
    "glm53-exl3": "glm53",
}  # bundled profiles of models whose inventory this build knows without a checkpoint
POINTS = 12  # of the curve
GB = 1e9


class Changes(NamedTuple):
    """What is asked instead of the profile's own."""

    resident: int | None = None
    context_tokens: int | None = None
    reserve_gb: float | None = None


class Given(NamedTuple):
    """Memory of each node and of each device that has its own; None: this machine's."""

    memory_gb: float | None = None
    device_gb: float | None = None


def run(profile: Path, changes: Changes, given: Given, like: str | None, as_json: bool) -> int:
    """The exit code: 1 when a start would be refused."""
    settings = changed(load(profile), changes)
    with waiting() as show:
        show([Item("reading headers")])
        with _opened(settings, profile, like) as (opened, made_up):
            known = facts(opened, given, profile, made_up)
    if as_json:
        emit("plan/1", known)
    else:
        from tidectl.plan_view import draw

        for note in known["notes"]:
            say(note)
        draw(known)
    return 0 if known["fits"] else 1


def changed(settings: Settings, changes: Changes) -> Settings:
    """Raises nothing: what no model allows is refused when it is opened."""
    if changes.resident is not None:
        settings = structs.replace(settings, experts=structs.replace(settings.experts, resident=changes.resident))
    if changes.context_tokens is not None:
        most = min(settings.cache.context_tokens, changes.context_tokens)
        cache = structs.replace(settings.cache, pool_tokens=changes.context_tokens, context_tokens=most)
        settings = structs.replace(settings, cache=cache)
    if changes.reserve_gb is not None:
        memory = structs.replace(settings.memory, reserve_bytes=round(changes.reserve_gb * GB))
        settings = structs.replace(settings, memory=memory)
    return settings


@contextmanager
def _opened(settings: Settings, profile: Path, like: str | None) -> Iterator[tuple["OpenedModel", str]]:
    """The model by its headers, and whose inventory stands for it where its checkpoint is not here."""
    from tided.engine.build import open_model

    made_up = like or ("" if Path(settings.model.path).is_dir() else LIKE_OF.get(profiles.name_of(str(profile)), ""))
    if not made_up:
        try:
            yield open_model(settings), ""
        except DataError as error:
            hint = "the headers are needed: config.json, the index and the shards (`tidectl fetch`); for a released "
            hint += "DeepSeek-V4.1-Flash `--like ds41` stands in"
            raise DataError(error.what, where=error.where, hint=error.hint or hint) from error
        return
    from tided.engine.synthetic import plan, synthesise

    with tempfile.TemporaryDirectory(prefix="tidelm-plan-") as folder:
        synthesise(Path(folder), plan(made_up, None, None, None, 0, held=True), lambda done, total: None)
        model = structs.replace(settings.model, path=folder, dense="", overlay="", ablation="")
        yield open_model(structs.replace(settings, model=model)), made_up


def facts(opened: "OpenedModel", given: Given, profile: Path, made_up: str) -> dict[str, Any]:
    """Everything that is shown. Bytes throughout."""
    from tided.engine import memory

    settings, shape = opened.settings, opened.shape
    ranks, resident = range(settings.parallel.ranks), settings.experts.resident
    node, where = _node(settings, given)
    needs = {rank: memory.needs(opened, rank, node.apart) for rank in ranks}
    judged = [memory.gates(opened, rank, node, False, needs) for rank in ranks]
    most = shape.moe_layers * shape.experts_per_layer
    largest = memory.largest_budget(opened, [node] * len(ranks), False, needs)
    expert_bytes = _marginal_bytes(opened)
    token_bytes = memory.context_token_bytes(opened)
    scores, source = _scores(opened, profile, made_up)
    return {
        "profile": profiles.name_of(str(profile)),
        "model": {"family": shape.family, "like": made_up, "path": "" if made_up else settings.model.path},
        "resident": resident,
        "experts": most,
        "least": shape.moe_layers * shape.top_k,
        "pool_tokens": settings.cache.pool_tokens,
        "reserve_bytes": settings.memory.reserve_bytes,
        "passing_bytes": memory.passing_bytes(opened),
        "free": {"bytes": node.free_bytes, "device_bytes": node.device_bytes, "apart": node.apart, "of": where},
        "ranks": [_rank(opened, rank, needs[rank], judged[rank]) for rank in ranks],
        "fits": all(gate.passes for gates in judged for gate in gates),
        "largest_resident": largest,
        "expert_bytes": round(expert_bytes),
        "context_token_bytes": round(token_bytes, 3),
        "a_gb": {"experts": round(GB / expert_bytes, 1), "context_tokens": round(GB / token_bytes)},
        "coverage": {"of": source, "points": _points(opened, scores, largest)},
        "notes": _notes(made_up, given),
    }


def _rank(opened: "OpenedModel", rank: int, found: "list[Need]", gates: "list[Gate]") -> dict[str, Any]:
    from tided.engine import memory

    return {
        "rank": rank,
        "host": memory.hosts(opened.settings)[rank],
        "classes": [
            {
                "what": need.what,
                "setting": need.setting,
                "bytes": need.nbytes,
                "system_memory": need.system,
                "estimate": need.estimate,
            }
            for need in found
        ],
        "total_bytes": sum(need.nbytes for need in found),
        "gates": [
            {"gate": g.name, "asked_bytes": g.asked_bytes, "free_bytes": g.free_bytes, "missing_bytes": g.missing_bytes}
            for g in gates
        ],
    }


def _node(settings: Settings, given: Given) -> tuple["Node", str]:
    """What a node is taken to have free, and by whose word. Raises UnavailableError where nothing tells."""
    from tided.engine.memory import Node

    if given.device_gb is not None and settings.engine.device != "cuda":
        raise UsageError("--device is of a profile that runs on CUDA", hint='engine.device = "cpu": name --memory')
    found = None if given.memory_gb is not None else _here(settings)
    if given.memory_gb is None and found is None:
        raise UnavailableError("this machine does not tell how much memory is free", hint="name it with --memory GB")
    free = round((given.memory_gb or 0) * GB) if found is None else found.free_bytes
    said = "--memory" if found is None else "this machine"
    if given.device_gb is not None:
        return Node(True, free, round(given.device_gb * GB)), said
    return (found if found is not None else Node(False, free)), said


def _here(settings: Settings) -> "Node | None":
    """A profile for CUDA on a machine without is planned as for one memory."""
    import torch

    from tided.engine.devices import here

    if settings.engine.device == "cuda" and not torch.cuda.is_available():
        settings = structs.replace(settings, engine=structs.replace(settings.engine, device="cpu"))
    return here(settings)


def _marginal_bytes(opened: "OpenedModel") -> float:
    """Of an expert more on a rank; of a mean one where sizes differ."""
    from tided.engine.memory import with_resident
    from tided.engine.slots import resident_bytes

    most = opened.shape.moe_layers * opened.shape.experts_per_layer
    return resident_bytes(with_resident(opened, most)) / most


def _scores(opened: "OpenedModel", profile: Path, made_up: str) -> "tuple[Grid | None, str]":
    """[layers, experts] of what a start would plan from, and where it is from; None: nothing tells experts apart."""
    from tided.tide.demand import RouterShape, blended, per_layer
    from tided.tide.history import History
    from tided.tide.seed import load_seed

    shape, tide = opened.shape, opened.settings.tide
    router = RouterShape(shape.moe_layers, shape.experts_per_layer, shape.top_k)
    seed = load_seed(Path(tide.seed), shape.family, router) if tide.seed else None
    prior = None if seed is None or seed.layer_residents else seed.prior
    if not made_up:
        history = History.open(state_dir() / "history", opened.checkpoint.served_identity(), router, record=False)
        if history.demand.requests:
            scores = blended(history.demand, prior, tide.prior_votes)
            return scores, f"a history of {history.demand.requests:g} requests"
    return (None, "") if prior is None else (per_layer(prior), "the seed")


def _points(opened: "OpenedModel", scores: "Grid | None", largest: int | None) -> list[dict[str, Any]]:
    from tided.engine.memory import with_resident
    from tided.engine.slots import resident_bytes
    from tided.tide.coverage import curve

    if scores is None:
        return []
    shape, resident = opened.shape, opened.settings.experts.resident
    least, most = shape.moe_layers * shape.top_k, shape.moe_layers * shape.experts_per_layer
    floor = opened.settings.tide.floor_per_layer or shape.top_k
    steps = {least + (most - least) * step // POINTS for step in range(POINTS + 1)}
    budgets = sorted(steps | {resident} | ({largest} if largest is not None else set()))
    return [
        {
            "resident": point.resident,
            "covered": round(point.covered, 5),
            "bytes": resident_bytes(with_resident(opened, point.resident)),
        }
        for point in curve(scores, floor, budgets, opened.kinds)
    ]


def _notes(made_up: str, given: Given) -> list[str]:
    notes = []
    if made_up:
        notes.append(f"the checkpoint is not here: planned from the released shapes ({made_up})")
    if given.memory_gb is None:
        try:
            now = running.look()
        except (TideError, OSError):
            return notes
        if now.ranks:
            budget = budget_line(now.health or {})
            notes.append(f"{profiles.name_of(now.profile)} runs here: what it holds counts as taken")
            notes += [f"it keeps {budget}"] if budget else []
    return notes
