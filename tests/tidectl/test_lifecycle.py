"""start, stop, restart, status and logs over the real supervisor, with ranks that only pretend to load a model."""

import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tidectl.canned import Tidectl
from tidectl import differing, preflight, starting, supervisor
from tidectl.waiting import Item

FAKE = (sys.executable, str(Path(__file__).with_name("fake_daemon.py")))


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nothing uses, below those that the kernel hands out by itself."""
    while True:
        first = random.randrange(20_000, 32_000)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


def within(seconds: float, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    return write_profile(tmp_path / "pair.toml")


def write_profile(path: Path) -> Path:
    server = free_ports(4)
    path.write_text(
        f"[model]\npath = 'model'\nserved_name = 'mini'\n[experts]\nresident = 8\n"
        f"[cache]\ncontext_tokens = 64\npool_tokens = 64\n[server]\nport = {server}\ndrain_s = 1\n"
        f"[parallel]\nranks = 2\ncontrol_port = {server + 1}\ndata_port = {server + 3}\n"
    )
    return path


@pytest.fixture(autouse=True)
def ranks_of_our_own(monkeypatch: pytest.MonkeyPatch, state: Path) -> Iterator[None]:
    monkeypatch.setattr(supervisor, "start", functools.partial(supervisor.start, program=FAKE))
    monkeypatch.delenv("FAKE_DAEMON", raising=False)
    yield
    if (state / "lock").exists() and supervisor.status(state).run:
        supervisor.stop(state, 0.5)


def test_start_status_logs_stop(tidectl: Tidectl, profile: Path, state: Path) -> None:
    url = f"http://127.0.0.1:{supervisor_port(profile)}"
    started = tidectl("start", str(profile))
    assert (started.exit_code, started.stdout) == (0, "")
    assert f"mini serves at {url} (profile {profile})\n" in started.stderr
    assert started.stderr.endswith(f"or {url}/expert-map; end it: tidectl stop\n")
    assert state.stat().st_mode & 0o777 == 0o700

    status = tidectl("status")
    assert status.exit_code == 0
    rows = {line.split()[0]: line.split(maxsplit=1)[1].rstrip() for line in status.stdout.splitlines() if line}
    assert rows["state"].startswith("serving")
    assert rows["profile"] == str(profile)
    assert rows["url"] == url
    assert (rows["model"], rows["lanes"]) == ("mini", "1 of 2 busy, 4 waiting")
    assert rows["residents"] == "312 of 480 experts (65.0 % of them), plan 3"
    assert rows["policy"] == "sensitivity high, no hot ring"
    assert rows["tide"] == "at rest; the newest plan (after a prompt, 3 min 20 s ago): 9 of 12 experts exchanged"
    assert re.fullmatch(r"\d+\.\d of \d+\.\d GB available", rows["memory"])
    assert rows["rank"].split() == ["phase", "for", "process", "memory", "reads"]
    assert rows["0"].startswith("ready")
    assert rows["1"].startswith("ready")

    as_json = json.loads(tidectl("status", "--json").stdout)
    assert (as_json["schema"], as_json["state"], as_json["trouble"]) == ("tidectl.status/1", "serving", [])
    assert [rank["rank"] for rank in as_json["ranks"]] == [0, 1]
    assert as_json["health"]["lanes"]["total"] == 2

    assert tidectl("logs", "--rank", "1").stdout == "rank 1 loads\n"
    assert tidectl("logs").stdout == "rank 0 | rank 0 loads\nrank 1 | rank 1 loads\n"

    stopped = tidectl("stop")
    assert (stopped.exit_code, stopped.stdout) == (0, "")
    assert f"stopped {profile}" in stopped.stderr
    assert "exit code" not in stopped.stderr
    after = tidectl("status")
    assert (after.exit_code, after.stdout, after.stderr) == (3, "", "nothing is running\n")
    assert tidectl("stop").exit_code == 3
    assert "ends" in tidectl("logs", "--rank", "0").stdout  # the log outlives the rank


def supervisor_port(profile: Path) -> int:
    from tided.profile import load

    return load(profile).server.port


def test_json_of_start_and_stop(tidectl: Tidectl, profile: Path) -> None:
    started = json.loads(tidectl("start", str(profile), "--json").stdout)
    assert started["schema"] == "tidectl.start/1"
    assert [rank["rank"] for rank in started["ranks"]] == [0, 1]
    assert all(Path(f"/proc/{rank['pid']}").exists() for rank in started["ranks"])
    stopped = json.loads(tidectl("stop", "--json").stdout)
    assert stopped == {
        "schema": "tidectl.stop/1",
        "profile": str(profile),
        "ranks": [{"rank": 0, "exit_code": 0}, {"rank": 1, "exit_code": 0}],
        "cut": {"running": 0, "waiting": 0},
    }


def test_starting_twice_names_what_runs(tidectl: Tidectl, profile: Path, state: Path) -> None:
    assert tidectl("start", str(profile)).exit_code == 0
    run = supervisor.status(state).run
    assert run is not None
    again = tidectl("start", str(profile))
    assert again.exit_code == 69
    assert f"{profile} runs already (process {run.supervisor.pid})" in again.stderr
    assert "tidectl stop" in again.stderr
    assert tidectl("status").exit_code == 0


def test_a_busy_port_is_named_before_anything_starts(tidectl: Tidectl, profile: Path, state: Path) -> None:
    with socket.create_server(("127.0.0.1", supervisor_port(profile))):
        ran = tidectl("start", str(profile))
    assert ran.exit_code == 69
    assert f"127.0.0.1:{supervisor_port(profile)} (server.port): the port is in use" in ran.stderr
    assert not (state / "logs").exists()
    assert tidectl("start", str(profile)).exit_code == 0


def test_what_cannot_start_is_refused_before_anything_starts(tidectl: Tidectl, profile: Path, state: Path) -> None:
    text = profile.read_text()
    cases = [
        (text.replace("resident", "residents"), 78, "did you mean 'resident'?"),
        (text.replace("'model'", "'elsewhere'"), 65, "there is no checkpoint at"),
        (text.replace("ranks = 2", "ranks = 2\nhosts = ['203.0.113.1', '203.0.113.2']"), 78, "is an address of this"),
        (text.replace("[server]", "[server]\nhost = '203.0.113.1'\nallow_open = true"), 78, "nothing can listen there"),
    ]
    for changed, code, words in cases:
        profile.write_text(changed)
        ran = tidectl("start", str(profile))
        assert (ran.exit_code, ran.stdout) == (code, ""), ran.stderr
        assert words in ran.stderr
        assert not (state / "logs").exists()
        assert tidectl("status").exit_code == 3


def test_a_rank_that_dies_at_start_is_told_with_its_log(
    tidectl: Tidectl, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DAEMON", "1:die")
    ran = tidectl("start", str(profile))
    assert ran.exit_code == 65
    assert "error: rank 1: the shard is truncated\n" in ran.stderr
    assert ran.stderr.count("truncated") == 1  # in the log too
    assert "the last lines of rank 1's log:\n  rank 1 loads\n  what went wrong, in full\n" in ran.stderr
    status = tidectl("status")
    assert status.exit_code == 3
    assert "rank 1 ended with exit code 65: the shard is truncated" in status.stderr
    assert json.loads(tidectl("status", "--json").stdout)["last"]["first"] == 1
    again = tidectl("start", str(profile))
    assert again.stderr.count("what went wrong, in full") == 1  # not the first run's lines too
    monkeypatch.delenv("FAKE_DAEMON")
    assert tidectl("start", str(profile)).exit_code == 0


def test_a_start_that_takes_too_long_goes_on(tidectl: Tidectl, profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DAEMON", "1:hang")
    ran = tidectl("start", str(profile), "--timeout", "4")
    assert ran.exit_code == 69
    assert "rank 0 ready, rank 1 loading (experts: 3 of 8)\n" in ran.stderr
    status = tidectl("status")
    assert status.exit_code == 4
    assert status.stdout.startswith("state      starting\n")
    rank = json.loads(tidectl("status", "--json").stdout)["ranks"][1]
    assert (rank["phase"], rank["done"], rank["total"]) == ("loading", 3, 8)
    assert tidectl("stop").exit_code == 0


def test_an_interrupted_start_leaves_nothing(
    tidectl: Tidectl, profile: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DAEMON", "1:hang")
    seen: list[int] = []

    def interrupt(start: starting.Start) -> list[Item]:
        ranks = supervisor.status(state).ranks
        if len(ranks) == 2:
            seen.extend(rank.pid for rank in ranks)
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(starting.Start, "items", interrupt)
    ran = tidectl("start", str(profile))
    assert ran.exit_code == 130
    assert "nothing is running" in ran.stderr
    assert len(seen) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in seen)
    assert tidectl("status").exit_code == 3


def test_ranks_of_a_killed_supervisor_are_seen_and_replaced(tidectl: Tidectl, profile: Path, state: Path) -> None:
    assert tidectl("start", str(profile)).exit_code == 0
    run = supervisor.status(state).run
    assert run is not None
    os.kill(run.supervisor.pid, signal.SIGKILL)
    within(5, lambda: not supervisor.is_locked(state))
    status = tidectl("status")
    assert status.exit_code == 4
    assert "the supervisor was killed" in status.stdout
    assert tidectl("start", str(profile)).exit_code == 0  # their ports are free again
    assert tidectl("status").exit_code == 0


def test_a_dead_rank_ends_all(tidectl: Tidectl, profile: Path, state: Path) -> None:
    assert tidectl("start", str(profile)).exit_code == 0
    rank = json.loads(tidectl("status", "--json").stdout)["ranks"][1]
    os.kill(rank["pid"], signal.SIGKILL)
    within(20, lambda: tidectl("status").exit_code == 3)
    first, second, third = tidectl("status").stderr.splitlines()[1:]
    assert re.fullmatch(rf"{profile} ended on [-0-9: ]+: rank 1 was killed by signal 9", first)
    assert "for want of memory" in second
    assert third == f"its log: tidectl logs --rank 1; again: tidectl start {profile}"
    again = tidectl("restart")
    assert (again.exit_code, f"nothing was running: starting {profile}" in again.stderr) == (0, True)


def test_a_deaf_rank_is_killed_and_named(tidectl: Tidectl, profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_DAEMON", "1:deaf")
    assert tidectl("start", str(profile)).exit_code == 0
    stopped = tidectl("stop", "--timeout", "0")
    assert stopped.exit_code == 0
    assert "rank 1 was killed by signal 9" in stopped.stderr  # by its supervisor, which tells of it
    assert "the time was over; requests cut: 1 running, 4 waiting" in stopped.stderr
    assert tidectl("status").exit_code == 3


def test_a_deaf_supervisor_is_killed_with_its_ranks(
    tidectl: Tidectl, profile: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DAEMON", "1:deaf")
    assert tidectl("start", str(profile)).exit_code == 0
    run = supervisor.status(state).run
    assert run is not None
    os.kill(run.supervisor.pid, signal.SIGSTOP)
    within(5, run.supervisor.is_stopped)
    assert tidectl("stop", "--timeout", "0").exit_code == 0
    assert not any(child.process.is_alive() for child in run.ranks)
    assert tidectl("status").exit_code == 3


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints of these tests are empty: only pretending ranks take them."""
    monkeypatch.setattr(differing, "refuse", lambda *_: None)


def test_a_checkpoint_that_only_ranks_can_judge_costs_no_service(tidectl: Tidectl, profile: Path) -> None:
    assert tidectl("start", str(profile)).exit_code == 0
    before = json.loads(tidectl("status", "--json").stdout)["ranks"]
    refused = tidectl("restart")
    assert (refused.exit_code, "no room for a safetensors header" in refused.stderr) == (65, True), refused.stderr
    after = json.loads(tidectl("status", "--json").stdout)
    assert after["state"] == "serving"
    assert [rank["pid"] for rank in after["ranks"]] == [rank["pid"] for rank in before]


@pytest.mark.usefixtures("judged")
def test_restart_needs_something_to_restart(tidectl: Tidectl, profile: Path) -> None:
    assert tidectl("restart").exit_code == 3
    assert tidectl("restart", str(profile)).exit_code == 0
    before = json.loads(tidectl("status", "--json").stdout)["ranks"]
    assert tidectl("restart").exit_code == 0
    after = json.loads(tidectl("status", "--json").stdout)["ranks"]
    assert {rank["pid"] for rank in before}.isdisjoint(rank["pid"] for rank in after)


@pytest.mark.usefixtures("judged")
def test_a_wrong_profile_costs_no_service(tidectl: Tidectl, profile: Path, tmp_path: Path) -> None:
    assert tidectl("start", str(profile)).exit_code == 0
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("x = 1")
    assert tidectl("restart", str(wrong)).exit_code == 78
    assert tidectl("status").exit_code == 0
    other = write_profile(tmp_path / "other.toml")
    assert tidectl("restart", str(other)).exit_code == 0
    assert json.loads(tidectl("status", "--json").stdout)["profile"] == str(other)


def test_logs_are_followed_until_the_ranks_end(profile: Path, tidectl: Tidectl, state: Path) -> None:
    assert tidectl("start", str(profile)).exit_code == 0
    command = [sys.executable, "-m", "tidectl.main", "logs", "-f", "--rank", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        first = json.loads(following.stdout.readline())
        assert first == {"schema": "tidectl.logs-line/1", "rank": 0, "line": "rank 0 loads"}
        assert tidectl("stop").exit_code == 0
        out, err = following.communicate(timeout=20)
    assert [json.loads(line)["line"] for line in out.splitlines()] == ["rank 0 ends"]
    assert (following.returncode, err) == (0, "the ranks have ended\n")


def test_chat_finds_what_runs(tidectl: Tidectl, profile: Path) -> None:
    from tidectl.running import running_url

    assert running_url() is None
    assert tidectl("start", str(profile)).exit_code == 0
    assert running_url() == f"http://127.0.0.1:{supervisor_port(profile)}"


@pytest.mark.parametrize("late", ["0:hang,1:hang", "1:hang"], ids=["without a port", "with a port"])
def test_chat_and_why_tell_of_a_start_that_is_under_way(
    tidectl: Tidectl, profile: Path, state: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    monkeypatch.setenv("FAKE_DAEMON", late)
    supervisor.start(profile, state)
    phases = ["loading", "loading"] if late.startswith("0") else ["ready", "loading"]
    within(20, lambda: [rank.phase for rank in supervisor.status(state).ranks] == phases)
    for command in (["chat", "?"], ["why"]):
        ran = tidectl(*command)
        assert ran.exit_code == 4
        assert f"{profile} is starting" in ran.stderr
        assert "tidectl status" in ran.stderr
        assert "8000" not in ran.stderr
    assert tidectl("chat", "?", "--url", f"127.0.0.1:{free_ports(1)}").exit_code == 3  # of another server


def test_a_port_below_1024_needs_a_privilege(monkeypatch: pytest.MonkeyPatch) -> None:
    from tided.errors import PermissionError_

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)  # tests may run as root
    with pytest.raises(PermissionError_, match="may not listen"):
        preflight.require_free("127.0.0.1", 80, "server.port")


@pytest.mark.parametrize("asked", [True, False])
def test_an_ordinary_stop_is_no_trouble(
    tidectl: Tidectl, profile: Path, state: Path, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """Asked for by `tidectl stop`, whose signal the supervisor gets, with rank 1 gone already; or each rank was told to
    end by itself. Rank 0 has closed its port in either case."""
    monkeypatch.setenv("FAKE_DAEMON", "0:drain" if asked else "0:drain,1:drain")
    assert tidectl("start", str(profile)).exit_code == 0
    run = supervisor.status(state).run
    assert run is not None
    for process in [run.supervisor] if asked else [child.process for child in run.ranks]:
        process.send(signal.SIGTERM)

    def phases() -> list[str]:
        return [rank.phase for rank in supervisor.status(state).ranks]

    within(20, lambda: phases() == ["draining", "stopped" if asked else "draining"])
    if asked:
        within(20, lambda: not run.ranks[1].process.is_alive())
    ran = tidectl("status", "--json")
    found = json.loads(ran.stdout)
    assert (ran.exit_code, found["state"], found["trouble"]) == (4, "stopping", [])
    assert tidectl("status").stdout.startswith("state      stopping\n")
    refused = tidectl("chat", "?")
    assert (refused.exit_code, f"{profile} is stopping" in refused.stderr) == (4, True)
    (state / "go").touch()
    within(20, lambda: not supervisor.is_locked(state))
    assert tidectl("status").exit_code == 3
