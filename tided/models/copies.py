"""Copies between host and device, and what waits for them.

What the host waits for comes by pinned memory with an event behind it. A copy to memory that may be paged out, which
`tolist`, `item` and `cpu` are, holds the device's context until it is done: a step's would keep the threads that copy
records of experts waiting until the step is over."""

import torch
from torch import Tensor


class Copies:
    """Until when the host's memory of a step, or of a proposal, belongs to copies between it and the device."""

    def __init__(self, device: torch.device) -> None:
        self._behind = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def made(self) -> None:
        """Those that were launched up to now are what is waited for."""
        if self._behind is not None:
            self._behind.record()

    def wait(self) -> None:
        """Until they are done. Those of the step before, whose memory is to be written again, are so long ago; for what
        was just launched this waits as long as the device works on it."""
        if self._behind is not None:
            self._behind.synchronize()


class Coming:
    """Tensors of a device, on their way to the host since this was made."""

    def __init__(self, *parts: Tensor) -> None:
        self._parts, self._behind = tuple(map(_sent, parts)), None
        if any(part.is_cuda for part in parts):
            self._behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._behind.record()

    def here(self) -> tuple[Tensor, ...]:
        """On the CPU, once they are there."""
        if self._behind is not None:
            self._behind.synchronize()
        return self._parts


def _sent(part: Tensor) -> Tensor:
    if not part.is_cuda:
        return part
    return torch.empty_like(part, device="cpu", pin_memory=True).copy_(part, non_blocking=True)
