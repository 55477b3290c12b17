"""What `bench/residency.py` makes of the answers it forced: gains with their spread, tokens until a switch is over,
tables."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

# Tokens after which a missed share is steady, and of the moving window: of prompts and answers, of answers alone.
ALL, ANSWERS = (300, 64), (100, 32)
BACK = 1.25  # times the steady share
LEAST_SHARE = 0.005  # below it a share is as good as none: 1.25 times nothing is never reached
DRAWS = 2000


@dataclass(frozen=True)
class Seen:
    """One forward pass: its tokens, whether they are an answer's, and sums over their picks of routing weight: wanted,
    missed, substituted."""

    tokens: int
    decodes: bool
    weight: float
    missed: float
    substituted: float


@dataclass
class Answer:
    """`losses` in nats, `hits`: whether the token is the likeliest. `digest`: of all logits, bit for bit. `apart`: by
    token, the divergence of what was said from what the engine says with all experts, in nats; whether the likeliest
    token is another is `other`."""

    domain: str
    is_first: bool = False
    losses: list[float] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    digest: str = ""
    apart: list[float] = field(default_factory=list)
    other: list[bool] = field(default_factory=list)
    read_bytes: int = 0


def gain(
    better: Sequence[Answer], worse: Sequence[Answer], seed: int = 0, what: Literal["losses", "apart"] = "losses"
) -> dict[str, float]:
    """Nats a token that `better` wins over the same texts, domains weighing alike, with the 95 % interval of a
    bootstrap over requests."""
    by_domain: dict[str, list[tuple[float, int]]] = {}
    for one, other in zip(better, worse, strict=True):
        ours, theirs = getattr(one, what), getattr(other, what)
        by_domain.setdefault(one.domain, []).append((sum(theirs) - sum(ours), len(ours)))
    rng, means = np.random.default_rng(seed), np.zeros(DRAWS)
    for rows in by_domain.values():
        won = np.array(rows)[rng.integers(len(rows), size=(DRAWS, len(rows)))].sum(axis=1)
        means += won[:, 0] / won[:, 1] / len(by_domain)
    low, high = np.quantile(means, [0.025, 0.975])
    mean = statistics.fmean(sum(won for won, _ in rows) / sum(n for _, n in rows) for rows in by_domain.values())
    return {"mean": mean, "low": float(low), "high": float(high)}


def figures(given: Sequence[Answer]) -> dict[str, float]:
    losses, hits = [x for one in given for x in one.losses], [x for one in given for x in one.hits]
    seen = [pass_ for one in given for pass_ in one.seen]
    weight = sum(one.weight for one in seen)
    return {
        "loss": statistics.fmean(losses),
        "top1": statistics.fmean(hits),
        "missed": sum(one.missed for one in seen) / weight,
        "substituted": sum(one.substituted for one in seen) / weight,
        "apart": statistics.fmean([x for one in given for x in one.apart] or [0.0]),
        "other": statistics.fmean([x for one in given for x in one.other] or [0.0]),
        "kb_a_token": sum(one.read_bytes for one in given) / 1000 / sum(one.tokens for one in seen),
    }


def summary(given: Sequence[Answer]) -> dict[str, Any]:
    """By domain, `first`: its first request, `steady`: the others; `mean`: over the domains."""
    found: dict[str, Any] = {}
    for domain in sorted({one.domain for one in given}):
        own = [one for one in given if one.domain == domain]
        parts = {"first": [one for one in own if one.is_first], "steady": [one for one in own if not one.is_first]}
        found[domain] = {name: figures(part or own) for name, part in parts.items()}
    keys = ("loss", "top1", "missed", "substituted", "apart", "other", "kb_a_token")
    found["mean"] = {
        part: {key: statistics.fmean(found[d][part][key] for d in found) for key in keys}
        for part in ("first", "steady")
    }
    return found


def back_after(seen: Sequence[Seen], steady_from: int, window: int) -> dict[str, float]:
    """`seen`: a domain's passes after a switch to it. `tokens`: until the share missed in a moving window of so many
    tokens is back near that of the passes behind `steady_from`, the `steady` one; `first`: the share before."""
    ends = np.cumsum([one.tokens for one in seen])
    weight, missed = np.array([one.weight for one in seen]), np.array([one.missed for one in seen])
    steady = share(missed, weight, ends > steady_from)
    back = math.inf
    for end in ends[ends >= window]:
        if share(missed, weight, (ends <= end) & (ends > end - window)) <= max(BACK * steady, LEAST_SHARE):
            back = float(end)
            break
    return {"tokens": back, "steady": steady, "first": share(missed, weight, ends <= max(window, ends[0]))}


def share(part: Any, whole: Any, where: Any) -> float:
    return float(part[where].sum() / whole[where].sum())


def pick(given: Sequence[Answer], part: str) -> list[Answer]:
    """A part of the answers; all of them where a domain has one request only."""
    return [one for one in given if part == "all" or one.is_first == (part == "first")] or list(given)


def bootstrap(off: Any, on: Any) -> tuple[float, float]:
    """The 95 % interval of the quotient of medians, pairs of steps drawn together."""
    drawn = np.random.default_rng(0).integers(len(on), size=(DRAWS, len(on)))
    low, high = np.quantile(np.median(on[drawn], axis=1) / np.median(off[drawn], axis=1), [0.025, 0.975])
    return float(low), float(high)


# What is shown


def show(found: dict[str, Any]) -> None:
    print(found["machine"])
    if found["ladder"]:
        show_ladder(found["ladder"])
    if found["switches"]:
        show_switches(found["switches"])
    if found["ring"]:
        show_ring(found["ring"])
    print(f"\n{found['seconds']:.0f} s")


def show_ring(found: dict[str, Any]) -> None:
    print(
        f"\nA decode step with a ring of {found['slots']} slots and without, {found['steps']} pairs of steps, ", end=""
    )
    print(f"{found['hot_reads']} hot reads\n")
    print("| | off, ms | on, ms | on / off (95 %) | median of each pair's own |\n|---|---|---|---|---|")
    for name in ("wall", "processor"):
        one = found[name]
        print(
            f"| {name} | {one['off_ms']:.2f} | {one['on_ms']:.2f} | "
            f"{one['on_over_off']:.3f} ({one['low']:.3f} to {one['high']:.3f}) | {one['paired']:.3f} |"
        )


def show_ladder(rows: list[dict[str, Any]]) -> None:
    domains = [name for name in rows[0]["domains"] if name != "mean"]
    print("\nLoss of the steady part, nats a token / top-1, %\n")
    print(f"| held | variant | {' | '.join(domains)} | mean |\n|{'---|' * (len(domains) + 3)}")
    for row in rows:
        if "equal" in row:  # of other, fewer tokens
            continue
        cells = [row["domains"][name]["steady"] for name in [*domains, "mean"]]
        shown = " | ".join(f"{cell['loss']:.3f} / {100 * cell['top1']:.0f}" for cell in cells)
        print(f"| {row['budget']:g} % | {row['variant']} | {shown} |")
    print("\nRise over all resident, and what each step of the ladder wins, nats a token with 95 % interval\n")
    print("| held | variant | rise, first request | rise, steady | won, all | won, steady | missed | KB read a token |")
    print(f"|{'---|' * 8}")
    for row in rows:
        if "equal" in row:
            continue
        mean, won = row["domains"]["mean"], row.get("won")
        parts = [interval(won[part]) if won else "" for part in ("all", "steady")]
        print(
            f"| {row['budget']:g} % | {row['variant']} | {interval(row['rise']['first'])} | "
            f"{interval(row['rise']['steady'])} | "
            f"{' | '.join(parts)} | {100 * mean['steady']['missed']:.1f} % | {mean['steady']['kb_a_token']:.0f} |"
        )
    print("\nDivergence from all resident, nats a token with 95 % interval, and likeliest tokens that are others\n")
    print("| held | variant | first request | steady | won, all | won, steady | others, first | steady |")
    print(f"|{'---|' * 8}")
    for row in rows:
        if "equal" in row or row["budget"] == 100:
            continue
        won, (first, steady) = row.get("nearer"), (row["domains"]["mean"][part] for part in ("first", "steady"))
        parts = [interval(won[part]) if won else "" for part in ("all", "steady")]
        print(
            f"| {row['budget']:g} % | {row['variant']} | {first['apart']:.3f} | {steady['apart']:.4f} | "
            f"{' | '.join(parts)} | {100 * first['other']:.1f} % | {100 * steady['other']:.1f} % |"
        )
    for row in rows:
        if "equal" in row:
            print(
                f"exact at {row['budget']:g} %: {row['equal']} of {row['answers']} answers equal in every bit of logits"
            )


def interval(value: dict[str, float]) -> str:
    """Without the interval where there is one request a domain."""
    if value["low"] == value["high"]:
        return f"{value['mean']:+.3f}"
    return f"{value['mean']:+.3f} ({value['low']:+.3f} to {value['high']:+.3f})"


def show_switches(rows: list[dict[str, Any]]) -> None:
    print("\nTokens after a change of domain until the missed share is back; the share at first, and steady\n")
    print("| variant | from | to | answers, first | steady | tokens | with prompts, first | steady | tokens |")
    print(f"|{'---|' * 9}")
    for row in rows:
        cells = [f"{100 * p['first']:.1f} % | {100 * p['steady']:.1f} % | {p['tokens']:.0f}" for p in parts_of(row)]
        print(f"| {row['variant']} | {row['from']} | {row['to']} | {' | '.join(cells)} |")
    for name in dict.fromkeys(row["variant"] for row in rows):
        for at, what in enumerate(("tokens of answers", "tokens, prompts included")):
            tokens = [parts_of(row)[at]["tokens"] for row in rows if row["variant"] == name]
            median = statistics.median(tokens)
            print(f"{name}: median {median:.0f}, worst {max(tokens):.0f} {what}, {len(tokens)} switches")


def parts_of(row: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    return row["answers"], row["all"]
