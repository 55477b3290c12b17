"""Directions that an abliterated model does without, projected out of what its layers add to the residual stream.

    y' = y - alpha (d . y) d

in fp32, before the addition. That is what weights W' = W - alpha d (d^T W) would give, but for their rounding; and it
is linear, so a rank's part of a sum may be edited as well as the sum.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.rows import by_row
from packers.ablation import layers_of
from packers.overlay import Overlay
from packers.shards import Checkpoint
from tided.errors import DataError
from tided.models.glm53.config import Config, read_config

LENGTH_ERROR = 1e-3


@dataclass(frozen=True)
class Projection:
    direction: Tensor  # [D] fp32, of length 1
    alpha: float

    def __call__(self, y: Tensor) -> Tensor:
        """y [T, D] fp32 -> [T, D]; the rows of a step each by itself: a GPU sums in an order that the number of rows
        decides."""
        share = by_row(lambda rows: (rows * self.direction).sum(1, keepdim=True), y)
        return y - share * (self.alpha * self.direction)


@dataclass(frozen=True)
class Points:
    """Of a layer: its attention's output, its shared expert's (or, where it is dense, its MLP's), its whole MLP's."""

    attention: Projection | None = None
    shared: Projection | None = None
    mlp: Projection | None = None


def ablated(checkpoint: Checkpoint, overlay: Overlay) -> Checkpoint:
    """Raises TensorError for a file that is not exactly what docs/formats/ablation.md says, for this model."""
    c = read_config(checkpoint.config)
    edits = layers_of(overlay, c.num_hidden_layers, c.hidden_size)
    alphas = [float(_tensor(overlay, f"layers.{n}.{point}")) for n, points in edits.items() for point in points]
    points = sorted({point for found in edits.values() for point in found})
    first, last = min(edits), max(edits)
    told = f"{len(edits)} layers ({first}-{last}), {', '.join(points)}, alpha {min(alphas):.3f}-{max(alphas):.3f}"
    return checkpoint.under(replace(overlay, points=told))


def load_points(checkpoint: Checkpoint, c: Config, layer: int, device: torch.device) -> Points:
    """Those of a layer, none without a file. Raises DataError for numbers that are no projection."""
    overlay = checkpoint.overlay
    points = layers_of(overlay, c.num_hidden_layers, c.hidden_size).get(layer, ()) if overlay else ()
    if not overlay or not points:
        return Points()
    direction = _tensor(overlay, f"layers.{layer}.direction").to(device)
    alphas = {point: float(_tensor(overlay, f"layers.{layer}.{point}")) for point in points}
    if not abs(float(direction.norm()) - 1) < LENGTH_ERROR or not all(abs(alpha) < 1e3 for alpha in alphas.values()):
        raise DataError(
            f"layers.{layer}: a direction of length 1 and finite alphas are wanted", where=str(overlay.path)
        )
    return Points(**{point: Projection(direction, alpha) for point, alpha in alphas.items()})


def _tensor(overlay: Overlay, name: str) -> Tensor:
    info = overlay.tensors[name]
    with info.path.open("rb") as file:
        file.seek(info.offset)
        return torch.frombuffer(bytearray(file.read(info.nbytes)), dtype=torch.float32)
