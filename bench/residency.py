"""What residency costs in quality, and what adaptation and reads win back: held-out answers, forced, by one rank.

    python bench/residency.py profiles/mini-deepseek.toml [--budgets 100,80,65,50,35] [--domains qa,code] [--tokens N]

The real engine serves requests of one domain after the other; between two requests it comes to rest, as it would for a
person who reads. Only the model's last word is replaced: its logits are judged against the held-out token, which is
then the token drawn, and against what all experts say to the same tokens, which no luck of a single token blurs. After
the first request of a domain come some that are not judged (--traffic, with answers of two tokens): a history follows
within ten requests, and prompts are cheap. Those behind them are the steady part. Every variant holds as many experts
as its budget says: slots of the ring and slots for reads before use are taken from the residents.

    substitution    the set that the bundled seed chooses, never changed
    + adaptation    the pilot plans after prompts, while answers grow, and between requests
    + hot reads     a ring beside it
    hot reads alone the ring beside the seed's set: no plans
    + balanced      requests of that fidelity: heavy misses are read before use
    exact           requests of that fidelity: every miss is; of each domain the first requests, --exact-tokens long

A second part (`--switches N`, at --switch-budget) changes the domain N times, and counts the tokens until the share of
routing weight that is missed is back. A third (--ring-cost) times decode steps with the ring on and off, in turns.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from residency_engine import (
    ADAPTS,
    EXACT,
    FROZEN,
    LADDER,
    RING,
    RING_ALONE,
    RING_SLOTS,
    Server,
    Variant,
    serving,
)
from residency_report import ALL, ANSWERS, Answer, Seen, back_after, bootstrap, gain, pick, show, summary

from tidectl.evals.texts import Text, read
from tided.engine.offline import settings_of
from tided.profile import load
from tided.settings import Settings

MOST_REQUEST_TOKENS = 640
SWITCH_LONGEST = 48  # tokens of an answer
TRAFFIC_TOKENS = 2


# What is asked


@dataclass(frozen=True)
class Block:
    """Requests of one domain: those that are judged, and those that come after the first of them for the traffic."""

    judged: list[Text]
    traffic: list[Text]


def blocks(texts: dict[str, list[Text]], tokens: int, longest: int, traffic: int, seed: int) -> list[Block]:
    """For each domain, in an order of the seed's, judged requests with `tokens` tokens of answer together."""
    rng, order = random.Random(seed), list(texts)
    rng.shuffle(order)
    return [block(rng.sample(texts[domain], len(texts[domain])), tokens, longest, traffic) for domain in order]


def block(texts: list[Text], tokens: int, longest: int, traffic: int) -> Block:
    chosen, left = [], tokens
    for text in texts:
        if left <= 0:
            break
        chosen.append(text.cut(min(longest, left)))
        left -= chosen[-1].answer_tokens
    rest = texts[len(chosen) :]
    return Block(chosen, [text.cut(TRAFFIC_TOKENS) for text in rest[:traffic]])


def tour(domains: Sequence[str], switches: int, seed: int) -> list[str]:
    """Domains such that every step goes from one to another, and no step comes twice."""
    rng, path, done = random.Random(seed), [domains[0]], set[tuple[str, str]]()
    while len(path) <= switches:
        here = path[-1]
        open_ends = [one for one in domains if one != here and (here, one) not in done]
        if not open_ends:
            break
        visits = {one: (path.count(one), rng.random()) for one in open_ends}
        path.append(min(open_ends, key=lambda one: visits[one]))
        done.add((here, path[-1]))
    return path


def answers(server: Server, asked: Sequence[Block], with_traffic: bool) -> list[Answer]:
    """Of the judged requests."""
    given = []
    for one in asked:
        given.append(server.answer(one.judged[0]))
        given[-1].is_first = True
        for text in one.traffic if with_traffic else ():
            server.answer(text)
        given += [server.answer(text) for text in one.judged[1:]]
    return given


# The runs


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run."""

    settings: Settings
    texts: dict[str, list[Text]]
    budgets: list[float]
    seeds: list[int]
    tokens: int
    longest: int
    traffic: int
    exact_tokens: int
    switches: int
    switch_tokens: int
    switch_budget: float
    jobs: int
    variants: tuple[str, ...] = ()


def ladder(plan: Plan) -> list[dict[str, Any]]:
    """A row for each budget and variant. Answers of all seeds stand beside each other."""
    variants = [one for one in (*LADDER, EXACT) if not plan.variants or one.name in plan.variants]
    rungs = [(budget, variant) for budget in plan.budgets if budget < 100 for variant in variants]
    with tempfile.TemporaryDirectory() as said:
        lengths = (False, True) if EXACT in variants else (False,)
        whole, *whole_short = serve_all(plan, [(100, FROZEN, is_short) for is_short in lengths], Path(said))
        given = serve_all(plan, [(budget, variant, variant is EXACT) for budget, variant in rungs], Path(said))
    rows = [row_of(100, "all resident", whole, whole, None)] if 100 in plan.budgets else []
    before: list[Answer] | None = None
    frozen: list[Answer] | None = None
    held = 100.0
    for (budget, variant), answered in zip(rungs, given, strict=True):
        if variant is EXACT:
            equal = sum(one.digest == other.digest for one, other in zip(answered, whole_short[0], strict=True))
            row = row_of(budget, EXACT.name, answered, whole_short[0], None)
            rows.append(row | {"equal": equal, "answers": len(answered)})
            continue
        if budget != held:
            before, frozen, held = None, None, budget
        if variant is FROZEN:
            frozen = answered
        rows.append(row_of(budget, variant.name, answered, whole, frozen if variant is RING_ALONE else before))
        before = answered
    return rows


def serve_all(plan: Plan, runs: Sequence[tuple[float, Variant, bool]], said: Path) -> list[list[Answer]]:
    """(budget, variant, whether the short requests of `exact` are asked) -> the answers of all seeds. Every seed begins
    with the boot set again, so that runs and seeds may go side by side. `said`: a directory for what all experts say,
    which the other runs are compared with."""
    with pool_of(plan) as pool:
        parts = [[pool.submit(serve, plan, *run, seed, said) for seed in plan.seeds] for run in runs]
        return [[answer for part in of_run for answer in part.result()] for of_run in parts]


@contextmanager
def pool_of(plan: Plan) -> Iterator[ProcessPoolExecutor]:
    """What was not begun when a run fails is not begun any more."""
    with ProcessPoolExecutor(plan.jobs, get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def serve(plan: Plan, budget: float, variant: Variant, is_short: bool, seed: int, said: Path) -> list[Answer]:
    torch.set_num_threads(1)
    tokens, traffic = (plan.exact_tokens, 0) if is_short else (plan.tokens, plan.traffic)
    asked = blocks(plan.texts, tokens, plan.longest, traffic, seed)
    file = said / f"{seed}-{'short' if is_short else 'whole'}.npz"
    with serving(plan.settings, budget, variant) as server:
        server.model.keeps = budget == 100
        if not server.model.keeps:
            with np.load(file, allow_pickle=False) as whole:
                server.model.whole = {name: whole[name] for name in whole.files}
        given = answers(server, asked, variant.adapts)
        if server.model.keeps:
            np.savez(file, **{name: np.stack(rows) for name, rows in server.model.said.items()})  # type: ignore[arg-type]
    tell(f"{budget:g} %, {variant.name}, seed {seed}")
    return given


def row_of(
    budget: float, name: str, given: list[Answer], whole: list[Answer], before: list[Answer] | None
) -> dict[str, Any]:
    """`rise`: of the loss over all resident; `won`: against the variant before, in all requests and in the steady
    ones."""
    row: dict[str, Any] = {"budget": budget, "variant": name, "domains": summary(given)}
    row["rise"] = {part: gain(pick(whole, part), pick(given, part)) for part in ("first", "steady")}
    if before is not None:
        row["won"] = {part: gain(pick(given, part), pick(before, part)) for part in ("all", "steady")}
        row["nearer"] = {part: gain(pick(given, part), pick(before, part), what="apart") for part in ("all", "steady")}
    steady = row["domains"]["mean"]["steady"]
    tell(f"  loss {steady['loss']:.4f}, top-1 {steady['top1']:.3f}, missed {steady['missed']:.3f}")
    return row


def switching(plan: Plan) -> list[dict[str, Any]]:
    """A row for each variant and change of domain."""
    with pool_of(plan) as pool:
        tours = [pool.submit(switch, plan, variant, seed) for variant in (ADAPTS, RING) for seed in plan.seeds]
        return [row for one in tours for row in one.result()]


def switch(plan: Plan, variant: Variant, seed: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    rng, rows = random.Random(seed), []
    supply = {name: rng.sample(texts, len(texts)) for name, texts in plan.texts.items()}
    path = tour(list(supply), plan.switches, seed)
    with serving(plan.settings, plan.switch_budget, variant) as server:
        stays = [stay(server, supply[domain], plan.switch_tokens) for domain in path]
    for old, new, seen in zip(path, path[1:], stays[1:], strict=False):
        parts = {"answers": back_after([one for one in seen if one.decodes], *ANSWERS), "all": back_after(seen, *ALL)}
        rows.append({"variant": variant.name, "from": old, "to": new, **parts})
    tell(f"{plan.switches} switches at {plan.switch_budget:g} %, {variant.name}, seed {seed}")
    return rows


def stay(server: Server, supply: list[Text], tokens: int) -> list[Seen]:
    """Requests of one domain, taken off the supply's front and put at its end, until `tokens` of their answers are
    decoded, and enough computed to tell what is steady."""
    seen: list[Seen] = []
    while sum(one.decodes for one in seen) < tokens or sum(one.tokens for one in seen) < 2 * ALL[0]:
        supply.append(supply.pop(0))
        seen += server.answer(supply[-1].cut(SWITCH_LONGEST)).seen
    return seen


def ring_cost(plan: Plan) -> dict[str, Any]:
    """The same answers with the ring and without, in turns in one process: what a decode step takes, in seconds of a
    clock and of the processor, readers included. The second does not feel what else the machine does."""
    tell(f"the ring on and off at {plan.switch_budget:g} %")
    asked = [text for one in blocks(plan.texts, plan.tokens, SWITCH_LONGEST, 0, plan.seeds[0]) for text in one.judged]
    with (
        serving(plan.settings, plan.switch_budget, ADAPTS) as without,
        serving(plan.settings, plan.switch_budget, RING) as with_ring,
    ):
        for at, text in enumerate(asked):
            for server in (without, with_ring) if at % 2 else (with_ring, without):
                server.answer(text)
        reads = with_ring.engine.motion.count.issued
        off, on = np.array(without.decodes), np.array(with_ring.decodes)
    found: dict[str, Any] = {"steps": len(on), "hot_reads": reads, "slots": RING_SLOTS}
    for column, name in enumerate(("wall", "processor")):
        quotients = on[:, column] / off[:, column]
        low, high = bootstrap(off[:, column], on[:, column])
        found[name] = {
            "off_ms": 1000 * float(np.median(off[:, column])),
            "on_ms": 1000 * float(np.median(on[:, column])),
            "on_over_off": float(np.median(on[:, column]) / np.median(off[:, column])),
            "low": low,
            "high": high,
            "paired": float(np.median(quotients)),
        }
    return found


def tell(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def machine() -> str:
    load_now = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, torch {torch.__version__}, load {load_now:.1f} at the end"


def plan_of(options: argparse.Namespace) -> Plan:
    target = Path(options.target)
    settings = settings_of(target) if target.is_dir() else load(target)
    settings = replace(
        settings,
        engine=replace(settings.engine, lanes=1, threads=1, device="cpu"),
        parallel=replace(settings.parallel, ranks=1, hosts=()),
    )
    texts = read(Path(settings.model.path), MOST_REQUEST_TOKENS)
    chosen = options.domains.split(",") if options.domains else list(texts)
    return Plan(
        settings,
        {name: texts[name] for name in chosen},
        [float(budget) for budget in options.budgets.split(",") if budget],
        [int(seed) for seed in options.seeds.split(",")],
        options.tokens,
        options.longest,
        options.traffic,
        options.exact_tokens,
        options.switches,
        options.switch_tokens,
        options.switch_budget,
        options.jobs,
        tuple(name for name in options.variants.split(",") if name),
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a profile, or the directory of a checkpoint")
    parser.add_argument("--budgets", default="100,80,65,50,35", help="percent of all experts that are held")
    parser.add_argument("--variants", default="", help="default: all; of the names above, by comma")
    parser.add_argument("--domains", default="", help="default: all")
    parser.add_argument("--seeds", default="1", help="each draws texts and the order of domains")
    parser.add_argument("--tokens", type=int, default=56, help="of answers, a domain and variant")
    parser.add_argument("--longest", type=int, default=24, help="tokens of an answer; the rest of it is left out")
    parser.add_argument("--traffic", type=int, default=6, help="requests of a domain that are not judged")
    parser.add_argument("--exact-tokens", type=int, default=12, help="of answers, a domain, for exact")
    parser.add_argument("--switches", type=int, default=7, help="changes of domain; 0: none")
    parser.add_argument("--switch-tokens", type=int, default=200, help="of answers between two changes")
    parser.add_argument("--switch-budget", type=float, default=65.0)
    parser.add_argument(
        "--ring-cost", action="store_true", help="what the ring costs a decode step, at --switch-budget"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the budgets, variants and seeds")
    parser.add_argument("--json", action="store_true")
    plan, began_s = plan_of(options := parser.parse_args(arguments)), time.monotonic()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "ladder": ladder(plan) if plan.budgets else [],
        "switches": switching(plan) if plan.switches else [],
        "ring": ring_cost(plan) if options.ring_cost else None,
        "machine": machine(),
        "seconds": time.monotonic() - began_s,
    }
    if options.json:
        print(json.dumps(found))
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
