"""A pack's file: every byte is under a checksum, and what is damaged is named with its offset."""

import os

import numpy as np
import pytest
from msgspec.structs import replace

from kernels.record import PAGE_BYTES, ExpertRecord
from packers.mxfp4 import Header, header_of
from packers.pack import pack
from packers.packs import Pack, decode_header, encode_header
from tided.errors import DataError

LAYERS, EXPERTS = 3, 5
RECORD = ExpertRecord(hidden=64, intermediate=64, ranks=2)
HEADER = header_of("ab" * 32, RECORD, 1, LAYERS, EXPERTS)


def record_of(layer: int, expert: int) -> memoryview:
    seed = np.random.default_rng(1000 * layer + expert)
    return memoryview(seed.integers(0, 256, RECORD.slot_bytes, dtype=np.uint8).tobytes())


@pytest.fixture
def written(tmp_path):
    pack(tmp_path, [HEADER], lambda *pair: [record_of(*pair)], lambda done, total: None)
    return tmp_path / HEADER.file_name


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_the_file_is_what_the_format_says(written):
    found, data = Pack.open(written), written.read_bytes()
    assert replace(found.header, index="") == HEADER
    assert len(data) == HEADER.size_bytes == HEADER.data_offset + LAYERS * EXPERTS * RECORD.slot_bytes
    assert HEADER.data_offset % PAGE_BYTES == RECORD.slot_bytes % PAGE_BYTES == 0
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            begin = HEADER.data_offset + (layer * EXPERTS + expert) * RECORD.slot_bytes
            assert data[begin : begin + RECORD.slot_bytes] == record_of(layer, expert)
    found.verify()


def test_a_flipped_byte_of_the_header_is_found(written):
    for offset in [0, 7, 8, 11, 12, 15, 16, 31, 32, 60, 200, PAGE_BYTES - 1]:
        flip(written, offset)
        with pytest.raises(DataError, match=rf"{written.name}:(0|8): "):
            Pack.open(written)
        flip(written, offset)
    Pack.open(written).verify()


def test_a_flipped_byte_of_the_index_is_found(written):
    for offset in [PAGE_BYTES, PAGE_BYTES + 16 * LAYERS * EXPERTS - 1, HEADER.data_offset - 1]:
        flip(written, offset)
        with pytest.raises(DataError, match=rf"{written.name}:4096: the index is damaged"):
            Pack.open(written)
        flip(written, offset)


def test_a_flipped_byte_of_a_record_is_found_with_its_expert_and_offset(written):
    rng = np.random.default_rng(7)
    ends = [(n, n * RECORD.slot_bytes + at) for n in (0, 7, 14) for at in (0, RECORD.slot_bytes - 1)]
    random = [(at // RECORD.slot_bytes, at) for at in rng.integers(0, HEADER.size_bytes - HEADER.data_offset, 20)]
    for number, at in [*ends, *random]:
        flip(written, HEADER.data_offset + int(at))
        layer, expert = divmod(int(number), EXPERTS)
        found = Pack.open(written)
        expected = rf"expert {expert} of layer {layer} is damaged.*{written.name}:{HEADER.offset(int(number))}"
        with pytest.raises(DataError, match=expected):
            found.verify()
        flip(written, HEADER.data_offset + int(at))


def test_many_damaged_records_are_counted_and_few_are_named(written):
    for number in range(LAYERS * EXPERTS):
        flip(written, HEADER.offset(number))
    with pytest.raises(DataError, match=r"15 damaged: expert 0 of layer 0.* and 5 more"):
        Pack.open(written).verify()


def test_a_truncated_or_longer_file_is_refused_with_its_offset(written):
    for size in [0, 100, PAGE_BYTES - 1]:
        shorter = written.with_name(f"cut-{size}")
        shorter.write_bytes(written.read_bytes()[:size])
        with pytest.raises(DataError, match=rf"{shorter.name}:{size}: ends after {size} bytes"):
            Pack.open(shorter)
    for size in [HEADER.size_bytes - 1, HEADER.offset(4), HEADER.data_offset, PAGE_BYTES]:
        os.truncate(written, size)
        with pytest.raises(DataError, match=rf"{written.name}:{size}: the file ends at byte {size}"):
            Pack.open(written)


def test_bytes_behind_the_last_record_are_refused(written):
    with written.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match="1 bytes after the last record belong to none"):
        Pack.open(written)


def test_what_is_no_finished_pack_is_told_apart(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"\x80\x02".ljust(PAGE_BYTES, b"."))
    with pytest.raises(DataError, match="is no pack of experts"):
        Pack.open(path)
    path.write_bytes(encode_header(HEADER, Header.PARTIAL))
    with pytest.raises(DataError, match="is a pack that is not finished"):
        Pack.open(path)
    with pytest.raises(DataError, match="is missing or cannot be read"):
        Pack.open(tmp_path / "none")
    with pytest.raises(DataError, match="is not a regular file"):
        Pack.open(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [{"rank": 2}, {"record_bytes": 8192}, {"hidden": 33}, {"layers": 1 << 20, "experts": 2}, {"intermediate": 32}],
    ids=str,
)
def test_a_header_that_contradicts_itself_is_refused_though_its_checksum_is_right(tmp_path, wrong):
    with pytest.raises(DataError, match="the header"):
        decode_header(encode_header(replace(HEADER, **wrong), Header.MAGIC), tmp_path / "x")
