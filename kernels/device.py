"""Which devices have kernels of their own."""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def has_kernels(device: torch.device) -> bool:
    """Whether Triton computes decode steps there: on CUDA, and on a CPU where its interpreter is asked for."""
    return device.type == "cuda" or INTERPRETED
