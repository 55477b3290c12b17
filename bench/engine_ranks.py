"""Ranks of a bench: the real engine over the real links, each a process; rank 0 is turned by the bench's own hand. What
to do comes by a file of a folder, and so do phases and figures."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tided import guard
from tided.control.keys import load_keys
from tided.control.lockstep import Follower, Leader, Solo
from tided.engine.build import OpenedModel, Rank, build_rank, open_model
from tided.engine.core import FollowerEngine
from tided.engine.dataplane import TorchGroup
from tided.engine.devices import use_device
from tided.engine.offline import first_pairs
from tided.errors import TideError
from tided.models.parallel import Alone
from tided.settings import Settings
from tided.tide.demand import RouterShape
from tided.tide.history import History
from tided.tide.pilot import Pilot
from tided.tide.seed import load_seed

JOB, RESULT, KEYS, PHASES = "job.json", "result.json", "keys.json", "phases.txt"
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Led:
    """What rank 0 has once every rank is ready."""

    rank: Rank
    link: Leader | Solo
    group: TorchGroup | Alone
    pilot: Pilot | None
    failures: list[TideError] = field(default_factory=list)


def serve_rank(
    folder: Path, number: int, settings: Settings, lead: Callable[[Led], Any], *, with_pilot: bool = True
) -> None:
    """A follower follows until it is told to stop; rank 0 leads, and what comes of it is the result. Without a pilot
    the residents are those of an offline run, and stay. Raises what the engine raises."""
    use_device(settings, number)
    opened = open_model(settings)
    facts, pairs = guard.facts(settings, opened.checkpoint.identity()), first_pairs(opened)
    tell(folder, number, f"{len(pairs)} resident experts over {settings.parallel.ranks} ranks")
    pilot = None
    if number:
        follower = Follower(settings, number, load_keys(folder / KEYS, create=True))
        pairs = follower.join(facts).residents
    else:
        leader = Leader(settings, load_keys(folder / KEYS, create=True)) if settings.parallel.ranks > 1 else Solo()
        pilot = pilot_of(opened, folder) if with_pilot else None
        pairs = pilot.boot_pairs() if pilot else pairs
        leader.gather(facts, pairs)
    group = TorchGroup(settings, number) if settings.parallel.ranks > 1 else Alone()
    rank = build_rank(opened, group, pairs, lambda what, done, total: tell(folder, number, f"loading: {what}"))
    failures: list[TideError] = []
    if number:
        follower.ready(rank.residents.digest())
        FollowerEngine(rank.executor, follower, failures.append, settings.engine.threads).run()
    else:
        leader.ready(rank.residents.digest())
        found = lead(Led(rank, leader, group, pilot, failures))
        (folder / RESULT).write_bytes(msgspec.json.encode(found))
        leader.stop("measured")
    if failures:
        raise failures[0]


def tell(folder: Path, number: int, phase: str) -> None:
    """What rank 0 is about to do, for the process that waits for the ranks."""
    if number == 0:
        with (folder / PHASES).open("a") as file:
            file.write(f"{phase}\n")


class Shown:
    """Rank 0's phases on stderr, each once: stdout has the figures alone."""

    def __init__(self, path: Path) -> None:
        self._path, self._last = path, ""

    def __call__(self) -> None:
        phase = self._path.read_text().rpartition("\n")[0].rpartition("\n")[2] if self._path.exists() else ""
        if phase != self._last:
            self._last = phase
            print(phase, file=sys.stderr, flush=True)


def pilot_of(opened: OpenedModel, folder: Path) -> Pilot:
    """As at a first start: the profile's seed, a history of this run's own."""
    shape, tide = opened.shape, opened.settings.tide
    router = RouterShape(shape.moe_layers, shape.experts_per_layer, shape.top_k)
    history = History.open(folder / "history", opened.checkpoint.identity(), router, tide.record)
    seed = load_seed(Path(tide.seed), shape.family, router) if tide.seed else None
    return Pilot(history, seed, tide, router, opened.settings.experts.resident, opened.kinds)
