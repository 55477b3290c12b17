"""Is simulated demand like the real model's? The same figures of both, side by side.

Real ones: `data/ds41_global_budget.csv` (36,250 tokens of many topics). A static set knows the whole trace; LRU reads
every miss, at once and without a limit, token by token and in blocks of six tokens that are routed together.
"""

import csv
from collections import OrderedDict
from importlib.resources import files

import msgspec
import numpy as np

from tided.sim.trace import Trace

BLOCK_TOKENS = 6


class Likeness(msgspec.Struct, frozen=True):
    """Shares of picks that are covered with `share` of all pairs: real and simulated."""

    share: float
    real_static: float
    static: float
    real_lru: float
    lru: float
    real_lru_block: float
    lru_block: float


def likeness(trace: Trace, shares: tuple[float, ...] = (0.26, 0.391, 0.521)) -> list[Likeness]:
    text = (files("tided.sim") / "data" / "ds41_global_budget.csv").read_text()
    union = [row for row in csv.DictReader(text.splitlines()) if row["trace"].startswith("union")]
    result = []
    for share in shares:
        real = next(row for row in union if abs(float(row["share_of_15360"]) - share) < 5e-4)
        columns = (float(real[name]) for name in ("static_coverage", "lru_hit_per_token", "lru_hit_per_6tok_block"))
        ours = (static_coverage(trace, share), lru_hits(trace, share, 1), lru_hits(trace, share, BLOCK_TOKENS))
        result.append(Likeness(share, *(value for both in zip(columns, ours, strict=True) for value in both)))
    return result


def static_coverage(trace: Trace, share: float) -> float:
    pairs = trace.shape.layers * trace.shape.experts
    counts = np.bincount(trace.flat(0, len(trace.experts)).ravel(), minlength=pairs)
    return float(np.sort(counts)[::-1][: round(share * pairs)].sum() / counts.sum())


def lru_hits(trace: Trace, share: float, block: int) -> float:
    """Of the distinct pairs that each block of tokens picks, the share that is there."""
    slots = round(share * trace.shape.layers * trace.shape.experts)
    picks, held, hits, asked = trace.flat(0, len(trace.experts)), OrderedDict[int, None](), 0, 0
    for at in range(0, len(picks), block):
        for pair in np.unique(picks[at : at + block]).tolist():
            asked += 1
            if pair in held:
                hits += 1
                held.move_to_end(pair)
                continue
            held[pair] = None
            if len(held) > slots:
                held.popitem(last=False)
    return hits / asked
