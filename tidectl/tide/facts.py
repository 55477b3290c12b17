"""What was learned, as a program sees it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tidectl import profiles, running
from tidectl.tide.model import Model, read
from tided.tide.demand import Grid, blended, observed_weight, per_layer
from tided.tide.kinds import Kinds
from tided.tide.pilot import Pilot

MOVERS = 8


def facts(model: Model) -> dict[str, Any]:
    """Everything that `show` shows. What a start would keep is asked of the pilot itself."""
    settings, tide = model.settings, model.settings.tide
    history, seed = read(model), model.seed
    pilot = Pilot(history, seed, tide, model.shape, settings.experts.resident, model.kinds)
    kept = np.zeros((model.shape.layers, model.shape.experts), dtype=bool)
    kept[tuple(np.array(pilot.boot_pairs()).T)] = True
    demand, prior = history.demand, per_layer(seed.prior if seed else np.ones(kept.shape))
    scores = blended(demand, prior, tide.prior_votes)
    live = _live(model)
    return {
        "profile": profiles.name_of(str(model.profile)),
        "history": str(model.history),
        "recorded": model.history.exists(),
        "note": history.note,
        "model": {"family": model.family, "identity": model.identity, **model.shape._asdict()},
        "requests": demand.requests,
        "votes": round(float(demand.mass.sum(axis=1).mean()), 3),
        "sensitivity": tide.sensitivity,
        "half_life_requests": pilot.sensitivity.half_life if pilot.sensitivity.adapts else None,
        "hot_ring_slots": tide.hot_ring_slots,
        "history_weight": round(float(observed_weight(demand, tide.prior_votes).mean()), 4),
        "prior": {"seed": tide.seed, "votes": tide.prior_votes},
        "running": live is not None,
        "resident_by_layer": live or kept.sum(axis=1).tolist(),
        "start_by_layer": kept.sum(axis=1).tolist(),
        "bytes": None if model.kinds is None else _bytes(kept, model.kinds),
        "coverage_by_layer": _coverage(kept, demand.mass),
        "coverage_by_topic": {} if seed is None else _topics(kept, seed.topics),
        "movers": _moved(scores, prior, kept) if demand.requests else [],
    }


def _bytes(kept: Grid, kinds: Kinds) -> dict[str, Any]:
    """Of whole experts that differ in size: how many of each size a start would keep, what of each layer's bytes."""
    sizes, count = kinds.sizes, len(kinds.whole)
    every, held = (np.bincount(of.ravel(), minlength=count).tolist() for of in (kinds.of, kinds.of[kept]))
    return {
        "experts": int(sizes.sum()),
        "start": int(sizes[kept].sum()),
        "start_share_by_layer": [round(float(share), 4) for share in (sizes * kept).sum(axis=1) / sizes.sum(axis=1)],
        "sizes": [
            {"bytes": nbytes, "experts": of, "start": own}
            for nbytes, of, own in zip(kinds.whole, every, held, strict=True)
        ],
    }


def _coverage(kept: Grid, mass: Grid) -> list[float] | None:
    """Of each layer's demand, what the experts take that a start would keep; None while nothing is known."""
    if not mass.any():
        return None
    return [round(float(share), 4) for share in (per_layer(mass) * kept).sum(axis=1)]


def _topics(kept: Grid, topics: Mapping[str, Grid]) -> dict[str, float]:
    """Of each topic of the seed, the same, over all layers; the least first."""
    shares = {name: round(float((share * kept).sum(axis=1).mean()), 4) for name, share in topics.items()}
    return dict(sorted(shares.items(), key=lambda item: (item[1], item[0])))


def _moved(scores: Grid, prior: Grid, kept: Grid) -> list[dict[str, Any]]:
    """Experts whose share of their layer's demand traffic has changed most, against the seed's."""
    change = scores - prior
    order = np.argsort(-np.abs(change), axis=None, kind="stable")[:MOVERS]
    return [
        {
            "layer": int(layer),
            "expert": int(expert),
            "seed_share": round(float(prior[layer, expert]), 5),
            "share": round(float(scores[layer, expert]), 5),
            "kept": bool(kept[layer, expert]),
        }
        for layer, expert in (np.unravel_index(index, change.shape) for index in order)
        if change[layer, expert]
    ]


def _live(model: Model) -> list[int] | None:
    """Residents by layer as the daemon of this profile says; None where it does not run."""
    now = running.look()
    if not now.health or Path(now.profile).resolve() != model.profile.resolve():
        return None
    said = now.health.get("residents_by_layer")
    return said if isinstance(said, list) and len(said) == model.shape.layers else None
