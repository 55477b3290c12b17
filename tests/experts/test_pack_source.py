"""Both sources of experts give the same bytes; a pack that is damaged or another's is refused by name and offset."""

import os

import numpy as np
import pytest
import torch
from expert_fakes import EXPERTS, LAYERS, TOP_K, expert_names, first, golden, golden_record, quiet
from msgspec.structs import replace

import tided.experts.files as files
from packers.mxfp4 import header_of
from packers.pack import pack
from tided.errors import DataError
from tided.experts.arena import Arena
from tided.experts.io import Depths, IoScheduler
from tided.experts.pack import PackSource
from tided.experts.residents import Residents
from tided.experts.source import CheckpointSource, EveryRank
from tided.experts.tables import RoutingTables

PAIRS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


def header(rank, ranks):
    return header_of(golden().identity(), golden_record(ranks), rank, LAYERS, EXPERTS)


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("packs")
    for ranks in (1, 2):
        parts = [CheckpointSource(golden(), expert_names, golden_record(ranks), rank) for rank in range(ranks)]
        source = EveryRank(parts)

        def read(layer, expert, source=source):
            room = aligned(source.slot_bytes(layer, expert))
            source.read(layer, expert, room)
            each = len(room) // source.ranks
            return [room[begin : begin + each] for begin in range(0, len(room), each)]

        pack(directory, [header(rank, ranks) for rank in range(ranks)], read, lambda done, total: None)
    return directory


def aligned(nbytes: int) -> memoryview:
    room = np.full(nbytes + 4096, 0xAA, np.uint8)
    at = -room.ctypes.data % 4096
    return room[at : at + nbytes].data


def read(source, pair, room=None) -> bytes:
    room = aligned(source.record.slot_bytes) if room is None else room
    source.read(*pair, room)
    return bytes(room)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("verify", [False, True])
def test_pack_and_checkpoint_give_the_same_bytes(packs, rank, ranks, verify):
    shards = CheckpointSource(golden(), expert_names, golden_record(ranks), rank)
    source = PackSource(packs, header(rank, ranks), verify)
    for pair in PAIRS:
        assert read(source, pair) == read(shards, pair), pair
    stats = source.stats
    assert (stats.records, stats.reads, stats.read_bytes) == (80, 80, 80 * source.record.slot_bytes)
    source.close()
    shards.close()


def test_a_record_is_one_read_into_the_slot_itself(packs, monkeypatch):
    source, plain, calls = PackSource(packs, header(1, 2), False), os.preadv, []

    def counted(fd, to, at):
        calls.append((np.frombuffer(to[0], np.uint8).ctypes.data, len(to[0]), at))
        return plain(fd, to, at)

    monkeypatch.setattr(files.os, "preadv", counted)
    slot = Arena(source.record, 40, 2, torch.device("cpu")).data[3]
    source.read(0, 1, slot.numpy().data)
    nbytes = source.record.slot_bytes
    assert calls == [(slot.data_ptr(), nbytes, header(1, 2).data_offset + nbytes)]


def test_memory_that_is_not_page_aligned_gets_the_same_bytes(packs):
    source = PackSource(packs, header(0, 2), True)
    room = memoryview(bytearray(source.record.slot_bytes + 17))[17:]
    assert read(source, (3, 4), room) == read(source, (3, 4))


def test_the_last_record_ends_with_the_file(packs):
    source = PackSource(packs, header(0, 1), True)
    assert source.path.stat().st_size == header(0, 1).offset(79) + source.record.slot_bytes
    assert read(source, (LAYERS - 1, EXPERTS - 1))


def test_residents_filled_from_a_pack_hold_what_those_from_the_shards_hold(packs):
    arenas = []
    for source in (
        PackSource(packs, header(1, 2), True),
        CheckpointSource(golden(), expert_names, golden_record(2), 1),
    ):
        arena, tables = (
            Arena(golden_record(2), 40, 2, torch.device("cpu")),
            RoutingTables(LAYERS, EXPERTS, torch.device("cpu")),
        )
        residents = Residents(arena, tables, IoScheduler(source, Depths(3, 1)), LAYERS, EXPERTS, TOP_K)
        residents.fill(first(LAYERS, 4), quiet)
        arenas.append({pair: bytes(arena.data[slot].numpy()) for pair, slot in arena.directory.items()})
    assert arenas[0] == arenas[1]


@pytest.fixture
def copied(packs, tmp_path):
    name = header(1, 2).file_name
    (tmp_path / name).write_bytes((packs / name).read_bytes())
    return tmp_path / name


def test_an_altered_record_is_refused_when_reads_are_verified(copied):
    offset = header(1, 2).offset(12) + 100
    with copied.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([copied.read_bytes()[offset] ^ 0x10]))
    source = PackSource(copied.parent, header(1, 2), verify=True)
    read(source, (1, 3))
    with pytest.raises(DataError, match=rf"{copied.name}:{header(1, 2).offset(12)}: expert 4 of layer 1 is damaged"):
        read(source, (1, 4))
    read(PackSource(copied.parent, header(1, 2), verify=False), (1, 4))


def test_a_truncated_pack_is_refused_at_the_start_and_while_serving(copied):
    source = PackSource(copied.parent, header(1, 2), verify=False)
    size = header(1, 2).offset(79) + 50
    os.truncate(copied, size)
    with pytest.raises(DataError, match=rf"{copied.name}:{header(1, 2).offset(79)}: the file ends at byte {size}"):
        read(source, (9, 7))
    with pytest.raises(DataError, match=rf"{copied.name}:{size}: the file ends at byte {size}"):
        PackSource(copied.parent, header(1, 2), verify=False)


def test_a_pack_of_another_checkpoint_is_refused(packs):
    name = header(0, 2).file_name
    with pytest.raises(DataError, match=rf"{name}: is a pack of another checkpoint \(\w{{16}}, not cdcd"):
        PackSource(packs, replace(header(0, 2), model="cd" * 32), False)


def test_a_pack_of_another_shape_is_refused(packs):
    with pytest.raises(DataError, match="its experts is 8, this model's 9"):
        PackSource(packs, replace(header(0, 2), experts=9), False)


def test_another_ranks_pack_is_refused_even_under_this_ranks_name(packs, tmp_path):
    (tmp_path / header(0, 2).file_name).write_bytes((packs / header(1, 2).file_name).read_bytes())
    with pytest.raises(DataError, match="its rank is 1, this model's 0"):
        PackSource(tmp_path, header(0, 2), False)


def test_a_missing_pack_says_how_to_make_it(tmp_path):
    with pytest.raises(DataError, match="tidectl pack"):
        PackSource(tmp_path, header(0, 2), False)


def test_an_expert_that_the_pack_does_not_hold_and_room_of_a_wrong_size_are_refused(packs):
    source = PackSource(packs, header(0, 1), False)
    for pair in [(LAYERS, 0), (0, EXPERTS), (-1, 0), (0, -1)]:
        with pytest.raises(DataError, match="there is no expert"):
            read(source, pair)
    with pytest.raises(ValueError, match="bytes of room"):
        source.read(0, 0, memoryview(bytearray(10)))
