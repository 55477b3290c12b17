"""What an edited checkpoint took out of a base checkpoint's residual stream: `docs/formats/ablation.md`.

Layer by layer, a tensor at a time: samples of both tell whether a matrix was edited, and those that were are read whole
and compared (`packers.rank_one`). A layer that is done is written down, a transfer that broke goes on where it was.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from packers.headers import TensorInfo
from packers.hub import Repository
from packers.rank_one import Matrix, RankOne, rank_one
from packers.shards import Checkpoint
from tided.errors import DataError

POINTS: Mapping[str, tuple[str, ...]] = {  # under model.layers.N; of several the first that is there
    "attention": ("self_attn.o_proj.weight",),
    "shared": ("mlp.shared_experts.down_proj.weight", "mlp.down_proj.weight"),
    "routed": ("mlp.experts.0.down_proj.weight",),
}
LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,3})\.self_attn\.o_proj\.weight")
MANTISSA_BITS = {"BF16": 7, "F16": 10, "F32": 23}
SAMPLE_BYTES, SAMPLES = 2048, 3
SAME_COSINE = 0.999  # two matrices of a layer: one direction
SAME_ALPHA = 0.05  # shared and routed experts: one alpha, so much apart at most


class Source(Protocol):
    """A checkpoint that can be read in ranges."""

    @property
    def label(self) -> str: ...  # names its content
    @property
    def fetched_bytes(self) -> int: ...  # over a network, so far
    def names(self) -> Iterator[str]: ...
    def tensor(self, name: str) -> TensorInfo: ...
    def read(self, info: TensorInfo, begin: int, end: int) -> Iterator[bytes]: ...  # of the tensor's bytes


class Local:
    """A directory."""

    fetched_bytes = 0

    def __init__(self, path: Path) -> None:
        self._checkpoint = Checkpoint.open(path)
        self.label = f"{path} ({self._checkpoint.identity()[:16]})"

    def names(self) -> Iterator[str]:
        return iter(self._checkpoint.tensors)

    def tensor(self, name: str) -> TensorInfo:
        self._checkpoint.spec(name)
        return self._checkpoint.tensors[name]

    def read(self, info: TensorInfo, begin: int, end: int) -> Iterator[bytes]:
        with info.path.open("rb") as file:
            file.seek(info.offset + begin)
            yield file.read(end - begin)


class Hub:
    """A repository, at one commit."""

    def __init__(self, repository: Repository) -> None:
        self._repository, self.label = repository, f"{repository.name}@{repository.commit}"

    @property
    def fetched_bytes(self) -> int:
        return self._repository.fetched_bytes

    def names(self) -> Iterator[str]:
        return self._repository.names()

    def tensor(self, name: str) -> TensorInfo:
        return self._repository.tensor(name)

    def read(self, info: TensorInfo, begin: int, end: int) -> Iterator[bytes]:
        return self._repository.read(str(info.path), info.offset + begin, info.offset + end)


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An edited layer. `alphas` by point (attention, shared, mlp); `explained`, by matrix, the share of its difference
    that lies along the direction."""

    layer: int
    direction: list[float]
    alphas: dict[str, float]
    explained: dict[str, float]


@dataclass(frozen=True)
class Work:
    """`folder` keeps what is fetched until it is compared: at most two tensors."""

    base: Source
    edited: Source
    folder: Path
    tell: Callable[[str, int, int], None]  # (what, bytes done, bytes in all)


def layers_of(source: Source) -> list[int]:
    """Those of the trunk. Raises DataError for a checkpoint of a family that this does not know."""
    names = set(source.names())
    found = sorted({int(match[1]) for name in names if (match := LAYER.fullmatch(name))})
    if not found:
        hint = "only checkpoints of GLM-5.3's layout can be compared, with unquantised attention"
        raise DataError("holds no model.layers.N.self_attn.o_proj.weight", where=source.label, hint=hint)
    return [layer for layer in found if f"model.layers.{layer}.eh_proj.weight" not in names]  # a drafter's has one


def fit_layer(work: Work, layer: int) -> Found | None:
    """None: nothing of the layer was edited. Raises DataError for an edit that is no projection of one direction."""
    names = set(work.base.names())
    fits: dict[str, RankOne] = {}
    for point, parts in POINTS.items():
        name = next((full for part in parts if (full := f"model.layers.{layer}.{part}") in names), None)
        if name and (found := _compared(work, name)):
            fits[point] = found
    return _one_direction(layer, fits) if fits else None


def _one_direction(layer: int, fits: Mapping[str, RankOne]) -> Found:
    best = min(fits.values(), key=lambda fit: fit.rounding)
    apart = [point for point, fit in fits.items() if abs(float(fit.direction @ best.direction)) < SAME_COSINE]
    if apart:
        raise DataError(
            f"its matrices have more than one direction ({', '.join(apart)} another)", where=f"layer {layer}"
        )
    alphas = {point: fit.alpha for point, fit in fits.items()}
    explained = {point: fit.explained for point, fit in fits.items()}
    return Found(layer, best.direction.tolist(), _whole_mlp(layer, alphas), explained)


def _whole_mlp(layer: int, alphas: Mapping[str, float]) -> dict[str, float]:
    """Routed experts are edited only together with the shared one, by the same alpha: then it is the whole MLP."""
    points = dict(alphas)
    routed = points.pop("routed", None)
    if routed is None:
        return points
    shared = points.pop("shared", None)
    if shared is None or abs(shared - routed) > SAME_ALPHA * abs(routed):
        raise DataError(f"routed experts by {routed:.3f}, the shared one by {shared}", where=f"layer {layer}")
    return points | {"mlp": (shared + routed) / 2}


def _compared(work: Work, name: str) -> RankOne | None:
    infos = [source.tensor(name) for source in (work.base, work.edited)]
    if infos[0].dtype != infos[1].dtype or infos[0].shape != infos[1].shape or infos[0].dtype not in MANTISSA_BITS:
        kinds = " against ".join(f"{info.dtype} {list(info.shape)}" for info in infos)
        raise DataError(f"cannot be compared: {kinds}", where=name, hint="fit unquantised checkpoints")
    if _samples(work.base, infos[0]) == _samples(work.edited, infos[1]):
        return None
    before, after = (_matrix(work, source, info) for source, info in zip((work.base, work.edited), infos, strict=True))
    found = rank_one(before, after, MANTISSA_BITS[infos[0].dtype])
    if not found.holds:
        raise DataError(
            f"the edit is not that of one direction: it explains {found.explained:.1%} of the difference, "
            f"rounding {found.rounding:.1%}",
            where=name,
            hint="only edits that take one direction out of each layer can be served over the stock weights",
        )
    return found


def _samples(source: Source, info: TensorInfo) -> list[bytes]:
    """A few windows, one in the first, the middle and the last row."""
    size = min(SAMPLE_BYTES, info.nbytes)
    starts = [(info.nbytes - size) * at // (SAMPLES - 1) for at in range(SAMPLES)]
    return [b"".join(source.read(info, start, start + size)) for start in starts]


def _matrix(work: Work, source: Source, info: TensorInfo) -> Matrix:
    """The tensor as fp32 [rows, columns], by a file that a broken run leaves for the next."""
    name = hashlib.sha256(f"{source.label}\n{info.name}".encode()).hexdigest()
    path = work.folder / f"{name[:32]}.part"
    with path.open("ab") as file:
        while (have := file.tell()) < info.nbytes:
            for part in source.read(info, have, info.nbytes):
                file.write(part)
                work.tell(info.name, file.tell(), info.nbytes)
            file.flush()
            if file.tell() == have:
                raise DataError("ends before this tensor does", where=f"{source.label}: {info.name}")
    raw = np.fromfile(path, dtype=np.uint8, count=info.nbytes)
    path.unlink()
    return _as_float(raw, info)


def _as_float(raw: "np.typing.NDArray[np.uint8]", info: TensorInfo) -> Matrix:
    if info.dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
    return raw.view("<f2" if info.dtype == "F16" else "<f4").astype(np.float32).reshape(info.shape)
