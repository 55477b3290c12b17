"""Times a decode step of a profile on this machine and prints where it goes.

    python bench/decode_step.py profiles/mini-deepseek.toml [--ranks N] [--lanes N] [--resident N] [--steps N]

The ranks run the real engine: lockstep over ZeroMQ, collectives, sampling, accounting, plans; only HTTP is left out. Of
a step of rank 0, `collectives` is the time its thread spends in the data plane, waiting for slower ranks included (on
CUDA: the time to launch them); `model` the rest of the model's decode; `sampler` the draws; `host` all that is left:
deciding, sending, events, statistics. One more line tells what a draw costs at the vocabulary of the large models.

    --swaps N    N residents are exchanged while steps are measured: steps while reads are under way, and those that
                 publish, beside the others
    --ring N     the same run without and with a hot ring of N slots, in turns, --rounds times: what hot reads cost
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from tided import guard
from tided.cache.pool import PAGE_TOKENS
from tided.control.keys import load_keys
from tided.control.lockstep import Follower, Leader, Solo
from tided.engine import executor, sampling
from tided.engine.build import OpenedModel, Rank, build_rank, open_model, scheduler_limits
from tided.engine.core import FollowerEngine
from tided.engine.dataplane import TorchGroup
from tided.engine.devices import use_device
from tided.engine.leader import LeaderEngine
from tided.engine.local_ranks import free_port, run_ranks
from tided.engine.offline import first_pairs, given, settings_of
from tided.engine.scheduler import Scheduler
from tided.engine.types import Request, Sampling
from tided.errors import ConfigError, TideError, UsageError
from tided.experts.arena import Pair
from tided.models.base import LaneState
from tided.models.parallel import Alone
from tided.profile import load
from tided.settings import Cache, Settings
from tided.tide.demand import RouterShape
from tided.tide.history import History
from tided.tide.pilot import Pilot
from tided.tide.seed import load_seed

JOB, RESULT, KEYS, PHASES = "job.json", "result.json", "keys.json", "phases.txt"
WARM_STEPS = 8
TIMEOUT_S = 1800.0
HOST_LIMIT_MS = 1.0
PARTS = ("model", "collectives", "sampler", "host")
SAMPLING = Sampling(temperature=1.0, top_p=0.95)
LARGE_VOCABULARY = 129_280
LARGE_DRAWS = 20


class Job(msgspec.Struct, frozen=True):
    settings: Settings
    prompt_tokens: int
    steps: int
    swaps: int = 0


class Times(msgspec.Struct):
    """Milliseconds of rank 0's measured steps, and collectives a step."""

    step: list[float] = []
    model: list[float] = []
    collectives: list[float] = []
    sampler: list[float] = []
    host: list[float] = []
    moving: list[bool] = []  # steps with reads under way, or with a change of the routable set
    swapped: int = 0
    hot_reads: int = 0
    calls: int = 0
    resident: int = 0
    total: int = 0


class TimedModel:
    """The model of a rank, with the seconds of its last decode."""

    def __init__(self, rank: Rank) -> None:
        self._model, self.seconds = rank.model, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def decode(self, lanes: Sequence[LaneState], token_ids: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        began = time.perf_counter()
        logits = self._model.decode(lanes, token_ids, counts)
        self.seconds = time.perf_counter() - began
        return logits


class TimedSampler:
    """The executor's sampler, with the seconds of its last draw: to begin it, and to have the tokens."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, logits: Tensor, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
        return self.drawing(logits, rows)()

    def drawing(self, logits: Tensor, rows: Sequence[tuple[Sampling, int]]) -> Callable[[], list[int]]:
        began = time.perf_counter()
        tokens = sampling.drawing(logits, rows)
        self.seconds = time.perf_counter() - began

        def finish() -> list[int]:
            began = time.perf_counter()
            found = tokens()
            self.seconds += time.perf_counter() - began
            return found

        return finish


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


def report(times: Times, job: Job) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, float]:
        tenths = statistics.quantiles(values, n=10)
        return {"median_ms": statistics.median(values), "p10_ms": tenths[0], "p90_ms": tenths[-1]}

    lanes = job.settings.engine.lanes
    return {
        "ranks": job.settings.parallel.ranks,
        "lanes": lanes,
        "steps": len(times.step),
        "resident": times.resident,
        "resident_share": times.resident / times.total,
        "context_tokens": job.prompt_tokens,
        "collectives_a_step": times.calls,
        "tokens_a_second": 1000 * lanes / statistics.median(times.step),
        **{part: spread(getattr(times, part)) for part in ("step", *PARTS)},
        "sampler_at": {"vocabulary": LARGE_VOCABULARY, "median_ms": large_draw_ms()},
        **({"swaps": swaps_of(times)} if job.swaps else {}),
    }


def swaps_of(times: Times) -> dict[str, Any]:
    """Steps while experts are exchanged against the others of the same run, in milliseconds and as shares."""
    moving = [value for value, moves in zip(times.step, times.moving, strict=True) if moves]
    rest = [value for value, moves in zip(times.step, times.moving, strict=True) if not moves]
    median = statistics.median(times.step)
    return {
        "swapped": times.swapped,
        "steps": len(moving),
        "median_ms": statistics.median(moving),
        "worst_ms": max(moving),
        "worst_of_median": max(moving) / median,
        "worst_of_median_at_rest": max(rest) / median,
    }


def large_draw_ms() -> float:
    """Median milliseconds of one draw with the requests' sampling, from logits as spread as a model's."""
    logits = 4 * torch.randn(1, LARGE_VOCABULARY, generator=torch.Generator().manual_seed(1))
    seconds, timed = [], TimedSampler()
    for position in range(LARGE_DRAWS):
        timed(logits, [(SAMPLING, position)])
        seconds.append(timed.seconds)
    return 1000 * statistics.median(seconds)


def show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['ranks']} ranks, {figures['lanes']} lanes, {figures['resident']} experts resident "
        f"({100 * figures['resident_share']:.1f} %), {figures['steps']} steps after {figures['context_tokens']} tokens"
    )
    for part in ("step", *PARTS):
        times = figures[part]
        share = 100 * times["median_ms"] / figures["step"]["median_ms"]
        print(
            f"  {part:12}{times['median_ms']:9.2f} ms {share:6.1f} %   ({times['p10_ms']:.2f} to {times['p90_ms']:.2f})"
        )
    if swaps := figures.get("swaps"):
        print(
            f"  {swaps['swapped']} swaps in {swaps['steps']} steps: median {swaps['median_ms']:.2f} ms, worst "
            f"{swaps['worst_ms']:.2f} ms, {swaps['worst_of_median']:.2f} x the median "
            f"(worst of the other steps: {swaps['worst_of_median_at_rest']:.2f} x)"
        )
    large = figures["sampler_at"]
    print(f"  a draw at a vocabulary of {large['vocabulary']:,}: {large['median_ms']:.2f} ms")
    verdict = "within" if figures["host"]["median_ms"] < HOST_LIMIT_MS else "OVER"
    print(f"  {figures['tokens_a_second']:.1f} tokens/s; {figures['collectives_a_step']} collectives a step; host time")
    print(f"  {verdict} its limit of {HOST_LIMIT_MS:g} ms")


def job_of(options: argparse.Namespace) -> Job:
    if options.steps < 2 or options.context < 1:
        raise UsageError("at least 2 steps are measured, after a prompt of at least 1 token")
    target = Path(options.target)
    settings = settings_of(target) if target.is_dir() else load(target)
    ranks, lanes = given(options.ranks, settings.parallel.ranks), given(options.lanes, 1)
    room = options.context + answer_tokens(lanes, options.context, options.steps)
    return Job(
        replace(
            settings,
            experts=replace(settings.experts, resident=given(options.resident, settings.experts.resident)),
            cache=Cache(context_tokens=room, pool_tokens=lanes * (room + PAGE_TOKENS)),
            engine=replace(settings.engine, lanes=lanes),
            parallel=replace(settings.parallel, ranks=ranks, hosts=(), control_port=free_port(), data_port=free_port()),
        ),
        options.context,
        options.steps,
        options.swaps,
    )


def run(job: Job) -> Times:
    with tempfile.TemporaryDirectory(prefix="tidelm-bench-") as name:
        folder = Path(name)
        (folder / JOB).write_bytes(msgspec.json.encode(job))
        print("starting the ranks", file=sys.stderr, flush=True)
        command = [__file__, "--as-rank"]
        run_ranks(command, folder, job.settings.parallel.ranks, TIMEOUT_S, Shown(folder / PHASES))
        return msgspec.json.decode((folder / RESULT).read_bytes(), type=Times)


def paired(options: argparse.Namespace) -> dict[str, Any]:
    """Runs without and with the ring in turns, each pair in the other order."""
    speeds: dict[int, list[float]] = {0: [], options.ring: []}
    reads = 0
    for number in range(options.rounds):
        for slots in (0, options.ring) if number % 2 == 0 else (options.ring, 0):
            job = job_of(options)  # ports of its own
            tide = replace(job.settings.tide, hot_ring_slots=slots)
            times = run(replace(job, settings=replace(job.settings, tide=tide)))
            speeds[slots].append(1000 * job.settings.engine.lanes / statistics.median(times.step))
            reads += times.hot_reads
    shares = [with_ring / without for without, with_ring in zip(speeds[0], speeds[options.ring], strict=True)]
    return {
        "ring": options.ring,
        "without_tok_s": speeds[0],
        "with_tok_s": speeds[options.ring],
        "hot_reads": reads,
        "with_over_without": statistics.median(shares),
    }


def show_pairs(figures: dict[str, Any]) -> None:
    for without, with_ring in zip(figures["without_tok_s"], figures["with_tok_s"], strict=True):
        print(f"  without {without:8.2f} tok/s   with {with_ring:8.2f} tok/s   {with_ring / without:.3f}")
    print(f"  a ring of {figures['ring']} slots, {figures['hot_reads']} hot reads: {figures['with_over_without']:.3f}")


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--as-rank"]:
        return as_rank(Path(arguments[1]), int(arguments[2]))
    parser = argparse.ArgumentParser(prog="decode_step.py", description=__doc__.split("\n")[0])
    parser.add_argument("target", help="a profile, or the directory of a checkpoint")
    for name, default, text in (
        ("--ranks", None, "ranks on this machine (default: the profile's)"),
        ("--lanes", None, "requests at a time (default: 1)"),
        ("--resident", None, "resident experts (default: the profile's)"),
        ("--steps", 100, "steps to measure"),
        ("--context", 64, "tokens of prompt before the first step"),
        ("--swaps", 0, "experts to exchange while steps are measured"),
        ("--ring", 0, "slots of a hot ring to compare with none"),
        ("--rounds", 3, "pairs of runs for --ring"),
    ):
        parser.add_argument(name, type=int, default=default, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        if options.ring:
            figures = paired(options)
        else:
            job = job_of(options)
            figures = report(run(job), job)
    except TideError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(figures))
    elif options.ring:
        show_pairs(figures)
    else:
        show(figures)
    return 0


def as_rank(folder: Path, number: int) -> int:
    try:
        run_rank(folder, number)
    except TideError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
