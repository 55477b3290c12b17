"""A bundle is what was written, or is damaged: nothing between."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tided.cache import bundle
from tided.cache.bundle import Damaged
from tided.files import TEMPORARY

PARTS = {
    "windows": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "tail": torch.tensor([7, -1, 1 << 40]),
    "none": torch.empty(0, 4),
    "one": torch.tensor(3.5),
}


def whole(key="k", parts=PARTS) -> bytearray:
    return bytearray(b"".join(bundle.encode(key, 12, ["a", "b"], parts)))


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "x"
    bundle.write(path, bundle.encode("k", 12, ["a", "b"], PARTS))
    assert path.stat().st_mode & 0o777 == 0o600
    head, parts = bundle.read(path, "k")
    assert (head.tokens, head.needs) == (12, ["a", "b"])
    assert parts.keys() == PARTS.keys()
    for name, tensor in PARTS.items():
        assert parts[name].dtype == tensor.dtype
        assert torch.equal(parts[name], tensor)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_bit_that_changes_is_noticed(data):
    written = whole()
    at = data.draw(st.integers(0, len(written) - 1))
    written[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(Damaged):
        bundle.decode(written, "k")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(whole()) - 1))
def test_any_end_that_comes_early_is_noticed(length):
    with pytest.raises(Damaged):
        bundle.decode(whole()[:length], "k")


def test_more_than_was_written_and_another_name(tmp_path):
    with pytest.raises(Damaged, match="as long as it says"):
        bundle.decode(whole() + b"x", "k")
    with pytest.raises(Damaged, match="another bundle"):
        bundle.decode(whole(), "other")
    with pytest.raises(Damaged, match="no context bundle"):
        bundle.decode(bytearray(b"short"), "k")


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        bundle.write(tmp_path / "x", bundle.encode("k", 1, [], PARTS))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
def test_a_file_is_written_and_read_a_piece_at_each_turn(tmp_path, monkeypatch, piece):
    """Between two pieces others have the disk; a piece is on it when its turn ends."""
    monkeypatch.setattr(bundle, "PIECE_BYTES", piece)
    path, encoded, sizes, synced = tmp_path / "x", bundle.encode("k", 12, ["a", "b"], PARTS), [], []

    def size():
        (temporary,) = tmp_path.iterdir()
        assert TEMPORARY.fullmatch(temporary.name)
        return temporary.stat().st_size

    monkeypatch.setattr(bundle.os, "fdatasync", lambda fd: synced.append(size()))

    def turn(work):
        work()
        sizes.append(size())

    bundle.write(path, encoded, turn)
    steps = [after - before for before, after in zip([0, *sizes], sizes, strict=False)]
    assert max(steps) <= piece
    assert sum(steps) == len(whole()) == path.stat().st_size
    assert synced == sizes[:-1]  # the last turn is the file's fsync
    turns = []

    def counted(work):
        turns.append(work)
        work()

    _, parts = bundle.read(path, "k", counted)
    assert len(turns) == -(-len(whole()) // piece)
    assert all(torch.equal(parts[name], tensor) for name, tensor in PARTS.items())
    path.write_bytes(whole())
    with pytest.raises(Damaged, match="ends early"):
        bundle.read(path, "k", lambda work: (path.write_bytes(whole()[:30]), work()))
