"""How a checkpoint routes held-out text, and what it costs to keep only some of its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minis.data import DOMAINS

MINIMUM_PER_LAYER = 4
Stats = dict[str, dict[int, dict[str, Tensor]]]


@dataclass(frozen=True)
class Subject:
    """`run`: domain, half of its rows, residents [layers, E] or None for all -> per layer scores of the chosen experts
    [N, E], and the loss over what the model has to write. `valid` [N, 1]: rows that are no pads."""

    layers: int
    experts: int
    device: torch.device
    run: Callable[[str, int, Tensor | None], tuple[list[Tensor], float]]
    valid: Callable[[str, int], Tensor]


def routing(s: Subject) -> Stats:
    """Per domain and half: tokens, counts, score mass and normalised weight [layers, E]."""
    stats: Stats = {}
    for d in DOMAINS:
        for half in (0, 1):
            picked, _ = s.run(d, half, None)
            valid = s.valid(d, half)
            picked = [k * valid for k in picked]
            weight = [(k / (k.sum(-1, keepdim=True) + 1e-20)).sum(0) for k in picked]
            stats.setdefault(d, {})[half] = {
                "tokens": valid.sum(),
                "counts": torch.stack([(k > 0).sum(0) for k in picked]),
                "mass": torch.stack([k.sum(0) for k in picked]),
                "weight": torch.stack(weight) / valid.sum(),
            }
    return stats


def best_set(weight: Tensor, share: float) -> Tensor:
    """weight [layers, E] -> bool: the best pairs over all layers, at least four a layer."""
    keep = torch.zeros_like(weight, dtype=torch.bool)
    keep.scatter_(1, weight.topk(MINIMUM_PER_LAYER, 1).indices, True)
    rest = weight.masked_fill(keep, float("inf")).flatten()
    count = round(share * weight.numel())
    return torch.zeros_like(rest, dtype=torch.bool).scatter(0, rest.topk(count).indices, True).view_as(weight)


def best_sets(stats: Stats, share: float) -> dict[str, Tensor]:
    """A set for every domain, chosen on the first half of its rows, and one for all."""
    sets = {d: best_set(stats[d][0]["weight"], share) for d in DOMAINS}
    return sets | {"all": best_set(mean_weight(stats), share)}


def mean_weight(stats: Stats) -> Tensor:
    return torch.stack([stats[d][0]["weight"] for d in DOMAINS]).mean(0)


def coverage(sets: dict[str, Tensor], stats: Stats) -> dict[str, dict[str, float]]:
    """Share of routing weight of the second half that sets chosen on the first half hold."""
    result = {}
    for name, keep in sets.items():
        result[name] = {
            d: round(float((stats[d][1]["weight"] * keep).sum() / stats[d][1]["weight"].sum()), 3) for d in DOMAINS
        }
    return result


def residency(s: Subject, sets: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Rise of loss on the second half when only a set may be chosen."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(s.layers, s.experts, generator=generator).to(s.device)
    share = float(next(iter(sets.values())).float().mean())
    table: dict[str, dict[str, float]] = {"own": {}, "one set for all": {}, "random": {}, "other domains": {}}
    for d in DOMAINS:
        free = s.run(d, 1, None)[1]

        def rise(keep: Tensor, d: str = d, free: float = free) -> float:
            return round(s.run(d, 1, keep)[1] - free, 4)

        table["own"][d] = rise(sets[d])
        table["one set for all"][d] = rise(sets["all"])
        table["random"][d] = rise(best_set(noise, share))
        table["other domains"][d] = round(float(np.mean([rise(sets[o]) for o in DOMAINS if o != d])), 4)
    for row in table.values():
        row["mean"] = round(float(np.mean(list(row.values()))), 4)
    return table


def routing_report(s: Subject, stats: Stats, shares: tuple[float, ...]) -> dict[str, Any]:
    """Coverage and residency for each share of experts kept, and how uneven the load is."""
    result: dict[str, Any] = {}
    for share in shares:
        sets = best_sets(stats, share)
        result[f"coverage {share}"] = coverage(sets, stats)
        result[f"residency {share}"] = residency(s, sets)
    return result | {"busiest expert": round(float(mean_weight(stats).max() * s.experts), 2)}


def demand_seed(model_type: str, top_k: int, stats: Stats) -> dict[str, Any]:
    """Aggregate routing demand of the held-out rows, per domain: whoever plans for all gives each domain one vote."""
    domains: dict[str, Any] = {}
    for d, halves in stats.items():
        counts, mass = (halves[0][k] + halves[1][k] for k in ("counts", "mass"))
        domains[d] = {
            "tokens": int(halves[0]["tokens"] + halves[1]["tokens"]),
            "counts": counts.tolist(),
            "mass": [[round(v, 1) for v in r] for r in mass.tolist()],
        }
    layers, experts = counts.shape
    return {"model_type": model_type, "layers": layers, "experts": experts, "top_k": top_k, "domains": domains}
