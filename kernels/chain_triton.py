"""Launches that begin while the one before them runs, where the device can (sm_90 and later).

A kernel of the chain lets the next be placed at once, does what depends on nobody (fetching weights), and waits until
all that came before is over and visible. Every kernel of a chain must wait, whatever its program has to do: the next
one waits for its end alone."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.device import INTERPRETED


@triton.jit
def place_next(CHAINED: tl.constexpr):
    """Lets the next launch begin to be placed."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(CHAINED: tl.constexpr):
    """Before this nothing may be read that a launch before wrote, and nothing be written."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def chained(CHAINED: tl.constexpr):
    place_next(CHAINED)
    wait_for_last(CHAINED)


@triton.jit
def fetch(lines, CHAINED: tl.constexpr):
    """lines [n]: addresses of lines of memory that will be read soon, to be brought into the L2 cache."""
    if CHAINED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [lines],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@lru_cache
def _can_chain(device: torch.device) -> bool:
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


def chain(device: torch.device) -> dict[str, Any]:
    """What a launch of such a kernel is given beside its arguments."""
    return {"CHAINED": True, "launch_pdl": True} if _can_chain(device) else {"CHAINED": False}
