"""The random checkpoint of a family behind the real engine: one rank, or two as threads of this process."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fakes import Wire, tokens_of
from integrity import at_rest
from msgspec.structs import replace

from tests import bundled
from tests.bundled import DEEPSEEK, Mini
from tided.control.lockstep import Solo
from tided.engine.build import OpenedModel, build_rank, draft_depths, open_model, scheduler_limits
from tided.engine.core import FollowerEngine
from tided.engine.leader import LeaderEngine
from tided.engine.offline import first_pairs, settings_of
from tided.engine.scheduler import Scheduler
from tided.engine.types import Failed, Finished, Request, Sampling, Tokens
from tided.models.parallel import Alone
from tided.settings import Cache, Engine, Experts, Parallel, Tide

GOLDEN, GLM = (mini.random.path for mini in bundled.MINIS)
EXL3 = GOLDEN.parent / "exl3-checkpoint"


def opened(
    ranks: int = 1,
    resident: int = 0,
    numerics: str = "fp32",
    lanes: int = 2,
    of: Mini = DEEPSEEK,
    path: Path | None = None,
    **engine,
) -> OpenedModel:
    """The random model of a family. `path`: another checkpoint. `resident` 0: every expert of the former."""
    settings = settings_of(path or of.random.path)
    return open_model(
        replace(
            settings,
            model=replace(settings.model, numerics=numerics, prefill_chunk_tokens=16),
            experts=Experts(resident=resident or of.random.experts, spare_slots=3),
            cache=Cache(context_tokens=256, pool_tokens=512),
            engine=Engine(lanes=lanes, guard_every_steps=4, **engine),
            parallel=Parallel(ranks=ranks),
        )
    )


def with_tide(model: OpenedModel, **tide) -> OpenedModel:
    return open_model(replace(model.settings, tide=Tide(**tide)))


def ask(name: str, prompt: list[int], answer: int = 12, fidelity: str = "fast", **sampling) -> Request:
    return Request(
        request_id=name,
        prompt_ids=prompt,
        sampling=Sampling(**{"temperature": 0.0} | sampling),
        max_tokens=answer,
        stop_ids=(),
        fidelity=fidelity,
    )


@dataclass(frozen=True, eq=False)
class Form:
    """A family's contexts as they can be kept, by so many ranks."""

    mini: Mini
    ranks: int = 1
    replay: str = "full"
    cache: dict[str, Any] = field(default_factory=dict)

    def model(
        self,
        resident: int = 0,
        numerics: str = "native",
        lanes: int = 2,
        chunk: int = 16,
        draft: str = "off",
        tide: dict[str, Any] | None = None,
        **cache,
    ) -> OpenedModel:
        """Prompts need not wait for answers, so that which tokens meet in the pool does not depend on a clock."""
        settings = opened(self.ranks, resident, numerics, lanes, self.mini, prefill_share=0.99, draft=draft).settings
        return open_model(
            replace(
                settings,
                model=replace(settings.model, decoder_replay=self.replay, prefill_chunk_tokens=chunk),
                tide=Tide(**tide or {}),
                cache=Cache(**{"context_tokens": 400, "pool_tokens": 512} | self.cache | cache),
            )
        )


FORMS = {
    "deepseek": Form(DEEPSEEK),
    "deepseek, two ranks": Form(DEEPSEEK, 2),
    "deepseek, bounded": Form(DEEPSEEK, replay="bounded"),
    "deepseek, bounded, two ranks": Form(DEEPSEEK, 2, "bounded"),
    "glm": Form(bundled.GLM),
    "glm, two ranks": Form(bundled.GLM, 2),
    "glm, fp8": Form(bundled.GLM, cache={"dtype": "fp8"}),
    "glm, split": Form(bundled.GLM, 2, cache={"split": True}),
    "glm, fp8, split": Form(bundled.GLM, 2, cache={"dtype": "fp8", "split": True}),
}


def forms(*left_out: str):
    """A mark: the test runs on each but these."""
    assert set(left_out) <= FORMS.keys()
    kept = {name: form for name, form in FORMS.items() if name not in left_out}
    return pytest.mark.parametrize("form", kept.values(), ids=kept.keys())


class ThreadGroup:
    """A rank's view of a group of threads: parts are exchanged over a barrier and joined in rank order."""

    def __init__(self, rank: int, parts: list, barrier: threading.Barrier) -> None:
        self.rank, self.ranks = rank, len(parts)
        self._parts, self._barrier = parts, barrier

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[self.rank] = part
        self._barrier.wait(60)
        parts = list(self._parts)
        self._barrier.wait(60)
        return parts

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        total, *others = self._gather(part)
        for other in others:
            total = total + other
        return total

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._gather(part))

    def concat(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gather(part), dim=-1)

    def check(self) -> None:
        pass


class Living:
    """An engine that is turned by hand, with all it said; the other ranks are threads, which follow."""

    def __init__(
        self, model: OpenedModel, pilot=None, prepare=lambda served: None, cache_dir: Path | None = None
    ) -> None:
        """`prepare` is called when everything is built and nothing runs."""
        self.events, self.faults, self.pilot = [], [], pilot
        pairs = pilot.boot_pairs() if pilot else first_pairs(model)
        ranks = model.settings.parallel.ranks
        parts, barrier = [None] * ranks, threading.Barrier(ranks)
        groups = [ThreadGroup(rank, parts, barrier) for rank in range(ranks)] if ranks > 1 else [Alone()]
        folders = [cache_dir and cache_dir / str(group.rank) for group in groups]
        with ThreadPoolExecutor(ranks) as threads:  # ranks agree while they are built
            built = [
                threads.submit(build_rank, model, group, pairs, lambda *_: None, folder)
                for group, folder in zip(groups, folders, strict=True)
            ]
        self.ranks = [one.result() for one in built]
        self.link = Wire() if ranks > 1 else Solo()
        self.barrier = barrier
        self.others = [FollowerEngine(rank.executor, self.link, self._fault) for rank in self.ranks[1:]]
        self._threads = [threading.Thread(target=engine.run, daemon=True) for engine in self.others]
        for thread in self._threads:
            thread.start()
        drafted = self.ranks[0].model
        scheduler = Scheduler(
            scheduler_limits(model.settings, drafted.draft_tokens), depths=draft_depths(model.settings, drafted)
        )
        self.engine = LeaderEngine(
            self.ranks[0].executor,
            scheduler,
            self.link,
            self.events.extend,
            self.faults.append,
            pilot,
            rest_after_s=0.0,
        )
        prepare(self)

    def _fault(self, error) -> None:
        """What the heartbeats do: one rank's end is the other's."""
        self.faults.append(error)
        self.tokens_at_fault = sum(len(event.token_ids) for event in self.events if isinstance(event, Tokens))
        self.barrier.abort()

    def submit(self, *requests) -> None:
        for request in requests:
            self.engine.submit(request)
        self.engine.take_in()

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)
        self.engine.take_in()
        self.engine._emit()

    def turn(self, times: int = 1) -> None:
        """Where there is nothing to do, other threads get a moment."""
        for _ in range(times):
            if not self._turned():
                time.sleep(0.0005)

    def _turned(self) -> bool:
        """One turn. Where another rank ended first, and this one only waits in vain, the error is that rank's."""
        try:
            return self.engine.turn()
        except threading.BrokenBarrierError:
            if self.faults:
                raise self.faults[-1] from None
            raise

    def rest(self, timeout_s: float = 120) -> None:
        """Until nothing is to be done, nothing is being read, and the other ranks are as far."""
        deadline_s = time.monotonic() + timeout_s
        while self._turned() or self.engine._reading or any(o.seq < self.engine.seq for o in self.others):
            self.turn()
            assert time.monotonic() < deadline_s, "the engine does not come to rest"
            assert not self.faults, self.faults

    def check(self, tampered: bool = False) -> None:
        """At rest: every rank's books agree, and all that requests had is given back."""
        for rank in self.ranks:
            assert rank.executor.caching.background.flush(60)
            at_rest(rank, tampered)
        self.engine.scheduler.check()
        self.engine.motion.hot.check(self.ranks[0].residents.pairs, self.ranks[0].residents.ring)

    def end(self, request_id: str) -> Finished | Failed | None:
        ends = [e for e in self.events if isinstance(e, Finished | Failed) and e.request_id == request_id]
        assert len(ends) <= 1
        return ends[0] if ends else None

    def close(self) -> None:
        """Ends the engine in order, unless a fault has ended it."""
        if not self.faults:
            self.engine.close("done")
            self.engine.run()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def tokens(self, request_id: str) -> list[int]:
        return tokens_of(self.events, request_id)

    def stats(self, request_id: str) -> dict:
        return next(e.stats for e in self.events if isinstance(e, Finished) and e.request_id == request_id)


class Served(Living):
    """What an engine said to the requests it was given."""

    def __init__(
        self, model: OpenedModel, requests, pilot=None, prepare=lambda served: None, cache_dir: Path | None = None
    ) -> None:
        super().__init__(model, pilot, prepare, cache_dir)
        for request in requests:
            self.engine.submit(request)
        self._serve()
        self.close()

    def _serve(self) -> None:
        self.engine.take_in()
        deadline_s = time.monotonic() + 120
        while (self.engine.turn() or self.engine._reading) and time.monotonic() < deadline_s:
            pass
