"""One rank's share of the weights that are not routed experts: as the fp32 that a CPU multiplies with, or as whatever a
release stores them in (`kernels.packed`).

A linear layer's layout is told by its leaves, never by a label:

    .weight BF16, F16 or F32 [N, K]
    .weight F8_E4M3 [N, K], .weight_scale_inv or .weight_scale F32 [ceil(N / 128), ceil(K / 128)]: code times scale
    .weight or .weight_packed U8 [N, K / 2] e2m1, the low nibble first; .weight_scale U8 or F8_E8M0 [N, K / 32]
    .trellis I16 [K / 16, N / 16, 16 * bits], .suh F16 [K], .svh F16 [N] (old: .su I16 [K / 16], .sv I16 [N / 16]), and
        .mcg or .mul1 or neither: `kernels.exl3`

The tool that writes EXL3 pads both dimensions of linear layers to 128, those that it leaves unquantised too.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels import exl3, packed
from kernels.formats import GROUP
from kernels.packed import FP8_BLOCK
from packers.headers import DTYPE_BYTES
from packers.shards import Checkpoint, TensorInfo, TensorSpec
from tided.errors import TensorError
from tided.models.below import ALL, Below
from tided.models.glm53.names import PLAIN, Cut

PADDED = 128
Kind = Literal["plain", "fp8", "mxfp4", "exl3"]
SCALES_FP8 = ("weight_scale_inv", "weight_scale")
SCALE_BYTES = ("U8", "F8_E8M0")
MARKERS = ("mcg", "mul1")
KNOWN = ("weight", "weight_packed", *SCALES_FP8, "trellis", "suh", "svh", "su", "sv", *MARKERS)


@dataclass(frozen=True)
class Layout:
    """How a linear layer is stored: `leaves` are its tensors, `shape` [N, K] as stored, which padding may have made
    larger than the layer."""

    kind: Kind
    leaves: dict[str, TensorSpec]
    shape: tuple[int, int]

    @property
    def codebook(self) -> exl3.Codebook:
        return "mcg" if "mcg" in self.leaves else "mul1" if "mul1" in self.leaves else "3inst"


def layout_of(checkpoint: Checkpoint, name: str, rows: int, columns: int) -> Layout:
    """Of the linear layer `name` [rows, columns], as the leaves that are there tell; what they must be, they may not
    be. Raises TensorError where no leaf that is known is there."""
    found = {leaf: checkpoint.tensors[f"{name}.{leaf}"] for leaf in KNOWN if f"{name}.{leaf}" in checkpoint.tensors}
    main = found.get("trellis") or found.get("weight") or found.get("weight_packed")
    if main is None:
        raise TensorError(f"tensor {name}.weight is missing", where=str(checkpoint.home(name)))
    leaf = main.name.rpartition(".")[2]
    if leaf == "trellis":
        return _exl3(found, rows, columns)
    if main.dtype in PLAIN:
        shape = _padded(rows, columns) if main.shape == _padded(rows, columns) else (rows, columns)
        return Layout("plain", {leaf: TensorSpec(PLAIN, shape)}, shape)
    if main.dtype == "F8_E4M3":
        scale = SCALES_FP8[0] if SCALES_FP8[0] in found else SCALES_FP8[1]
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        specs = {leaf: TensorSpec("F8_E4M3", (rows, columns)), scale: TensorSpec("F32", blocks)}
        return Layout("fp8", specs, (rows, columns))
    if main.dtype in ("U8", "I8"):
        codes, scales = (
            TensorSpec(("U8", "I8"), (rows, columns // 2)),
            TensorSpec(SCALE_BYTES, (rows, columns // GROUP)),
        )
        return Layout("mxfp4", {leaf: codes, "weight_scale": scales}, (rows, columns))
    raise TensorError(f"tensor {main.name} is {main.dtype}: no layout of a linear layer", where=str(checkpoint.path))


def _exl3(found: dict[str, TensorInfo], rows: int, columns: int) -> Layout:
    """A trellis [K / 16, N / 16, words]: the words say how many bits, a marker of at most one element which codebook.
    Old files have signs for scales, sixteen of them a word."""
    n, k = _padded(rows, columns)
    trellis = found["trellis"].shape
    specs = {"trellis": TensorSpec("I16", (k // exl3.TILE, n // exl3.TILE, trellis[2] if len(trellis) == 3 else 0))}
    for scale, sign, length in (("suh", "su", k), ("svh", "sv", n)):
        if sign in found and scale not in found:
            specs[sign] = TensorSpec("I16", (length // 16,))
        else:
            specs[scale] = TensorSpec("F16", (length,))
    for marker in MARKERS:
        if marker in found:
            shape = found[marker].shape
            specs[marker] = TensorSpec("I32", shape if math.prod(shape) <= 1 else ())
    return Layout("exl3", specs, (n, k))


def _padded(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // PADDED) * PADDED, -(-columns // PADDED) * PADDED


def expected_of(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    """The tensors of one linear layer by name, in the layout that it has."""
    return {f"{name}.{leaf}": spec for leaf, spec in layout_of(checkpoint, name, *shape).leaves.items()}


@dataclass(frozen=True)
class Weights(Below):
    """`shapes`: [N, K] of all linear layers. `widened`: they are kept as fp32, exactly what is stored."""

    shapes: Mapping[str, tuple[int, int]]
    widened: bool = True

    def linear(self, name: str, rows: slice = ALL, columns: slice = ALL) -> packed.Linear:
        """A linear layer [N, K]; cut first, so that only the rank's share is read. Raises ValueError for a cut through
        a group of weights that share a scale."""
        stored = self._stored(name, rows, columns)
        return packed.Plain(packed.dense(stored).to(self.device)) if self.widened else stored

    def whole(self, name: str, dtype: torch.dtype, rows: slice = ALL) -> Tensor:
        """`linear` as a matrix, for products that are none of a linear layer: fp32 where weights are widened, else
        `dtype`. bf16 rounds what some formats hold, as much as the inputs are rounded anyway; fp32 would be twice
        the bytes of every step."""
        weight = packed.dense(self.linear(name, rows))
        return weight if self.widened else weight.to(dtype)

    def _stored(self, name: str, rows: slice, columns: slice) -> packed.Linear:
        at = self.prefix + name
        shape = self.shapes[at]
        layout = layout_of(self.checkpoint, at, *shape)
        parts = {leaf: self.checkpoint.read(f"{at}.{leaf}") for leaf in layout.leaves}
        rows, columns = _within(rows, shape[0]), _within(columns, shape[1])
        if layout.kind == "exl3":
            whole = rows == slice(0, shape[0])
            held = slice(0, layout.shape[0]) if whole else rows
            return _trellis(parts, layout.codebook, rows, held, columns, self.device)
        weight, *scales = parts.values()
        if layout.kind == "plain":
            return packed.Plain(weight[rows, columns].to(self.device, copy=True))
        if layout.kind == "fp8":
            blocks = scales[0][_blocks(rows), _blocks(columns)]
            skipped = rows.start % FP8_BLOCK, columns.start % FP8_BLOCK
            return packed.Fp8(self._bytes(weight[rows, columns]), blocks.to(self.device, copy=True), skipped)
        groups, pairs = _parts(columns, GROUP), _parts(columns, 2)
        return packed.Mxfp4(self._bytes(weight[rows, pairs]), self._bytes(scales[0][rows, groups]))

    def _bytes(self, part: Tensor) -> Tensor:
        return part.contiguous().view(torch.uint8).to(self.device, copy=True)


def held_bytes(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, int],
    cut: Cut,
    widened: bool,
    whole: torch.dtype | None = None,
) -> int:
    """What `Weights.linear` keeps of the layer `name` [N, K] on the first rank of `cut`; or `Weights.whole`, as the
    dtype `whole`."""
    layout = layout_of(checkpoint, name, *shape)
    rows, columns = cut.of(*shape)
    if widened:
        return rows * columns * torch.float32.itemsize
    if whole:
        return rows * columns * whole.itemsize
    if layout.kind == "plain":
        (leaf,) = layout.leaves
        return rows * columns * DTYPE_BYTES[checkpoint.tensors[f"{name}.{leaf}"].dtype]
    if layout.kind != "exl3":
        return packed.stored_bytes(layout.kind, (rows, columns))
    held = layout.shape[0] if cut.rows == 1 else rows
    if held % exl3.BLOCK or columns % exl3.BLOCK:
        return torch.float32.itemsize * rows * columns
    return packed.stored_bytes("exl3", (held, columns), bits=layout.leaves["trellis"].shape[2] / exl3.TILE)


def _within(part: slice, length: int) -> slice:
    """What was stored may be longer."""
    return slice(*part.indices(length)[:2])


def _trellis(
    parts: dict[str, Tensor], codebook: exl3.Codebook, rows: slice, held: slice, columns: slice, device: torch.device
) -> packed.Linear:
    """The cut of [N, K]: by whole blocks, or decoded where the ranks' borders are no such. `held`: `rows`, with the
    padding behind them where they are all there are."""
    suh, svh = (
        parts[scale].clone() if scale in parts else exl3.signs(parts[sign])
        for scale, sign in (("suh", "su"), ("svh", "sv"))
    )
    matrix = exl3.Exl3Matrix(parts["trellis"], suh, svh, codebook)
    if any(part.start % exl3.BLOCK or part.stop % exl3.BLOCK for part in (held, columns)):
        return packed.Plain(exl3.dense(matrix)[rows, columns].contiguous().to(device))
    own = matrix.columns(held).rows(columns)
    trellis, suh, svh = (part.to(device, copy=True).contiguous() for part in (own.trellis, own.suh, own.svh))
    return packed.Exl3(exl3.Exl3Matrix(trellis, suh, svh, codebook), rows.stop - rows.start)


def _blocks(part: slice) -> slice:
    """Those that a cut touches."""
    return slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK))


def _parts(part: slice, size: int) -> slice:
    if part.start % size or part.stop % size:
        raise ValueError(f"{part.start} to {part.stop} cuts through a group of {size}")
    return slice(part.start // size, part.stop // size)
