"""Directions that are projected out of a residual stream at run time, as a file: docs/formats/ablation.md."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from packers.headers import TensorInfo, shown
from packers.overlay import Overlay
from tided.errors import TensorError
from tided.files import whole

if TYPE_CHECKING:
    import numpy as np

POINTS = ("attention", "shared", "mlp")
NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.(direction|attention|shared|mlp)")


def layers_of(overlay: Overlay, layers: int, hidden: int) -> Mapping[int, tuple[str, ...]]:
    """The points of each layer that the file edits, of a model of so many layers. Raises TensorError saying which
    tensor is missing, extra or different."""
    found: dict[int, set[str]] = {}
    for name, info in overlay.tensors.items():
        match = NAME.fullmatch(name)
        if match is None or int(match[1]) >= layers:
            raise TensorError(f"{shown(name)} is no tensor of an ablation of {layers} layers", where=str(overlay.path))
        _check(info, (hidden,) if match[2] == "direction" else (1,), overlay)
        found.setdefault(int(match[1]), set()).add(match[2])
    for layer, parts in found.items():
        if "direction" not in parts or len(parts) == 1:
            raise TensorError(f"layers.{layer} needs a direction and a point of {POINTS}", where=str(overlay.path))
        if {"shared", "mlp"} <= parts:
            raise TensorError(f"layers.{layer} names mlp, which holds shared: one of both", where=str(overlay.path))
    if not found:
        raise TensorError("holds no direction", where=str(overlay.path))
    return {layer: tuple(point for point in POINTS if point in found[layer]) for layer in sorted(found)}


def write(path: Path, edits: Iterable[tuple[int, "np.typing.NDArray[np.float64]", Mapping[str, float]]]) -> None:
    """(layer, direction [hidden], alpha by point): a whole file or none."""
    import numpy as np
    from safetensors.numpy import save

    tensors: dict[str, np.typing.NDArray[np.float32]] = {}
    for layer, direction, alphas in edits:
        tensors[f"layers.{layer}.direction"] = direction.astype(np.float32)
        tensors |= {f"layers.{layer}.{point}": np.array([alpha], np.float32) for point, alpha in alphas.items()}
    with whole(path) as file:
        file.write(save(tensors))


def _check(info: TensorInfo, shape: tuple[int, ...], overlay: Overlay) -> None:
    if (info.dtype, info.shape) != ("F32", shape):
        is_, must = f"{info.dtype} {list(info.shape)}", f"F32 {list(shape)}"
        raise TensorError(f"{shown(info.name)} is {is_}, must be {must}", where=str(overlay.path))
