"""What a rank's engine thread does, from nothing to the end of the step loop.

    open the checkpoint (headers)        a wrong or missing checkpoint is refused within a second
    rank 0: history, first resident set
    handshake: facts, session, residents ranks that differ never load anything
    data plane                           from here on a lost peer is seen by the heartbeats
    arena, dense weights, residents      the memory and the time
    Ready: digest of what was loaded
    on a GPU: kernels and graphs         what takes seconds once is not a request's
    step loop

Each phase leaves one line in the log: seconds, and the memory of the process after it.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from tided.control.keys import Keys
from tided.control.lockstep import Follower, Leader, Solo
from tided.engine.budget import nodes_of
from tided.engine.build import OpenedModel, Rank, build_rank, draft_depths, open_model, open_source, scheduler_limits
from tided.engine.core import Engine, FollowerEngine
from tided.engine.dataplane import TorchGroup, refuse_one_shot
from tided.engine.devices import allocating, refuse_shortage, use_device
from tided.engine.facts import about, facts_of
from tided.engine.flight import flight_path
from tided.engine.leader import LeaderEngine
from tided.engine.link_probe import LinkSpeed, measure
from tided.engine.scheduler import Scheduler
from tided.engine.types import Event
from tided.engine.warming import warm_up
from tided.errors import TideError, told
from tided.experts.arena import Pair
from tided.models.parallel import Alone, Group
from tided.settings import Settings
from tided.tide.demand import RouterShape
from tided.tide.history import History
from tided.tide.pilot import Pilot
from tided.tide.seed import load_seed

log = logging.getLogger("boot")

LOADED_S = 3600.0  # until the slowest rank has loaded: one that died is told by the heartbeats within seconds
WAITING_TOLD_S = 5.0


class LoopSide(Protocol):
    """What the engine thread asks of the loop. Every method may be called from that thread."""

    def tell(self, message: str, done: int = 0, total: int = 0) -> None:
        """Progress of the start, for people. `total` 0: it has no number."""
        ...

    def joined(self, session: str) -> None:
        """The ranks have met. Returns when the heartbeats run; raises what keeps them from it."""
        ...

    def ready(self, engine: Engine) -> None: ...

    def events(self, events: Sequence[Event]) -> None: ...

    def ended(self, error: TideError | None) -> None:
        """The last word: None for an orderly end. Later words do not count."""
        ...


def run_rank(settings: Settings, rank: int, keys: Keys | None, state_dir: Path, loop: LoopSide) -> None:
    """The thread's target. `keys` is None for one rank alone. Never raises: `loop.ended` is told."""
    try:
        if rank == 0:
            _lead(settings, keys, state_dir, loop)
        else:
            assert keys is not None
            _follow(settings, rank, keys, state_dir, loop)
    except TideError as error:
        loop.ended(error)
    except Exception as error:
        log.exception("the start failed")
        loop.ended(TideError(f"the start failed: {told(error)}", hint="the log has the trace"))
    else:
        loop.ended(None)


def _lead(settings: Settings, keys: Keys | None, state_dir: Path, loop: LoopSide) -> None:
    with closing(Leader(settings, keys) if keys else Solo()) as link, _last_word(link):
        opened = _open(settings, 0, loop)
        with closing(_history(opened, state_dir)) as history:
            pilot = _pilot(opened, history)
            with _phase("handshake", loop):
                pairs, facts = pilot.boot_pairs(), facts_of(opened)
                loop.joined(link.gather(facts, pairs))
            with _built(opened, 0, pairs, state_dir, loop) as built:
                with _phase("other ranks", loop):
                    link.ready(built.residents.digest(), LOADED_S, _Waiting(loop, "other ranks"))
                _warm(built, 0, loop)
                limits = scheduler_limits(settings, built.model.draft_tokens)
                scheduler = Scheduler(limits, depths=draft_depths(settings, built.model))
                engine = LeaderEngine(
                    built.executor,
                    scheduler,
                    link,
                    loop.events,
                    loop.ended,
                    pilot,
                    settings.engine.threads,
                    built.reads.about() | {"slots": str(built.residents.arena.placement)},
                    resident=settings.experts.resident,
                    nodes=nodes_of(opened),
                )
                engine.data_plane = built.link.about() if built.link else {}
                engine.about = about(facts)
                _serve(engine, 0, state_dir, loop)


def _follow(settings: Settings, rank: int, keys: Keys, state_dir: Path, loop: LoopSide) -> None:
    with closing(Follower(settings, rank, keys)) as link:
        opened = _open(settings, rank, loop)
        with _phase("handshake", loop):
            welcome = link.join(facts_of(opened))
            loop.joined(welcome.session)
        with _built(opened, rank, welcome.residents, state_dir, loop) as built:
            link.ready(built.residents.digest())
            _warm(built, rank, loop, link.still_welcome)
            engine = FollowerEngine(built.executor, link, loop.ended, settings.engine.threads)
            _serve(engine, rank, state_dir, loop)


def _serve(engine: Engine, rank: int, state_dir: Path, loop: LoopSide) -> None:
    engine.flight.path = flight_path(state_dir, rank)
    loop.ready(engine)
    engine.run()


@contextmanager
def _last_word(link: Leader | Solo) -> Iterator[None]:
    """Ranks that wait in the handshake are told why rank 0 does not go on."""
    try:
        yield
    except Exception as error:
        link.stop(str(error) if isinstance(error, TideError) else told(error))
        raise


def _open(settings: Settings, rank: int, loop: LoopSide) -> OpenedModel:
    with _phase("checkpoint", loop):
        use_device(settings, rank)
        opened = open_model(settings)
        if overlay := opened.checkpoint.overlay:
            log.info("overlay: %s from %s (sha256 %s)", overlay.points, overlay.path, overlay.sha256)
        open_source(opened, rank).close()  # a pack that is missing or another's is refused before the ranks meet
        refuse_shortage(opened, rank)
        return opened


def _history(opened: OpenedModel, state_dir: Path) -> History:
    history = History.open(
        state_dir / "history", opened.checkpoint.served_identity(), _router(opened), opened.settings.tide.record
    )
    log.info("history %s: %g requests", history.path.name, history.demand.requests)
    return history


def _pilot(opened: OpenedModel, history: History) -> Pilot:
    settings, router = opened.settings, _router(opened)
    seed = load_seed(Path(settings.tide.seed), opened.shape.family, router) if settings.tide.seed else None
    return Pilot(history, seed, settings.tide, router, settings.experts.resident, opened.kinds)


def _router(opened: OpenedModel) -> RouterShape:
    return RouterShape(opened.shape.moe_layers, opened.shape.experts_per_layer, opened.shape.top_k)


@contextmanager
def _built(opened: OpenedModel, rank: int, pairs: Sequence[Pair], state_dir: Path, loop: LoopSide) -> Iterator[Rank]:
    """The rank with its group and its reader threads, given back at the end."""
    with _group(opened.settings, rank, loop) as (group, link):
        with _phase("model", loop), allocating(opened, rank):
            built = build_rank(opened, group, pairs, _Reporter(loop), state_dir / "cache" / f"rank-{rank}")
        log.info("residents: %d experts, %d MB of slots", len(pairs), built.residents.arena_bytes >> 20)
        with closing(built):
            yield replace(built, link=link)


def _warm(built: Rank, rank: int, loop: LoopSide, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Once all ranks have loaded; `meanwhile` raises when there is nothing to wait for any more. A CPU compiles
    nothing."""
    settings = built.opened.settings
    if settings.engine.device != "cuda":
        return
    with _phase("warming up", loop), allocating(built.opened, rank):
        if isinstance(built.group, TorchGroup):
            built.group.meet("loaded", LOADED_S, _Waiting(loop, "waiting for the other ranks to load", meanwhile))
        warm_up(built.model, built.bank.tap, settings, _Reporter(loop))


@contextmanager
def _group(settings: Settings, rank: int, loop: LoopSide) -> Iterator[tuple[Group, LinkSpeed | None]]:
    """Its link is measured before the model comes: what is slow then is the link."""
    if settings.parallel.ranks == 1:
        refuse_one_shot(settings.parallel, settings.engine.device == "cuda")
        yield Alone(), None
        return
    with _phase("data plane", loop):
        group = TorchGroup(settings, rank)
    with closing(group):
        link = measure(group, torch.device(settings.engine.device))
        log.info("data plane: %s", link)
        yield group, link


@contextmanager
def _phase(name: str, loop: LoopSide) -> Iterator[None]:
    began_s = time.monotonic()
    loop.tell(name)
    yield
    log.info("%s: %.2f s, process at %d MB", name, time.monotonic() - began_s, _memory_bytes() >> 20)


class _Reporter:
    """Progress of a load: every half a second, and at the end of a part."""

    def __init__(self, loop: LoopSide) -> None:
        self._loop, self._told_s = loop, 0.0

    def __call__(self, part: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told_s > 0.5 or done == total:
            self._told_s = now
            self._loop.tell(f"{part}: {done} of {total}" if total > 1 else part, done, total)


class _Waiting:
    """A wait for other ranks, told every few seconds: it is progress to whoever watches the start. `also` is called
    all the time."""

    def __init__(self, loop: LoopSide, what: str, also: Callable[[], None] = lambda: None) -> None:
        self._loop, self._what, self._also = loop, what, also
        self._began_s = self._told_s = time.monotonic()

    def __call__(self) -> None:
        self._also()
        now = time.monotonic()
        if now - self._told_s >= WAITING_TOLD_S:
            self._told_s = now
            self._loop.tell(f"{self._what}, for {now - self._began_s:.0f} s now")


def _memory_bytes() -> int:
    """What the process holds in memory, mapped files included; 0 where /proc does not tell."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
