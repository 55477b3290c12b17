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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from decode_figures import report, show, show_pairs
from decode_rank import Job, answer_tokens, run_rank
from decode_timed import Times
from engine_ranks import JOB, PHASES, RESULT, TIMEOUT_S, Shown
from msgspec.structs import replace

from tided.cache.pool import PAGE_TOKENS
from tided.engine.local_ranks import free_port, run_ranks
from tided.engine.offline import given, settings_of
from tided.errors import TideError, UsageError
from tided.profile import load
from tided.settings import Cache


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
