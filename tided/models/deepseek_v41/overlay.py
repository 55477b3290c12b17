"""The one edit of weights that this family takes: other attention output projections of some layers.

An abliterated V4.1-Flash is published as such a file: `attn.wo_b`, weight and scale, of layers 10 to 35."""

import re
from collections.abc import Iterable
from dataclasses import replace

from packers.overlay import Overlay
from packers.shards import Checkpoint, require
from tided.errors import TensorError
from tided.models.deepseek_v41.config import TextConfig, read_config

NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.attn\.wo_b\.(weight|scale)")
REAL = (40, 5120)  # layers and width of V4.1-Flash
REAL_LAYERS = range(10, 36)


def overlaid(checkpoint: Checkpoint, overlay: Overlay) -> Checkpoint:
    """The checkpoint under a file of exactly both `wo_b` tensors of its layers, in the checkpoint's own names, dtypes
    and shapes. Raises TensorError saying which are missing, extra or different."""
    layers = _layers(read_config(checkpoint.config).text_config, overlay.tensors)
    if not layers:
        raise TensorError("holds no layers.N.attn.wo_b tensor of this model", where=str(overlay.path))
    names = [f"layers.{layer}.attn.wo_b.{kind}" for layer in layers for kind in ("weight", "scale")]
    wanted = {name: checkpoint.spec(name) for name in names}
    require(
        overlay.tensors, wanted, overlay.path, f"it must hold attn.wo_b of layers {layers[0]} to {layers[-1]} alone"
    )
    points = f"layers {layers[0]}-{layers[-1]} attn.wo_b"
    return checkpoint.under(replace(overlay, points=points, replaces=overlay.tensors))


def _layers(t: TextConfig, names: Iterable[str]) -> range:
    """Those that the file must hold: of the real model the published ones, else from its first to its last."""
    if (t.num_hidden_layers, t.hidden_size) == REAL:
        return REAL_LAYERS
    found = [int(match[1]) for name in names if (match := NAME.fullmatch(name))]
    inside = [layer for layer in found if layer < t.num_hidden_layers]
    return range(min(inside), max(inside) + 1) if inside else range(0)
