"""Where a forward pass rounds. `NATIVE` is what the model was made for; `FP32` rounds nowhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels import quantise

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Numerics:
    """Each field maps fp32 to fp32. `cache` is the dtype that holds rounded rows without loss."""

    store: Rounding  # streams, norm outputs, projections: bf16
    activation: Rounding  # input of every FP8 or FP4 linear: e4m3, UE8M0 per 32
    window: Rounding  # window rows: e4m3, UE8M0 per 32
    latent: Rounding  # compressed rows: e2m1, E4M3 per 16
    index: Rounding  # index queries and keys: e2m1, UE8M0 per 32
    probability: Rounding  # attention probabilities before the values: bf16
    cache: torch.dtype
    rotated: Rounding  # rotated input of every EXL3 product: fp16


def _exact(x: Tensor) -> Tensor:
    return x


NATIVE = Numerics(
    store=quantise.bf16,
    activation=quantise.fp8_ue8m0,
    window=quantise.fp8_ue8m0,
    latent=quantise.fp4_e4m3,
    index=quantise.fp4_ue8m0,
    probability=quantise.bf16,
    cache=torch.bfloat16,
    rotated=quantise.fp16,
)
# Of models whose weights are quantised and whose activations are bf16.
WEIGHTS_ONLY = Numerics(quantise.bf16, _exact, _exact, _exact, _exact, quantise.bf16, torch.bfloat16, quantise.fp16)
FP32 = Numerics(_exact, _exact, _exact, _exact, _exact, _exact, torch.float32, _exact)


def numerics_of(name: Literal["native", "fp32"]) -> Numerics:
    return NATIVE if name == "native" else FP32
