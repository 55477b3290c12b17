"""A demand seed: what a corpus asked for, topic by topic, so that a first start is not slow. Aggregates only.

    {"model_type": "deepseek_v41", "layers": 40, "experts": 384, "top_k": 6,
     "domains": {"english": {"tokens": 3000, "counts": [[...], ...], "mass": [[...], ...]}, ...}}

counts and mass: [layers][experts], raw sums over the tokens of the domain.

Where it is known how many experts a layer needs and not which, a seed may say so much and no more:

    {"model_type": "deepseek_v41", "layers": 40, "experts": 384, "top_k": 6,
     "source": "whose counts", "layer_residents": [285, 266, ...]}

A start then shares its residents out over the layers in these proportions. Within a layer every expert is as likely as
any other, and traffic alone teaches which to keep.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from tided.errors import DataError
from tided.tide.demand import Grid, RouterShape, Vote, per_layer, vote_of
from tided.tide.planner import Pair, check_budget

log = logging.getLogger(__name__)

MAX_SEED_BYTES = 256 << 20


@dataclass(frozen=True)
class Seed:
    """`prior` [layers, experts], every layer sums to 1: each domain has one vote. `sha256` is the file's. With
    `layer_residents` the prior knows no expert from another."""

    prior: Grid
    sha256: str
    domains: tuple[str, ...]
    layer_residents: tuple[int, ...] = ()
    topics: Mapping[str, Grid] = field(default_factory=dict)  # of each domain, [layers, experts] that sum to 1 a layer


class _Domain(msgspec.Struct, forbid_unknown_fields=True):
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    counts: list[list[float]]
    mass: list[list[float]]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    model_type: str
    layers: int
    experts: int
    top_k: int
    domains: dict[str, _Domain] = {}
    source: str = ""
    layer_residents: list[Annotated[int, msgspec.Meta(ge=1)]] = []


def load_seed(path: Path, model_type: str, shape: RouterShape) -> Seed:
    """Raises DataError for a file that is damaged or made for another model."""
    content = _content(path)
    try:
        file = msgspec.json.decode(content, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise DataError(f"is not a demand seed: {e}", where=str(path)) from e
    found = (file.model_type, RouterShape(file.layers, file.experts, file.top_k))
    if found != (model_type, shape):
        raise DataError(
            f"is a seed for {found[0]}, {_shown(found[1])}; the model is {model_type}, {_shown(shape)}",
            where=str(path),
            hint="set `seed` of the [tide] section to this model's seed, or to nothing",
        )
    sha256 = hashlib.sha256(content).hexdigest()
    if not file.domains or file.layer_residents:
        return _layers_only(path, file, shape, sha256)
    votes = [_vote(path, name, domain, shape) for name, domain in sorted(file.domains.items())]
    prior = per_layer(sum((vote.mass for vote in votes), start=votes[0].mass * 0.0))
    topics = {name: vote.mass for name, vote in zip(sorted(file.domains), votes, strict=True)}
    seed = Seed(prior, sha256, tuple(topics), topics=topics)
    log.info("demand seed %s (sha256 %s): %s", path.name, seed.sha256[:16], ", ".join(seed.domains))
    return seed


def layered_set(residents: tuple[int, ...], experts: int, budget: int, floor: int) -> list[Pair]:
    """`budget` pairs, as many of each layer as its share of `residents` says, at least `floor`; the first experts of a
    layer, since it is not known which are better."""
    check_budget(len(residents), experts, budget, floor)
    shares = np.array(residents, dtype=np.float64)
    low, high = 0.0, experts / float(shares.min())
    for _ in range(200):  # to the last bit: the scale at which the layers, within their limits, hold the budget
        middle = (low + high) / 2
        if np.clip(middle * shares, floor, experts).sum() >= budget:
            high = middle
        else:
            low = middle
    exact = np.clip(high * shares, floor, experts)
    whole = np.floor(exact).astype(int)
    nearest = np.argsort(whole - exact, kind="stable")  # the largest remainders take what does not divide
    whole[nearest[: budget - int(whole.sum())]] += 1
    return [(layer, expert) for layer, count in enumerate(whole.tolist()) for expert in range(count)]


def _layers_only(path: Path, file: _File, shape: RouterShape, sha256: str) -> Seed:
    residents = tuple(file.layer_residents)
    fault = ""
    if bool(file.domains) == bool(residents):
        fault = "it must hold either domains or layer_residents"
    elif len(residents) != shape.layers or max(residents) > shape.experts:
        fault = f"layer_residents must be {shape.layers} numbers up to {shape.experts}"
    if fault:
        raise DataError(f"is not a demand seed: {fault}", where=str(path))
    even = np.full((shape.layers, shape.experts), 1.0 / shape.experts)
    log.info("demand seed %s (sha256 %s): shares of layers, no experts; %s", path.name, sha256[:16], file.source)
    return Seed(even, sha256, (), residents)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SEED_BYTES + 1)
    except OSError as e:
        raise DataError(
            f"cannot be read: {e.strerror}", where=str(path), hint="check `seed` of the [tide] section"
        ) from e
    if len(content) > MAX_SEED_BYTES:
        raise DataError(f"is larger than {MAX_SEED_BYTES} bytes, no seed is", where=str(path))
    return content


def _vote(path: Path, name: str, domain: _Domain, shape: RouterShape) -> Vote:
    try:
        vote = vote_of(domain.counts, domain.mass, shape)
        if not (vote.counts.any(axis=1).all() and vote.mass.any(axis=1).all()):
            raise ValueError("a layer of it holds no demand")
    except ValueError as e:
        raise DataError(f"domain {name!r}: {e}", where=str(path)) from e
    return vote


def _shown(shape: RouterShape) -> str:
    return f"{shape.layers} layers x {shape.experts} experts, {shape.top_k} a token"
