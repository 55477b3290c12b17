"""Packs grow under a temporary name, survive a kill at any point, and never replace what is not theirs."""

import errno
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import packers.pack as packing
import packers.pack_writer as writing
from kernels.record import PAGE_BYTES, ExpertRecord
from packers.mxfp4 import Header, header_of
from packers.pack import pack
from packers.pack_writer import PackWriter
from packers.packs import Pack, encode_header
from packers.pool import MOST_ASKED, Pool
from tided.errors import DataError, UnavailableError

LAYERS, EXPERTS, RANKS = 3, 5, 2
RECORD = ExpertRecord(hidden=64, intermediate=64, ranks=RANKS)
HEADERS = [header_of("ab" * 32, RECORD, rank, LAYERS, EXPERTS) for rank in range(RANKS)]
NAMES = [header.file_name for header in HEADERS]


class Killed(BaseException):
    pass


class Source:
    def __init__(self):
        self.reads = []

    def __call__(self, layer, expert):
        self.reads.append((layer, expert))
        return [record_of(layer, expert, rank) for rank in range(RANKS)]


def record_of(layer: int, expert: int, rank: int) -> memoryview:
    seed = np.random.default_rng((layer, expert, rank))
    return memoryview(seed.integers(0, 256, RECORD.slot_bytes, dtype=np.uint8).tobytes())


def make(directory, source=None, headers=HEADERS, told=None):
    return pack(
        directory, headers, source or Source(), lambda *counts: (told if told is not None else []).append(counts)
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    directory = tmp_path_factory.mktemp("expected")
    make(directory)
    return [(directory / name).read_bytes() for name in NAMES]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(writing, "FLUSH_BYTES", 2 * RECORD.slot_bytes)
    for flush in ("fsync", "fdatasync"):  # hundreds of them, on a disk that others use
        monkeypatch.setattr(writing.os, flush, lambda fd: None)


def contents(directory):
    return [(directory / name).read_bytes() for name in NAMES]


def test_one_pass_over_the_source_makes_the_packs_of_all_ranks(tmp_path, expected):
    source, told = Source(), []
    paths = make(tmp_path / "new", source, told=told)
    assert paths == [tmp_path / "new" / name for name in NAMES]
    assert sorted(source.reads) == [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
    assert told == [(n, 15) for n in range(16)]
    assert contents(tmp_path / "new") == expected
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == NAMES


def test_records_are_flushed_before_their_checksums_and_everything_before_the_name(tmp_path, monkeypatch):
    events, pwrite, rename = [], os.pwrite, Path.rename
    monkeypatch.setattr(writing.os, "pwrite", lambda fd, data, at: (events.append(at), pwrite(fd, data, at))[1])
    for flush in ("fsync", "fdatasync"):
        monkeypatch.setattr(writing.os, flush, lambda fd: events.append("flush"))
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("name"), rename(path, to))[1])
    make(tmp_path, lambda *pair: Source()(*pair)[:1], headers=HEADERS[:1])
    at = HEADERS[0].offset
    batches = [[at(n), at(n + 1), "flush", PAGE_BYTES + 16 * n] for n in range(0, 14, 2)]
    last = [at(14), "flush", PAGE_BYTES + 16 * 14]
    written = [event for batch in batches for event in batch]
    end = [PAGE_BYTES, "flush", 0, "flush", "name", "flush"]
    assert events == [0, "flush", *written, *last, *end]


class CallsThatEnd:
    """The n-th call that changes a file ends the process; a write gets half of its bytes out first."""

    def __init__(self, monkeypatch, n):
        self.calls, self.n, self.lock = 0, n, threading.Lock()  # every pack has a thread
        for name in ("pwrite", "fdatasync", "fsync", "ftruncate"):
            monkeypatch.setattr(writing.os, name, self.wrapped(name, getattr(os, name)))
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda path, to: self.counted(lambda: rename(path, to), lambda: None))

    def counted(self, whole, half):
        with self.lock:
            self.calls += 1
            ends = self.calls == self.n
        if ends:
            half()
            raise Killed
        return whole()

    def wrapped(self, name, call):
        def half(fd, *rest):
            if name == "pwrite" and len(rest[0]) != PAGE_BYTES:  # a page is written as a whole
                call(fd, rest[0][: len(rest[0]) // 2], rest[1])

        return lambda *arguments: self.counted(lambda: call(*arguments), lambda: half(*arguments))


def calls_of_a_whole_run(directory):
    with pytest.MonkeyPatch.context() as patch:
        calls = CallsThatEnd(patch, 0)
        make(directory)
    return calls.calls


def test_killed_at_any_call_then_run_again_gives_the_same_bytes(tmp_path, expected):
    total = calls_of_a_whole_run(tmp_path / "whole")
    assert total > 50
    for n in range(1, total + 1):
        directory = tmp_path / str(n)
        with pytest.MonkeyPatch.context() as patch:
            CallsThatEnd(patch, n)
            with pytest.raises(Killed):
                make(directory)
        for name in NAMES:  # whatever has its name is whole
            if (directory / name).exists():
                Pack.open(directory / name).verify()
        make(directory)
        assert contents(directory) == expected, f"killed at call {n}"
        assert sorted(path.name for path in directory.iterdir()) == NAMES


def test_a_kill_at_random_moments_of_a_real_process_loses_nothing_but_the_last_batch(tmp_path, expected):
    program = textwrap.dedent("""
        import sys, time
        sys.path[:0] = sys.argv[2:]
        import packers.pack_writer as writing
        import test_pack_writer as t
        writing.FLUSH_BYTES = 2 * t.RECORD.slot_bytes
        read = t.Source()
        def slow(layer, expert):
            print(f"{layer} {expert}\\n", end="", flush=True)  # one write: two threads read ahead
            time.sleep(0.002)
            return read(layer, expert)
        t.make(t.Path(sys.argv[1]), slow)
    """)
    here = Path(__file__).parent
    rng = np.random.default_rng(3)
    for lines in rng.integers(1, 12, 4):
        directory = tmp_path / str(lines)
        command = [sys.executable, "-c", program, str(directory), str(here), str(here.parents[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for _ in range(lines):
                assert process.stdout.readline(), "it ended before it was killed"
            time.sleep(float(rng.uniform(0, 0.004)))
            process.send_signal(signal.SIGKILL)
        make(directory)
        assert contents(directory) == expected


def killed_after(directory, records):
    def ending(layer, expert):
        if layer * EXPERTS + expert == records:
            raise Killed
        return Source()(layer, expert)

    with pytest.raises(Killed):
        make(directory, ending)


def test_a_second_run_reads_only_what_is_missing(tmp_path, expected):
    killed_after(tmp_path, 11)
    source, told = Source(), []
    make(tmp_path, source, told=told)
    assert told[0] == (10, 15)
    assert sorted(source.reads) == [(2, expert) for expert in range(EXPERTS)]
    assert contents(tmp_path) == expected


@pytest.mark.parametrize("region", ["record", "index"])
def test_a_record_that_did_not_reach_the_disk_is_written_again(tmp_path, expected, region):
    """After a loss of power the index may be newer than the records, or the other way round."""
    killed_after(tmp_path, 11)
    part = tmp_path / f".{NAMES[1]}.part"
    with part.open("r+b") as file:
        file.seek(HEADERS[1].offset(4) if region == "record" else PAGE_BYTES + 4 * 16)
        file.write(bytes(16))
    told = []
    make(tmp_path, told=told)
    assert told[0] == (4, 15)
    assert contents(tmp_path) == expected


def test_a_pack_that_is_there_is_left_as_it_is(tmp_path, expected):
    make(tmp_path)
    before = [(tmp_path / name).stat() for name in NAMES]
    source = Source()
    make(tmp_path, source)
    assert source.reads == []
    assert [(tmp_path / name).stat() for name in NAMES] == before


def test_a_missing_rank_is_made_beside_one_that_is_there(tmp_path, expected):
    make(tmp_path)
    (tmp_path / NAMES[1]).unlink()
    kept = (tmp_path / NAMES[0]).stat()
    make(tmp_path)
    assert contents(tmp_path) == expected
    assert (tmp_path / NAMES[0]).stat().st_mtime_ns == kept.st_mtime_ns


FOREIGN = [{"model": "cd" * 32}, {"layers": 4}, {"hidden": 128, "record_bytes": 16384}]


@pytest.mark.parametrize("other", FOREIGN, ids=str)
def test_a_pack_of_another_checkpoint_is_not_overwritten(tmp_path, other):
    make(tmp_path)
    before = contents(tmp_path)
    headers = [replace(header, **other) for header in HEADERS]
    headers = [replace(header, record_bytes=header.record.slot_bytes) for header in headers]
    with pytest.raises(DataError, match="is a pack of another checkpoint or layout, and stays as it is"):
        make(tmp_path, headers=headers)
    assert contents(tmp_path) == before


def test_an_unfinished_pack_of_another_checkpoint_is_not_overwritten(tmp_path):
    killed_after(tmp_path, 11)
    part = tmp_path / f".{NAMES[0]}.part"
    before = part.read_bytes()
    with pytest.raises(DataError, match="an unfinished pack of another checkpoint or layout is in the way"):
        make(tmp_path, headers=[replace(header, model="cd" * 32) for header in HEADERS])
    assert part.read_bytes() == before


@pytest.mark.parametrize("name", [NAMES[0], f".{NAMES[0]}.part"])
def test_a_file_that_is_no_pack_is_not_overwritten(tmp_path, name):
    (tmp_path / name).write_bytes(b"a letter to my aunt\n" * 300)
    with pytest.raises(DataError, match="is no pack of experts"):
        make(tmp_path)
    assert (tmp_path / name).read_bytes() == b"a letter to my aunt\n" * 300


def test_a_link_is_not_written_through(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"")
    (tmp_path / f".{NAMES[0]}.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnavailableError, match="cannot be written"):
        make(tmp_path)
    assert (tmp_path / "elsewhere").read_bytes() == b""


def test_too_little_room_is_told_before_anything_is_read(tmp_path, monkeypatch):
    plain = os.statvfs(tmp_path)
    needed = sum(header.size_bytes - header.data_offset for header in HEADERS)

    def statvfs(path, free=needed - 1):
        return os.statvfs_result([1, 1, *plain[2:4], free, *plain[5:]])

    monkeypatch.setattr(writing.os, "statvfs", statvfs)
    source = Source()
    with pytest.raises(UnavailableError, match=r"the packs need 0\.00 GB more"):
        make(tmp_path, source)
    assert source.reads == []
    monkeypatch.setattr(writing.os, "statvfs", lambda path: statvfs(path, needed))
    make(tmp_path, source)


def test_a_disk_that_fills_up_is_told_and_the_pack_goes_on_later(tmp_path, monkeypatch, expected):
    plain, written = os.pwrite, []

    def full(fd, data, offset):
        if len(written) >= 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(offset)
        return plain(fd, data[: len(data) // 2 + 1], offset)  # and writes that are cut short

    with monkeypatch.context() as patch:
        patch.setattr(writing.os, "pwrite", full)
        with pytest.raises(UnavailableError, match="the file system is full") as caught:
            make(tmp_path)
    assert "goes on where it stopped" in caught.value.hint
    assert not any((tmp_path / name).exists() for name in NAMES)
    make(tmp_path)
    assert contents(tmp_path) == expected


def test_a_writer_that_cannot_begin_holds_no_lock(tmp_path, monkeypatch, expected):
    def refused(path):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "_direct", refused)
        with pytest.raises(UnavailableError, match="Too many open files"):
            make(tmp_path)
    make(tmp_path)
    assert contents(tmp_path) == expected


def test_two_processes_do_not_write_one_pack(tmp_path):
    with (
        PackWriter(tmp_path / NAMES[0], HEADERS[0]),
        pytest.raises(UnavailableError, match="another process is writing this pack"),
    ):
        make(tmp_path)


@pytest.mark.parametrize("successor", [False, True], ids=["gone", "another"])
def test_a_pack_that_is_finished_while_a_second_writer_waits_for_its_lock_stays_whole(
    tmp_path, monkeypatch, expected, successor
):
    """The second has opened the file under its temporary name; by the time it has the lock, the file is the pack."""
    make(tmp_path)
    pack_file, part, flock = tmp_path / NAMES[0], tmp_path / f".{NAMES[0]}.part", writing.fcntl.flock
    pack_file.rename(part)

    def finished_by_the_first(fd, operation):
        part.rename(pack_file)
        if successor:
            part.touch()
        flock(fd, operation)

    monkeypatch.setattr(writing.fcntl, "flock", finished_by_the_first)
    with pytest.raises(UnavailableError, match="has just finished or removed this pack") as caught:
        PackWriter(pack_file, HEADERS[0])
    assert "run the command again" in caught.value.hint
    assert contents(tmp_path) == expected


def test_an_error_of_the_source_ends_the_run_and_leaves_no_pack(tmp_path):
    def failing(layer, expert):
        if (layer, expert) == (1, 2):
            raise DataError("cannot be read: Input/output error", where="model-00001.safetensors:4096")
        return Source()(layer, expert)

    with pytest.raises(DataError, match=r"model-00001\.safetensors:4096"):
        make(tmp_path, failing)
    assert not any((tmp_path / name).exists() for name in NAMES)


def test_a_pack_gets_no_name_before_it_is_whole(tmp_path):
    with PackWriter(tmp_path / NAMES[0], HEADERS[0]) as writer:
        writer.write(0, record_of(0, 0, 0))
        with pytest.raises(ValueError, match="1 of 15 records"):
            writer.finish()
        with pytest.raises(ValueError, match="record 1 of 10 bytes"):
            writer.write(1, memoryview(bytes(10)))


def test_a_record_that_could_not_be_written_is_followed_by_none(tmp_path, monkeypatch, expected):
    """All records are of one size: the next would lie in its place, under a checksum that agrees."""
    plain, at = os.pwrite, HEADERS[0].offset(1)

    def once(fd, data, offset):
        if offset == at:
            monkeypatch.setattr(writing.os, "pwrite", plain)
            raise OSError(errno.EIO, "Input/output error")
        return plain(fd, data, offset)

    monkeypatch.setattr(writing.os, "pwrite", once)
    with PackWriter(tmp_path / NAMES[0], HEADERS[0]) as writer:
        sent = [writer.send(number, record_of(*divmod(number, EXPERTS), 0)) for number in range(4)]
        assert [type(one.exception(30)) for one in sent] == [type(None), OSError, ValueError, ValueError]
        assert writer.done == 1
    make(tmp_path)
    assert contents(tmp_path) == expected


def test_a_flush_that_failed_is_not_tried_again_and_believed(tmp_path, monkeypatch, expected):
    """The device tells of a loss once."""
    flushes = []

    def once(fd):
        flushes.append(fd)
        if len(flushes) == 2:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(writing.os, "fdatasync", once)
    with PackWriter(tmp_path / NAMES[0], HEADERS[0]) as writer:
        sent = [writer.send(number, record_of(*divmod(number, EXPERTS), 0)) for number in range(15)]
        failures = [type(one.exception(30)) for one in sent]
        assert failures == [*[type(None)] * 3, OSError, *[ValueError] * 11]
        with pytest.raises(ValueError, match="4 of 15 records"):
            writer.finish()
    part = (tmp_path / f".{NAMES[0]}.part").read_bytes()
    index = part[PAGE_BYTES : PAGE_BYTES + 15 * 16]
    assert index[: 2 * 16] == expected[0][PAGE_BYTES : PAGE_BYTES + 2 * 16]
    assert not any(index[2 * 16 :])
    told = []
    make(tmp_path, told=told)
    assert (told[0], contents(tmp_path)) == ((0, 15), expected)  # of the other rank there is nothing


def test_a_last_flush_that_failed_gives_no_pack_its_name(tmp_path, monkeypatch):
    with PackWriter(tmp_path / NAMES[0], HEADERS[0]) as writer:
        for number in range(15):
            writer.write(number, record_of(*divmod(number, EXPERTS), 0))
        with monkeypatch.context() as patch:
            patch.setattr(writing.os, "fdatasync", lost)
            with pytest.raises(OSError, match="Input/output"):
                writer.finish()
        with pytest.raises(ValueError, match="a write before this one failed"):
            writer.finish()
    assert not (tmp_path / NAMES[0]).exists()


def lost(fd):
    raise OSError(errno.EIO, "Input/output error")


def test_what_only_memory_holds_of_an_earlier_run_is_not_believed(tmp_path, monkeypatch, expected):
    killed_after(tmp_path, 11)
    part, at = tmp_path / f".{NAMES[1]}.part", HEADERS[1].offset(4)
    cached, plain, dropped = part.read_bytes(), os.pread, set()
    with part.open("r+b") as file:
        file.seek(at)
        file.write(bytes(16))

    def pread(fd, count, offset):
        if os.path.samestat(os.fstat(fd), part.stat()) and fd not in dropped:
            return cached[offset : offset + count]
        return plain(fd, count, offset)

    monkeypatch.setattr(writing.os, "pread", pread)
    monkeypatch.setattr(writing.os, "posix_fadvise", lambda fd, *_: dropped.add(fd))
    told = []
    make(tmp_path, told=told)
    assert told[0] == (4, 15)
    assert contents(tmp_path) == expected


def test_a_disk_that_hangs_is_told_and_its_files_stay_open_under_the_write(tmp_path, monkeypatch, expected):
    plain, goes_on, used, writers = os.pwrite, threading.Event(), set(), []

    def hanging(fd, data, offset):
        if offset == HEADERS[0].offset(3):
            used.add(fd)
            goes_on.wait(600)
        return plain(fd, data, offset)

    def first(*pair):
        return Source()(*pair)[:1]

    class Noted(PackWriter):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            writers.append(self)

    monkeypatch.setattr(writing.os, "pwrite", hanging)
    monkeypatch.setattr(packing, "PackWriter", Noted)
    monkeypatch.setattr(packing, "STEP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(writing, "END_TIMEOUT_S", 0.2)
    try:
        with pytest.raises(UnavailableError, match=r"no expert could be read or written for .* s"):
            make(tmp_path, first, headers=HEADERS[:1])
        assert not goes_on.is_set()
        assert all(os.fstat(fd).st_size > 0 for fd in used)  # a number given to another file would be written to
        with pytest.raises(UnavailableError, match="another process is writing this pack"):
            make(tmp_path, first, headers=HEADERS[:1])
    finally:
        goes_on.set()
    monkeypatch.setattr(writing, "END_TIMEOUT_S", 30.0)
    [hung] = writers
    hung.__exit__(None, None, None)
    make(tmp_path)
    assert contents(tmp_path) == expected


def test_who_asks_without_end_is_refused_and_the_pool_still_ends():
    goes_on, pool = threading.Event(), Pool(1, "test")
    for _ in range(MOST_ASKED):
        pool.submit(goes_on.wait, 600)
    with pytest.raises(queue.Full):
        list(map(pool.submit, [goes_on.wait] * 2))  # one may have begun
    assert not pool.end(0.0)
    goes_on.set()
    assert pool.end(30.0)


@pytest.mark.parametrize("stuck", ["read", "write"])
def test_a_command_whose_disk_hangs_ends(tmp_path, stuck):
    program = textwrap.dedent("""
        import os, sys, threading
        sys.path[:0] = sys.argv[3:]
        import packers.pack as packing, packers.pack_writer as writing
        import test_pack_writer as t
        packing.STEP_TIMEOUT_S = packing.END_TIMEOUT_S = writing.END_TIMEOUT_S = 0.2
        plain, read = os.pwrite, t.Source()
        def hang(*arguments):
            threading.Event().wait(600)
        def write(fd, data, offset):
            return hang() if offset == t.HEADERS[0].offset(3) else plain(fd, data, offset)
        if sys.argv[2] == "write":
            os.pwrite = write
        t.make(t.Path(sys.argv[1]), hang if sys.argv[2] == "read" else read)
    """)
    here = Path(__file__).parent
    command = [sys.executable, "-c", program, str(tmp_path), stuck, str(here), str(here.parents[1])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "no expert could be read or written" in ended.stderr


def test_packs_are_written_beside_each_other_while_the_next_expert_is_read(tmp_path, monkeypatch, expected):
    plain, met, source = os.pwrite, threading.Barrier(3, timeout=30), Source()

    def write(fd, data, offset):
        if offset == HEADERS[0].offset(0):
            met.wait()
        return plain(fd, data, offset)

    def read(layer, expert):
        if (layer, expert) == (0, packing.READERS - 1):
            met.wait()
        return source(layer, expert)

    monkeypatch.setattr(writing.os, "pwrite", write)
    make(tmp_path, read)
    assert contents(tmp_path) == expected


def test_an_expert_is_needed_no_longer_than_until_the_one_so_far_behind_is_asked_for(tmp_path, expected):
    """Rooms are used in turns, and overwritten before anything is read into them."""
    rooms = [[bytearray(RECORD.slot_bytes) for _ in range(RANKS)] for _ in range(packing.AT_ONCE)]
    begun, told = [], [(0, 15)]

    def read(layer, expert):
        number = layer * EXPERTS + expert
        begun.append((number, told[-1][0]))
        for rank, room in enumerate(rooms[number % packing.AT_ONCE]):
            room[:] = bytes(len(room))
            room[:] = record_of(layer, expert, rank)
        return [memoryview(room) for room in rooms[number % packing.AT_ONCE]]

    make(tmp_path, read, told=told)
    assert contents(tmp_path) == expected
    assert all(number - done < packing.AT_ONCE for number, done in begun)


def test_a_pack_that_only_lacked_its_name_gets_it(tmp_path, expected):
    make(tmp_path)
    (tmp_path / NAMES[0]).rename(tmp_path / f".{NAMES[0]}.part")
    assert (tmp_path / f".{NAMES[0]}.part").read_bytes().startswith(Header.MAGIC)
    make(tmp_path)
    assert contents(tmp_path) == expected
    assert encode_header(Pack.open(tmp_path / NAMES[0]).header, Header.MAGIC) == expected[0][:PAGE_BYTES]
