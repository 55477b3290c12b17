"""What drafting brings, by domain and depth: the mini answers held-out prompts, off and drafted in turns.

    python bench/drafts.py profiles/mini-deepseek.toml [--ranks N] [--depths off,1,3,5,acceptance,confidence]
        [--tokens N] [--domains A,B] [--resident N] [--json] [--record FILE]

The ranks run the real engine, one lane, the resident set frozen: every depth makes the same tokens, which is checked.
Each prompt is answered at every depth before the next one comes, in an order that turns from prompt to prompt; domains
take turns too, and a policy keeps what it learned from answer to answer, as in a server. Conversations are answered
greedily and to their end, which is soon; plain texts are continued at temperature 1 with a seed, or the mini would
repeat itself. Prompts are found in the prompt cache, so that the time goes into answers.

    speed       tokens behind the first, by the seconds that they took and those of the drafts made with the first
    ratio       by the speed of "off" over the same prompts of a domain; from, to: 90 % of a bootstrap over prompts
    a step      tokens that a step brought
    calls, rows of the drafter and of the model, for a token

"off" has the drafter loaded, which watches the model's layers; that costs less than timings differ by. --record writes,
instead, what the drafter proposed behind every token, for simulations of a policy.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from engine_ranks import JOB, KEYS, PHASES, RESULT, TIMEOUT_S, Led, Shown, serve_rank, tell
from msgspec.structs import replace

from tidectl.evals.texts import Text, read
from tided.control.keys import load_keys
from tided.control.lockstep import Leader, Solo
from tided.engine.build import Rank, draft_depths, scheduler_limits
from tided.engine.depth import Depths, Row
from tided.engine.leader import LeaderEngine
from tided.engine.local_ranks import free_port, run_ranks
from tided.engine.scheduler import Scheduler
from tided.engine.types import Event, Finished, Request, Sampling, Tokens
from tided.errors import TideError, UsageError
from tided.models.base import Choose, Draft, LaneState, Model
from tided.profile import load
from tided.settings import Engine, Parallel, Settings

OFF, RECORD = "off", "record"
PLAIN = ("prose", "code")  # texts without an end
LONGEST = 80  # tokens of an answer
WARM_TOKENS = 24
RESAMPLED = 500
IDLE_S = 0.0005


class Job(msgspec.Struct, frozen=True):
    settings: Settings
    depths: tuple[str, ...]
    tokens: int
    domains: tuple[str, ...]


class Run(msgspec.Struct, frozen=True):
    """An answer: `seconds` are those of the tokens behind the first. `blocks`: what was proposed behind each token,
    where that is recorded, as (ids, confidence)."""

    domain: str
    depth: str
    tokens: list[int]
    ended: bool
    seconds: float
    steps: int
    calls: int
    depths: dict[str, int]
    blocks: list[tuple[list[int], list[float]]] = []

    @property
    def speed(self) -> float:
        return self.came / self.seconds

    @property
    def came(self) -> int:
        """Tokens of steps: those behind the first, the one that ended the answer included."""
        return len(self.tokens) - 1

    @property
    def rows(self) -> int:
        return sum((1 + int(depth)) * steps for depth, steps in self.depths.items())


class Counting:
    """A model that counts how often it was asked to draft."""

    def __init__(self, model: Model) -> None:
        self._model, self.calls = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def propose(self, lanes: Sequence[LaneState], anchors: Any, choose: Choose) -> Draft:
        self.calls += 1
        return self._model.propose(lanes, anchors, choose)


class Recording(Depths):
    """Drafts behind every token, and verifies none."""

    def begin(self, row: Row) -> bool:
        return row.room > 0

    def plan(self, rows: Sequence[Row]) -> tuple[list[int], bool]:
        return [0] * len(rows), any(row.room > 1 for row in rows)


class Server:
    """Rank 0 of an engine with its drafter. A depth is a policy of the scheduler."""

    def __init__(self, settings: Settings, rank: Rank, link: Leader | Solo, failures: list[TideError]) -> None:
        self._events: list[Event] = []
        self._failures, self._served = failures, 0
        self._eos = rank.model.shape.eos_id
        self._model = rank.executor.model = Counting(rank.model)
        scheduler = Scheduler(scheduler_limits(settings, rank.model.draft_tokens))
        self.engine = LeaderEngine(rank.executor, scheduler, link, self._events.extend, failures.append, None)
        self._settings, self._policies = settings, dict[str, Depths]()

    def answer(self, text: Text, depth: str, tokens: int) -> Run:
        """At most `tokens` of it."""
        self._served += 1
        name, plain, executor = str(self._served), text.domain in PLAIN, self.engine.executor
        self.engine.scheduler.depths = self._policy(depth)
        request = Request(
            request_id=name,
            prompt_ids=text.ids[: text.prompt_tokens],
            sampling=Sampling(temperature=1.0 if plain else 0.0, seed=7),
            max_tokens=tokens,
            stop_ids=() if plain else (self._eos,),
        )
        self.engine.submit(request)
        self.engine.take_in()
        calls, opening_s, blocks, count = self._model.calls, None, [], 0
        while not any(isinstance(event, Finished) for event in self._events[-1:]) and not self._failures:
            if not self.engine.turn():
                time.sleep(IDLE_S)  # a prompt is looked up on a thread
            came = sum(len(event.token_ids) for event in self._events if isinstance(event, Tokens))
            if came and opening_s is None:
                opening_s = executor.draft_s
            if depth == RECORD and came > count:
                blocks += [(lane.drafts, lane.sure) for lane in executor.lanes.values()][:1]
            count = came
        end = self._events[-1] if self._events else None
        if self._failures or not isinstance(end, Finished):
            raise RuntimeError(f"a request of {text.domain} failed: {self._failures or end}")
        found = [token for event in self._events if isinstance(event, Tokens) for token in event.token_ids]
        self._events.clear()
        return Run(
            text.domain,
            depth,
            [*found, self._eos] if end.reason == "stop" else found,
            end.reason == "stop",
            end.stats["decode_s"] + (opening_s or 0.0),
            end.stats["steps"],
            self._model.calls - calls,
            end.stats["spec_depth"],
            blocks,
        )

    def _policy(self, depth: str) -> Depths:
        if depth not in self._policies:
            places = self._model.draft_tokens
            chosen = replace(self._settings, engine=replace(self._settings.engine, draft=depth))
            self._policies[depth] = (
                Recording("fixed", places) if depth == RECORD else draft_depths(chosen, self._model._model)
            )
        return self._policies[depth]


def run_rank(folder: Path, number: int) -> None:
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)

    def lead(led: Led) -> list[Run]:
        return list(measure(job, Server(job.settings, led.rank, led.link, led.failures), folder))

    serve_rank(folder, number, job.settings, lead, with_pilot=False)


def measure(job: Job, server: Server, folder: Path) -> Iterator[Run]:
    """After an answer at every depth that does not count."""
    texts = read(Path(job.settings.model.path), job.settings.cache.context_tokens - LONGEST)
    chosen = [prompts(texts[domain], job.tokens) for domain in job.domains or texts]
    for depth in job.depths:
        server.answer(chosen[0][0], depth, WARM_TOKENS)
    turns = [texts[i] for i in range(max(map(len, chosen))) for texts in chosen if i < len(texts)]
    for number, text in enumerate(turns):
        tell(folder, 0, f"prompt {number + 1} of {len(turns)} ({text.domain})")
        shift = number % len(job.depths)
        found = [server.answer(text, depth, LONGEST) for depth in (*job.depths[shift:], *job.depths[:shift])]
        if len({tuple(run.tokens) for run in found}) != 1:
            raise RuntimeError(f"{text.domain}, prompt {number}: depths do not agree on the answer")
        yield from found


def prompts(texts: Sequence[Text], tokens: int) -> list[Text]:
    """The first, as many as the tokens of their answers ask for; at least two, and of two tokens at least."""
    chosen: list[Text] = []
    for text in (text for text in texts if text.answer_tokens > 2):
        if len(chosen) >= 2 and sum(min(LONGEST, one.answer_tokens) for one in chosen) >= tokens:
            break
        chosen.append(text)
    return chosen


def pooled(runs: Sequence[Run]) -> float:
    return sum(run.came for run in runs) / sum(run.seconds for run in runs)


def between(runs: Sequence[Run], plain: Sequence[Run]) -> tuple[float, float]:
    """The middle 90 % of the ratio, over prompts drawn again."""
    source, ratios = random.Random(1), []
    for _ in range(RESAMPLED):
        drawn = source.choices(range(len(runs)), k=len(runs))
        ratios.append(pooled([runs[i] for i in drawn]) / pooled([plain[i] for i in drawn]))
    ranks = statistics.quantiles(ratios, n=20)
    return ranks[0], ranks[-1]


def table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    rows = []
    for domain, depth in dict.fromkeys((run.domain, run.depth) for run in runs):
        found = [run for run in runs if (run.domain, run.depth) == (domain, depth) and run.came]
        plain = [run for run in runs if (run.domain, run.depth) == (domain, OFF) and run.came]
        least, most = between(found, plain)
        came, depths = sum(run.came for run in found), Counter[str]()
        for run in found:
            depths.update(run.depths)
        rows.append(
            {
                "domain": domain,
                "depth": depth,
                "prompts": len(found),
                "tokens": came,
                "tok_s": statistics.median(run.speed for run in found),
                "ratio": pooled(found) / pooled(plain),
                "from": least,
                "to": most,
                "tokens_a_step": came / sum(run.steps for run in found),
                "calls": sum(run.calls for run in found) / came,
                "rows": sum(run.rows for run in found) / came,
                "steps_by_depth": dict(sorted(depths.items())),
            }
        )
    return sorted(rows, key=lambda row: row["domain"])


def recorded(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """An answer a line: steps to its end, how many drafts behind each token are right, the confidence in each place."""
    for run in runs:
        right = [leading(ids, run.tokens[at + 1 :]) for at, (ids, _) in enumerate(run.blocks)]
        sure = [[round(value, 1) for value in found] for _, found in run.blocks]
        yield {"domain": run.domain, "tokens": run.came, "ends": run.ended, "right": right, "sure": sure}


def leading(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many drafts are as the tokens that came."""
    return sum(
        all(drafts[i] == tokens[i] for i in range(count)) for count in range(1, 1 + min(len(drafts), len(tokens)))
    )


def settings_of(options: argparse.Namespace) -> Settings:
    base = load(options.profile)
    context = base.cache.context_tokens
    return replace(
        base,
        experts=replace(base.experts, resident=options.resident or base.experts.resident),
        cache=replace(base.cache, prefix_disk_bytes=0, pool_tokens=max(context, base.cache.pool_tokens)),
        engine=replace(base.engine, lanes=1, draft="5"),
        tide=replace(base.tide, hot_ring_slots=0, record=False),
        parallel=Parallel(ranks=options.ranks, control_port=free_port(), data_port=free_port()),
    )


def started(job: Job) -> list[Run]:
    with tempfile.TemporaryDirectory(prefix="tidelm-drafts-") as name:
        folder = Path(name)
        (folder / JOB).write_bytes(msgspec.json.encode(job))
        load_keys(folder / KEYS, create=True)
        ranks = job.settings.parallel.ranks
        run_ranks([__file__, "--rank"], folder, ranks, TIMEOUT_S, Shown(folder / PHASES))
        return msgspec.json.decode((folder / RESULT).read_bytes(), type=list[Run])


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--rank"]:
        run_rank(Path(arguments[1]), int(arguments[2]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--depths", default="off,1,3,5,acceptance,confidence")
    parser.add_argument("--tokens", type=int, default=90, help="of a domain's answers, about")
    parser.add_argument("--resident", type=int, help="experts (default: the profile's)")
    parser.add_argument("--domains", default="", help="these only")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--record", type=Path, help="write proposals here instead of timing depths")
    options = parser.parse_args(arguments)
    depths = (RECORD,) if options.record else tuple(options.depths.split(","))
    known = get_args(get_args(Engine.__annotations__["draft"])[0])
    if not options.record and (depths[0] != OFF or not set(depths) <= set(known)):
        parser.error(f"--depths begins with off, and is of {', '.join(known)}")
    domains = tuple(options.domains.split(",")) if options.domains else ()
    began_s = time.monotonic()
    try:
        runs = started(Job(settings_of(options), depths, options.tokens, domains))
    except UsageError as error:
        parser.error(str(error))
    if options.record:
        options.record.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in recorded(runs)))
        return 0
    rows = table(runs)
    if options.json:
        print(json.dumps(rows))
        return 0
    print(f"{options.ranks} ranks, {len(runs)} answers, {time.monotonic() - began_s:.0f} s")
    print(
        f"{'domain':<9} {'depth':<11} {'prompts':>7} {'tokens':>6} {'tok/s':>6} {'ratio':>6} {'from':>5} {'to':>5} "
        f"{'a step':>6} {'calls':>6} {'rows':>5}  steps by depth"
    )
    for row in rows:
        print(
            f"{row['domain']:<9} {row['depth']:<11} {row['prompts']:>7} {row['tokens']:>6} {row['tok_s']:>6.1f} "
            f"{row['ratio']:>6.2f} {row['from']:>5.2f} {row['to']:>5.2f} {row['tokens_a_step']:>6.2f} "
            f"{row['calls']:>6.2f} {row['rows']:>5.2f}  {row['steps_by_depth']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
