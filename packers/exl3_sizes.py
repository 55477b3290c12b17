"""Bytes of whole routed experts in EXL3, by a checkpoint's headers: each has the size that its matrices give it.
Importing this module imports neither torch nor numpy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.exl3_record import Exl3Record, Stored

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from packers.shards import Checkpoint

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Experts:
    """`layers` of the file that have routed experts, `number` in each, of [intermediate, hidden] weights a matrix."""

    layers: range
    number: int
    hidden: int
    intermediate: int


def whole_sizes(checkpoint: "Checkpoint", of: Experts) -> "npt.NDArray[np.int64] | None":
    """[layers, experts] bytes; None: these are not stored in EXL3, and are of one size. Raises TensorError for tensors
    that are no expert's, ValueError for dimensions that EXL3 does not have."""
    import numpy as np

    if f"{_name(of.layers.start, 0)}.{PROJECTIONS[0]}.trellis" not in checkpoint.tensors:
        return None
    record = Exl3Record(of.hidden, of.intermediate, 1)
    sizes = [[record.nbytes(_stored(checkpoint, of, n, e)) for e in range(of.number)] for n in of.layers]
    return np.array(sizes, dtype=np.int64)


def _stored(checkpoint: "Checkpoint", of: Experts, layer: int, expert: int) -> Stored:
    from packers.exl3 import matrix_of

    inward, outward = (of.hidden, of.intermediate), (of.intermediate, of.hidden)
    gate, up, down = (
        matrix_of(checkpoint, f"{_name(layer, expert)}.{projection}", *sides)
        for projection, sides in zip(PROJECTIONS, (inward, inward, outward), strict=True)
    )
    return Stored((gate.half_bits, up.half_bits, down.half_bits), (gate.codebook, up.codebook, down.codebook))


def _name(layer: int, expert: int) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}"
