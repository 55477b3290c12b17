"""What scores say: loss, top-1 and divergence, by domain, with their spread. No torch, no model."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tided.engine.types import TokenLogprob

DRAWS = 2000  # of the bootstrap
SEED = 0


class Judged(NamedTuple):
    """One text's answer. `row`: the line of the file that it is of, with other answers of its conversation. In nats a
    token: `losses`, and `apart`, how far the distribution is from the reference's; `hits`: the token is the likeliest;
    `other`: the likeliest token is not the reference's; `covered`: the share of the reference's probability that
    `apart` has seen token by token."""

    domain: str
    row: int
    losses: list[float]
    hits: list[bool]
    apart: list[float]
    other: list[bool]
    covered: list[float]
    substituted: float | None


def judge(
    domain: str,
    row: int,
    given: Sequence[TokenLogprob],
    reference: Sequence[TokenLogprob],
    substituted: float | None,
) -> Judged:
    """Both of the same tokens."""
    pairs = list(zip(given, reference, strict=True))
    divergences = [divergence(one, whole) for one, whole in pairs]
    return Judged(
        domain,
        row,
        [-one.logprob for one in given],
        [one.rank == 1 for one in given],
        [apart for apart, _ in divergences],
        [one.top[0][0] != whole.top[0][0] for one, whole in pairs],
        [covered for _, covered in divergences],
        substituted,
    )


def divergence(given: TokenLogprob, reference: TokenLogprob) -> tuple[float, float]:
    """KL(reference || given) in nats over the tokens that both tell of, all others as one: never more than that of the
    whole distributions. And the reference's probability of those tokens."""
    ours = dict(given.top) | {given.token_id: given.logprob}
    theirs = dict(reference.top) | {reference.token_id: reference.logprob}
    both = ours.keys() & theirs.keys()
    covered, said = (math.fsum(math.exp(of[one]) for one in both) for of in (theirs, ours))
    apart = math.fsum(math.exp(theirs[one]) * (theirs[one] - ours[one]) for one in both)
    rest, their_rest = max(1 - said, 0.0), max(1 - covered, 0.0)
    if their_rest > 1e-9:  # below that it is rounding
        apart += their_rest * (math.log(their_rest) - math.log(max(rest, 1e-12)))
    return max(apart, 0.0), covered


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """By domain, and the mean of the domains."""
    domains = {name: _figures([one for one in judged if one.domain == name]) for name in _names(judged)}
    keys = ("loss", "top1", "kl", "other", "covered")
    mean = {key: statistics.fmean(found[key] for found in domains.values()) for key in keys}
    shares = [one.substituted for one in judged if one.substituted is not None]
    return {
        "domains": domains,
        "mean": mean | {"tokens": sum(found["tokens"] for found in domains.values())},
        "substituted_weight_share": statistics.fmean(shares) if shares else None,
    }


def _names(judged: Sequence[Judged]) -> list[str]:
    return list(dict.fromkeys(one.domain for one in judged))


def _figures(judged: Sequence[Judged]) -> dict[str, float]:
    def mean(name: str) -> float:
        return statistics.fmean(value for one in judged for value in getattr(one, name))

    return {
        "texts": len(judged),
        "tokens": sum(len(one.losses) for one in judged),
        "loss": mean("losses"),
        "top1": mean("hits"),
        "kl": mean("apart"),
        "other": mean("other"),
        "covered": mean("covered"),
    }


def rise(given: Sequence[Judged], reference: Sequence[Judged]) -> dict[str, float | None]:
    """Nats a token that `given` loses more than `reference` on the same texts, domains weighing alike, with the 95 %
    interval of a bootstrap over rows: answers of one conversation are drawn together. Without an interval where a
    domain has one row alone, which says nothing of how much rows differ."""
    rng, means, rises, known = np.random.default_rng(SEED), np.zeros(DRAWS), [], True
    names = _names(reference)
    for name in names:
        summed: dict[int, list[float]] = {}
        for a, b in zip(given, reference, strict=True):
            if b.domain == name:
                of = summed.setdefault(b.row, [0.0, 0.0])
                of[0] += sum(a.losses) - sum(b.losses)
                of[1] += len(b.losses)
        rows = np.array(list(summed.values()))
        known &= len(rows) > 1
        drawn = rows[rng.integers(len(rows), size=(DRAWS, len(rows)))].sum(axis=1)
        means += drawn[:, 0] / drawn[:, 1] / len(names)
        rises.append(rows[:, 0].sum() / rows[:, 1].sum())
    low, high = np.quantile(means, [0.025, 0.975])
    ends = (float(low), float(high)) if known else (None, None)
    return {"mean": float(np.mean(rises)), "low": ends[0], "high": ends[1]}
