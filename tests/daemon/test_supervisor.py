import os
import signal
import sys
import time
from contextlib import contextmanager
from functools import partial

import pytest

from tests.daemon.helpers import FAKE, running, started, until, write_profile
from tidectl import supervise, supervisor
from tidectl.nodes import local_ranks
from tidectl.processes import Identity, identify
from tidectl.supervise import Log
from tided.errors import ConfigError, DataError, NotRunningError, PairError, UnavailableError
from tided.settings import Parallel

PROGRAM = (sys.executable, "-m", "tests.daemon.fake_rank")
fake = partial(running, FAKE, program=PROGRAM)


def behave(tmp_path, rank, words):
    (tmp_path / "state").mkdir(mode=0o700, exist_ok=True)
    (tmp_path / "state" / f"behaviour-{rank}").write_text(words)


@contextmanager
def starting(tmp_path):
    profile, port = write_profile(tmp_path, FAKE)
    with started(profile, tmp_path / "state", port, PROGRAM) as pair:
        yield pair


def alive(pid):
    with_stat = supervisor_identity(pid)
    return with_stat is not None and with_stat.is_alive()


def supervisor_identity(pid):
    try:
        return identify(pid)
    except ProcessLookupError:
        return None


def test_ranks_start_serve_and_stop_and_nothing_is_left(tmp_path):
    seen = []
    profile, port = write_profile(tmp_path, FAKE)
    with started(profile, tmp_path / "state", port, PROGRAM) as pair:
        ready = pair.handle.wait_ready(30, seen.append)
        assert [(state.rank, state.phase, state.port) for state in ready] == [(0, "ready", 8000), (1, "ready", 0)]
        assert seen[-1] == ready
        pids = pair.pids
        status = supervisor.status(pair.state_dir)
        assert status.running
        assert status.run.profile == str(profile)
        assert os.getsid(pids[0]) == pair.handle.process.pid != os.getsid(0)
        supervisor.stop(pair.state_dir, 10)
        assert not any(map(alive, pids))
        assert pair.handle.process.wait(5) == 0
        last = pair.ended()
        assert last.first is None
        assert [rank.exit_code for rank in last.ranks] == [0, 0]
        assert not supervisor.status(pair.state_dir).running
        assert not (pair.state_dir / "supervisor.json").exists()
        with pytest.raises(NotRunningError):
            supervisor.stop(pair.state_dir, 1)
        assert "INFO rank 1 starts" in pair.log(1)


def test_a_second_start_names_the_first(tmp_path):
    with fake(tmp_path) as pair:
        with pytest.raises(UnavailableError, match=f"profile.toml runs already.*{pair.handle.process.pid}"):
            supervisor.start(pair.profile, pair.state_dir, PROGRAM)
        assert all(map(alive, pair.pids))
        assert pair.state(0).phase == "ready"


@pytest.mark.parametrize(("victim", "other"), [(0, 1), (1, 0)])
def test_when_a_rank_is_killed_all_end_and_a_new_start_works(tmp_path, victim, other):
    with fake(tmp_path) as pair:
        pids = pair.pids
        pair.kill(victim, signal.SIGKILL)
        last = pair.ended()
        assert last.first == victim
        assert {rank.rank: rank.exit_code for rank in last.ranks} == {victim: 137, other: 0}
        assert not any(map(alive, pids))
    with fake(tmp_path) as again:
        assert all(map(alive, again.pids))
        assert not (again.state_dir / "last.json").exists()


def test_a_stopped_and_a_deaf_rank_are_killed(tmp_path, monkeypatch):
    behave(tmp_path, 1, "deaf")
    with fake(tmp_path) as pair:
        pids = pair.pids
        pair.kill(1, signal.SIGSTOP)
        pair.kill(0, signal.SIGKILL)
        assert [rank.exit_code for rank in pair.ended().ranks] == [137, 137]
        assert not any(map(alive, pids))


def test_a_stopped_rank_is_not_waited_for(tmp_path):
    profile, port = write_profile(tmp_path, FAKE)
    profile.write_text(profile.read_text().replace("drain_s = 2", "drain_s = 600"))
    with started(profile, tmp_path / "state", port, PROGRAM) as pair:
        pair.handle.wait_ready(30)
        pair.kill(1, signal.SIGSTOP)
        until(lambda: identify(pair.pids[1]).is_stopped())
        pair.handle.process.send_signal(signal.SIGTERM)
        assert {rank.rank: rank.exit_code for rank in pair.ended().ranks} == {0: 0, 1: 137}


def test_a_deaf_rank_is_killed_when_its_time_is_over(tmp_path):
    behave(tmp_path, 1, "deaf")
    with fake(tmp_path) as pair:
        pids = pair.pids
        supervisor.stop(pair.state_dir, 1)  # kills the supervisor itself, then what it left
        assert not any(map(alive, pids))
        assert not supervisor.status(pair.state_dir).running


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        ("fail 78 rank 1 differs from rank 0", ConfigError, 78),
        ("fail 65 model.safetensors is truncated", DataError, 65),
        ("fail 70 rank 0 hung up", PairError, 70),
        ("fail 3 unheard of", PairError, 70),
    ],
)
def test_a_start_fails_with_the_words_and_the_code_of_the_rank_that_failed(tmp_path, words, kind, code):
    behave(tmp_path, 1, words)
    with starting(tmp_path) as pair:
        with pytest.raises(kind) as error:
            pair.handle.wait_ready(30)
        assert words.split(maxsplit=2)[2] in str(error.value)
        assert "rank-1.log" in str(error.value)
        assert error.value.exit_code == code
        assert pair.ended().first == 1


def test_a_rank_that_dies_without_a_word_is_reported(tmp_path):
    behave(tmp_path, 0, "die")
    with starting(tmp_path) as pair, pytest.raises(PairError, match="rank 0 was killed by signal 9 and said nothing"):
        pair.handle.wait_ready(30)


def test_a_wrong_profile_ends_the_supervisor_with_a_clear_error(tmp_path):
    profile = tmp_path / "profile.toml"
    profile.write_text("[modle]\n")
    with started(profile, tmp_path / "state", 0, PROGRAM) as pair:
        with pytest.raises(UnavailableError, match="supervisor ended"):
            pair.handle.wait_ready(30)
        assert "modle" in (pair.state_dir / "logs" / "supervisor.log").read_text()


def test_not_ready_in_time_is_said_and_the_run_goes_on(tmp_path):
    with starting(tmp_path) as pair:
        with pytest.raises(UnavailableError, match="not ready"):
            pair.handle.wait_ready(0.0)
        pair.handle.wait_ready(30)


@pytest.mark.parametrize("command", ["start", "stop"])
def test_orphans_of_a_killed_supervisor_are_ended(tmp_path, command):
    with fake(tmp_path) as pair:
        pids = pair.pids
        pair.handle.process.kill()
        pair.handle.process.wait(5)
        status = supervisor.status(pair.state_dir)
        assert not status.running
        assert status.run is not None
        assert all(map(alive, pids))
        if command == "stop":
            supervisor.stop(pair.state_dir, 5)
            assert not any(map(alive, pids))
        else:
            with fake(tmp_path) as again:
                assert not any(map(alive, pids))
                assert all(map(alive, again.pids))


def test_a_pid_that_was_used_again_is_left_alone():
    stranger = Identity(os.getpid(), identify(os.getpid()).start_ticks - 1)
    assert not stranger.is_alive()
    stranger.send(signal.SIGKILL)
    assert identify(os.getpid()).is_alive()


def test_all_lines_of_a_loud_rank_are_kept_in_order(tmp_path):
    behave(tmp_path, 0, "loud 3000")
    with fake(tmp_path) as pair:
        lines = until(lambda: len(found := pair.log(0).splitlines()) == 3002 and found)
        assert " start of " in lines[0]  # the supervisor's own, between two runs
        assert [int(line.split()[1]) for line in lines[2:]] == list(range(3000))
        assert (pair.state_dir / "logs" / "rank-0.log").stat().st_mode & 0o777 == 0o600


def test_a_full_log_is_rotated_and_the_oldest_goes(tmp_path):
    log = Log(tmp_path / "rank-0.log", limit_bytes=100)
    for line in range(60):
        log.write(f"line {line:3}\n".encode())
    log.close()
    files = sorted(tmp_path.iterdir(), reverse=True)
    assert [file.name for file in files] == ["rank-0.log.3", "rank-0.log.2", "rank-0.log.1", "rank-0.log"]
    numbers = [int(line.split()[1]) for file in files for line in file.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 60))
    assert all(file.stat().st_size <= 100 for file in files)


def test_a_log_is_rotated_between_lines_however_they_are_cut(tmp_path):
    text = b"".join(b"line %04d\n" % line for line in range(30))
    log = Log(tmp_path / "rank-0.log", limit_bytes=95)
    for start in range(0, len(text), 3):
        log.write(text[start : start + 3])
    log.close()
    files = sorted(tmp_path.iterdir(), reverse=True)
    assert len(files) > 2
    assert b"".join(file.read_bytes() for file in files) == text
    assert all(file.read_bytes().endswith(b"\n") for file in files)
    assert all(file.stat().st_size <= 95 + 10 for file in files)


def test_a_rank_that_had_stopped_when_the_word_came_has_stopped(tmp_path):
    behave(tmp_path, 1, "gone")
    with starting(tmp_path) as pair:
        until(lambda: (state := pair.state(1)) and state.phase == "stopped")
        until(lambda: pair.state(0))  # it takes the word by now
        until(lambda: pair.run)
        supervisor.stop(pair.state_dir, 10)
        last = pair.ended()
    assert [rank.exit_code for rank in last.ranks] == [0, 0]


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_how_a_run_ended_is_told_on_a_full_disk_in_the_room_of_what_ran(tmp_path, monkeypatch, refused):
    """`refused`: writes, one after the other."""
    ended, run = tmp_path / "last.json", tmp_path / "supervisor.json"
    run.write_text("{}")
    left, write = [OSError(28, "No space left on device")] * refused, supervise.write_private

    def full(path, data):
        if left:
            raise left.pop()
        write(path, data)

    monkeypatch.setattr(supervise, "write_private", full)
    one = supervise.Supervisor(tmp_path / "p.toml", tmp_path, [], [], None)
    one._finish()
    assert not run.exists()
    assert ended.exists() == (refused < 2)
    one._selector.close()


def test_only_ranks_of_this_machine_are_started():
    assert local_ranks(Parallel(ranks=3)) == [0, 1, 2]
    assert local_ranks(Parallel(ranks=2, hosts=("192.0.2.1", "127.0.0.1"))) == [1]


def test_the_state_is_readable_by_nobody_else(tmp_path):
    with fake(tmp_path) as pair:
        for path in (pair.state_dir, pair.state_dir / "logs", *pair.state_dir.glob("*.json")):
            assert path.stat().st_mode & 0o077 == 0, path
        assert time.time() - pair.state(0).since < 60
