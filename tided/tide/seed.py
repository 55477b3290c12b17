"""A demand seed: what a corpus asked for, topic by topic, so that a first start is not slow. Aggregates only.

    {"model_type": "deepseek_v41", "layers": 40, "experts": 384, "top_k": 6,
     "domains": {"english": {"tokens": 3000, "counts": [[...], ...], "mass": [[...], ...]}, ...}}

counts and mass: [layers][experts], raw sums over the tokens of the domain.
"""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from tided.errors import DataError
from tided.tide.demand import Grid, RouterShape, Vote, per_layer, vote_of

log = logging.getLogger(__name__)

MAX_SEED_BYTES = 256 << 20


@dataclass(frozen=True)
class Seed:
    """`prior` [layers, experts], every layer sums to 1: each domain has one vote. `sha256` is the file's."""

    prior: Grid
    sha256: str
    domains: tuple[str, ...]


class _Domain(msgspec.Struct, forbid_unknown_fields=True):
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    counts: list[list[float]]
    mass: list[list[float]]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    model_type: str
    layers: int
    experts: int
    top_k: int
    domains: Annotated[dict[str, _Domain], msgspec.Meta(min_length=1)]


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
    votes = [_vote(path, name, domain, shape) for name, domain in sorted(file.domains.items())]
    prior = per_layer(sum((vote.mass for vote in votes), start=votes[0].mass * 0.0))
    seed = Seed(prior, hashlib.sha256(content).hexdigest(), tuple(sorted(file.domains)))
    log.info("demand seed %s (sha256 %s): %s", path.name, seed.sha256[:16], ", ".join(seed.domains))
    return seed


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
