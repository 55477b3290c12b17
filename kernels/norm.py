"""RMSNorm."""

from torch import Tensor
from torch.nn.functional import rms_norm as _rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, n] fp32, weight [n] fp32: weight * x / sqrt(mean(x^2) + eps)."""
    return _rms_norm(x, weight.shape, weight, eps)
