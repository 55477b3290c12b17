"""RMSNorm."""

from torch import Tensor
from torch.nn.functional import rms_norm as _rms_norm

from kernels.rows import by_row


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, n] fp32, weight [n] fp32: weight * x / sqrt(mean(x^2) + eps)."""
    return by_row(lambda row: _rms_norm(row, weight.shape, weight, eps), x)
