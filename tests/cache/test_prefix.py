"""The prompt cache of a rank: what is read is what was saved, or is a miss."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tided.cache import bundle
from tided.cache.background import Background
from tided.cache.chain import chain
from tided.cache.prefix import PrefixCache
from tided.files import temporary_of

CHUNK, BIG = 4, 1 << 24


def content(ids) -> dict[str, torch.Tensor]:
    """Tells its tokens, so that a wrong one is seen."""
    return {"ids": torch.tensor(list(ids)), "filling": torch.full((200,), float(sum(ids)))}


def save(cache: PrefixCache, ids: list[int], at: int | None = None, seed: str = "s") -> str:
    keys, at = chain(seed, ids, CHUNK), len(ids) if at is None else at
    needs = keys.chunks[: at // CHUNK]
    key = needs[-1]
    cache.save(key, at, needs, lambda i: content(ids[i * CHUNK : (i + 1) * CHUNK]), lambda: content(ids[:at]))
    return key


def read(cache: PrefixCache, key: str, ids: list[int]) -> bool:
    """Whether it is there; and if it is, it is the right one."""
    held, loaded, snapshot = cache.read([key])
    if snapshot is None:
        assert (held, loaded) == ([], -1)
        return False
    assert (held, loaded) == ([0], 0)
    assert snapshot.tokens == len(ids)
    assert snapshot.state["ids"].tolist() == ids
    assert [token for part in snapshot.pages for token in part["ids"].tolist()] == ids
    return True


@pytest.fixture
def background():
    found = Background()
    yield found
    found.close()


def disk(tmp_path, background, disk_bytes=BIG, ram_bytes=0) -> PrefixCache:
    return PrefixCache(ram_bytes, disk_bytes, tmp_path / "prefix", background)


IDS = list(range(1, 13))


@pytest.mark.parametrize(("ram", "on_disk"), [(BIG, 0), (0, BIG), (BIG, BIG)])
def test_what_is_saved_is_found_and_what_is_not_is_a_miss(tmp_path, background, ram, on_disk):
    cache = disk(tmp_path, background, on_disk, ram)
    key = save(cache, IDS)
    assert background.flush(30)
    assert read(cache, key, IDS)
    assert cache.read(["0" * 32]) == ([], -1, None)
    longer = chain("s", [*IDS, 1, 2, 3, 4], CHUNK).chunks
    held, loaded, snapshot = cache.read(list(reversed(longer)))
    assert (held, loaded, snapshot.tokens) == ([1], 1, 12)
    cache.check()


def test_another_namespace_is_another_prefix(tmp_path, background):
    cache = disk(tmp_path, background, ram_bytes=BIG)
    key = save(cache, IDS, seed="overlay a")
    assert key != chain("overlay b", IDS, CHUNK).chunks[-1]
    assert not cache.holds(chain("overlay b", IDS, CHUNK).chunks[-1])


def test_snapshots_of_a_conversation_share_their_pages(tmp_path, background):
    cache = disk(tmp_path, background)
    asked = []
    for at in (4, 8, 12):
        keys = chain("s", IDS, CHUNK).chunks[: at // CHUNK]
        cache.save(keys[-1], at, keys, lambda i: asked.append(i) or content([i]), lambda: content(IDS))
        assert background.flush(30)
    assert asked == [0, 1, 2]
    names = sorted(path.suffix for path in (tmp_path / "prefix").iterdir())
    assert names == [".pages"] * 3 + [".state"] * 3


def test_files_are_private(tmp_path, background):
    save(disk(tmp_path, background), IDS)
    assert background.flush(30)
    assert (tmp_path / "prefix").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "prefix").iterdir()} == {0o600}


def test_a_start_takes_in_what_is_whole_and_clears_the_rest(tmp_path, background):
    cache = disk(tmp_path, background)
    one, two = save(cache, IDS), save(cache, [9, *IDS[1:]])
    assert background.flush(30)
    folder = tmp_path / "prefix"
    (folder / f"{chain('s', IDS, CHUNK).chunks[0]}.pages").unlink()  # of `one`
    (folder / ".leftover.tmp").write_bytes(b"x")
    (folder / ("a" * 32 + ".state")).write_bytes(b"cut off")
    (folder / ("b" * 32 + ".pages")).write_bytes(b"nobody's")
    later = disk(tmp_path, background)
    assert not later.holds(one)
    assert read(later, two, [9, *IDS[1:]])
    later.check()
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("suffix", [".state", ".pages"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_damaged_file_is_a_miss_with_a_line(tmp_path, background, caplog, suffix, how):
    cache = disk(tmp_path, background)
    key = save(cache, IDS)
    assert background.flush(30)
    path = sorted((tmp_path / "prefix").glob(f"*{suffix}"))[0]
    data = bytearray(path.read_bytes())
    data[-300] ^= 1
    path.write_bytes(data if how == "flip" else data[:-10])
    if how == "gone":
        path.unlink()
    with caplog.at_level(logging.WARNING):
        assert not read(cache, key, IDS)
    assert path.name in caplog.text
    assert not cache.holds(key)
    cache.check()
    save(cache, IDS)  # and is written again
    assert background.flush(30)
    assert read(cache, key, IDS)


def test_what_is_lost_while_it_is_written_leaves_no_file(tmp_path, background, monkeypatch):
    """A reader finds damaged the pages that a snapshot under way shares: both go, and so does what is written."""
    cache = disk(tmp_path, background)
    first = save(cache, IDS)
    assert background.flush(30)
    shared = tmp_path / "prefix" / f"{chain('s', IDS, CHUNK).chunks[0]}.pages"
    shared.write_bytes(shared.read_bytes()[:-10])
    write, longer = bundle.write, [*IDS[:4], *range(20, 28)]

    def writes(path, pieces, turn):
        monkeypatch.setattr(bundle, "write", write)
        assert not read(cache, first, IDS)
        write(path, pieces)

    monkeypatch.setattr(bundle, "write", writes)
    key = save(cache, longer)
    assert background.flush(30)
    assert not cache.holds(key)
    cache.check()
    assert list((tmp_path / "prefix").iterdir()) == []
    save(cache, longer)  # and is written again
    assert background.flush(30)
    assert read(cache, key, longer)


def test_the_disk_budget_is_kept_and_the_oldest_goes(tmp_path, background):
    cache = disk(tmp_path, background, disk_bytes=9_500)  # two of three pages and a state each
    prompts = [[i, *IDS[1:]] for i in range(5)]
    keys = [save(cache, ids) for ids in prompts]
    assert background.flush(30)
    assert [read(cache, key, ids) for key, ids in zip(keys, prompts, strict=True)] == [False] * 3 + [True] * 2
    files = list((tmp_path / "prefix").iterdir())
    assert sum(path.stat().st_size for path in files) == cache._disk.used_bytes <= 9_500  # heads and paddings too
    names = {path.stem for path in files}
    assert len(names) == 2 * 3 + 0  # a state bears the name of its last pages


def test_the_memory_budget_is_kept(background):
    cache = PrefixCache(8_000, 0, None, background)
    keys = [save(cache, [i, *IDS[1:]]) for i in range(5)]
    assert [cache.holds(key) for key in keys] == [False] * 3 + [True] * 2
    cache.check()


def test_a_full_disk_is_a_miss_with_a_line(tmp_path, background, caplog, monkeypatch):
    cache = disk(tmp_path, background)
    monkeypatch.setattr("tided.cache.prefix.free_bytes", lambda folder: 100)
    key = save(cache, IDS)
    assert background.flush(30)
    assert not cache.holds(key)
    assert "almost full" in caplog.text
    cache.check()


def test_too_much_that_waits_is_not_written(tmp_path, background, caplog, monkeypatch):
    monkeypatch.setattr("tided.cache.background.MOST_PENDING_BYTES", 100)
    cache = disk(tmp_path, background)
    key = save(cache, IDS)
    assert background.flush(30)
    assert not cache.holds(key)
    assert "too much waits" in caplog.text


def test_pages_that_went_before_the_write_are_a_miss(tmp_path, background, caplog, monkeypatch):
    cache, jobs = disk(tmp_path, background), []
    save(cache, IDS[:8])
    assert background.flush(30)
    monkeypatch.setattr(background, "write", lambda nbytes, job: jobs.append(job) or True)
    key = save(cache, IDS)  # counts on the pages of the first
    gone = cache._disk.remove(chain("s", IDS, CHUNK).chunks[1])
    cache._forget(gone)
    cache._unlink(gone)
    jobs[0]()
    assert not cache.holds(key)
    cache.check()


def test_no_text_and_no_token_is_in_a_name_or_a_line(tmp_path, background, caplog):
    with caplog.at_level(logging.DEBUG):
        save(disk(tmp_path, background), [123456789] * 12)
        assert background.flush(30)
    assert "123456789" not in caplog.text + " ".join(map(str, tmp_path.rglob("*")))


WRITER = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.cache.test_prefix import CHUNK, IDS, disk, save
from tided.cache.background import Background
background = Background()
cache = disk(Path({folder!r}), background)
print("ready", flush=True)
for i in range(1_000_000):
    save(cache, [i % 50, *IDS[1:]])
    background.flush(30)
"""


@pytest.mark.parametrize("written", [1, 7, 40])
def test_after_a_kill_whatever_is_read_is_right(tmp_path, background, written):
    root = str(Path(__file__).parents[2])
    script = WRITER.format(root=root, folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ)
    try:
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "prefix").iterdir())) < written and time.monotonic() < deadline:
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    cache = disk(tmp_path, background)
    found = 0
    for i in range(50):
        ids = [i, *IDS[1:]]
        found += read(cache, chain("s", ids, CHUNK).chunks[-1], ids)
    cache.check()
    assert found >= (written - 4) // 4
    assert not list((tmp_path / "prefix").glob(".*"))


@pytest.mark.parametrize("point", range(5))  # three page sets, the state, its name
def test_a_write_that_ends_at_any_point_is_a_miss_and_no_more(tmp_path, background, monkeypatch, point):
    """What a kill leaves: everything up to some file, and a piece of that one under its temporary name."""
    cache, done = disk(tmp_path, background), []

    def write(path, pieces, turn):
        if len(done) == point:
            temporary_of(path).write_bytes(bytes(pieces[0]))
            raise KeyboardInterrupt  # not an error that the cache would clean up after
        done.append(path)
        real(path, pieces)

    real = bundle.write
    monkeypatch.setattr(bundle, "write", write)
    monkeypatch.setattr("tided.cache.background._run", lambda job: run(job))

    def run(job):
        try:
            job()
        except KeyboardInterrupt:
            return

    key = save(cache, IDS)
    assert background.flush(30)
    monkeypatch.setattr(bundle, "write", real)
    later = disk(tmp_path, background)
    assert read(later, key, IDS) == (point == 4)
    later.check()
    assert {path.suffix for path in (tmp_path / "prefix").iterdir()} <= ({".pages", ".state"} if point == 4 else set())


class Store(RuleBasedStateMachine):
    """More snapshots than there is room for, some given up on the way: every hit is its own entry's."""

    def __init__(self) -> None:
        super().__init__()
        self.background = Background()
        self.cache = PrefixCache(9_000, 0, None, self.background)

    prompts = st.lists(st.sampled_from([[0] * 4, [1] * 4]), min_size=1, max_size=3).map(
        lambda parts: [token for part in parts for token in part]
    )

    @rule(ids=prompts)
    def save(self, ids):
        save(self.cache, ids)

    @rule(ids=prompts)
    def abandon(self, ids):
        keys = chain("s", ids, CHUNK).chunks

        def broken():
            raise ValueError("the request is gone")

        if not self.cache.holds(keys[-1]):
            with pytest.raises(ValueError, match="gone"):
                self.cache.save(keys[-1], len(ids), keys, lambda i: content([i]), broken)

    @rule(ids=prompts)
    def read(self, ids):
        read(self.cache, chain("s", ids, CHUNK).chunks[-1], ids)

    @invariant()
    def agrees(self):
        self.cache.check()

    def teardown(self):
        self.background.close()


Store.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestStore = Store.TestCase
