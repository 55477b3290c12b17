"""Dense linear layers of an FP8 checkpoint."""

from torch import Tensor

from kernels.numerics import Rounding
from kernels.rows import matmul


def fp8_linear(x: Tensor, weight: Tensor, activation: Rounding) -> Tensor:
    """x [T, K] fp32, weight [N, K] fp32 as dequantised at load -> [T, N] fp32, not yet rounded.

    Block scales are powers of two, so the product of dequantised operands equals the block-scaled product."""
    return matmul(activation(x), weight)


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, G, K], weight [G, N, K] -> [T, G * N]: each group of inputs has its own matrix. One row or a whole chunk:
    call through `rows.by_row`."""
    return (weight @ x.permute(1, 2, 0)).permute(2, 0, 1).flatten(1)
