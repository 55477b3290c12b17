"""The loop's side of a rank, with an engine thread that does what the test says."""

import asyncio
import errno
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
from msgspec.structs import replace

from tests.control.conftest import make_settings
from tests.daemon.helpers import until, write_profile
from tests.daemon.tiny import profile_text
from tided import boot, life
from tided.control.progress import Progress
from tided.control.state import StateFile, read_rank
from tided.daemon import make_room
from tided.engine.flight import Flight
from tided.engine.offline import settings_of
from tided.errors import DataError, PairError, TideError, UnavailableError
from tided.life import Daemon
from tided.settings import Cache, Engine, Experts, Server


class FakeEngine:
    """Its loop comes round until `stands` says that it stood still from some time on."""

    seq = 0
    flight = Flight()
    stands = 0.0

    @property
    def turned_s(self):
        return self.stands or time.monotonic()


@pytest.fixture
def make_daemon(tmp_path, monkeypatch):
    """`make_daemon(thread)`: a rank whose engine thread runs `thread(loop_side)`."""

    def make(thread, environment=(), number=1, **parallel):
        for name, value in dict(environment).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(boot, "run_rank", lambda settings, rank, keys, state_dir, side: thread(side))
        return Daemon(make_settings(2, **parallel), number, None, StateFile(tmp_path, number))

    return make


async def test_an_orderly_end(make_daemon, tmp_path):
    def thread(side):
        side.tell("handshake")
        side.ready(FakeEngine())
        side.ended(None)
        side.ended(PairError("later words do not count"))

    assert await asyncio.wait_for(make_daemon(thread).run(), 10) is None
    assert read_rank(tmp_path, 1).phase == "stopped"
    assert read_rank(tmp_path, 1).exit_code == 0


async def test_progress_of_a_load_is_in_the_state_file_in_words_and_numbers(make_daemon, tmp_path):
    states = []

    def thread(side):
        reporter = boot._Reporter(side)
        for part, done, total in (("dense weights", 1, 1), ("experts", 8, 8)):
            reporter(part, done, total)
            side.joined("")  # returns when the loop has come round
            states.append(read_rank(tmp_path, 1))
        side.ended(None)

    daemon = make_daemon(thread)
    daemon.joined = lambda _: asyncio.run_coroutine_threadsafe(asyncio.sleep(0), daemon._loop).result(10)
    assert await asyncio.wait_for(daemon.run(), 10) is None
    told = [(state.phase, state.message, state.done, state.total) for state in states]
    assert told == [("loading", "dense weights", 1, 1), ("loading", "experts: 8 of 8", 8, 8)]


def test_a_state_file_without_progress_is_read(tmp_path):
    (tmp_path / "rank-0.json").write_text('{"rank":0,"pid":1,"started":0,"phase":"loading","since":0,"new":1}')
    state = read_rank(tmp_path, 0)
    assert (state.done, state.total) == (0, 0)


async def test_an_error_is_kept_in_the_state_file(make_daemon, tmp_path):
    fault = DataError("is truncated", where="model.safetensors")
    assert await asyncio.wait_for(make_daemon(lambda side: side.ended(fault)).run(), 10) is fault
    state = read_rank(tmp_path, 1)
    assert (state.phase, state.exit_code, state.message) == ("failed", 65, "model.safetensors: is truncated")


async def test_a_lost_peer_ends_a_rank_whose_engine_hangs(make_daemon):
    release = threading.Event()

    def thread(side):
        side.ready(FakeEngine())
        release.wait(30)

    rank = make_daemon(thread)
    asyncio.get_running_loop().call_later(0.1, rank._conclude, PairError("rank 0 is silent"))
    assert "silent" in str(await asyncio.wait_for(rank.run(), 10))
    assert rank.engine_is_alive  # the process must not wait for it
    release.set()


async def test_a_library_that_is_not_there_is_told_by_its_name(make_daemon, monkeypatch, caplog):
    rank, broken = make_daemon(lambda side: None), types.ModuleType("tided.boot")
    broken.__file__ = "/secret/boot.py"
    monkeypatch.setitem(sys.modules, "tided.boot", broken)
    error = await asyncio.wait_for(rank.run(), 10)
    assert "a library cannot be loaded: tided.boot" in str(error)
    assert "/secret" not in str(error)
    assert "/secret/boot.py" in caplog.text


async def test_the_service_manager_is_told(make_daemon, tmp_path):
    release = threading.Event()

    def thread(side):
        side.tell("experts: 1 of 2")
        side.ready(FakeEngine())
        release.wait(30)
        side.ended(None)

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        rank = make_daemon(thread, {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "90000"})
        running = asyncio.create_task(rank.run())
        heard = []
        while heard.count("WATCHDOG=1") < 4:
            heard.append((await asyncio.to_thread(manager.recv, 4096)).decode())
        assert "READY=1" in heard
        assert heard.index("STATUS=loading experts: 1 of 2") < heard.index("READY=1")
        assert "STOPPING=1" not in heard
        os.kill(os.getpid(), signal.SIGTERM)
        while heard[-1] != "STOPPING=1":
            heard.append((await asyncio.to_thread(manager.recv, 4096)).decode())
        release.set()
        assert await asyncio.wait_for(running, 10) is None


async def test_a_follower_that_is_asked_to_stop_waits_for_rank_0_as_long_as_it_lives(
    make_daemon, monkeypatch, tmp_path
):
    release = threading.Event()

    def thread(side):
        side.ready(FakeEngine())
        release.wait(30)
        side.ended(None)

    monkeypatch.setattr(life, "ENGINE_END_S", 0.01)
    rank = make_daemon(thread)
    rank._settings = replace(rank._settings, server=Server(drain_s=0.0))  # rank 0's own affair
    running = asyncio.create_task(rank.run())
    while read_rank(tmp_path, 1).phase != "ready":
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    done, _ = await asyncio.wait((running,), timeout=0.5)
    assert not done
    release.set()
    assert await asyncio.wait_for(running, 10) is None


def test_an_engine_stalls_only_while_it_has_work():
    progress = Progress(now_s=0.0)
    assert progress.stalled_s(3, True, 10.0) == 0  # the first look knows no step before it
    assert progress.stalled_s(3, True, 14.0) == 4
    assert progress.stalled_s(4, True, 15.0) == 0  # a step
    assert progress.stalled_s(4, False, 90.0) == 0  # rest
    assert progress.stalled_s(4, True, 92.0) == 2  # counted from the last rest on


class Peers:
    """Stands for the heartbeats."""

    def __init__(self, **seq):
        self.peer_seq = {int(name.removeprefix("rank_")): value for name, value in seq.items()}
        self.faults = []

    async def fault(self, message):
        self.faults.append(message)

    async def close(self): ...


async def test_a_rank_whose_engine_hangs_ends_and_tells_the_others(make_daemon):
    release = threading.Event()

    def thread(side):
        side.ready(FakeEngine())
        release.wait(30)

    rank = make_daemon(thread, step_timeout_s=0.2)
    rank._heartbeats = Peers(rank_0=5)
    error = await asyncio.wait_for(rank.run(), 10)
    assert isinstance(error, PairError)
    assert "rank 1's engine makes no step since 0." in error.what
    assert rank._heartbeats.faults == [error.what]
    release.set()


@pytest.mark.parametrize(
    ("busy", "behind", "words"),
    [
        (True, 7, "rank 0's engine makes no step since"),
        (True, 3, "rank 1's engine makes no step since"),
        (False, 3, "rank 1's engine makes no step since"),
        (False, 7, None),
    ],
)
async def test_rank_0_names_the_rank_that_is_behind_and_lets_a_pair_rest(make_daemon, busy, behind, words):
    release = threading.Event()
    rank = make_daemon(lambda side: release.wait(30), number=0, step_timeout_s=0.1)
    rank._start_engine()
    rank._engine, rank._heartbeats = FakeEngine(), Peers(rank_1=behind)
    rank._engine.seq = 7
    client = type("Client", (), {"health": lambda self: {"busy": busy}})()
    rank._front = type("Front", (), {"client": client})()
    watch = asyncio.create_task(rank._watch_engine())
    await asyncio.wait((rank._outcome,), timeout=10 if words else 0.5)
    assert rank._outcome.done() == (words is not None)
    assert not words or words in rank._outcome.result().what
    watch.cancel()
    release.set()


async def broken(*_, **__):
    raise PermissionError(errno.EPERM, "not permitted", "/secret/x")


@pytest.mark.parametrize(
    ("where", "name", "words"),
    [
        (life, "watch", "the watch over this node's memory failed: PermissionError: not permitted"),
        (Daemon, "_watch_engine", "the watch over the engine failed: PermissionError: not permitted"),
        (Daemon, "_live", "the loop failed: PermissionError: not permitted"),
    ],
)
async def test_a_watch_that_fails_ends_its_rank_and_tells_the_others(make_daemon, monkeypatch, where, name, words):
    release = threading.Event()

    def thread(side):
        side.ready(FakeEngine())
        release.wait(30)

    monkeypatch.setattr(where, name, broken)
    rank = make_daemon(thread)
    rank._heartbeats = Peers()
    error = await asyncio.wait_for(rank.run(), 10)
    assert error is not None
    assert error.what == words
    assert rank._heartbeats.faults == [words]
    release.set()


@pytest.mark.parametrize("engine_runs", [True, False])
async def test_the_watchdog_is_fed_while_the_engine_runs_and_not_otherwise(make_daemon, engine_runs):
    release = threading.Event()
    fed = []
    rank = make_daemon(lambda side: release.wait(30))
    rank._notifier.alive = lambda: fed.append(1)
    rank._notifier.watchdog_s = 0.03
    rank._start_engine()
    rank._engine = FakeEngine()
    if not engine_runs:
        release.set()
        rank._thread.join(10)
    watch = asyncio.create_task(rank._watch_engine())
    await asyncio.sleep(0.2)
    assert bool(fed) == engine_runs
    watch.cancel()
    release.set()


@pytest.mark.parametrize("stands", [True, False])
async def test_an_engine_that_stands_still_ends_its_rank_though_it_has_no_work(make_daemon, monkeypatch, stands):
    monkeypatch.setattr(life, "TURN_S", 0.1)
    release = threading.Event()
    fed = []
    rank = make_daemon(lambda side: release.wait(30), step_timeout_s=0.1)
    rank._notifier.alive = lambda: fed.append(1)
    rank._start_engine()
    rank._engine = FakeEngine()
    rank._engine.stands = time.monotonic() if stands else 0.0
    watch = asyncio.create_task(rank._watch_engine())
    await asyncio.wait((rank._outcome,), timeout=10 if stands else 0.5)
    assert rank._outcome.done() == stands
    if stands:
        assert "rank 1's engine makes no step since 0." in rank._outcome.result().what
        heard = len(fed)
        await asyncio.sleep(0.1)
        assert len(fed) == heard  # the service manager hears no more of it
    watch.cancel()
    release.set()


async def test_a_start_asks_for_the_time_in_which_the_other_ranks_may_come(make_daemon):
    asked = []
    rank = make_daemon(lambda side: side.ended(None), start_timeout_s=300.0)
    rank._notifier.more_time = asked.append
    rank._show("joining", "handshake")
    assert asked == [300.0 + life.START_MORE_S]


async def test_a_reload_is_told_to_the_service_manager_and_changes_nothing_before_it_serves(make_daemon, caplog):
    told = []
    rank = make_daemon(lambda side: None)
    rank._notifier.reloading, rank._notifier.ready = lambda: told.append("reloading"), lambda: told.append("ready")
    rank._front = type("Front", (), {"reload": lambda self: told.append("keys")})()
    with caplog.at_level("INFO"):
        rank._reload()
    assert (told, "while not serving" in caplog.text) == ([], True)
    rank._engine = FakeEngine()
    rank._reload()
    assert told == ["reloading", "keys", "ready"]


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (ValueError("a mistake"), TideError, "ValueError"),  # its words may hold paths: they are in the log
        (DataError("damaged"), DataError, "damaged"),
    ],
)
def test_whatever_the_start_raises_is_told(monkeypatch, tmp_path, raised, kind, words):
    def fail(*_):
        raise raised

    class Side:
        told = None

        def ended(self, error):
            self.told = error

    monkeypatch.setattr(boot, "_lead", fail)
    side = Side()
    boot.run_rank(make_settings(1), 0, None, tmp_path, side)
    assert type(side.told) is kind
    assert words in str(side.told)


def outcome(settings, tmp_path):
    """What a rank's engine thread says in the end."""

    class Side:
        told = None

        def tell(self, *_): ...

        def joined(self, session): ...

        def ended(self, error):
            self.told = error

    side = Side()
    boot.run_rank(settings, 0, None, tmp_path, side)
    return side.told


def test_a_budget_that_no_machine_holds_is_refused_with_its_bytes_and_its_setting(checkpoint, tmp_path):
    settings = settings_of(checkpoint)
    fault = outcome(replace(settings, experts=Experts(resident=80, spare_slots=1 << 40)), tmp_path)
    assert type(fault) is UnavailableError
    assert re.search(r"[\d,.]+ GB of slots beside them", fault.what)
    assert " GB are free" in fault.what  # before the ranks met: nothing was asked for yet
    fault = outcome(replace(settings, cache=Cache(context_tokens=1024, pool_tokens=1 << 44)), tmp_path)
    assert type(fault) is UnavailableError
    assert "GB of context (cache.pool_tokens)" in fault.what


def test_cuda_where_there_is_none_is_refused(checkpoint, tmp_path):
    fault = outcome(replace(settings_of(checkpoint), engine=Engine(device="cuda")), tmp_path)
    assert type(fault) is UnavailableError
    assert "no CUDA device" in fault.what


HANGING = """
import asyncio, atexit, logging, pathlib, sys, time
from tests.control.conftest import make_settings
from tided import boot, daemon
from tided.control.state import StateFile
from tided.errors import PairError

def hang(settings, rank, keys, state_dir, side):
    side.ended(PairError("rank 0 is silent"))
    time.sleep(60)

boot.run_rank = hang
atexit.register(time.sleep, 60)  # as the destructors of a broken process group may
logging.basicConfig()
sys.exit(asyncio.run(daemon._run(make_settings(2), 1, None, StateFile(pathlib.Path(sys.argv[1]), 1))))
"""


def test_a_process_whose_engine_hangs_ends_at_once_and_leaves_a_trace(tmp_path):
    command = [sys.executable, "-c", HANGING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 70
    assert "rank 0 is silent" in done.stderr
    assert "in hang" in done.stderr  # where the engine stood
    assert read_rank(tmp_path, 1).exit_code == 70


def test_a_rank_that_waits_for_the_others_can_be_stopped(checkpoint, tmp_path):
    profile, _ = write_profile(tmp_path, profile_text(checkpoint))
    command = [sys.executable, "-m", "tided.daemon", "--profile", str(profile), "--rank", "1"]
    process = subprocess.Popen([*command, "--state-dir", str(tmp_path / "state")], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: (state := read_rank(tmp_path / "state", 1)) and state.phase == "joining", 60)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(5) == 0
        assert read_rank(tmp_path / "state", 1).phase == "stopped"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("soft", "hard", "becomes", "warns"),
    [
        (1024, 4096, (1536, 4096), False),
        (1024, resource.RLIM_INFINITY, (1536, resource.RLIM_INFINITY), False),
        (256, 1100, (1100, 1100), True),
        (2048, 4096, None, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, False),
    ],
)
def test_there_is_room_for_connections_beside_the_engines_files(monkeypatch, caplog, soft, hard, becomes, warns):
    became = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: became.append(limits))
    make_room(512)
    assert became == ([becomes] if becomes else [])
    assert ("LimitNOFILE" in caplog.text) is warns
