"""Memory of the host that a device copies from, and that it copies to, beside what the host does meanwhile."""

from collections import deque

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SENDINGS = 4  # of which each has memory of its own: none waits for the copy of the one before


class Sendings:
    """Copies of the bytes `here` [n] uint8 to a device, while the host goes on changing its own."""

    def __init__(self, here: Tensor, device: torch.device) -> None:
        self._here = here.numpy()
        self.there: Tensor = here.to(device, copy=True)
        self._there = None if self.there.is_cuda else self.there.numpy()
        self._rooms = deque(_Room(here) for _ in range(SENDINGS * self.there.is_cuda))

    def send(self) -> None:
        """What is launched from now on sees them as they are now; what was launched before, as they were."""
        if self._there is not None:
            self._there[:] = self._here
            return
        self._rooms[0].send(self._here, self.there)
        self._rooms.rotate(-1)


class _Room:
    """Pinned memory of one sending."""

    def __init__(self, like: Tensor) -> None:
        self._memory = torch.empty_like(like, pin_memory=True)
        self._bytes = self._memory.numpy()
        self._behind = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, here: npt.NDArray[np.uint8], there: Tensor) -> None:
        come = self._behind.query()  # type: ignore[no-untyped-call]
        if not come:  # to ask keeps the interpreter; to wait gives it away, and has to get it back
            self._behind.synchronize()
        self._bytes[:] = here
        there.copy_(self._memory, non_blocking=True)
        self._behind.record()


class Here:
    """A copy of a tensor of a CUDA device on the host, sent along with the device's work."""

    def __init__(self, there: Tensor) -> None:
        self._there, self._copy = there, torch.zeros(there.shape, dtype=there.dtype, pin_memory=True)
        self._behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._fresh = False

    def copy(self) -> None:
        self._copy.copy_(self._there, non_blocking=True)

    def sent(self) -> None:
        """`copy` was launched, by a graph perhaps."""
        self._behind.record()
        self._fresh = True

    def stale(self) -> None:
        """What is there has changed since."""
        self._fresh = False

    def now(self) -> npt.NDArray[np.float64] | None:
        """None: stale."""
        if not self._fresh:
            return None
        self._behind.synchronize()
        return self._copy.numpy().copy()
