"""What a captured step's memory on the host must wait for."""

import torch


class Copies:
    """Until when a step's memory on the host is read by copies to the device."""

    def __init__(self, device: torch.device) -> None:
        self._behind = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def made(self) -> None:
        if self._behind is not None:
            self._behind.record()

    def wait(self) -> None:
        """Those of the step before are long done."""
        if self._behind is not None:
            self._behind.synchronize()
