"""The decode steps of `bench/decode_step.py`, measured on rank 0."""

import time
from pathlib import Path

import msgspec
from decode_timed import PARTS, SAMPLING, TimedModel, TimedSampler, Times
from engine_ranks import JOB, Led, serve_rank, tell
from msgspec.structs import replace

from tided.engine import executor
from tided.engine.build import Rank, scheduler_limits
from tided.engine.dataplane import TorchGroup
from tided.engine.leader import LeaderEngine
from tided.engine.scheduler import Scheduler
from tided.engine.types import Request
from tided.errors import ConfigError
from tided.experts.arena import Pair
from tided.models.parallel import Alone
from tided.settings import Settings

WARM_STEPS = 8


class Job(msgspec.Struct, frozen=True):
    settings: Settings
    prompt_tokens: int
    steps: int
    swaps: int = 0


def run_rank(folder: Path, number: int) -> None:
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)

    def lead(led: Led) -> Times:
        tell(folder, number, f"prompts of {job.prompt_tokens} tokens, then {WARM_STEPS} + {job.steps} steps")
        return measure(job, led)

    serve_rank(folder, number, job.settings, lead)


def measure(job: Job, led: Led) -> Times:
    """Decode steps of full lanes, one after the other, after a few that do not count. Where swaps are asked for, there
    are no others."""
    rank, group = led.rank, led.group
    model, sampler = TimedModel(rank), TimedSampler()
    rank.executor.model = model
    executor.drawing = sampler.drawing
    limits = scheduler_limits(job.settings)
    engine = LeaderEngine(
        rank.executor,
        Scheduler(limits),
        led.link,
        lambda events: None,
        lambda error: None,
        None if job.swaps else led.pilot,
        rest_after_s=0.0,
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
