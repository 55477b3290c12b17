import fcntl
import os
import stat
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from threading import Barrier

import pytest

from tided import files
from tided.control import keys
from tided.control.keys import load_keys
from tided.control.state import StateFile, read_rank
from tided.errors import DataError, PermissionError_, UnavailableError


def public_keys(path):
    keys = load_keys(path, create=True)
    return keys.leader.public, keys.followers.public


def test_ranks_that_start_together_get_the_same_keys(tmp_path):
    path = tmp_path / "new" / "state" / "curve.key"
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        seen = set(pool.map(public_keys, [path] * 12))
    assert len(seen) == 1


def test_threads_that_start_at_the_same_instant_get_the_same_keys(tmp_path):
    count = 8
    barrier = Barrier(count)

    def load(path):
        barrier.wait(10)
        return public_keys(path)

    with ThreadPoolExecutor(count) as pool:
        for attempt in range(20):
            path = tmp_path / str(attempt) / "curve.key"
            assert len(set(pool.map(load, [path] * count))) == 1


def test_the_file_is_private_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "state" / "curve.key"
    before = os.umask(0)
    try:
        load_keys(path, create=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert sorted(file.name for file in path.parent.iterdir()) == ["curve.key", "curve.key.lock"]


def test_secrets_are_not_shown(tmp_path):
    keys = load_keys(tmp_path / "state" / "curve.key", create=True)
    assert keys.leader.secret not in repr(keys)
    assert keys.followers.secret not in repr(keys)


def test_a_second_node_never_makes_keys_of_its_own(tmp_path):
    with pytest.raises(UnavailableError, match="not there"):
        load_keys(tmp_path / "curve.key", create=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_key_file_that_others_may_touch_is_refused(tmp_path, mode):
    path = tmp_path / "state" / "curve.key"
    load_keys(path, create=True)
    path.chmod(mode)
    with pytest.raises(PermissionError_, match=f"{mode:04o}"):
        load_keys(path, create=True)


def test_a_link_in_place_of_the_key_file_is_refused(tmp_path):
    path = tmp_path / "state" / "curve.key"
    load_keys(path, create=True)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError_):
        load_keys(path, create=True)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff" * 100, b"x" * 10_000])
def test_a_damaged_key_file_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "state" / "curve.key"
    load_keys(path, create=True)
    path.write_bytes(damage)
    with pytest.raises(DataError, match=r"curve\.key"):
        load_keys(path, create=True)


def test_a_public_key_that_is_not_the_secret_ones_is_refused(tmp_path):
    path, other = tmp_path / "a" / "curve.key", tmp_path / "b" / "curve.key"
    ours, theirs = load_keys(path, create=True), load_keys(other, create=True)
    path.write_text(path.read_text().replace(ours.leader.public, theirs.leader.public))
    with pytest.raises(DataError):
        load_keys(path, create=False)


def test_a_lock_that_is_never_given_back_ends_the_wait(tmp_path, monkeypatch):
    path = tmp_path / "state" / "curve.key"
    load_keys(path, create=True)
    monkeypatch.setattr(keys, "LOCK_TIMEOUT_S", 0.1)
    with path.with_name("curve.key.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UnavailableError, match="holds the lock"):
            load_keys(path, create=True)


@pytest.mark.parametrize(("phase", "waits"), [("loading", 0), ("ready", 0), ("failed", 1), ("stopped", 1)])
def test_only_a_last_word_waits_for_the_disk(tmp_path, monkeypatch, phase, waits):
    state = StateFile(tmp_path, 0)
    synced = []
    monkeypatch.setattr(files.os, "fsync", synced.append)
    state.enter(phase)
    assert len(synced) == waits
    assert read_rank(tmp_path, 0).phase == phase


def test_keys_wait_for_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files.os, "fsync", synced.append)
    load_keys(tmp_path / "state" / "curve.key", create=True)
    assert synced
