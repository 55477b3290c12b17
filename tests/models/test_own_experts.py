"""Experts in memory of their own: every record in its place, and no second memory for all of them on the way."""

import numpy as np
import pytest
import torch

from kernels.exl3_record import Exl3Record
from kernels.record import PAGE_BYTES
from tided.models.own_experts import resident_bank

LAYERS, EXPERTS = 2, 5


class Source:
    """Record (layer, expert) is full of its number. `rooms`: where records were read to."""

    def __init__(self, sizes):
        self.sizes, self.rooms, self.closed = sizes, [], False

    def slot_bytes(self, layer, expert):
        return self.sizes[layer][expert]

    def read(self, layer, expert, out):
        room = np.frombuffer(out, np.uint8)
        assert len(room) == self.sizes[layer][expert]
        room[:] = 10 * layer + expert + 1
        self.rooms.append((room.ctypes.data, len(room)))

    def close(self):
        self.closed = True


@pytest.mark.parametrize("pages", [(3, 3, 3), (1, 2, 3)], ids=["one size", "several"])
def test_records_go_to_their_places_through_one_buffer_of_the_largest(pages):
    sizes = [[PAGE_BYTES * pages[(layer + expert) % 3] for expert in range(EXPERTS)] for layer in range(LAYERS)]
    source = Source(sizes)
    bank = resident_bank(source, Exl3Record(128, 128, 1), LAYERS, EXPERTS, torch.device("cpu"))
    assert source.closed
    assert bank.slots.numel() == sum(map(sum, sizes)), "no byte more than the records take"
    unit = bank.slots.shape[1]
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            at = int(bank.tables.slot_of[layer, expert]) * unit
            held = bank.slots.view(-1)[at : at + sizes[layer][expert]]
            assert bool((held == 10 * layer + expert + 1).all())
    assert len({address for address, _ in source.rooms}) == 1
    assert max(nbytes for _, nbytes in source.rooms) == 3 * PAGE_BYTES
    begin = bank.slots.data_ptr()
    assert not begin <= source.rooms[0][0] < begin + bank.slots.nbytes
