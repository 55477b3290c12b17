"""Expert records from a checkpoint: the right bytes, cut to the rank, from few reads, on any file system."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from expert_fakes import EXPERTS, GOLDEN, LAYERS, expert_names, golden, golden_record

import tided.experts.files as files
from kernels.record import ExpertRecord
from packers.shards import Checkpoint
from tided.errors import DataError, TensorError
from tided.experts.source import CheckpointSource

PAIRS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]


def read(source, layer, expert) -> bytes:
    room = bytearray(b"\xaa" * source.record.slot_bytes)  # whatever a slot held before
    source.read(layer, expert, memoryview(room))
    return bytes(room)


def whole(checkpoint, layer, expert) -> list[torch.Tensor]:
    """The six tensors [rows, bytes] as the library of the checkpoint gives them."""
    return [checkpoint.read(name).view(torch.uint8) for name in expert_names(layer, expert)]


def cut(tensors, rank, ranks) -> bytes:
    """The record by its definition: rows of w1 and w3, columns of w2."""
    parts = [t.chunk(ranks, dim=1 if i % 3 == 2 else 0)[rank].contiguous() for i, t in enumerate(tensors)]
    return b"".join(part.numpy().tobytes() for part in parts)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_a_record_is_the_ranks_cut_of_the_six_tensors(rank, ranks):
    checkpoint, record = golden(), golden_record(ranks)
    source = CheckpointSource(checkpoint, expert_names, record, rank)
    for pair in PAIRS:
        expected = cut(whole(checkpoint, *pair), rank, ranks)
        assert len(expected) == record.nbytes
        assert read(source, *pair) == expected + bytes(record.slot_bytes - record.nbytes), pair
    source.close()


def test_the_ranks_together_hold_the_expert():
    checkpoint, record = golden(), golden_record(2)
    sources = [CheckpointSource(checkpoint, expert_names, record, rank) for rank in range(2)]
    for pair in PAIRS:
        shares = [read(source, *pair) for source in sources]
        for i, (part, tensor) in enumerate(zip(record.parts, whole(checkpoint, *pair), strict=True)):
            pieces = [
                np.frombuffer(share, np.uint8)[part.offset : part.offset + part.nbytes].reshape(part.rows, -1)
                for share in shares
            ]
            assert np.array_equal(np.concatenate(pieces, axis=1 if i % 3 == 2 else 0), tensor.numpy()), (pair, i)


def test_the_last_expert_of_a_file_that_ends_inside_a_block_is_read():
    checkpoint = golden()
    ends = [info for info in checkpoint.tensors.values() if info.name.startswith("layers.0.ffn.experts")]
    last = max(ends, key=lambda info: info.offset)
    assert last.offset + last.nbytes == last.path.stat().st_size
    assert last.path.stat().st_size % files.ALIGN_BYTES
    expert = int(last.name.split(".")[4])
    source = CheckpointSource(checkpoint, expert_names, golden_record(1), 0)
    assert read(source, 0, expert).startswith(cut(whole(checkpoint, 0, expert), 0, 1))


def test_a_file_system_without_direct_reads_gives_the_same_bytes_and_is_named_once(monkeypatch, caplog):
    plain = os.open

    def refusing(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, *rest, **more)

    expected = read(CheckpointSource(golden(), expert_names, golden_record(2), 1), 3, 4)
    files._say_not_direct.cache_clear()
    caplog.clear()
    monkeypatch.setattr(files.os, "open", refusing)
    source = CheckpointSource(golden(), expert_names, golden_record(2), 1)
    assert read(source, 3, 4) == expected
    assert not source.stats.direct
    read(source, 9, 4)  # of another file
    (message,) = caplog.messages
    assert message.startswith(f"{GOLDEN}: this file system takes no direct reads")
    files._say_not_direct.cache_clear()


@pytest.mark.parametrize("most", [4096, 5000, 8192])
def test_reads_that_come_in_pieces_are_put_together(monkeypatch, most):
    expected = read(CheckpointSource(golden(), expert_names, golden_record(1), 0), 9, 7)
    plain = os.preadv

    def short(fd, to, at):
        room = memoryview(to[0])
        count = plain(fd, to, at)
        if count > most:
            room[most:count] = bytes(count - most)
        return min(count, most)

    monkeypatch.setattr(files.os, "preadv", short)
    assert read(CheckpointSource(golden(), expert_names, golden_record(1), 0), 9, 7) == expected


def test_a_failing_disk_is_reported_with_file_and_offset(monkeypatch):
    source = CheckpointSource(golden(), expert_names, golden_record(1), 0)
    read(source, 0, 0)

    def failing(fd, to, at):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "preadv", failing)
    with pytest.raises(DataError, match=r"model-00003-of-00018\.safetensors:\d+: cannot be read: Input/output error"):
        read(source, 0, 1)


def test_a_file_cut_after_the_start_is_reported_not_served(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "copy")
    checkpoint = Checkpoint.open(tmp_path / "copy")
    source = CheckpointSource(checkpoint, expert_names, golden_record(1), 0)
    os.truncate(tmp_path / "copy" / "model-00003-of-00018.safetensors", 300_000)
    with pytest.raises(DataError, match=r"model-00003-of-00018\.safetensors:\d+: the file ends at byte 300000"):
        read(source, 0, 7)


def test_a_file_removed_after_the_start_is_reported(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "copy")
    source = CheckpointSource(Checkpoint.open(tmp_path / "copy"), expert_names, golden_record(1), 0)
    (tmp_path / "copy" / "model-00003-of-00018.safetensors").unlink()
    with pytest.raises(DataError, match=r"model-00003-of-00018\.safetensors: cannot be opened"):
        read(source, 0, 0)


def test_an_expert_of_another_size_or_name_is_refused():
    said = r"experts\.0\.w1\.weight is I8 \[64, 64\], an expert here needs 32 rows of 64 bytes"
    with pytest.raises(TensorError, match=said):
        read(CheckpointSource(golden(), expert_names, ExpertRecord(128, 32, 1), 0), 0, 0)
    with pytest.raises(TensorError, match=r"layers\.0\.ffn\.experts\.8\.w1\.weight is missing"):
        read(CheckpointSource(golden(), expert_names, golden_record(1), 0), 0, 8)


def test_room_of_a_wrong_size_and_a_rank_that_is_none_are_refused():
    source = CheckpointSource(golden(), expert_names, golden_record(1), 0)
    with pytest.raises(ValueError, match="bytes of room"):
        source.read(0, 0, memoryview(bytearray(100)))
    with pytest.raises(ValueError, match="rank 2 of 2"):
        CheckpointSource(golden(), expert_names, golden_record(2), 2)


@pytest.fixture(scope="module")
def released_layout(tmp_path_factory):
    """Two experts in the sizes and the order of the released checkpoint: all scales in front, weights behind."""
    directory = tmp_path_factory.mktemp("released")
    d, i = 5120, 2304
    shapes = {"w1": (i, d), "w2": (d, i), "w3": (i, d)}
    header, at = {}, 0
    for kind, dtype, divisor in (("scale", "F8_E8M0", 32), ("weight", "I8", 2)):
        for expert in range(2):
            for w, (rows, columns) in shapes.items():
                size = rows * columns // divisor
                header[f"layers.0.ffn.experts.{expert}.{w}.{kind}"] = {
                    "dtype": dtype, "shape": [rows, columns // divisor], "data_offsets": [at, at + size],
                }  # fmt: skip
                at += size
    text = json.dumps(header).encode()
    (directory / "config.json").write_text("{}")
    data = np.random.default_rng(1).integers(0, 256, at, dtype=np.uint8).tobytes()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return Checkpoint.open(directory)


@pytest.mark.parametrize(("ranks", "reads", "share"), [(1, 2, 1.0), (2, 3, 0.69)])
def test_an_expert_of_the_released_layout_takes_few_reads_and_no_needless_bytes(released_layout, ranks, reads, share):
    record = ExpertRecord(5120, 2304, ranks)
    for rank in range(ranks):
        source = CheckpointSource(released_layout, expert_names, record, rank)
        for expert in range(2):
            expected = cut(whole(released_layout, 0, expert), rank, ranks)
            assert read(source, 0, expert)[: record.nbytes] == expected
        stats = source.stats
        assert (stats.records, stats.reads) == (2, 2 * reads)
        assert stats.read_bytes <= share * 2 * 18_800_640
        assert stats.seconds > 0
        source.close()


def test_a_rank_of_four_takes_four_or_five_reads(released_layout):
    reads = []
    for rank in range(4):
        source = CheckpointSource(released_layout, expert_names, ExpertRecord(5120, 2304, 4), rank)
        read(source, 0, 0)
        reads.append(source.stats.reads)
        source.close()
    assert (min(reads), max(reads)) == (4, 5)


def test_files_of_a_source_that_is_dropped_are_closed(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(files.ALIGN_BYTES))
    for drop in (lambda file: file.close(), lambda file: None):
        file = files.RangeFile(path)
        assert open_on(path) == 1
        drop(file)
        del file
        assert open_on(path) == 0


def open_on(path) -> int:
    return sum(entry.samefile(path) for entry in Path("/proc/self/fd").iterdir() if entry.exists())
