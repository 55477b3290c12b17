"""Dense linear layers of an FP8 checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats import fp8_blocks
from kernels.numerics import Rounding
from kernels.rows import matmul


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix as it is stored, for devices that multiply by it so: codes [N, K] e4m3 as uint8, scale [ceil(N / 32),
    ceil(K / 32)] UE8M0 as uint8. Both contiguous."""

    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, first: int, last: int) -> "Fp8Matrix":
        """A view; `first` begins a block of scales."""
        return Fp8Matrix(self.codes[first:last], self.scale[first // 32 : -(-last // 32)])

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[N, K]: exact in bf16 too, which has the three bits of e4m3 and the range of the scales."""
        return fp8_blocks(self.codes.view(torch.float8_e4m3fn), self.scale).to(dtype)


Matrix = Tensor | Fp8Matrix


def stacked(*matrices: Matrix) -> Matrix:
    """One over the other, [sum of N, K]; of FP8 matrices all but the last have a multiple of 32 rows."""
    dense = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    if dense:
        return torch.cat(dense)
    codes = [matrix.codes for matrix in matrices if isinstance(matrix, Fp8Matrix)]
    return Fp8Matrix(
        torch.cat(codes), torch.cat([matrix.scale for matrix in matrices if isinstance(matrix, Fp8Matrix)])
    )


def rows_of(matrix: Matrix, first: int, last: int) -> Matrix:
    """A view of these rows; of an FP8 matrix `first` begins a block of scales."""
    return matrix[first:last] if isinstance(matrix, Tensor) else matrix.rows(first, last)


def rounded_product(x: Tensor, weight: Matrix) -> Tensor:
    """x [T, K] fp32, rounded as activation; weight [N, K], fp32 as dequantised at load or FP8 -> [T, N] fp32.

    Block scales are powers of two, so the product of dequantised operands equals the block-scaled product. Rounded
    activations and FP8 weights are exact in bf16, so matrix units compute the same sums of the same products."""
    if isinstance(weight, Tensor):
        return matmul(x, weight)
    if x.is_cuda:
        return torch.mm(x.to(torch.bfloat16), _bf16(weight).t(), out_dtype=torch.float32)
    return matmul(x, weight.dense(x.dtype))


def _bf16(weight: Fp8Matrix) -> Tensor:
    """`Fp8Matrix.dense` on CUDA, in one launch."""
    from kernels.linear_chunk_triton import dense  # a compiler, which a CPU need not have

    return dense(weight)


def fp8_linear(x: Tensor, weight: Matrix, activation: Rounding) -> Tensor:
    """x [T, K] fp32, weight [N, K] -> [T, N] fp32, not yet rounded. An FP8 matrix needs the native rounding."""
    return rounded_product(activation(x), weight)


def grouped_linear(x: Tensor, weight: Matrix) -> Tensor:
    """x [T, G, K], weight [G * N, K] -> [T, G * N]: each group of inputs has its own matrix. One row or a whole chunk:
    call through `rows.by_row`. An FP8 matrix needs an x that bf16 holds."""
    by_group = x.permute(1, 2, 0)
    if isinstance(weight, Fp8Matrix) and x.is_cuda:
        dense = _bf16(weight).view(x.shape[1], -1, x.shape[2])
        result = torch.bmm(dense, by_group.to(torch.bfloat16), out_dtype=torch.float32)
    else:
        whole = weight if isinstance(weight, Tensor) else weight.dense(x.dtype)
        result = whole.view(x.shape[1], -1, x.shape[2]) @ by_group
    return result.permute(2, 0, 1).flatten(1)
