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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packers.memory import LARGE_BYTES, ask_for_huge_pages, device_memory

log = logging.getLogger(__name__)

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # addresses are not counted as memory (Linux)
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
PROBE_BYTES = 256 << 20  # several times what caches hold
SEGMENT_BYTES = 64 << 20  # of the system's memory that a device is given, and that is taken from it, at once
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


class Memory(Protocol):
    """Of slots that are not all there at once. Bytes [begin, end). `by_writing`: what is used is real memory once it is
    written, else at once."""

    by_writing: bool

    def use(self, begin: int, end: int) -> None:
        """To be called before anything is written there. Raises MemoryError, RuntimeError."""
        ...

    def give_back(self, begin: int, end: int) -> None:
        """Nothing reads or writes there any more: the system gets its pages, and finds zeros when it is used again."""
        ...

    def held(self, used: Sequence[tuple[int, int]]) -> int:
        """Bytes that are the slots' own while these parts are used and no others: in what units memory is given."""
        ...


class Slots(NamedTuple):
    """The same slots as the device reads them, data [units, unit bytes] uint8, and as reads fill them: None where they
    are copied to. `memory`: what there is of them is to be asked for; None: all of them are there for good."""

    data: Tensor
    host: Tensor | None
    placement: Placement
    memory: Memory | None = None


class Device(Protocol):
    """What the probe asks of a device."""

    @property
    def integrated(self) -> bool: ...
    def mapped(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """Memory of the system as the device sees it, and as processors do. Raises MemoryError where there is not as
        much, RuntimeError where it cannot for another reason."""
        ...

    def reserved(self, nbytes: int) -> tuple[Tensor, Tensor, Memory]:
        """The same of addresses alone, of which parts are used. Raises what `mapped` raises."""
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


def slots_on(
    device: torch.device, units: int, unit_bytes: int, probed: Device | None = None, most_units: int = 0
) -> Slots:
    """[units, unit_bytes] of zeros, where they are cheapest. `probed`: stands for the device in tests. `most_units`:
    that there may come to be: addresses for so many, where these cost nothing and memory is taken and given back in
    parts. 0, or else: there are `units`, for good."""
    if device.type == "cpu":
        return _of_system(units, unit_bytes, most_units)
    cuda = probed or Cuda(device)
    placement, slots = choose(cuda), None
    if placement.direct:
        try:
            slots = _of_device(cuda, units, unit_bytes, most_units, placement)
        except RuntimeError as e:  # the probe asked for little; a device may allow no more
            placement = replace(placement, direct=False, why=f"not so much of the system's memory can be shared: {e}")
    log.info("expert slots: %s", placement)
    return slots or Slots(cuda.zeros(units * unit_bytes).view(units, unit_bytes), None, placement)


def _of_system(units: int, unit_bytes: int, most_units: int) -> Slots:
    """Where a system counts addresses as memory, there are no more of them than are used."""
    placement, memory = Placement(True, "a CPU"), None
    if most_units:
        try:
            memory = Reserved(most_units * unit_bytes)
        except (OSError, OverflowError, ValueError) as e:
            log.warning(
                "the budget of experts cannot change while serving: %d slots have no addresses: %s", most_units, e
            )
    if memory is None:
        held = _anonymous(units * unit_bytes).view(units, unit_bytes)
        return Slots(held, held, placement)
    held = memory.host.view(most_units, unit_bytes)
    return Slots(held, held, placement, memory)


def _of_device(cuda: Device, units: int, unit_bytes: int, most_units: int, placement: Placement) -> Slots:
    if most_units:
        try:
            data, host, memory = cuda.reserved(most_units * unit_bytes)
        except (RuntimeError, OSError) as e:
            log.warning("the budget of experts cannot change while serving: %s", e)
        else:
            return Slots(data.view(most_units, unit_bytes), host.view(most_units, unit_bytes), placement, memory)
    data, host = cuda.mapped(units * unit_bytes)
    return Slots(data.view(units, unit_bytes), host.view(units, unit_bytes), placement)


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
        _register(host.data_ptr(), nbytes)
        weakref.finalize(host, torch.cuda.cudart().cudaHostUnregister, host.data_ptr())  # type: ignore[no-untyped-call]
        return torch.as_tensor(_Seen(host), device=self._device), host

    def reserved(self, nbytes: int) -> tuple[Tensor, Tensor, Memory]:
        memory = Registered(nbytes)
        memory.use(0, 1)  # torch asks whose the first byte is
        return torch.as_tensor(_Seen(memory.host), device=self._device), memory.host, memory

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


class Reserved:
    """Addresses of the system's memory. A page is there once it is written, and until it is given back. A child has
    none of them: pages that it shared would be parted from what a disk is just reading into."""

    by_writing = True

    def __init__(self, nbytes: int) -> None:
        """Raises OSError where there are not as many addresses."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, nbytes + LARGE_BYTES, flags=flags)
        self._map.madvise(mmap.MADV_DONTFORK)
        self._first = self._begin()
        self.host = torch.frombuffer(memoryview(self._map)[self._first : self._first + nbytes], dtype=torch.uint8)

    def _begin(self) -> int:
        """Small pages, which come and go one by one."""
        return 0

    def use(self, begin: int, end: int) -> None:
        return

    def give_back(self, begin: int, end: int) -> None:
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            self._map.madvise(mmap.MADV_DONTNEED, self._first + begin, end - begin)

    def held(self, used: Sequence[tuple[int, int]]) -> int:
        return _rounded_bytes(used, mmap.PAGESIZE, self.host.numel())


class Registered(Reserved):
    """The same, which a device sees: whole segments, as far as any of their bytes is used. What is registered is real
    memory, whether it was written or not."""

    by_writing = False

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._nbytes = nbytes
        self._used = np.zeros(-(-nbytes // SEGMENT_BYTES), dtype=bool)
        self._in_use: list[tuple[int, int]] = []
        weakref.finalize(self.host, _unregister_all, self.host.data_ptr(), self._used)

    def _begin(self) -> int:
        """Huge pages, of which a segment has many whole ones."""
        return ask_for_huge_pages(self._map)

    def use(self, begin: int, end: int) -> None:
        self._in_use.append((begin, end))
        for segment in range(begin // SEGMENT_BYTES, -(-end // SEGMENT_BYTES)):
            if not self._used[segment]:
                _register(self.host.data_ptr() + segment * SEGMENT_BYTES, self._size(segment))
                self._used[segment] = True

    def give_back(self, begin: int, end: int) -> None:
        self._in_use = [part for one in self._in_use for part in _without(one, begin, end)]
        for segment in range(begin // SEGMENT_BYTES, -(-end // SEGMENT_BYTES)):
            first, last = segment * SEGMENT_BYTES, segment * SEGMENT_BYTES + self._size(segment)
            if self._used[segment] and not any(a < last and b > first for a, b in self._in_use):
                torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr() + first)  # type: ignore[no-untyped-call]
                self._used[segment] = False
                super().give_back(first, last)

    def held(self, used: Sequence[tuple[int, int]]) -> int:
        return _rounded_bytes(used, SEGMENT_BYTES, self._nbytes)

    def _size(self, segment: int) -> int:
        return min(SEGMENT_BYTES, self._nbytes - segment * SEGMENT_BYTES)


def rounding_bytes(ranges: int) -> int:
    """Most that the segments of so many ranges are larger than these; the first range begins where a segment does."""
    return (2 * ranges - 1) * SEGMENT_BYTES


def _rounded_bytes(used: Sequence[tuple[int, int]], unit_bytes: int, most_bytes: int) -> int:
    """Of all units of `most_bytes` that the ranges touch."""
    total = reached = 0
    for begin, end in sorted(one for one in used if one[0] < one[1]):
        first = max(reached, begin // unit_bytes * unit_bytes)
        reached = max(first, min(-(-end // unit_bytes) * unit_bytes, most_bytes))
        total += reached - first
    return total


def _without(part: tuple[int, int], begin: int, end: int) -> list[tuple[int, int]]:
    """What of a range lies outside [begin, end)."""
    first, last = part
    return [one for one in ((first, min(last, begin)), (max(first, end), last)) if one[0] < one[1]]


def _register(address: int, nbytes: int) -> None:
    result = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
    if result:
        kind = MemoryError if result == OUT_OF_MEMORY else RuntimeError
        raise kind(f"cudaHostRegister of {nbytes / 1e9:.1f} GB: error {result}")


def _unregister_all(address: int, used: npt.NDArray[np.bool_]) -> None:
    for segment in np.flatnonzero(used).tolist():
        torch.cuda.cudart().cudaHostUnregister(address + segment * SEGMENT_BYTES)  # type: ignore[no-untyped-call]


class _Seen:
    """Registered memory of the system, as torch takes memory of a device from elsewhere. It keeps the memory."""

    def __init__(self, host: Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.numel(),), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip


def _anonymous(nbytes: int) -> Tensor:
    """[nbytes] uint8: page-aligned, zero, real memory only once written; as `Registered` has it, for the probe."""
    return torch.frombuffer(device_memory(nbytes)[:nbytes], dtype=torch.uint8)
