"""The resident set to start with, and what tells pairs apart of which nothing has been learned."""

import numpy as np

from tided.errors import ConfigError
from tided.tide.demand import Grid, RouterShape
from tided.tide.kinds import Kinds, first_order
from tided.tide.planner import Pair, boot_set, boot_set_of_bytes, check_budget, first_set
from tided.tide.seed import Seed, layered_set

TIE_BREAK = 1e-9  # of a layer's demand


def check_boot(shape: RouterShape, budget: int, floor: int) -> None:
    """Raises ConfigError for a budget or a floor that no set can have."""
    if floor < shape.top_k:
        raise ConfigError(
            f"floor_per_layer = {floor}, but a token of this model picks {shape.top_k} experts a layer", where="[tide]"
        )
    try:
        check_budget(shape.layers, shape.experts, budget, floor)
    except ValueError as e:
        raise ConfigError(str(e), where="[experts] resident") from e


def boot_residents(scores: Grid, unseen: Grid, budget: int, floor: int, kinds: Kinds | None) -> list[Pair]:
    """scores, unseen [layers, experts]; `unseen` ranks, where records differ in size, what no score tells apart."""
    if kinds is None:
        return boot_set(scores, budget, floor)
    try:
        return boot_set_of_bytes(scores, kinds.sizes, kinds.budget_bytes(budget), floor, unseen)
    except ValueError as e:
        raise ConfigError(str(e), where="[experts] resident") from e


def tie_breaks(shape: RouterShape, seed: Seed | None, budget: int, floor: int, kinds: Kinds | None) -> Grid:
    """[layers, experts]: too little to count against anything learned, and enough to rank pairs that are not told
    apart. Ranked by their ids, the first layers would get every one of them; so each layer has its share of whatever is
    left, as the seed has it or as large as any other's."""
    layers, experts, _ = shape
    if seed is not None and not seed.layer_residents:
        return np.zeros((layers, experts))
    if seed is None:
        start = first_set(layers, experts, budget, floor)
    else:
        start = layered_set(seed.layer_residents, experts, budget, floor)
    of = np.zeros((layers, experts), dtype=np.int64) if kinds is None else kinds.of
    return TIE_BREAK * first_order(of, start)
