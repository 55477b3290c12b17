"""Any series of requests, steps, cancellations, swaps of contexts and of experts, snapshots kept and lost, on the real
engine: each answer is the one it gets alone, and whenever the engine rests nothing is left of it (C5).

A pool that shrinks parks the newest, one that grows lets them come back. `exact` answers do not depend on the resident
set; `fast` ones are compared while it has not changed. TIDE_LIVES=10 tries ten times as many.
"""

import os
import random
import shutil
import tempfile
from functools import cache, lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from integrity import check_arena
from real_pair import Living
from small_model import CONTEXT, IDS, PAGE, Small, small_model, small_of, small_pages
from test_drafted_answers import Alternating, Prompter

from tided.engine.audit import Answered, again
from tided.engine.types import Failed, Finished, Request, Sampling, Scored

LONGEST, ROOMY, TIGHT = 14, 4 * CONTEXT, CONTEXT
LENGTHS = (1, 8, 14, 30, 46, 64)
SAMPLED = (Sampling(temperature=0.0), Sampling(temperature=1.0, top_p=0.9, seed=3), Sampling(presence_penalty=0.5))
ASKED = st.tuples(
    st.integers(0, 1),
    st.sampled_from(LENGTHS),
    st.booleans(),
    st.integers(1, LONGEST),
    st.sampled_from(["fast", "exact"]),
)


@pytest.fixture(scope="module")
def checkpoint(mini, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        small_pages(patch)
        yield small_of(mini, tmp_path_factory.mktemp("small"))


@lru_cache
def prompt(base: int, length: int, other_end: bool) -> tuple[int, ...]:
    """Those of one base begin alike."""
    ids = random.Random(base).choices(range(3, IDS), k=max(LENGTHS))
    return (*ids[: length - 1], IDS + 1) if other_end else tuple(ids[:length])


@cache
def alone(small: Small, ranks: int, ids: tuple[int, ...], sampled: int, resident: int = 0) -> list[int]:
    """The longest answer, of an engine of as many ranks that never knew anything else."""
    living = Living(small_model(small, ranks=ranks, lanes=1, resident=resident))
    living.submit(ask("alone", ids, sampled, LONGEST))
    living.rest()
    living.close()
    for rank in living.ranks:
        rank.close()
    return living.tokens("alone")


def ask(name: str, ids, sampled: int, answer: int, fidelity="fast") -> Request:
    return Request(
        request_id=name,
        prompt_ids=list(ids),
        sampling=SAMPLED[sampled],
        max_tokens=answer,
        stop_ids=(),
        fidelity=fidelity,
    )


class Guesser(Prompter):
    """Wrong at other places of every answer, so that blocks are cut on either side of a page's end."""

    def knows(self, request, place):
        return (place * 7 + len(request.prompt_ids)) % 5 > 1


class Lives(RuleBasedStateMachine):
    def __init__(self, small: Small, ranks: int) -> None:
        super().__init__()
        self.small, self.ranks = small, ranks
        self.folder = Path(tempfile.mkdtemp())
        self.requests, self.answers, self.behind = [], {}, {}
        self.cancelled, self.at_risk = set(), set()
        self.tampered = False  # files were lost or damaged
        self.moved = False  # the resident set is not that of the start

    @initialize(
        draft=st.sampled_from(["off", "5", "alternating", "acceptance"]),
        whole=st.booleans(),
        lanes=st.sampled_from([2, 3]),
        ram=st.sampled_from([0, 12_000, 1 << 20]),
        disk=st.sampled_from([0, 30_000, 1 << 20]),
        strict=st.booleans(),
    )
    def start(self, draft, whole, lanes, ram, disk, strict):
        self.resident = 0 if whole else self.small.few
        model = small_model(
            self.small,
            ranks=self.ranks,
            lanes=lanes,
            resident=self.resident,
            draft="5" if draft == "alternating" else draft,
            pool_tokens=ROOMY,
            prefix_ram_bytes=ram,
            prefix_disk_bytes=disk,
            prefix_strict=strict,
        )
        self.living = Living(model, prepare=lambda living: self._prompted(living, draft), cache_dir=self.folder)
        self.engine, self.scheduler = self.living.engine, self.living.engine.scheduler

    def _prompted(self, living, draft):
        """Drafts are right at most places."""
        if draft != "off":
            for rank in living.ranks:
                rank.executor.model = Guesser(rank.model, self.requests, self.answers)
        if draft == "alternating":
            living.engine.scheduler.depths = Alternating("fixed", 5, 5)

    @rule(asked=st.lists(ASKED, min_size=1, max_size=3))
    def admit(self, asked):
        for one in asked[: max(0, 6 - len(self.scheduler.waiting))]:
            self._ask(*one)

    def _ask(self, base, length, other_end, answer, fidelity):
        sampled = length % len(SAMPLED)
        request = ask(str(len(self.requests)), prompt(base, length, other_end), sampled, answer, fidelity)
        resident = 0 if fidelity == "exact" else self.resident
        self.answers[request.request_id] = alone(self.small, self.ranks, tuple(request.prompt_ids), sampled, resident)
        self.requests.append(request)
        if fidelity == "fast" and self.moved:
            self.at_risk.add(request.request_id)
        self.living.submit(request)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 50))
    def audit(self, which):
        """An answer is drawn again with every expert, in the background."""
        request = self.requests[which % len(self.requests)]
        ids = tuple(request.prompt_ids)
        if self.scheduler.behind or any(one.request.background for one in self.scheduler.running.values()):
            return
        name, answer = f"behind {len(self.behind)}", alone(self.small, self.ranks, ids, len(ids) % len(SAMPLED))
        self.behind[name] = answer
        self.living.submit(again(Answered(request, answer, "length"), name, "exact"))

    @rule(times=st.integers(1, 24))
    def step(self, times):
        self.living.turn(times)

    @precondition(lambda self: self.scheduler.running or self.scheduler.waiting)
    @rule(which=st.integers(0, 7))
    def cancel(self, which):
        open_ = [*self.scheduler.waiting, *(running.request for running in self.scheduler.running.values())]
        name = open_[which % len(open_)].request_id
        self.cancelled.add(name)
        self.living.cancel(name)

    @rule(tokens=st.sampled_from([TIGHT, TIGHT + 2 * PAGE, 2 * CONTEXT]))
    def swap_out(self, tokens):
        self._pool(tokens)

    @rule()
    def resume(self):
        self._pool(ROOMY)

    def _pool(self, tokens):
        """As if others held the rest of it."""
        self.scheduler.limits = type(self.scheduler.limits)(**(vars(self.scheduler.limits) | {"pool_tokens": tokens}))
        self.living.turn()

    @rule()
    def write(self):
        """Snapshots and parked contexts that wait for the disk are there."""
        for rank in self.living.ranks:
            assert rank.executor.caching.background.flush(60)

    @rule(rank=st.integers(0, 1), which=st.integers(0, 30))
    def evict(self, rank, which):
        """A snapshot leaves the memory of one rank."""
        prefixes = self.living.ranks[rank % self.ranks].executor.caching.prefixes
        with prefixes._lock:
            if keys := list(prefixes._states):
                prefixes._drop(prefixes._ram.remove(keys[which % len(keys)]))

    @rule(rank=st.integers(0, 1), which=st.integers(0, 30), cut=st.booleans())
    def lose(self, rank, which, cut):
        """A file of the prompt cache is gone, or damaged."""
        files = sorted((self.folder / str(rank % self.ranks) / "prefix").glob("[!.]*"))
        if files:
            self.tampered = True
            path = files[which % len(files)]
            path.write_bytes(path.read_bytes()[:-1]) if cut else path.unlink()

    @rule(which=st.integers(0, 100), into=st.integers(0, 100))
    def exchange(self, which, into):
        """An absent expert takes the place of another of its layer."""
        residents = self.living.ranks[0].residents
        absent = [pair for pair in self.small.pairs if pair not in residents.pairs]
        if not absent:
            return
        pair = absent[into % len(absent)]
        out = [other for other in residents.pairs if other[0] == pair[0]]
        self.engine.motion.take_plan([(out[which % len(out)], pair)], "test")
        self.moved = True
        self.at_risk |= {request.request_id for request in self.requests if request.fidelity == "fast"} - self._over

    @property
    def _over(self) -> set[str]:
        return {event.request_id for event in self.living.events if isinstance(event, Finished | Failed)}

    @rule()
    def rest(self):
        self._pool(ROOMY)
        self.living.rest()
        self.living.check(self.tampered)
        assert self._over == {request.request_id for request in self.requests} | self.behind.keys()
        self._compare()

    def _compare(self):
        for request in self.requests:
            name = request.request_id
            end, tokens, expected = self.living.end(name), self.living.tokens(name), self.answers[name]
            assert isinstance(end, Finished), end
            assert end.completion_tokens == len(tokens)
            assert end.reason == "length" or (end.reason == "cancelled" and name in self.cancelled)
            if end.reason == "length":
                assert len(tokens) == request.max_tokens
            if name not in self.at_risk:
                assert tokens == expected[: len(tokens)], request

        for name, answer in self.behind.items():
            end = self.living.end(name)
            assert isinstance(end, Finished), end
            if end.reason == "length":
                events = [e for e in self.living.events if isinstance(e, Scored) and e.request_id == name]
                assert [token for event in events for token in event.redrawn] == answer
            else:
                assert end.reason == "cancelled"  # its lane or its pages were somebody's

    @invariant()
    def books(self):
        if not hasattr(self, "living"):
            return
        assert not self.living.faults, self.living.faults
        if self.scheduler.limits.pool_tokens == ROOMY:
            self.scheduler.check()
        executor, pool = self.living.ranks[0].executor, self.living.ranks[0].model.pool
        executor.check()
        check_arena(self.living.ranks[0].residents)
        held = {index: len(lane.state.pages) for index, lane in executor.lanes.items() if not lane.parked}
        assert sum(held.values()) * PAGE + pool.free_tokens == ROOMY
        for running in self.scheduler.active:
            assert held.get(running.lane, 0) <= max(running.pages, 1), "a lane has pages that nobody promised it"

    def teardown(self):
        if hasattr(self, "living"):
            try:
                if not self.living.faults:
                    self.rest()
            finally:
                self.living.close()
                for rank in self.living.ranks:
                    rank.close()
        shutil.rmtree(self.folder)


@pytest.mark.parametrize(("ranks", "examples"), [(1, 18), (2, 4)])
def test_any_life_of_an_engine(checkpoint, ranks, examples):
    run_state_machine_as_test(
        lambda: Lives(checkpoint, ranks),
        settings=settings(
            max_examples=int(os.environ.get("TIDE_LIVES", 1)) * examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
