"""Given tokens scored without a daemon: the serving engine on one rank of this process, with a set that never changes.

The same steps as over HTTP, so that a figure of one means the same as a figure of the other.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from tided.control.lockstep import Solo
from tided.engine.build import Progress, Rank, build_rank, open_model, scheduler_limits
from tided.engine.devices import allocating, refuse_shortage, use_device
from tided.engine.leader import LeaderEngine
from tided.engine.offline import first_pairs
from tided.engine.scheduler import Scheduler
from tided.engine.types import Event, Failed, Fidelity, Finished, Request, Sampling, Scored, TokenLogprob
from tided.errors import PairError, TideError
from tided.models.families import family_of, open_checkpoint
from tided.models.parallel import Alone
from tided.settings import Cache, Engine, Parallel, Settings, Vision


class OfflineScorer:
    """Scores one list of tokens after the other. `overlay_sha256`: of the edit that the model has; empty: none."""

    def __init__(self, rank: Rank, settings: Settings) -> None:
        overlay = rank.opened.checkpoint.overlay
        self.overlay_sha256 = overlay.sha256 if overlay else ""
        self._events: list[Event] = []
        self._faults: list[TideError] = []
        self._engine = LeaderEngine(
            rank.executor,
            Scheduler(scheduler_limits(settings)),
            Solo(),
            self._events.extend,
            self._faults.append,
            rest_after_s=math.inf,
        )
        self._number = 0

    def score(self, ids: Sequence[int], fidelity: Fidelity, top: int) -> tuple[list[TokenLogprob], dict[str, Any]]:
        """Of every token but the first, with the `top` likeliest beside it; the request's statistics. Raises
        RequestError for a fidelity that the settings have no slots for."""
        self._number += 1
        request = Request(
            request_id=f"score-{self._number}",
            prompt_ids=list(ids),
            sampling=Sampling(temperature=0.0),
            max_tokens=1,
            stop_ids=(),
            fidelity=fidelity,
            scored=True,
            scored_top=top,
            adapts=False,
        )
        self._events.clear()
        self._engine.submit(request)
        self._engine.take_in()
        while not any(isinstance(event, Finished | Failed) for event in self._events):
            if not self._engine.turn():
                raise PairError("the engine has nothing to do, and a request is open")
        if failed := next((event for event in self._events if isinstance(event, Failed)), None):
            raise PairError(failed.message)
        told = [one for event in self._events if isinstance(event, Scored) for one in event.logprobs]
        [stats] = [event.stats for event in self._events if isinstance(event, Finished)]
        self._engine.turn()  # releases the lane
        return told, stats


@contextmanager
def scoring(settings: Settings, progress: Progress) -> Iterator[OfflineScorer]:
    """Loads the model with the resident set of a first start. Raises ConfigError for what cannot be, UnavailableError
    where memory is short."""
    opened = open_model(settings)
    use_device(settings, 0)
    refuse_shortage(opened, 0)
    with allocating(opened, 0):
        rank = build_rank(opened, Alone(), first_pairs(opened), progress)
    try:
        yield OfflineScorer(rank, settings)
    finally:
        rank.close()


def settings_at(settings: Settings, resident: int | None, context_tokens: int) -> Settings:
    """One rank and one lane for texts of so many tokens, no ring, no cached prompts, no drafts, no tower. `resident`
    None: as the settings say."""
    experts, context = settings.experts, max(context_tokens + 1, 16)
    return replace(
        settings,
        experts=replace(experts, resident=experts.resident if resident is None else resident, spare_slots=1),
        tide=replace(settings.tide, hot_ring_slots=0),
        cache=Cache(context_tokens=context, pool_tokens=context, dtype=settings.cache.dtype, park_tokens=0),
        engine=Engine(device=settings.engine.device, lanes=1, threads=settings.engine.threads),
        parallel=Parallel(),
        vision=Vision(),
    )


def expert_count(settings: Settings) -> tuple[int, int]:
    """Of the model: least experts that can be resident, and all there are. Read from its configuration."""
    config = open_checkpoint(settings.model).config
    shape = family_of(config).shape(config)
    return shape.moe_layers * shape.top_k, shape.moe_layers * shape.experts_per_layer
