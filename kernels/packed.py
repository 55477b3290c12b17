"""Linear layers as a checkpoint stores them, and products by them: nothing is expanded but a tile in passing.

    Plain     a matrix of floats; bf16 and fp16 have a kernel, fp32 is what a CPU multiplies by
    Fp8       e4m3 codes [N, K] and an fp32 scale per block of 128 x 128, of any value
    Mxfp4     e2m1 codes [N, K / 2] and a UE8M0 scale per 32 of a row
    Exl3      a trellis (`kernels.exl3`), which may be padded
    Stacked   several, one over the other

Weights are what they are stored as, exactly; sums are fp32. Tiles do not depend on what they are multiplied with, so a
row of inputs has the same bits beside others.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kernels import exl3
from kernels.formats import GROUP, fp4_rows
from kernels.numerics import Numerics
from kernels.rows import by_row, matmul

FP8_BLOCK = 128
_TILE_ELEMENTS = 1 << 22  # of fp32 in passing


@dataclass(frozen=True)
class Plain:
    weight: Tensor  # [N, K]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def dense(self, first: int, last: int) -> Tensor:
        """Rows [first, last) in fp32."""
        return self.weight[first:last].to(torch.float32)


@dataclass(frozen=True)
class Fp8:
    """A cut may begin inside a block: `skipped` rows and columns of the first one are not here."""

    codes: Tensor  # [N, K] uint8
    scale: Tensor  # [blocks, blocks] fp32
    skipped: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dense(self, first: int, last: int) -> Tensor:
        device, columns = self.codes.device, self.codes.shape[1]
        down = torch.arange(first + self.skipped[0], last + self.skipped[0], device=device) // FP8_BLOCK
        across = torch.arange(self.skipped[1], columns + self.skipped[1], device=device) // FP8_BLOCK
        return self.codes[first:last].view(torch.float8_e4m3fn).to(torch.float32) * self.scale[down][:, across]


@dataclass(frozen=True)
class Mxfp4:
    codes: Tensor  # [N, K / 2] uint8, the low nibble first
    scale: Tensor  # [N, K / 32] uint8

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def dense(self, first: int, last: int) -> Tensor:
        return fp4_rows(self.codes[first:last], self.scale[first:last])


@dataclass(frozen=True)
class Exl3:
    """The first `outputs` of the matrix are the layer's; a trellis has whole blocks of them."""

    matrix: exl3.Exl3Matrix
    outputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.matrix.shape[0]

    def dense(self, first: int, last: int) -> Tensor:
        """Of whole blocks of rows; whatever they are, blocks are decoded."""
        whole = slice(first - first % exl3.BLOCK, last + -last % exl3.BLOCK)
        return exl3.dense(self.matrix.columns(whole))[first - whole.start : last - whole.start]


@dataclass(frozen=True)
class Stacked:
    parts: "tuple[Linear, ...]"

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


Linear = Plain | Fp8 | Mxfp4 | Exl3 | Stacked


def product(x: Tensor, weight: Linear, n: Numerics) -> Tensor:
    """x [T, K] fp32 times weight [N, K] -> [T, N] fp32. `n` rounds the rotated input of a trellis; with its native
    rounding x is what bf16 holds, by which devices with kernels multiply."""
    if x.is_cuda and n.cache is torch.bfloat16 and has_kernel(weight):
        from kernels import packed_triton

        return packed_triton.product(x, weight)
    if isinstance(weight, Stacked):
        return torch.cat([product(x, part, n) for part in weight.parts], 1)
    if isinstance(weight, Exl3):
        tiles = _tiles(weight.matrix.shape[1], weight.matrix.shape[0])
        whole = torch.cat([_trellis_product(x, weight.matrix.columns(tile), n) for tile in tiles], 1)
        return whole[:, : weight.outputs].contiguous()
    if isinstance(weight, Plain) and weight.weight.dtype is torch.float32:
        return matmul(x, weight.weight)
    return torch.cat([matmul(x, weight.dense(tile.start, tile.stop)) for tile in _tiles(*weight.shape)], 1)


def has_kernel(weight: Linear) -> bool:
    """On CUDA, with the native rounding."""
    if isinstance(weight, Stacked):
        return all(map(has_kernel, weight.parts))
    return not isinstance(weight, Plain) or weight.weight.dtype in (torch.bfloat16, torch.float16)


def _trellis_product(x: Tensor, matrix: exl3.Exl3Matrix, n: Numerics) -> Tensor:
    """Decoded once for all rows."""
    weight = exl3.inner(matrix)
    return by_row(lambda rows: exl3.through(rows, matrix, weight, n.rotated, matmul), x)


def dense(weight: Linear) -> Tensor:
    """[N, K] fp32, all of it."""
    if isinstance(weight, Stacked):
        return torch.cat([dense(part) for part in weight.parts])
    return weight.dense(0, weight.shape[0])


def stacked(*parts: Linear) -> Linear:
    """One over the other; floats of one kind become one matrix."""
    plain = [part.weight for part in parts if isinstance(part, Plain)]
    if len(plain) == len(parts) and len({one.dtype for one in plain}) == 1:
        return Plain(torch.cat(plain))
    return Stacked(parts)


def nbytes(weight: Linear) -> int:
    if isinstance(weight, Stacked):
        return sum(map(nbytes, weight.parts))
    held = weight.matrix if isinstance(weight, Exl3) else weight
    return sum(part.nbytes for field in fields(held) if isinstance(part := getattr(held, field.name), Tensor))


def _tiles(rows: int, columns: int) -> Iterator[slice]:
    """Of rows, whole blocks of any format."""
    size = max(FP8_BLOCK, _TILE_ELEMENTS // columns // FP8_BLOCK * FP8_BLOCK)
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))


def stored_bytes(kind: str, shape: tuple[int, int], skipped: tuple[int, int] = (0, 0), bits: float = 0.0) -> int:
    """Of an [N, K] part in a packed format: what `nbytes` will be. `bits` of a trellis."""
    rows, columns = shape
    if kind == "fp8":
        blocks = [-(-(length + skip) // FP8_BLOCK) for length, skip in zip(shape, skipped, strict=True)]
        return rows * columns + 4 * blocks[0] * blocks[1]
    if kind == "mxfp4":
        return rows * columns // 2 + rows * columns // GROUP
    if kind == "exl3":
        return int(rows * columns * bits) // 8 + 2 * (rows + columns)
    raise ValueError(f"no packed format: {kind}")
