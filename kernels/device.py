"""Which devices have kernels of their own, and what those who call them must know without importing a compiler."""

import os

import torch

# Tokens whose projections a lane keeps for groups that are open. More than a pass has rows: what an open group needs is
# never overwritten by the pass itself. Groups are of a size that divides it.
RECENT_TOKENS = 32
ROW_FIELDS = 8  # int64, what a row is told about itself; `rounding_triton` names them
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def has_kernels(device: torch.device) -> bool:
    """Whether Triton computes decode steps there: on CUDA, and on a CPU where its interpreter is asked for."""
    return device.type == "cuda" or INTERPRETED
