"""A pair under mixed traffic for minutes: two lanes, a pool that parks, drafts, prompt caches that overflow, clients
that hang up. No request may fail; each that is answered whole is answered as by a plain pair that had nothing else to
do; and at rest the pair holds no more than it did when it was warm.

A substituted expert makes an answer depend on what is resident. So the set "whole" keeps every expert resident and
compares every answer; the set "moving" lets residents and a hot ring follow the traffic, and compares the answers of
requests that ask for `exact`, which residency does not change.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.bundled import Mini
from tests.daemon.helpers import Running, running
from tests.soak import watch
from tests.soak.bodies import TALES, Visit, distinct, traffic
from tests.soak.clients import Answer, Tally, at_once, one_by_one

RAM_BYTES, DISK_BYTES = 2_000_000, 6_000_000
PEER_TIMEOUT_S = 30  # a machine that others use as well is slow, and not dead
WARM_SHARE = 0.4  # of the traffic; by then caches are full and all paths were taken
Set = Literal["whole", "moving"]
Tell = Callable[[str], None]

PROFILE = """
[model]
path = "{mini.path}"
served_name = "mini-{mini}"
prefill_chunk_tokens = 64
[experts]
resident = {resident}
spare_slots = 8
[tide]
seed = "{mini.path}/demand-seed.json"
hot_ring_slots = {ring}
[cache]
context_tokens = 640
{cache}
[engine]
guard_every_steps = 16
{engine}
"""
CACHES = f"pool_tokens = 640\nprefix_ram_bytes = {RAM_BYTES}\nprefix_disk_bytes = {DISK_BYTES}"


def plain(mini: Mini) -> str:
    cache, engine = "pool_tokens = 640\npark_tokens = 0", 'lanes = 1\ndraft = "off"'
    return PROFILE.format(mini=mini, resident=mini.experts, ring=0, cache=cache, engine=engine)


def full(mini: Mini, which: Set) -> str:
    resident, ring = (mini.experts, 0) if which == "whole" else (mini.some, 24)
    return PROFILE.format(
        mini=mini, resident=resident, ring=ring, cache=CACHES, engine='lanes = 2\ndraft = "acceptance"'
    )


@dataclass(frozen=True)
class Size:
    """Requests of a run, different ones among them, clients at a time, share of those that hang up."""

    requests: int = 500
    distinct: int = 64
    clients: int = 4
    cancel_share: float = 0.2


@dataclass
class Verdict:
    mini: Mini
    seed: int
    set: Set
    tally: Tally
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        counts, tally = self.tally.counts, self.tally
        return (
            f"{self.mini}, seed {self.seed}, {self.set}: {tally.done} requests in {self.seconds:.0f} s, "
            f"{tally.compared} compared, {tally.hung_up} hung up, {counts['parked']} parked, "
            f"{counts['accepted']} drafts right, {counts['cached']} tokens from caches, "
            f"{counts['swaps']} experts swapped: "
            + ("nothing wrong" if not self.faults else f"{len(self.faults)} WRONG")
        )


def soak(mini: Mini, seed: int, which: Set, size: Size, folder: Path, tell: Tell) -> Verdict:
    asks = distinct(seed, size.distinct, 0.0 if which == "whole" else 0.5)
    visits = traffic(seed, asks, size.requests, size.cancel_share)
    met = {visit.ask.name for visit in visits if visit.ask.compared}
    alone = [ask for ask in asks if ask.name in met]
    with running(plain(mini), _made(folder / "plain"), peer_timeout_s=PEER_TIMEOUT_S) as pair:
        tell(f"{mini}, seed {seed}, {which}: {len(alone)} different requests one by one, on a plain pair")
        expected = asyncio.run(one_by_one(pair.url, alone, lambda number: None))
    with running(full(mini, which), _made(folder / "soaked"), peer_timeout_s=PEER_TIMEOUT_S) as pair:
        return _soaked(pair, Verdict(mini, seed, which, Tally()), visits, expected, size, tell)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _soaked(
    pair: Running, verdict: Verdict, visits: list[Visit], expected: dict[str, Answer], size: Size, tell: Tell
) -> Verdict:
    tally, began_s = verdict.tally, time.monotonic()
    unfit = [f"alone: {name}: {answer.error}" for name, answer in expected.items() if answer.error]

    def told() -> None:
        if tally.done % 25 == 0:
            tell(f"{tally.done}/{len(visits)} requests, {time.monotonic() - began_s:.0f} s, {len(tally.wrong)} wrong")

    caches = [pair.state_dir / "cache" / f"rank-{rank}" for rank in (0, 1)]
    warm = int(len(visits) * WARM_SHARE)
    restless, moments = [], []
    asyncio.run(at_once(pair.url, visits[:TALES], expected, TALES, tally, told))
    for part in (visits[TALES:warm], visits[warm:]):
        asyncio.run(at_once(pair.url, part, expected, size.clients, tally, told))
        if why := watch.come_to_rest(pair.url, caches):
            restless.append(why)
            break
        moments.append([watch.held(pid, cache) for pid, cache in zip(pair.pids, caches, strict=True)])
        tell(f"at rest: {moments[-1]}")
    verdict.seconds = time.monotonic() - began_s
    grown = [
        f"rank {rank}: {leak}"
        for rank, (before, after) in enumerate(zip(moments[0], moments[-1], strict=True) if moments else ())
        for leak in watch.leaks(before, after, DISK_BYTES)
    ]
    said = [f"log of rank {rank}: {line}" for rank in (0, 1) for line in watch.flagged(pair.log(rank))]
    verdict.faults = unfit + tally.wrong + restless + grown + said + _did_nothing(verdict)
    return verdict


def _did_nothing(verdict: Verdict) -> list[str]:
    """A soak in which something never happened shows nothing about it."""
    happened = dict(verdict.tally.counts) | {"hung up": verdict.tally.hung_up, "compared": verdict.tally.compared}
    wanted = ["parked", "accepted", "cached", "beside", "hung up", "compared"]
    wanted += ["swaps"] if verdict.set == "moving" else []
    return [f"nothing was {name}" for name in wanted if not happened.get(name)]
