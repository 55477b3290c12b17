"""A history as a file to carry: aggregate counts only, no tokens, no text, no order of requests.

    {"format": "tidelm-demand", "version": 1, "identity": "398f57d2...", "model_type": "deepseek_v41",
     "unit": "request", "layers": 40, "experts": 384, "top_k": 6, "requests": 1200,
     "counts": [[...], ...], "mass": [[...], ...]}

counts and mass: [layers][experts], the aged sums of votes as the history holds them.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tided.errors import DataError
from tided.tide.demand import Demand, RouterShape, checked_grid

MAX_EXPORT_BYTES = 256 << 20
SHOWN_DIGITS = 16


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`identity` is the checkpoint's."""

    format: Literal["tidelm-demand"] = "tidelm-demand"
    version: Literal[1] = 1
    identity: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    model_type: str
    unit: Literal["request"] = "request"
    layers: Annotated[int, msgspec.Meta(ge=1)]
    experts: Annotated[int, msgspec.Meta(ge=1)]
    top_k: Annotated[int, msgspec.Meta(ge=1)]
    requests: Annotated[int, msgspec.Meta(ge=0)]
    counts: list[list[float]]
    mass: list[list[float]]

    @property
    def shape(self) -> RouterShape:
        return RouterShape(self.layers, self.experts, self.top_k)

    @property
    def name(self) -> str:
        """What it is a history of."""
        layers, experts, top_k = self.shape
        return f"{self.model_type} {self.identity[:SHOWN_DIGITS]}, {layers} layers x {experts} experts, {top_k} a token"

    @property
    def demand(self) -> Demand:
        """Raises ValueError for another shape, NaN and such."""
        counts, mass = checked_grid(self.counts, "counts", self.shape), checked_grid(self.mass, "mass", self.shape)
        return Demand(counts, mass, self.requests)


def export_of(demand: Demand, identity: str, model_type: str, shape: RouterShape) -> Export:
    return Export(
        identity=identity,
        model_type=model_type,
        requests=demand.requests,
        counts=demand.counts.tolist(),
        mass=demand.mass.tolist(),
        **shape._asdict(),
    )


def encoded(export: Export) -> bytes:
    """One line a layer, so that two of them can be compared by eye."""
    return msgspec.json.encode(export).replace(b"],[", b"],\n[") + b"\n"


def load_export(path: Path) -> Export:
    """Raises DataError for a file that is damaged, of another kind or version."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_EXPORT_BYTES + 1)
    except OSError as e:
        raise DataError(f"cannot be read: {e.strerror}", where=str(path)) from e
    if len(content) > MAX_EXPORT_BYTES:
        raise DataError(f"is larger than {MAX_EXPORT_BYTES} bytes, no export is", where=str(path))
    try:
        export = msgspec.json.decode(content, type=Export)
        export.demand  # noqa: B018  judged here, where the file has a name
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as e:
        hint = "`tidectl tide export` writes such files"
        raise DataError(f"is no exported history: {e}", where=str(path), hint=hint) from e
    return export


def merged(one: Export, other: Export) -> Export:
    """The votes of both. Raises ValueError naming both when they are not of the same model."""
    if (one.identity, one.shape) != (other.identity, other.shape):
        raise ValueError(f"one is of {one.name}; the other of {other.name}")
    return export_of(added(one.demand, other.demand), one.identity, one.model_type, one.shape)


def added(one: Demand, other: Demand) -> Demand:
    return Demand(one.counts + other.counts, one.mass + other.mass, one.requests + other.requests)
