"""The clamped SwiGLU between an expert's matrices."""

from torch import Tensor
from torch.nn.functional import silu


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """gate_up [T, 2n] = gate | up, fp32 -> silu(min(gate, limit)) * clamp(up, -limit, limit), [T, n]."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
