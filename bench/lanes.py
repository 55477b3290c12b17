"""What a newcomer costs a running answer, and how long the newcomer waits: an answer's rate alone, then while a prompt
of 2,048 tokens is computed beside it.

    python bench/lanes.py profiles/mini-deepseek.toml [--ranks N] [--prompt N] [--repeats N] [--window N] [--share F]
        [--resident N] [--json]

The ranks run the real engine, plans included; only HTTP is left out. Prompts are held-out texts, none found in a cache;
answers have no end, and no drafts, whose rate changes with the text. Each repeat is an answer of its own:

    alone       its rate over --window tokens before the newcomer came, and as many after it left
    beside      its rate from the newcomer's submission to the newcomer's first token
    first_token_s, idle_first_token_s
                of the newcomer, beside the answer and on the idle engine just before
    share       beside by alone; the rule is that it stays above 1 - engine.prefill_share
    time_share  of the time beside, what went into the answer's own steps; above `share` where those were slower then
    longest_gap_ms
                between two tokens of the answer meanwhile
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec
from engine_ranks import JOB, PHASES, RESULT, TIMEOUT_S, Led, Shown, serve_rank, tell
from msgspec.structs import replace

from tidectl.evals.texts import read
from tided.cache.pool import PAGE_TOKENS
from tided.engine.build import scheduler_limits
from tided.engine.leader import LeaderEngine
from tided.engine.local_ranks import free_port, run_ranks
from tided.engine.offline import given
from tided.engine.scheduler import Scheduler
from tided.engine.types import Event, Request, Sampling, Tokens
from tided.errors import TideError, UsageError
from tided.profile import load
from tided.settings import Settings

ANSWER_PROMPT = 64  # tokens
WARM_TOKENS = 16
ANSWERED = 4  # tokens of the newcomer's answer


class Job(msgspec.Struct, frozen=True):
    settings: Settings
    prompt_tokens: int
    repeats: int
    window: int

    @property
    def answer_tokens(self) -> int:
        """As many as the context has room for: how many come beside the newcomer is what is measured."""
        return self.settings.cache.context_tokens - ANSWER_PROMPT


class Repeat(msgspec.Struct, frozen=True):
    alone_tok_s: float
    beside_tok_s: float
    first_token_s: float
    idle_first_token_s: float
    longest_gap_ms: float
    tokens_beside: int
    time_share: float

    @property
    def share(self) -> float:
        return self.beside_tok_s / self.alone_tok_s


class Clock:
    """The moments at which tokens of each request came."""

    def __init__(self) -> None:
        self.came: dict[str, list[float]] = {}

    def __call__(self, events: Sequence[Event]) -> None:
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Tokens):
                self.came.setdefault(event.request_id, []).extend([now] * len(event.token_ids))

    def count(self, name: str) -> int:
        return len(self.came.get(name, ()))


def run_rank(folder: Path, number: int) -> None:
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)

    def lead(led: Led) -> list[Repeat]:
        clock, scheduler = Clock(), Scheduler(scheduler_limits(job.settings))
        engine = LeaderEngine(
            led.rank.executor, scheduler, led.link, clock, led.failures.append, led.pilot, rest_after_s=0.0
        )
        return list(measure(job, engine, clock, folder))

    serve_rank(folder, number, job.settings, lead)


def measure(job: Job, engine: LeaderEngine, clock: Clock, folder: Path) -> Iterator[Repeat]:
    """The first repeat warms everything up and does not count."""
    texts = cycle(
        token for row in read(Path(job.settings.model.path), 1 << 20).values() for t in row for token in t.ids
    )
    for number in range(job.repeats + 1):
        tell(folder, 0, f"repeat {number} of {job.repeats}")
        idle, answer, newcomer = (f"{kind}-{number}" for kind in ("idle", "answer", "newcomer"))
        began = submit(engine, idle, list(islice(texts, job.prompt_tokens)), ANSWERED)
        until(engine, clock, idle, 1)
        idle_s = clock.came[idle][0] - began
        rest(engine)
        submit(engine, answer, list(islice(texts, ANSWER_PROMPT)), job.answer_tokens)
        until(engine, clock, answer, WARM_TOKENS + job.window)
        before = clock.came[answer][-job.window - 1 :]
        began = submit(engine, newcomer, list(islice(texts, job.prompt_tokens)), ANSWERED)
        decoding_s = until(engine, clock, newcomer, 1, answer)
        first = clock.came[newcomer][0]
        beside = [before[-1], *(at for at in clock.came[answer] if began < at <= first)]
        while any(running.request.request_id == newcomer for running in engine.scheduler.running.values()):
            engine.turn()
        left = clock.count(answer)
        until(engine, clock, answer, left + job.window)
        after = clock.came[answer][left - 1 :]
        engine.cancel(answer)
        engine.take_in()
        rest(engine)
        alone = 2 * job.window / (before[-1] - before[0] + after[-1] - after[0])
        if number:
            yield Repeat(
                alone_tok_s=alone,
                beside_tok_s=(len(beside) - 1) / (first - began),
                first_token_s=first - began,
                idle_first_token_s=idle_s,
                longest_gap_ms=1000 * max(b - a for a, b in zip(beside, [*beside[1:], first], strict=True)),
                tokens_beside=len(beside) - 1,
                time_share=decoding_s / (first - began),
            )


def submit(engine: LeaderEngine, name: str, prompt: list[int], tokens: int) -> float:
    """The moment of it."""
    sampling = Sampling(temperature=1.0, seed=len(prompt))
    began = time.perf_counter()
    engine.submit(Request(request_id=name, prompt_ids=prompt, sampling=sampling, max_tokens=tokens, stop_ids=()))
    engine.take_in()
    return began


def until(engine: LeaderEngine, clock: Clock, name: str, tokens: int, beside: str = "") -> float:
    """Until the request has so many tokens. Seconds of the steps that brought one to the request beside it."""
    seconds = 0.0
    while clock.count(name) < tokens:
        began, had = time.perf_counter(), clock.count(beside)
        if not engine.turn():
            raise UsageError(f"{name} ended after {clock.count(name)} tokens: the context has no room for the window")
        seconds += time.perf_counter() - began if clock.count(beside) > had else 0.0
    return seconds


def rest(engine: LeaderEngine) -> None:
    """Until nothing runs, and nothing is read; what the tide plans at rest is done."""
    while engine.turn() or engine.motion.reading:
        pass


def report(repeats: Sequence[Repeat], job: Job) -> dict[str, Any]:
    def spread(values: Sequence[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "least": min(values), "most": max(values)}

    names = Repeat.__struct_fields__
    return {
        "ranks": job.settings.parallel.ranks,
        "prompt_tokens": job.prompt_tokens,
        "prefill_share": job.settings.engine.prefill_share,
        "repeats": len(repeats),
        "share": spread([repeat.share for repeat in repeats]),
        **{name: spread([float(getattr(repeat, name)) for repeat in repeats]) for name in names},
    }


def show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['ranks']} ranks, a prompt of {figures['prompt_tokens']} tokens beside an answer, "
        f"prefill_share {figures['prefill_share']:g}, {figures['repeats']} repeats: median (least to most)"
    )
    for name in (
        "alone_tok_s",
        "beside_tok_s",
        "share",
        "time_share",
        "first_token_s",
        "idle_first_token_s",
        "longest_gap_ms",
    ):
        value = figures[name]
        print(f"  {name:20}{value['median']:10.3f}   ({value['least']:.3f} to {value['most']:.3f})")
    kept = figures["share"]["least"] >= 1 - figures["prefill_share"]
    print(
        f"  the answer {'kept' if kept else 'DID NOT KEEP'} {1 - figures['prefill_share']:.0%} of its rate every time"
    )


def job_of(options: argparse.Namespace) -> Job:
    if min(options.prompt, options.repeats) < 1 or options.window < 2:
        raise UsageError("a prompt and a repeat at least, and a window of 2 tokens")
    profile = load(options.target)
    room = options.prompt + ANSWERED
    context = profile.cache.context_tokens
    if room > context:
        raise UsageError(f"a prompt of {options.prompt} tokens does not fit the profile's context of {context}")
    settings = replace(
        profile,
        experts=replace(profile.experts, resident=given(options.resident, profile.experts.resident)),
        cache=replace(profile.cache, pool_tokens=2 * (context + PAGE_TOKENS), prefix_ram_bytes=0, prefix_disk_bytes=0),
        engine=replace(
            profile.engine,
            lanes=2,
            draft="off",
            prefill_share=options.share or profile.engine.prefill_share,
        ),
        parallel=replace(
            profile.parallel,
            ranks=given(options.ranks, profile.parallel.ranks),
            hosts=(),
            control_port=free_port(),
            data_port=free_port(),
        ),
    )
    return Job(settings, options.prompt, options.repeats, options.window)


def run(job: Job) -> list[Repeat]:
    with tempfile.TemporaryDirectory(prefix="tidelm-bench-") as name:
        folder = Path(name)
        (folder / JOB).write_bytes(msgspec.json.encode(job))
        print("starting the ranks", file=sys.stderr, flush=True)
        run_ranks([__file__, "--as-rank"], folder, job.settings.parallel.ranks, TIMEOUT_S, Shown(folder / PHASES))
        return msgspec.json.decode((folder / RESULT).read_bytes(), type=list[Repeat])


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--as-rank"]:
        return ended(lambda: run_rank(Path(arguments[1]), int(arguments[2])))
    parser = argparse.ArgumentParser(prog="lanes.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("target", type=Path, help="a profile")
    parser.add_argument("--ranks", type=int, help="ranks on this machine (default: the profile's)")
    parser.add_argument("--resident", type=int, help="resident experts (default: the profile's)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the newcomer's prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--window", type=int, default=100, help="tokens that the rate alone is measured over, twice")
    parser.add_argument("--share", type=float, help="engine.prefill_share (default: the profile's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    def measured() -> None:
        job = job_of(options)
        figures = report(run(job), job)
        print(json.dumps(figures)) if options.json else show(figures)

    return ended(measured)


def ended(work: Callable[[], None]) -> int:
    """The exit code of it; an error's words go to stderr."""
    try:
        work()
    except TideError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
