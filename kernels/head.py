"""The output head."""

import torch
from torch import Tensor

from kernels.rows import matmul


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] after the final norm; weight [V, D] fp32, or bf16 for an x that bf16 holds -> fp32 logits [T, V]."""
    if x.is_cuda and weight.dtype == torch.bfloat16:
        return torch.mm(x.to(torch.bfloat16), weight.t(), out_dtype=torch.float32)
    return matmul(x, weight)
