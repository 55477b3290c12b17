"""The output head."""

from torch import Tensor

from kernels.rows import matmul


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] after the final norm, weight [V, D], fp32 -> fp32 logits [T, V]."""
    return matmul(x, weight)
