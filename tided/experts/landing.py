"""What stands between a record that is read and the slot that it lands in: the memory of the reading thread that it is
copied from, and what the device may still read there."""

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Mark:
    """A place in the device's work. `turn`: how often it was set; who knows an earlier one has nothing to wait for."""

    event: torch.cuda.Event
    turn: int = 0


class Fences:
    """By slot, what was launched that may still read it. One thread, which launches, puts them; any may take one. An
    event is recorded anew once it has come: making one, and freeing it, gives the interpreter away."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks = deque[Mark]()  # in the order they come in
        self._of: dict[int, tuple[Mark, int]] = {}

    def put(self, slots: Collection[int]) -> None:
        """What was launched up to now may read them."""
        come = self._marks and self._marks[0].event.query()  # type: ignore[no-untyped-call]
        mark = self._marks.popleft() if come else Mark(torch.cuda.Event())  # type: ignore[no-untyped-call]
        mark.turn += 1  # before it is set again: who takes a fence of its last turn meanwhile waits for nothing
        mark.event.record(torch.cuda.current_stream(self._device))
        self._marks.append(mark)
        self._of.update(dict.fromkeys(slots, (mark, mark.turn)))

    def take(self, slot: int) -> torch.cuda.Event | None:
        """What must have come before the slot is written to; None: nothing. It holds for once."""
        mark, turn = self._of.pop(slot, (None, 0))
        return None if mark is None or mark.turn != turn else mark.event


class Staging(threading.local):
    """The calling thread's pinned memory for one record, and the stream that copies it. Views of it are made once: a
    torch operation gives the interpreter away and asks for it again, which the engine's thread may wait for."""

    def __init__(self) -> None:
        self._made: tuple[Tensor, torch.cuda.Stream] | None = None
        self._parts: dict[int, tuple[Tensor, memoryview, torch.cuda.Stream]] = {}

    def of(self, nbytes: int, most: int, device: torch.device) -> tuple[Tensor, memoryview, torch.cuda.Stream]:
        """[nbytes] uint8 of the same `most` bytes, for a copy and for a read."""
        part = self._parts.get(nbytes)
        if part is None:
            if self._made is None:
                memory = torch.empty(most, dtype=torch.uint8, pin_memory=True)
                self._made = memory, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            memory, stream = self._made
            part = self._parts[nbytes] = memory[:nbytes], memory[:nbytes].numpy().data, stream
        return part
