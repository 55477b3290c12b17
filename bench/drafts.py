"""What drafting brings, by domain and depth: the mini answers held-out prompts, off and drafted in turns.

    python bench/drafts.py profiles/mini-deepseek.toml [--depths off,3,5,acceptance,confidence] [--requests N]
        [--tokens N] [--resident N]

One rank, one lane, the resident set frozen, no end of sequence: every depth makes the same tokens, which is checked.
Each prompt is answered at every depth before the next one comes, in an order that changes from prompt to prompt.
Conversations are answered greedily; plain texts are continued at temperature 1 with a seed, or the mini would repeat
itself. Speed is tokens behind the first by the seconds that they took; a ratio is the median over a domain's prompts,
of a depth by "off" of the same prompt.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from heldout.texts import Text, read
from msgspec.structs import replace

from tided.control.lockstep import Solo
from tided.engine.build import build_rank, draft_depths, open_model, scheduler_limits
from tided.engine.leader import LeaderEngine
from tided.engine.offline import first_pairs
from tided.engine.scheduler import Scheduler
from tided.engine.types import Event, Finished, Request, Sampling, Tokens
from tided.errors import TideError
from tided.models.parallel import Alone
from tided.profile import load
from tided.settings import Engine, Parallel, Settings

OFF = "off"


@dataclass(frozen=True)
class Run:
    """An answer: its tokens, the speed of those behind the first, and its statistics."""

    tokens: list[int]
    tokens_per_s: float
    stats: dict[str, Any]


class Server:
    """A rank with its drafter. A depth is a policy of the scheduler, new for every answer."""

    def __init__(self, settings: Settings) -> None:
        self._settings = replace(settings, engine=replace(settings.engine, draft="5"))
        opened = open_model(self._settings)
        self.rank = build_rank(opened, Alone(), first_pairs(opened), lambda what, done, total: None)
        self._events: list[Event] = []
        self._faults: list[TideError] = []
        scheduler = Scheduler(scheduler_limits(self._settings, self.rank.model.draft_tokens))
        self.engine = LeaderEngine(
            self.rank.executor, scheduler, Solo(), self._events.extend, self._faults.append, None
        )
        self._served = 0

    def use(self, depth: str) -> None:
        settings = replace(self._settings, engine=replace(self._settings.engine, draft=depth))
        self.engine.scheduler.depths = draft_depths(settings, self.rank.model)

    def answer(self, text: Text, tokens: int) -> Run:
        self._served += 1
        plain = text.domain in ("prose", "code")
        sampling = Sampling(temperature=1.0 if plain else 0.0, seed=7)
        prompt = text.ids[: text.prompt_tokens]
        self.engine.submit(
            Request(request_id=str(self._served), prompt_ids=prompt, sampling=sampling, max_tokens=tokens, stop_ids=())
        )
        self.engine.take_in()
        while self.engine.turn():
            pass
        if self._faults or not isinstance(end := self._events[-1], Finished):
            raise RuntimeError(f"a request of {text.domain} failed: {self._faults or self._events[-1]}")
        found = [token for event in self._events if isinstance(event, Tokens) for token in event.token_ids]
        self._events.clear()
        return Run(found, end.stats["decode_tok_s"], end.stats)


def measure(server: Server, texts: dict[str, list[Text]], depths: Sequence[str], requests: int, tokens: int) -> Any:
    """domain -> depth -> the runs of its prompts, in their order."""
    runs: dict[str, dict[str, list[Run]]] = {}
    for domain, found in texts.items():
        runs[domain] = {depth: [] for depth in depths}
        for number, text in enumerate(found[:requests]):
            shift = number % len(depths)
            for depth in (*depths[shift:], *depths[:shift]):
                server.use(depth)
                runs[domain][depth].append(server.answer(text, tokens))
            said = {tuple(runs[domain][depth][-1].tokens) for depth in depths}
            if len(said) != 1:
                raise RuntimeError(f"{domain}, prompt {number}: depths do not agree on the answer")
            print(f"{domain} {number + 1} of {min(requests, len(found))}", file=sys.stderr, flush=True)
    return runs


def table(runs: dict[str, dict[str, list[Run]]], depths: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for domain, by_depth in runs.items():
        for depth in depths:
            ratios = [
                run.tokens_per_s / plain.tokens_per_s for run, plain in zip(by_depth[depth], by_depth[OFF], strict=True)
            ]
            accepted = [run.stats["accept_len_mean"] for run in by_depth[depth]]
            rows.append(
                {
                    "domain": domain,
                    "depth": depth,
                    "tok_s": statistics.median(run.tokens_per_s for run in by_depth[depth]),
                    "ratio": statistics.median(ratios),
                    "least": min(ratios),
                    "most": max(ratios),
                    "tokens_a_step": statistics.mean(accepted),
                    "prompts": len(ratios),
                }
            )
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("--depths", default="off,3,5,acceptance,confidence")
    parser.add_argument("--requests", type=int, default=6, help="prompts of a domain")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--resident", type=int, help="experts (default: the profile's)")
    parser.add_argument("--domains", default="", help="these only")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    options = parser.parse_args(arguments)
    depths = options.depths.split(",")
    known = get_args(get_args(Engine.__annotations__["draft"])[0])
    if depths[0] != OFF or not set(depths) <= set(known):
        parser.error(f"--depths begins with off, and is of {', '.join(known)}")
    base = load(options.profile)
    settings = replace(
        base,
        experts=replace(base.experts, resident=options.resident or base.experts.resident),
        cache=replace(base.cache, prefix_ram_bytes=0, prefix_disk_bytes=0),
        engine=replace(base.engine, lanes=1),
        tide=replace(base.tide, hot_ring_slots=0),
        parallel=Parallel(ranks=1),
    )
    texts = read(Path(base.model.path), base.cache.context_tokens - options.tokens)
    wanted = options.domains.split(",") if options.domains else list(texts)
    server = Server(settings)
    with closing(server.rank):
        warm = next(iter(texts.values()))[0]
        for depth in depths:
            server.use(depth)
            server.answer(warm, 16)
        runs = measure(server, {d: texts[d] for d in wanted}, depths, options.requests, options.tokens)
    rows = table(runs, depths)
    if options.json:
        print(json.dumps(rows))
        return 0
    print(f"{'domain':<10} {'depth':<11} {'tok/s':>7} {'ratio':>6} {'least':>6} {'most':>6} {'tokens a step':>14}")
    for row in rows:
        print(
            f"{row['domain']:<10} {row['depth']:<11} {row['tok_s']:>7.1f} {row['ratio']:>6.2f} {row['least']:>6.2f} "
            f"{row['most']:>6.2f} {row['tokens_a_step']:>14.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
