"""Packs of EXL3 experts: records of several sizes, found, checked, resumed."""

import errno
import json
import mmap
import os

import numpy as np
import pytest
from msgspec.structs import replace

import packers.pack_writer as writing
from kernels.exl3_record import Exl3Record, Stored
from kernels.record import PAGE_BYTES
from packers.exl3_pack import Exl3Header, exl3_header_of
from packers.mxfp4 import Header
from packers.pack import pack
from packers.packs import Pack, checksum, decode_header, encode_header
from tided.errors import DataError

LAYERS, EXPERTS = 3, 5
RECORD = Exl3Record(256, 256, 2)
WIDTHS = [(4, 4, 4), (4, 4, 6), (6, 6, 8), (16, 2, 3)]
STORED = [Stored(WIDTHS[number % 4], ("mul1", "mul1", "mul1")) for number in range(LAYERS * EXPERTS)]
HEADERS = [exl3_header_of("ab" * 32, RECORD, rank, LAYERS, EXPERTS, STORED) for rank in range(2)]
HEADER = HEADERS[1]


def record_of(layer: int, expert: int, rank: int) -> memoryview:
    draw = np.random.default_rng((layer, expert, rank))
    nbytes = HEADERS[rank].nbytes(layer * EXPERTS + expert)
    return memoryview(draw.integers(0, 256, nbytes, dtype=np.uint8).tobytes())


def read(layer, expert):
    return [record_of(layer, expert, rank) for rank in range(2)]


def quiet(done, total):
    pass


@pytest.fixture
def written(tmp_path):
    pack(tmp_path, HEADERS, read, quiet)
    return tmp_path / HEADER.file_name


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_the_file_is_what_the_format_says(written):
    data = written.read_bytes()
    assert data[:8] == b"TIDEX3PK"
    length = int.from_bytes(data[12:16], "little")
    text = json.loads(data[32 : 32 + length])
    assert text["matrices"].startswith("242424" + "242426" + "262628" + "2g2223")
    assert (text["layers"], text["experts"], text["rank"], text["ranks"]) == (3, 5, 1, 2)
    header_bytes = -(-(32 + length) // PAGE_BYTES) * PAGE_BYTES
    index = data[header_bytes : header_bytes + PAGE_BYTES]
    assert text["index"] == checksum(index).hex()
    at = header_bytes + PAGE_BYTES
    for number, stored in enumerate(STORED):
        nbytes = RECORD.slot_bytes(stored)
        assert data[at : at + nbytes] == record_of(*divmod(number, EXPERTS), 1)
        assert index[16 * number : 16 * (number + 1)] == checksum(data[at : at + nbytes])
        at += nbytes
    assert at == len(data) == HEADER.size_bytes


def test_a_header_of_many_records_takes_as_many_pages_as_it_needs(tmp_path):
    """All experts of GLM-5.3."""
    stored = [STORED[number % 4] for number in range(75 * 256)]
    header = exl3_header_of("ab" * 32, Exl3Record(6144, 2048, 2), 0, 75, 256, stored)
    assert header.header_bytes == 29 * PAGE_BYTES
    whole = replace(header, index="cd" * 16)
    assert whole.header_bytes == header.header_bytes, "the index's checksum moves nothing"
    assert decode_header(encode_header(whole, Exl3Header.MAGIC), tmp_path / "x") == whole
    assert header.offset(19_199) + header.nbytes(19_199) == header.size_bytes
    assert all(header.offset(number) % PAGE_BYTES == 0 for number in range(0, 19_200, 97))


@pytest.mark.parametrize("place", ["header", "index", "first", "last"])
def test_a_flipped_byte_is_found_wherever_it_is(written, place):
    offset = {
        "header": 200,
        "index": HEADER.header_bytes + 16 * 15,
        "first": HEADER.offset(0),
        "last": HEADER.size_bytes - 1,
    }[place]
    Pack.open(written).verify()
    flip(written, offset)
    said = {"header": "header is damaged", "index": "index is damaged", "first": "expert 0 of layer 0"}
    with pytest.raises(DataError, match=said.get(place, f"expert 4 of layer 2 .*{HEADER.offset(14)}")):
        Pack.open(written).verify()


@pytest.mark.parametrize("missing", [1, PAGE_BYTES])
def test_a_truncated_or_longer_file_is_refused(written, missing):
    size = written.stat().st_size
    os.truncate(written, size - missing)
    with pytest.raises(DataError, match=f"ends at byte {size - missing}"):
        Pack.open(written)
    os.truncate(written, size + missing)
    with pytest.raises(DataError, match="belong to none"):
        Pack.open(written)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"matrices": "242424"}, "of 1 experts where there are 15"),
        ({"matrices": HEADER.matrices[:-2]}, "of 14.6667 experts"),
        ({"matrices": "05" * 45}, "no expert: no EXL3 expert: 2.5 2.5 2.5 bits"),
        ({"matrices": "28" * 44 + "x8"}, "not what a pack holds"),
        ({"intermediate": 128}, "whole blocks of 128"),
        ({"rank": 2}, "rank 2 of 2"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused_though_its_checksum_is_right(tmp_path, wrong, said):
    header = HEADER
    made = replace(header, **wrong)
    try:
        region = encode_header(made, Exl3Header.MAGIC)
    except (ValueError, IndexError):
        region = forged(made)
    with pytest.raises(DataError, match=said):
        decode_header(region, tmp_path / "x")


def forged(header) -> bytes:
    """What `encode_header` refuses to make."""

    class Forged(Exl3Header, frozen=True, kw_only=True):
        @property
        def header_bytes(self):
            return PAGE_BYTES

    return encode_header(Forged(**{name: getattr(header, name) for name in header.__struct_fields__}), Exl3Header.MAGIC)


def test_a_pack_of_the_other_kind_is_told_apart(written, tmp_path):
    data = bytearray(written.read_bytes())
    data[:8] = Header.MAGIC
    written.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        Pack.open(written)
    data[:8] = Exl3Header.PARTIAL
    written.write_bytes(data)
    with pytest.raises(DataError, match="not finished"):
        Pack.open(written)


def aligned(layer, expert):
    """The same records in memory that begins at a page."""
    rooms = []
    for record in read(layer, expert):
        room = mmap.mmap(-1, len(record))
        room[:] = record
        rooms.append(memoryview(room))
    return rooms


@pytest.mark.parametrize("refuses", [False, True])
def test_what_is_written_past_the_page_cache_is_the_same(written, tmp_path, monkeypatch, refuses):
    """Also where the device takes no such writes after all."""
    direct, pwrite, opened = [], os.pwrite, os.open

    def noticed(path, flags, *rest):
        fd = opened(path, flags, *rest)
        direct.extend([fd] if flags & os.O_DIRECT and flags & os.O_WRONLY else [])
        return fd

    def write(fd, data, offset):
        if refuses and fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "open", noticed)
    monkeypatch.setattr(os, "pwrite", write)
    pack(tmp_path / "direct", HEADERS, aligned, quiet)
    assert (tmp_path / "direct" / written.name).read_bytes() == written.read_bytes()


class Killed(BaseException):
    pass


def test_killed_at_any_record_then_run_again_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "FLUSH_BYTES", 2 * RECORD.slot_bytes(STORED[0]))
    pack(tmp_path / "whole", HEADERS, read, quiet)
    wanted = [(tmp_path / "whole" / header.file_name).read_bytes() for header in HEADERS]
    for records in (0, 1, 4, 9, 14):
        asked = []

        def ending(layer, expert, last=records, asked=asked):
            asked.append((layer, expert))
            if layer * EXPERTS + expert == last:
                raise Killed
            return read(layer, expert)

        out = tmp_path / str(records)
        with pytest.raises(Killed):
            pack(out, HEADERS, ending, quiet)
        assert not any((out / header.file_name).exists() for header in HEADERS)
        again = []

        def counted(layer, expert, again=again):
            again.append((layer, expert))
            return read(layer, expert)

        pack(out, HEADERS, counted, quiet)
        assert [(out / header.file_name).read_bytes() for header in HEADERS] == wanted
        assert len(again) <= 15 - max(0, records - 4), "what was flushed is read again"


MANY = exl3_header_of("ab" * 32, Exl3Record(128, 128, 1), 0, 7, 100, [Stored((2, 3, 2), ("mul1",) * 3)] * 700)
NOISE = np.random.default_rng(9).integers(0, 256, MANY.nbytes(0), dtype=np.uint8)


def many(layer, expert):
    return [memoryview(np.roll(NOISE, layer * 100 + expert))]


class Tears:
    """The n-th call that changes a file ends the process; of a write of several pages, `reaches` of them got out."""

    def __init__(self, monkeypatch, n, reaches):
        self.calls, self.n, self.reaches = 0, n, reaches
        for name in ("pwrite", "fdatasync", "fsync", "ftruncate"):
            monkeypatch.setattr(writing.os, name, self.wrapped(name, getattr(os, name)))
        rename = writing.Path.rename
        monkeypatch.setattr(writing.Path, "rename", self.wrapped("rename", rename))

    def wrapped(self, name, call):
        def counted(*arguments):
            self.calls += 1
            if self.calls != self.n:
                return None if "sync" in name else call(*arguments)
            if name == "pwrite" and len(arguments[1]) > PAGE_BYTES:
                fd, data, at = arguments
                reached = slice(0, PAGE_BYTES) if self.reaches == "first" else slice(PAGE_BYTES, None)
                call(fd, data[reached], at + reached.start)
            raise Killed

        return counted


@pytest.mark.parametrize("reaches", ["first", "all but the first"])
def test_killed_at_a_call_between_the_pages_of_a_header_then_run_again_gives_the_same_bytes(
    tmp_path, monkeypatch, reaches
):
    assert MANY.header_bytes == 2 * PAGE_BYTES
    monkeypatch.setattr(writing, "FLUSH_BYTES", 1 << 20)
    monkeypatch.setattr(writing, "_direct", lambda path: None)  # as many calls whatever the memory's alignment
    with monkeypatch.context() as patch:
        run = Tears(patch, 0, reaches)
        pack(tmp_path / "whole", [MANY], many, quiet)
    wanted, last = (tmp_path / "whole" / MANY.file_name).read_bytes(), run.calls
    for n in [*range(1, 8), *range(150, last, 150), *range(last - 8, last + 1)]:
        out = tmp_path / str(n)
        with monkeypatch.context() as patch:
            Tears(patch, n, reaches)
            with pytest.raises(Killed):
                pack(out, [MANY], many, quiet)
        if (out / MANY.file_name).exists():
            Pack.open(out / MANY.file_name).verify()
        pack(out, [MANY], many, quiet)
        assert (out / MANY.file_name).read_bytes() == wanted, f"killed at call {n} of {last}"
        assert [path.name for path in out.iterdir()] == [MANY.file_name]
        (out / MANY.file_name).unlink()


def test_an_unfinished_pack_that_an_earlier_version_began_is_refused(tmp_path):
    part = tmp_path / f".{MANY.file_name}.part"
    part.write_bytes(encode_header(MANY, Exl3Header.PARTIAL).ljust(MANY.offset(0), b"\0"))
    before = part.read_bytes()
    with pytest.raises(DataError, match="unfinished pack of an earlier version") as caught:
        pack(tmp_path, [MANY], many, quiet)
    assert "delete it" in caught.value.hint
    assert part.read_bytes() == before


def test_an_unfinished_pack_of_other_widths_is_not_overwritten(tmp_path):
    other = exl3_header_of("ab" * 32, RECORD, 1, LAYERS, EXPERTS, STORED[::-1])

    def ending(layer, expert):
        raise Killed

    with pytest.raises(Killed):
        pack(tmp_path, [HEADER], ending, quiet)
    with pytest.raises(DataError, match="unfinished pack of another checkpoint or layout"):
        pack(tmp_path, [other], read, quiet)
