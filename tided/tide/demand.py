"""What the router asked for: votes of requests, their aging, and the scores that a plan is made from.

A request is one vote, whatever its length: its picks are normalised to 1 in every layer before they are added. Added
as they are, one long prompt would outweigh and age away all that was learned before it.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Grid = npt.NDArray[np.float64]  # [layers, experts]

PROMPT_CAP_TOKENS = 512  # a prompt counts as at most so many tokens when its picks are joined with its answer's


class RouterShape(NamedTuple):
    layers: int  # layers with routed experts
    experts: int
    top_k: int


class Sensitivity(NamedTuple):
    """`half_life` in requests. `gate`: the share of missed picks from which a prompt causes a plan of its own."""

    half_life: float
    gate: float

    @property
    def adapts(self) -> bool:
        return math.isfinite(self.half_life)

    @property
    def decay(self) -> float:
        """What is left of a vote after one more request."""
        return math.pow(0.5, 1.0 / self.half_life)


SENSITIVITY = {
    "off": Sensitivity(math.inf, math.inf),
    "low": Sensitivity(40, 0.04),
    "medium": Sensitivity(20, 0.02),
    "high": Sensitivity(10, 0.01),
    "max": Sensitivity(5, 0.005),
}
MEDIUM_SHARE = 1.0 - SENSITIVITY["medium"].decay


def sensitivity_of(level: str | float) -> Sensitivity:
    """A level by its name, or by the share of all votes that the newest request is to have, from 0 (off) to below 0.5.
    The gate scales against it: what follows slowly is not worth a plan for a few misses."""
    if isinstance(level, str):
        return SENSITIVITY[level]
    if not 0 <= level < 0.5:
        raise ValueError(f"a share of {level} of all votes, must be from 0 to below 0.5")
    if not level:
        return SENSITIVITY["off"]
    gate = SENSITIVITY["medium"].gate * MEDIUM_SHARE / level
    return Sensitivity(math.log(0.5) / math.log1p(-level), min(max(gate, 0.005), 0.2))


@dataclass(frozen=True)
class Vote:
    """`counts`: picks, `mass`: router scores of the picks. Every layer sums to 1, or to 0 where nothing was routed."""

    counts: Grid
    mass: Grid

    @property
    def empty(self) -> bool:
        return not self.counts.any()


def vote_of(counts: npt.ArrayLike, mass: npt.ArrayLike, shape: RouterShape) -> Vote:
    """Raw sums [layers, experts] of a request, or of a part of one, as a vote. Raises ValueError for NaN and such."""
    return Vote(per_layer(checked_grid(counts, "counts", shape)), per_layer(checked_grid(mass, "mass", shape)))


def joined(prompt: Vote, prompt_tokens: int, answer: Vote, answer_tokens: int) -> Vote:
    """One vote of a prompt and its answer, weighed by their tokens, with the prompt capped: else a long prompt would
    leave no say to what was generated, where a missing expert does the harm."""
    of_prompt, of_answer = min(prompt_tokens, PROMPT_CAP_TOKENS), answer_tokens
    return Vote(
        per_layer(of_prompt * prompt.counts + of_answer * answer.counts),
        per_layer(of_prompt * prompt.mass + of_answer * answer.mass),
    )


@dataclass(frozen=True)
class Demand:
    """Aged sum of votes. `counts` and `mass` of a layer sum to the votes it holds; `requests` were ever folded in."""

    counts: Grid
    mass: Grid
    requests: int = 0

    @classmethod
    def none(cls, shape: RouterShape) -> "Demand":
        return cls(np.zeros((shape.layers, shape.experts)), np.zeros((shape.layers, shape.experts)))

    def folded(self, vote: Vote, decay: float) -> "Demand":
        """With one more request. A new value: what is only a preview stays one."""
        return Demand(self.counts * decay + vote.counts, self.mass * decay + vote.mass, self.requests + 1)


def observed_weight(demand: Demand, prior_votes: float) -> Grid:
    """[layers]: how much of a layer's scores comes from requests and not from the prior."""
    votes = demand.mass.sum(axis=1)
    weight: Grid = np.divide(votes, votes + prior_votes, out=np.zeros_like(votes), where=votes > 0)
    return weight


def blended(demand: Demand, prior: Grid | None, prior_votes: float) -> Grid:
    """Scores [layers, experts], every layer sums to 1: observed mass and the prior, which counts as `prior_votes`
    requests in each layer. Without a prior all experts are equally likely."""
    if prior is None:
        prior = np.ones_like(demand.mass)
    weight = observed_weight(demand, prior_votes)[:, None]
    return (1.0 - weight) * per_layer(prior) + weight * per_layer(demand.mass)


def guessed(demand: Demand, prior_votes: float) -> Grid:
    """[layers, experts]: the part of `blended` without a prior that nobody observed."""
    unseen = (1.0 - observed_weight(demand, prior_votes)) / demand.mass.shape[1]
    grid: Grid = np.repeat(unseen[:, None], demand.mass.shape[1], axis=1)
    return grid


def per_layer(grid: Grid) -> Grid:
    """Every layer divided by its sum; a layer of zeros stays one."""
    sums = grid.sum(axis=1, keepdims=True)
    normalised: Grid = np.divide(grid, sums, out=np.zeros_like(grid), where=sums > 0)
    return normalised


def checked_grid(values: npt.ArrayLike, name: str, shape: RouterShape) -> Grid:
    """`values` as float64 [layers, experts]. Raises ValueError for another shape, NaN, infinity or a negative one."""
    grid = np.asarray(values, dtype=np.float64)
    if grid.shape != (shape.layers, shape.experts):
        raise ValueError(f"{name} is {list(grid.shape)}, must be [{shape.layers}, {shape.experts}]")
    if not np.isfinite(grid).all() or (grid < 0).any():
        raise ValueError(f"{name} holds NaN, infinite or negative values")
    return grid
