"""Two ranks as threads of one process, with the real step loop, motion, residents, caches and history, and faults drawn
from a seed: reads that fail, are late or damaged on one rank, a rank that ends, hangs or is killed, a link that is cut,
a full disk, damaged files, a clock that jumps, clients that leave. Then a second life on what the first left behind.

    python -m tests.faults.simulated [--mini deepseek|glm] [--seeds 1-1000] [--receipt FILE]

Whatever happens: what was told of an answer is the beginning of the right one; each request ends once; both ranks end,
or none; and the history holds every vote that could be written.
"""

import argparse
import errno
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from real_pair import Living
from small_model import Small, small_model, small_of, small_pages
from test_engine_stateful import LENGTHS, SAMPLED, alone, ask, prompt

from tests.bundled import DEEPSEEK, MINIS, Mini, named
from tests.faults.grid import numbers
from tided.cache import bundle
from tided.control.messages import Step
from tided.engine import core
from tided.engine.build import open_model
from tided.engine.types import Failed, Finished, Request
from tided.errors import DataError, PairError, TideError
from tided.settings import Tide
from tided.tide import history as histories
from tided.tide.demand import Demand, RouterShape
from tided.tide.history import History
from tided.tide.pilot import Pilot

IDENTITY = "ab" * 32
ANSWER = 9  # tokens at most
TIDE = Tide(
    sensitivity="max",
    prior_votes=0.0,
    urgent_miss_rate=0.01,
    sync_slots=3,
    hot_ring_slots=2,
    replan_decode_tokens=6,
    replan_chunk_tokens=8,
    min_prefill_tokens=1,
    urgent_gap_tokens=4,
)
SILENCE_S = 0.05  # after which the heartbeats would end the pair
END_S = 10.0
LONGEST_LIFE_S = 120.0
FATAL = ("raise", "hang", "kill", "cut")


@dataclass
class Plan:
    """What a life has to bear. `fatal`: what ends it, on which rank and at which step."""

    fatal: str
    rank: int
    step: int
    bad_share: float
    bad_for_good: int
    late_s: float
    full_from: int
    full_for: int
    jump_days: int
    damage: bool

    @classmethod
    def draw(cls, chance: random.Random) -> "Plan":
        return cls(
            fatal=chance.choice(("", "", *FATAL)),
            rank=chance.randrange(2),
            step=chance.randint(1, 24),
            bad_share=chance.choice((0.0, 0.0, 0.02, 0.2)),
            bad_for_good=chance.choice((0, 0, 1, 3)),
            late_s=chance.choice((0.0, 0.0, 0.001, 0.004)),
            full_from=chance.choice((10**9, chance.randint(1, 30))),
            full_for=chance.randint(1, 30),
            jump_days=chance.choice((0, 0, -3, 1, 400)),
            damage=chance.random() < 0.5,
        )


@dataclass
class Told:
    """Of one seed."""

    seed: int
    faults: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)


class Disk:
    """A rank's reads: late, failing now and then, or for good."""

    def __init__(self, rank, pairs: list, plan: Plan, chance: random.Random, seen: Counter[str]) -> None:
        self._inner, self._plan, self._chance, self._seen = rank.reads.io._source, plan, chance, seen
        self._lock = threading.Lock()
        self._bad = set(chance.sample(pairs, plan.bad_for_good))
        rank.reads.io._source = self

    def read(self, layer, expert, out) -> None:
        with self._lock:
            fails = (layer, expert) in self._bad or self._chance.random() < self._plan.bad_share
            late_s = self._chance.random() * self._plan.late_s
        if late_s:
            time.sleep(late_s)
        if fails:
            self._seen["reads failed"] += 1
            out[: len(out) // 2] = bytes(len(out) // 2)  # half of it is there
            raise DataError("cannot be read: Input/output error", where="experts:4096")
        self._inner.read(layer, expert, out)


class Life:
    """From a start to an end of whatever kind, in a folder that may hold what an earlier one left."""

    def __init__(self, small: Small, model, folder: Path, plan: Plan, chance: random.Random, told: Told) -> None:
        self.small, self.folder, self.plan, self.chance, self.told = small, folder, plan, chance, told
        self.shape = RouterShape(small.layers, small.experts, small.top_k)
        self.history = History.open(folder / "history", IDENTITY, self.shape, True)
        self.first = self.history.demand
        self.written = self.first  # the newest demand that the disk took
        self.full = False
        self.ended = False  # by rank 0's own engine
        self.image: Path | None = None  # of the folder, at the moment of a kill
        self.requests: list[Request] = []
        pilot = Pilot(self.history, None, TIDE, self.shape, small.few)
        self.living = Living(model, pilot, self._prepare, folder / "cache")
        self.living.engine._on_fault = self._end

    def _prepare(self, living: Living) -> None:
        chances = [random.Random(self.chance.random()) for _ in living.ranks]
        for rank, chance in zip(living.ranks, chances, strict=True):
            Disk(rank, self.small.pairs, self.plan, chance, self.told.seen)
        for number, rank in enumerate(living.ranks):
            self._watch_steps(number, rank.executor)
        if self.plan.fatal == "cut":
            self._cut(living.link)

    def _watch_steps(self, rank: int, executor) -> None:
        execute = executor.execute

        def watched(step: Step):
            if rank == 0:
                self.full = self.plan.full_from <= step.seq < self.plan.full_from + self.plan.full_for
            if rank == self.plan.rank and step.seq == self.plan.step:
                self._strike()
            return execute(step)

        executor.execute = watched

    def _cut(self, link) -> None:
        """Steps are sent, and do not arrive."""
        send = link.send

        def cut(step: Step) -> None:
            if step.seq < self.plan.step:
                send(step)
            elif step.seq == self.plan.step:
                self.told.seen["links cut"] += 1
                self._silence()

        link.send = cut

    def _strike(self) -> None:
        """On the thread of the rank that is struck."""
        if self.plan.fatal in ("raise", "hang", "kill"):
            self.told.seen[f"ranks that {self.plan.fatal}"] += 1
        if self.plan.fatal == "raise":
            raise OSError("the device is gone")
        if self.plan.fatal == "kill":
            self._take_image()
            raise PairError("killed")
        if self.plan.fatal == "hang":
            self._silence()
            time.sleep(2 * SILENCE_S)
            raise PairError("it was hanging")

    def _silence(self) -> None:
        """What the heartbeats do once nothing has been heard for long enough."""
        timer = threading.Timer(SILENCE_S, lambda: self._end(PairError("a rank is silent")))
        timer.daemon = True
        timer.start()

    def _take_image(self) -> None:
        """The folder as killed processes leave it, caches half written. Of rank 1, its caches alone: rank 0 lives on,
        for a moment."""
        self.image = self.folder.with_name(f"{self.folder.name}-killed")
        mine = self.folder if self.plan.rank == 0 else self.folder / "cache" / "1"
        with suppress(shutil.Error):  # the caches' writer renamed a file meanwhile; the others were copied
            shutil.copytree(mine, self.image / mine.relative_to(self.folder), copy_function=copy_what_is_there)

    def _end(self, error: TideError) -> None:
        self.living._fault(error)
        for other in self.living.others:
            other.close()

    # What it is asked

    def serve(self, count: int) -> None:
        """Requests come one by one, and some clients leave, until all has ended, or the pair has. Then somebody makes
        room on the disk, and somebody asks once more."""
        self._until_rest(count)
        if not self.living.faults:
            self.plan.full_for, self.full = 0, False
            self._until_rest(1)
        if self.living.faults and not self.ended:  # the other rank's end was heard while this one had nothing to do
            self.living.engine._end(self.living.faults[0])

    def _until_rest(self, left: int) -> None:
        living, chance, deadline_s = self.living, self.chance, time.monotonic() + LONGEST_LIFE_S
        while not living.faults:
            assert time.monotonic() < deadline_s, "the life does not end"
            if left and chance.random() < 0.3:
                left -= 1
                self._ask()
            if self.requests and chance.random() < 0.01:
                living.cancel(chance.choice(self.requests).request_id)
            if not self._turn():
                time.sleep(0.0002)
                if not left and self._rests:
                    return

    def _turn(self) -> bool:
        """As the engine's own thread does."""
        try:
            return self.living.engine.turn()
        except Exception as error:
            self.ended = True
            self.living.engine._end(core.as_fault(error, self.living.engine.seq + 1))
            return True

    @property
    def _rests(self) -> bool:
        """And nothing is read back for a request that has been cancelled."""
        engine, ranks = self.living.engine, self.living.ranks
        recalling = any(rank.executor.caching.recalling for rank in ranks)
        return not (engine._reading or recalling) and all(other.seq >= engine.seq for other in self.living.others)

    def _ask(self) -> None:
        chance, number = self.chance, len(self.requests)
        ids = prompt(chance.randrange(2), chance.choice(LENGTHS[1:4]), chance.random() < 0.5)
        fidelity = "exact" if chance.random() < 0.7 else "fast"
        request = ask(str(number), ids, chance.randrange(len(SAMPLED)), chance.randint(1, ANSWER), fidelity)
        self.requests.append(request)
        self.living.submit(request)

    # What must hold

    def close(self) -> None:
        began_s = time.monotonic()
        self.living.close()
        if self.image is not None and self.plan.rank == 1:
            with suppress(shutil.Error):  # as above: rank 0's writer may have a file in hand
                mine = self.folder / "cache" / "0"
                shutil.copytree(mine, self.image / "cache" / "0", copy_function=copy_what_is_there)
            self.history.close()
            shutil.copytree(self.folder / "history", self.image / "history")
        if time.monotonic() - began_s > END_S:
            self.told.faults.append(f"the ranks took {time.monotonic() - began_s:.1f} s to end")
        for rank in self.living.ranks:
            rank.close()
        self.history.close()

    def judge(self) -> None:
        living, told = self.living, self.told
        for request in self.requests:
            name, tokens = request.request_id, living.tokens(request.request_id)
            ends = [e for e in living.events if isinstance(e, Finished | Failed) and e.request_id == name]
            if len(ends) != 1:
                told.faults.append(f"request {name} ended {len(ends)} times")
            if request.fidelity != "exact":
                continue
            right = alone(self.small, 2, tuple(request.prompt_ids), SAMPLED.index(request.sampling))
            told.seen["answers compared"] += 1
            told.seen["tokens compared"] += len(tokens)
            if tokens != right[: len(tokens)]:
                told.faults.append(f"request {name}: {tokens} where alone it is {right}")
            elif isinstance(ends[0], Finished) and ends[0].reason == "length" and len(tokens) != request.max_tokens:
                told.faults.append(f"request {name} ended after {len(tokens)} of {request.max_tokens} tokens")
        found = History.open((self.image or self.folder) / "history", IDENTITY, self.shape, False)
        if found.note:
            told.faults.append(found.note)
        if not same(found.demand, self.written):
            told.faults.append(f"{self.written.requests} votes were written, {found.demand.requests} are there")
        told.seen["experts swapped"] += living.engine._swaps
        told.seen["hot reads"] += living.engine.motion.count.issued
        told.seen["votes"] += int(self.written.requests - self.first.requests)
        unwritten = int(self.history.demand.requests - self.written.requests)
        told.seen["votes while the disk was full"] += unwritten
        if unwritten and not (self.full or self.image):
            told.faults.append(f"{unwritten} votes were never written")


def same(one: Demand, other: Demand) -> bool:
    return (
        one.requests == other.requests
        and np.array_equal(one.counts, other.counts)
        and np.array_equal(one.mass, other.mass)
    )


def copy_what_is_there(source: str, target: str) -> str:
    try:
        return shutil.copy2(source, target)
    except FileNotFoundError:  # the writer renamed it meanwhile
        return target


@contextmanager
def wrapped(life: Life) -> Iterator[None]:
    """The disk that may be full, and the clock, for one life."""
    write, put, date = histories._write, bundle.write, histories.datetime

    class Moved(date):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=life.plan.jump_days if life.chance.random() < 0.5 else 0)

    def written(connection, demand):
        if life.full:
            life.told.seen["writes on a full disk"] += 1
            raise sqlite3.OperationalError("database or disk is full")
        write(connection, demand)
        if life.image is None or life.plan.rank == 1:  # else: what nobody would have done any more
            life.written = demand

    def put_down(*arguments):
        if life.full:
            life.told.seen["writes on a full disk"] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        put(*arguments)

    histories._write, bundle.write, histories.datetime = written, put_down, Moved
    try:
        yield
    finally:
        histories._write, bundle.write, histories.datetime = write, put, date


def damage(folder: Path, chance: random.Random, seen: Counter[str]) -> None:
    """Cached prompts, cut, changed or gone."""
    for path in sorted(folder.glob("cache/*/prefix/[!.]*")):
        if chance.random() < 0.4:
            data = bytearray(path.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            chance.choice((lambda p, d: p.write_bytes(d), lambda p, d: p.write_bytes(d[:-9]), lambda p, d: p.unlink()))(
                path, data
            )
            seen["cached files damaged"] += 1


def run(seed: int, small: Small, folder: Path) -> Told:
    """Two lives."""
    chance, told = random.Random(seed), Told(seed)
    model = small_model(small, ranks=2, lanes=2, resident=small.few, prefix_ram_bytes=12_000, prefix_disk_bytes=1 << 20)
    model = open_model(replace(model.settings, tide=TIDE))
    plan, calm = Plan.draw(chance), Plan("", 0, 0, 0.0, 0, 0.0, 10**9, 0, 0, False)
    folder = folder / str(seed)
    try:
        first = live(Life(small, model, folder, plan, chance, told), chance.randint(2, 4))
        left = first.image or folder
        if plan.damage:
            damage(left, chance, told.seen)
        second = Life(small, model, left, calm, chance, told)
        live(second, 1)
        if second.living.faults:
            told.faults.append(f"the next life ended: {second.living.faults}")
        leftovers = [p.name for p in left.rglob("*") if p.name.startswith(".") or p.name.endswith(".tmp")]
        if leftovers:
            told.faults.append(f"unfinished files: {leftovers}")
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        told.faults.append(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno}, {last.line})")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder.with_name(f"{seed}-killed"), ignore_errors=True)
    return told


def live(life: Life, count: int) -> Life:
    with wrapped(life):
        life.serve(count)
        if not life.living.faults:
            life.living.check(tampered=True)
        life.close()
    life.judge()
    return life


@contextmanager
def small(mini: Mini) -> Iterator[Small]:
    """Its family's checkpoint, with pages of a few tokens."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="pairs-") as folder, pytest.MonkeyPatch.context() as patch:
        small_pages(patch)
        patch.setattr(core, "IDLE_WAIT_S", SILENCE_S)
        yield small_of(mini, Path(folder))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mini", choices=list(map(str, MINIS)), default=str(DEEPSEEK), help="whose family")
    parser.add_argument("--seeds", default="1-1000", help="A, or A-B")
    parser.add_argument("--receipt", type=Path, help="where all that is printed is kept")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    said = [f"python -m tests.faults.simulated --mini {options.mini} --seeds {options.seeds}"]

    def say(line: str) -> None:
        said.append(line)
        print(line, flush=True)

    wrong = run_all(named(options.mini), numbers(options.seeds), say)
    if options.receipt:
        options.receipt.write_text("\n".join(said) + "\n")
    return int(wrong > 0)


def run_all(mini: Mini, seeds: Sequence[int], say: Callable[[str], None]) -> int:
    """How many of them were wrong."""
    seen: Counter[str] = Counter()
    wrong, began_s = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lives-") as folder, small(mini) as checkpoint:
        for done, seed in enumerate(seeds, 1):
            told = run(seed, checkpoint, Path(folder))
            seen += told.seen
            wrong += bool(told.faults)
            for fault in told.faults:
                say(f"seed {seed}: {fault[:600]}")
            if done % 50 == 0:
                print(f"{done} of {len(seeds)}, {wrong} wrong", file=sys.stderr, flush=True)
    say(f"{len(seeds)} runs in {time.monotonic() - began_s:.0f} s, {wrong} wrong")
    say(", ".join(f"{count} {what}" for what, count in sorted(seen.items())))
    return wrong


if __name__ == "__main__":
    sys.exit(main())
