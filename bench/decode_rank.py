"""A rank of a bench: the real engine, turned by hand on rank 0, told by files of a folder what to do."""

import sys
import time
from pathlib import Path

import msgspec
from decode_timed import PARTS, SAMPLING, TimedModel, TimedSampler, Times
from msgspec.structs import replace

from tided import guard
from tided.control.keys import load_keys
from tided.control.lockstep import Follower, Leader, Solo
from tided.engine import executor
from tided.engine.build import OpenedModel, Rank, build_rank, open_model, scheduler_limits
from tided.engine.core import FollowerEngine
from tided.engine.dataplane import TorchGroup
from tided.engine.devices import use_device
from tided.engine.leader import LeaderEngine
from tided.engine.offline import first_pairs
from tided.engine.scheduler import Scheduler
from tided.engine.types import Request
from tided.errors import ConfigError, TideError
from tided.experts.arena import Pair
from tided.models.parallel import Alone
from tided.settings import Settings
from tided.tide.demand import RouterShape
from tided.tide.history import History
from tided.tide.pilot import Pilot
from tided.tide.seed import load_seed

JOB, RESULT, KEYS, PHASES = "job.json", "result.json", "keys.json", "phases.txt"
WARM_STEPS = 8
TIMEOUT_S = 1800.0


class Job(msgspec.Struct, frozen=True):
    settings: Settings
    prompt_tokens: int
    steps: int
    swaps: int = 0


def run_rank(folder: Path, number: int) -> None:
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)
    use_device(job.settings, number)
    settings, opened = job.settings, open_model(job.settings)
    facts = guard.facts(settings, opened.checkpoint.identity())
    pairs = first_pairs(opened)
    tell(folder, number, f"{len(pairs)} resident experts over {settings.parallel.ranks} ranks")
    if number:
        follower = Follower(settings, number, load_keys(folder / KEYS, create=True))
        pairs = follower.join(facts).residents
    else:
        leader = Leader(settings, load_keys(folder / KEYS, create=True)) if settings.parallel.ranks > 1 else Solo()
        pilot = pilot_of(opened, folder)
        pairs = pilot.boot_pairs()
        leader.gather(facts, pairs)
    group = TorchGroup(settings, number) if settings.parallel.ranks > 1 else Alone()
    rank = build_rank(opened, group, pairs, lambda what, done, total: tell(folder, number, f"loading: {what}"))
    failures: list[TideError] = []
    if number:
        follower.ready(rank.residents.digest())
        FollowerEngine(rank.executor, follower, failures.append, settings.engine.threads).run()
    else:
        leader.ready(rank.residents.digest())
        tell(folder, number, f"prompts of {job.prompt_tokens} tokens, then {WARM_STEPS} + {job.steps} steps")
        times = measure(job, rank, leader, group, None if job.swaps else pilot)
        (folder / RESULT).write_bytes(msgspec.json.encode(times))
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


def measure(job: Job, rank: Rank, link: Leader | Solo, group: TorchGroup | Alone, pilot: Pilot | None) -> Times:
    """Decode steps of full lanes, one after the other, after a few that do not count."""
    model, sampler = TimedModel(rank), TimedSampler()
    rank.executor.model = model
    executor.drawing = sampler.drawing
    limits = scheduler_limits(job.settings)
    engine = LeaderEngine(
        rank.executor, Scheduler(limits), link, lambda events: None, lambda error: None, pilot, rest_after_s=0.0
    )
    for lane in range(limits.lanes):
        engine.submit(request(job, lane, rank.opened.shape.vocab_size))
    engine.take_in()
    while any(running.in_prefill for running in engine.scheduler.running.values()) or not engine.seq:
        engine.turn()
    times = Times(resident=len(rank.residents.pairs), total=len(rank.opened.all_pairs))
    swaps = exchanges(rank, job.swaps)
    before = rank.residents.pairs
    for step in range(WARM_STEPS + job.steps):
        if step == WARM_STEPS + job.steps // 4:
            engine.motion.take_plan(swaps, "measured")
        moving, generation = engine.motion.planned + engine.motion.reading > 0, rank.residents.generation
        calls, waited = counters(group)
        began = time.perf_counter()
        engine.take_in()
        engine.turn()
        whole = time.perf_counter() - began
        calls_now, waited_now = counters(group)
        if step >= WARM_STEPS:
            shared = waited_now - waited
            drawn = sampler.seconds
            parts = (whole, model.seconds - shared, shared, drawn, whole - model.seconds - drawn)
            for name, value in zip(("step", *PARTS), parts, strict=True):
                getattr(times, name).append(1000 * value)
            times.moving.append(moving or rank.residents.generation != generation)
            times.calls = calls_now - calls
    times.swapped, times.hot_reads = len(set(rank.residents.pairs) - set(before)), engine.motion.count.issued
    link.stop("measured")
    return times


def exchanges(rank: Rank, count: int) -> list[tuple[Pair, Pair]]:
    """Swaps inside layers, spread over them: the last residents for the first absentees."""
    residents, swaps = rank.residents.pairs, []
    here = set(residents)
    absent = [pair for pair in rank.opened.all_pairs if pair not in here]
    for layer in range(rank.opened.shape.moe_layers):
        leaving = [pair for pair in reversed(residents) if pair[0] == layer]
        swaps += list(enumerate(zip(leaving, [pair for pair in absent if pair[0] == layer], strict=False)))
    if len(swaps) < count:
        raise ConfigError(f"only {len(swaps)} experts can be exchanged inside their layers")
    return [swap for _, swap in sorted(swaps)[:count]]


def request(job: Job, lane: int, vocab_size: int) -> Request:
    """A prompt of arbitrary tokens, and more answer than is measured; drawn, because drawing costs more than argmax."""
    ids = [(lane * 7919 + 104_729 * i) % vocab_size for i in range(job.prompt_tokens)]
    tokens = answer_tokens(job.settings.engine.lanes, job.prompt_tokens, job.steps)
    drawn = replace(SAMPLING, seed=lane)
    return Request(request_id=f"bench-{lane}", prompt_ids=ids, sampling=drawn, max_tokens=tokens, stop_ids=())


def answer_tokens(lanes: int, prompt_tokens: int, steps: int) -> int:
    """What the first lane may generate while the prompts of the others are computed, and while it is measured."""
    return lanes * prompt_tokens + WARM_STEPS + steps + 1


def counters(group: TorchGroup | Alone) -> tuple[int, float]:
    return (group.calls, group.seconds) if isinstance(group, TorchGroup) else (0, 0.0)
