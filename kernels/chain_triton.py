"""Launches that begin while the one before them runs, where the device can (sm_90 and later).

A kernel of the chain waits until all that came before is over and visible, and then lets the next be placed. Every
kernel of a chain must wait, whatever its program has to do: the next one waits for its end alone. And it lets the next
be placed only behind its own wait: else a dozen launches stand on the device at once, each where the others left room,
and run as unevenly as they stand. Fetching weights into the L2 cache before the wait brought nothing."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.device import INTERPRETED


@triton.jit
def place_next(CHAINED: tl.constexpr):
    """Lets the next launch begin to be placed, once every program has come here."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    """Before this nothing may be read that a launch before wrote, and nothing be written."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def chained(CHAINED: tl.constexpr):
    wait_for_last(CHAINED)
    place_next(CHAINED)


@lru_cache
def _can_chain(device: torch.device) -> bool:
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


def chain(device: torch.device) -> dict[str, Any]:
    """What a launch of such a kernel is given beside its arguments."""
    return {"CHAINED": True, "launch_pdl": True} if _can_chain(device) else {"CHAINED": False}
