"""Where the slots of a rank lie, by a probe at each start.

A device with memory of its own holds them there: a record is read into pinned memory and copied on a stream of the
reading thread's own, so neither the disk nor the copy keeps the steps waiting. A device that shares the system's memory
can read slots where records are read to; then nothing is copied, and no second memory is needed. Whether it reads them
there as fast as its own allocations is measured, and whether it sees what a processor writes is tried: otherwise it
gets copies too.
"""

import logging
import mmap
import weakref
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
PROBE_BYTES = 256 << 20  # several times what caches hold
ENOUGH = 0.95  # of the rate at which the device reads its own allocations
ROUNDS = 5


@dataclass(frozen=True)
class Placement:
    """`direct`: records are read into the slots themselves. Rates in bytes a second, 0 where not measured: the device
    reads its own memory, and the system's; pinned memory is copied to the device."""

    direct: bool
    why: str
    own: float = 0.0
    shared: float = 0.0
    copied: float = 0.0

    def __str__(self) -> str:
        rates = (("own", self.own), ("the system's", self.shared))
        read = ", ".join(f"{name} memory at {rate / 1e9:.0f} GB/s" for name, rate in rates if rate)
        copied = f"copies at {self.copied / 1e9:.0f} GB/s" if self.copied else ""
        told = "; ".join(part for part in (f"reads {read}" if read else "", copied, self.why) if part)
        return f"{'read in place' if self.direct else 'copied to'} ({told})"


class Slots(NamedTuple):
    """The same slots as the device reads them, data [units, unit bytes] uint8, and as reads fill them: None where they
    are copied to."""

    data: Tensor
    host: Tensor | None
    placement: Placement


class Device(Protocol):
    """What the probe asks of a device."""

    @property
    def integrated(self) -> bool: ...
    def mapped(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """Memory of the system as the device sees it, and as processors do. Raises MemoryError where there is not as
        much, RuntimeError where it cannot for another reason."""
        ...

    def zeros(self, nbytes: int) -> Tensor:
        """[nbytes] uint8 of the device's own memory, zero for whatever stream writes to it next."""
        ...

    def sees(self, data: Tensor, host: Tensor) -> bool:
        """Whether what a processor writes now is what the device reads."""
        ...

    def read_rate(self, data: Tensor | None) -> float:
        """Of reading this memory; None: some of its own."""
        ...

    def copy_rate(self) -> float: ...


def slots_on(device: torch.device, units: int, unit_bytes: int, probed: Device | None = None) -> Slots:
    """[units, unit_bytes] of zeros, where they are cheapest. `probed`: stands for the device in tests."""
    if device.type == "cpu":
        memory = _anonymous(units * unit_bytes).view(units, unit_bytes)
        return Slots(memory, memory, Placement(True, "a CPU"))
    cuda = probed or Cuda(device)
    placement, mapped = choose(cuda), None
    if placement.direct:
        try:
            mapped = cuda.mapped(units * unit_bytes)
        except RuntimeError as e:  # the probe asked for little; a device may allow no more
            placement = replace(placement, direct=False, why=f"not so much of the system's memory can be shared: {e}")
    log.info("expert slots: %s", placement)
    if mapped is None:
        return Slots(cuda.zeros(units * unit_bytes).view(units, unit_bytes), None, placement)
    return Slots(mapped[0].view(units, unit_bytes), mapped[1].view(units, unit_bytes), placement)


def choose(device: Device) -> Placement:
    copied = device.copy_rate()
    if not device.integrated:
        return Placement(False, "a device with memory of its own", copied=copied)
    try:
        data, host = device.mapped(PROBE_BYTES)
        if not device.sees(data, host):
            return Placement(False, "the device does not see what a processor writes", copied=copied)
    except RuntimeError as e:
        return Placement(False, f"the system's memory cannot be shared: {e}", copied=copied)
    own, shared = device.read_rate(None), device.read_rate(data)
    fast = shared >= ENOUGH * own
    return Placement(fast, "one memory" if fast else "one memory, read slower in place", own, shared, copied)


class Cuda:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def integrated(self) -> bool:
        return bool(getattr(torch.cuda.get_device_properties(self._device), "is_integrated", False))

    def mapped(self, nbytes: int) -> tuple[Tensor, Tensor]:
        host = _anonymous(nbytes)
        result = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), nbytes, 0)  # type: ignore[no-untyped-call]
        if int(result) != 0:
            kind = MemoryError if int(result) == OUT_OF_MEMORY else RuntimeError
            raise kind(f"cudaHostRegister of {nbytes / 1e9:.1f} GB: error {int(result)}")
        weakref.finalize(host, torch.cuda.cudart().cudaHostUnregister, host.data_ptr())  # type: ignore[no-untyped-call]
        return torch.as_tensor(_Seen(host), device=self._device), host

    def zeros(self, nbytes: int) -> Tensor:
        zeros = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)  # records come on other streams, and must not be overtaken by the zeros
        return zeros

    def sees(self, data: Tensor, host: Tensor) -> bool:
        wrong = 0
        for value in (3, 200):
            host.fill_(value)
            wrong += int((data != value).sum())
        host.zero_()
        return not wrong and not bool(data.any())

    def read_rate(self, data: Tensor | None) -> float:
        if data is None:
            data = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=self._device)
        words = data.view(torch.int64)
        return words.nbytes / self._seconds(lambda: words.sum())

    def copy_rate(self) -> float:
        source = torch.empty(PROBE_BYTES >> 3, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=self._device)
        return source.nbytes / self._seconds(lambda: target.copy_(source, non_blocking=True))

    def _seconds(self, work: Any) -> float:
        """The best of some rounds, behind one that warms up."""
        found = []
        for _ in range(ROUNDS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        return float(min(found[1:]))


class _Seen:
    """Registered memory of the system, as torch takes memory of a device from elsewhere. It keeps the memory."""

    def __init__(self, host: Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.numel(),), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip


def _anonymous(nbytes: int) -> Tensor:
    """[nbytes] uint8: page-aligned, zero, and real memory only once written."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
