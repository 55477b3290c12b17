"""start, stop, status and logs over two nodes: 127.0.0.1, and 127.0.0.2 behind a program that stands for ssh and gives
it a state directory of its own. The ranks only pretend to load a model."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.tidectl.canned import Tidectl
from tests.tidectl.test_lifecycle import free_ports, within
from tidectl import lifecycle, nodes, peers, record, runner, seeing, starting, status, stopping, supervisor
from tidectl.node_messages import PROTOCOL, About, Done, Lines, Look, MoreLogs, OpenLogs, Process, Seen, Tail
from tidectl.node_work import Work, seen
from tidectl.nodes import Node, nodes_of
from tidectl.processes import Identity, identify
from tidectl.running import Snapshot, ranks_of
from tidectl.team import Here, Team
from tided.control.state import RankState
from tided.errors import UnavailableError
from tided.profile import load
from tided.settings import Parallel

PEER = "127.0.0.2"
DAEMON = Path(__file__).with_name("fake_daemon.py")
# The supervisor is started by another process there, so the pretending ranks are put in its place by the environment.
PRETEND = f"""
import os, sys
if "FAKE_RANKS" in os.environ:
    import tidectl.supervisor as supervisor
    program = (sys.executable, {str(DAEMON)!r})
    supervisor.start.__defaults__ = (program, None)
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in for ssh keeps its hosts."""
    programs = tmp_path / "bin"
    programs.mkdir()
    shutil.copy(Path(__file__).with_name("fake_ssh.sh"), programs / "ssh")
    (programs / "sitecustomize.py").write_text(PRETEND)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    paths = [str(programs), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in paths if path))
    monkeypatch.setenv("FAKE_RANKS", "1")
    monkeypatch.setenv("FAKE_SSH", str(tmp_path / "hosts"))
    monkeypatch.delenv("FAKE_DAEMON", raising=False)
    monkeypatch.setattr(supervisor.start, "__defaults__", ((sys.executable, str(DAEMON)), None))
    (tmp_path / "hosts" / PEER).mkdir(parents=True)
    return tmp_path / "hosts"


@pytest.fixture
def there(hosts: Path, state: Path) -> Iterator[Path]:
    """The other node's state directory. Nothing is left running, on either."""
    path = hosts / PEER / "state"
    yield path
    for directory in (state, path):
        if (directory / "lock").exists() and supervisor.status(directory).run:
            supervisor.stop(directory, 0.5)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    port = free_ports(4)
    path = tmp_path / "pair.toml"
    path.write_text(
        f"[model]\npath = 'model'\nserved_name = 'mini'\n[experts]\nresident = 8\n"
        f"[cache]\ncontext_tokens = 64\npool_tokens = 64\n[server]\nport = {port}\ndrain_s = 1\n"
        f"[parallel]\nranks = 2\nhosts = ['127.0.0.1', '{PEER}']\ncontrol_port = {port + 1}\ndata_port = {port + 3}\n"
    )
    return path


def fails(hosts: Path, mode: str) -> None:
    (hosts / PEER / "mode").write_text(mode)


def test_start_status_logs_stop(tidectl: Tidectl, profile: Path, state: Path, there: Path, tmp_path: Path) -> None:
    started = tidectl("start", str(profile), "--json")
    assert started.exit_code == 0, started.stderr
    assert [rank["rank"] for rank in json.loads(started.stdout)["ranks"]] == [0, 1]
    words = started.stderr
    assert f"rank 0 (127.0.0.1) starting, rank 1 ({PEER}) waits for rank 0" in words
    assert f"rank 0 (127.0.0.1) ready, rank 1 ({PEER}) ready" in words

    ours, theirs = supervisor.status(state).run, supervisor.status(there).run
    assert ours is not None
    assert theirs is not None
    assert [child.rank for child in ours.ranks] == [0]
    assert [child.rank for child in theirs.ranks] == [1]
    sent = there / "profile.toml"
    assert f'path = "{tmp_path / "model"}"' in sent.read_text()
    assert sent.stat().st_mode & 0o077 == 0
    assert (there / "curve.key").read_bytes() == (state / "curve.key").read_bytes()

    found = json.loads(tidectl("status", "--json").stdout)
    assert (found["state"], found["trouble"]) == ("serving", [])
    assert [(rank["rank"], rank["host"], rank["phase"]) for rank in found["ranks"]] == [
        (0, "127.0.0.1", "ready"),
        (1, PEER, "ready"),
    ]
    assert all(rank["memory_bytes"] > 0 for rank in found["ranks"])
    assert [machine["host"] for machine in found["machines"]] == ["127.0.0.1", PEER]
    assert tidectl("status").stdout.count("GB available") == 2

    assert tidectl("logs").stdout == "rank 0 | rank 0 loads\nrank 1 | rank 1 loads\n"
    assert tidectl("logs", "--rank", "1").stdout == "rank 1 loads\n"

    stopped = json.loads(tidectl("stop", "--json").stdout)
    assert stopped["ranks"] == [{"rank": 0, "exit_code": 0}, {"rank": 1, "exit_code": 0}]
    assert not supervisor.is_locked(there)
    assert tidectl("status").exit_code == 3
    assert tidectl("stop").exit_code == 3
    assert tidectl("logs", "--rank", "1").stdout == "rank 1 loads\nrank 1 ends\n"


def test_logs_are_followed_on_both_nodes(tidectl: Tidectl, profile: Path, there: Path) -> None:
    assert tidectl("start", str(profile)).exit_code == 0
    command = [sys.executable, "-m", "tidectl.main", "logs", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        first = {following.stdout.readline() for _ in range(2)}
        assert tidectl("stop").exit_code == 0
        rest, words = following.communicate(timeout=30)
    assert first == {"rank 0 | rank 0 loads\n", "rank 1 | rank 1 loads\n"}
    assert set(rest.splitlines()) == {"rank 0 | rank 0 ends", "rank 1 | rank 1 ends"}
    assert (following.returncode, words) == (0, "the ranks have ended\n")


def test_logs_go_on_behind_a_lost_connection_and_beside_one_that_hangs(
    tidectl: Tidectl, profile: Path, state: Path, hosts: Path, there: Path
) -> None:
    def add(directory: Path, rank: int, text: str) -> None:
        with (directory / "logs" / f"rank-{rank}.log").open("a") as log:
            log.write(f"{text}\n")

    def connection() -> int:
        """The process that stands for ssh, 0 where there is none."""
        tasks = Path(f"/proc/{follow.pid}/task").glob("*/children")
        return int(next((pid for task in tasks for pid in task.read_text().split()), 0))

    assert tidectl("start", str(profile)).exit_code == 0
    command = [sys.executable, "-m", "tidectl.main", "logs", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follow:
        assert follow.stdout is not None
        first = {follow.stdout.readline() for _ in range(2)}
        lost = connection()
        fails(hosts, "hang")
        add(there, 1, "beforehand")
        assert follow.stdout.readline() == "rank 1 | beforehand\n"
        os.killpg(lost, signal.SIGKILL)
        within(20, lambda: connection() not in (0, lost))
        hung = connection()
        add(state, 0, "beside")
        add(there, 1, "meanwhile")
        assert follow.stdout.readline() == "rank 0 | beside\n"
        assert connection() == hung
        fails(hosts, "")
        os.killpg(hung, signal.SIGKILL)
        assert follow.stdout.readline() == "rank 1 | meanwhile\n"
        add(there, 1, "afterwards")
        assert follow.stdout.readline() == "rank 1 | afterwards\n"
        assert tidectl("stop").exit_code == 0
        rest, words = follow.communicate(timeout=30)
    assert len(first) == 2
    assert set(rest.splitlines()) == {"rank 0 | rank 0 ends", "rank 1 | rank 1 ends"}
    assert (follow.returncode, words) == (0, "the ranks have ended\n")


def test_a_log_that_comes_later_is_followed_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that waits for rank 0 still."""
    monkeypatch.setattr(runner, "is_running", lambda _: True)
    work = Work(tmp_path)
    assert work(OpenLogs([1], 5, False)) == work(MoreLogs()) == Lines([], True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text("one\ntwo\n")
    assert work(MoreLogs()) == Lines([(1, "one"), (1, "two")], True)
    assert work(MoreLogs()) == Lines([], True)
    work.close()


@pytest.mark.parametrize(
    ("mode", "code", "words"),
    [
        ("refuse", 69, "127.0.0.2: ssh does not get there: ssh: connect to host 127.0.0.2 port 22: Connection refused"),
        ("absent", 78, "127.0.0.2: there is no TideLM at"),
        ("hang", 69, "127.0.0.2: it does not answer in time"),
        ("build", 78, "127.0.0.2: TideLM there is another build"),
        ("later", 78, "127.0.0.2: TideLM there is another version"),
    ],
)
def test_a_peer_that_cannot_join_is_named_before_anything_starts(
    tidectl: Tidectl,
    profile: Path,
    state: Path,
    hosts: Path,
    there: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    code: int,
    words: str,
) -> None:
    if mode == "hang":
        monkeypatch.setattr(peers, "HELLO_S", 0.5)
    fails(hosts, mode)
    ran = tidectl("start", str(profile))
    assert (ran.exit_code, words in ran.stderr) == (code, True), ran.stderr
    assert not (state / "logs").exists()
    assert tidectl("status").exit_code == 3


def test_what_a_peer_refuses_is_told_with_its_name(
    tidectl: Tidectl, profile: Path, state: Path, there: Path, tmp_path: Path
) -> None:
    there.mkdir(mode=0o700)
    node_file = there / "node.toml"
    cases = [
        ("[model]\npath = 'elsewhere'", 65, f"there is no checkpoint at {there / 'elsewhere'}"),
        ("[model]\npaths = 'x'", 78, "unknown key 'model.paths'"),
        ("[experts]\nresident = 9", 78, "'experts.resident' must be the same on all nodes"),
        ("[parallel]\nhosts = []", 78, "'parallel.hosts' must be the same on all nodes"),
        ("model", 78, "it cannot be read"),
    ]
    for text, code, words in cases:
        node_file.write_text(text)
        ran = tidectl("start", str(profile))
        assert (ran.exit_code, words in ran.stderr, PEER in ran.stderr) == (code, True, True), ran.stderr
        assert not (state / "logs").exists()
    shutil.copytree(tmp_path / "model", there / "mine")
    node_file.write_text("[model]\npath = 'mine'\n[experts]\nread_threads = 7")
    assert tidectl("start", str(profile)).exit_code == 0
    sent = (there / "profile.toml").read_text()
    assert "read_threads = 7" in sent
    assert f'path = "{there / "mine"}"' in sent  # of the state directory, wherever the profile is kept


def test_api_keys_lie_on_rank_0s_node_alone(
    tidectl: Tidectl, profile: Path, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "api-keys"
    keys.write_text("one\n")
    text = profile.read_text().replace("[server]", "[server]\nhost = '0.0.0.0'\napi_keys_file = 'api-keys'")
    profile.write_text(text)
    prepare = starting.Start._prepare

    def elsewhere(start: starting.Start, watch: starting.Watch) -> None:
        """Both nodes are this machine: the file is away while the other one looks."""
        keys.rename(tmp_path / "away")
        prepare(start, watch)
        (tmp_path / "away").rename(keys)

    monkeypatch.setattr(starting.Start, "_prepare", elsewhere)
    ran = tidectl("start", str(profile))
    assert ran.exit_code == 0, ran.stderr
    sent = load(there / "profile.toml").server
    assert (sent.host, sent.api_keys_file, sent.allow_open) == ("127.0.0.1", "", False)
    assert profile.read_text() == text
    assert tidectl("stop").exit_code == 0


def test_a_peer_where_something_runs_is_named(
    tidectl: Tidectl, profile: Path, there: Path, state: Path, tmp_path: Path
) -> None:
    supervisor.start(profile, there, ranks=[1])
    within(20, lambda: supervisor.status(there).run is not None)
    ran = tidectl("start", str(profile))
    assert ran.exit_code == 69
    assert f"{PEER}: {there}: {profile} runs already" in ran.stderr
    assert not (state / "logs").exists()


def test_a_rank_that_dies_on_a_peer_is_told_with_its_log_and_the_other_is_ended(
    tidectl: Tidectl, profile: Path, state: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DAEMON", "1:die")
    ran = tidectl("start", str(profile))
    assert ran.exit_code == 65
    assert f"error: rank 1 on {PEER}: the shard is truncated\n  its log: tidectl logs --rank 1\n" in ran.stderr
    assert "the last lines of rank 1's log:\n  rank 1 loads\n  what went wrong, in full\n" in ran.stderr
    assert len(ran.stderr.splitlines()) < 24  # one screen
    assert not supervisor.is_locked(state)
    assert not supervisor.is_locked(there)
    status = tidectl("status")
    assert status.exit_code == 3
    assert "rank 1 ended with exit code 65: the shard is truncated" in status.stderr
    monkeypatch.delenv("FAKE_DAEMON")
    assert tidectl("start", str(profile)).exit_code == 0


def test_a_rank_that_dies_here_ends_the_other(
    tidectl: Tidectl, profile: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DAEMON", "0:die")
    ran = tidectl("start", str(profile))
    assert (ran.exit_code, "error: rank 0: the shard is truncated" in ran.stderr) == (65, True)
    assert not (there / "lock").exists() or not supervisor.is_locked(there)


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), UnavailableError("no"), BrokenPipeError(32, "nobody reads"), OSError(28, "disk"), KeyError()],
    ids=lambda error: type(error).__name__,
)
def test_an_interrupted_start_leaves_nothing_on_either_node(
    tidectl: Tidectl, profile: Path, state: Path, there: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Whatever interrupts it."""
    monkeypatch.setenv("FAKE_DAEMON", "1:hang")
    items = starting.Start.items

    def interrupt(start: starting.Start) -> object:
        if [rank.phase for rank in supervisor.status(there).ranks] == ["loading"]:
            if isinstance(error, BrokenPipeError):
                monkeypatch.setattr(lifecycle, "say", broken)
            raise error
        return items(start)

    def broken(_: str) -> None:
        raise error

    monkeypatch.setattr(starting.Start, "items", interrupt)
    ran = tidectl("start", str(profile))
    assert ran.exit_code != 0
    if isinstance(error, KeyboardInterrupt):
        assert (ran.exit_code, "nothing is running" in ran.stderr) == (130, True)
    assert not supervisor.is_locked(state)
    assert not supervisor.is_locked(there)


def test_a_dead_rank_on_a_peer_is_seen(tidectl: Tidectl, profile: Path, there: Path) -> None:
    assert tidectl("start", str(profile)).exit_code == 0
    run = supervisor.status(there).run
    assert run is not None
    os.kill(run.ranks[0].process.pid, signal.SIGKILL)
    within(20, lambda: not supervisor.is_locked(there))
    found = tidectl("status")
    assert found.exit_code == 4
    assert f"{PEER}: rank 1 was killed by signal 9" in found.stdout
    assert tidectl("stop").exit_code == 0
    assert tidectl("status").exit_code == 3


def test_watching_keeps_its_connections_and_waits_once_for_a_peer_that_hangs(
    tidectl: Tidectl, profile: Path, hosts: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connections() -> int:
        return (hosts / PEER / "commands").read_text().count("tidectl.node")

    def told(_: str, data: dict[str, object]) -> None:
        states.append(data["state"])
        if len(states) == 3:
            raise KeyboardInterrupt

    states: list[object] = []
    assert tidectl("start", str(profile)).exit_code == 0
    monkeypatch.setattr(status, "WATCH_S", 0.0)
    monkeypatch.setattr(status, "emit", told)
    before = connections()
    assert tidectl("status", "--watch", "--json").exit_code == 130
    assert states == ["serving"] * 3
    assert connections() == before + 1
    monkeypatch.setattr(peers, "HELLO_S", 0.5)
    fails(hosts, "hang")
    found = tidectl("status")
    assert (found.exit_code, f"{PEER}: it does not answer in time" in found.stdout) == (4, True)
    assert connections() == before + 2


@pytest.mark.parametrize("alive", [True, False])
def test_whether_a_rank_lives_is_its_own_machines_word(profile: Path, alive: bool) -> None:
    """Its process number means nothing here."""
    ours, theirs = Identity(os.getpid(), identify(os.getpid()).start_ticks), Identity(4_000_000, 1)
    children = [[supervisor.Child(rank, process)] for rank, process in enumerate((ours, theirs))]
    runs = [supervisor.Run(str(profile), ours, 0.0, 1, child) for child in children]
    said = [
        RankState(rank=rank, pid=run.ranks[0].process.pid, started=0.0, phase="ready", since=0.0)
        for rank, run in enumerate(runs)
    ]
    process = {0: Process(1, 1), 1: Process(1, 1)}
    there = Seen(True, runs[1], [said[1]], None, 1.0, 0, 0, {1: process[1]} if alive else {})
    here = Seen(True, runs[0], [said[0]], None, 1.0, 0, 0, {0: process[0]})
    nodes_seen = {Node("a", (0,), True): here, Node("b", (1,), False): there}
    status = supervisor.Status(True, runs[0], [said[0]], None)
    snapshot = Snapshot("serving", str(profile), "", 0.0, ranks_of(status, [0]), None, [], None)
    found = seeing._joined(snapshot, nodes_seen, nodes_seen)
    assert found.state == ("serving" if alive else "degraded")
    assert found.trouble == ([] if alive else ["rank 1 on b has ended"])


def test_a_peer_that_is_out_of_reach_is_trouble_and_stop_says_so(
    tidectl: Tidectl, profile: Path, hosts: Path, there: Path
) -> None:
    assert tidectl("start", str(profile)).exit_code == 0
    fails(hosts, "refuse")
    found = tidectl("status")
    assert (found.exit_code, f"{PEER}: ssh does not get there" in found.stdout) == (4, True)
    stopped = tidectl("stop")
    assert stopped.exit_code == 69
    assert f"the ranks of this machine have ended, others may run: {PEER}: ssh does not get there" in stopped.stderr
    fails(hosts, "")
    found = tidectl("status")
    assert (found.exit_code, f"ranks on {PEER} still run" in found.stdout + found.stderr) == (4, True)
    assert tidectl("stop").exit_code == 0
    assert not supervisor.is_locked(there)


def test_a_connection_that_is_lost_is_made_again(profile: Path, hosts: Path, there: Path) -> None:
    peer = peers.Peer(Node(PEER, (1,), False))
    try:
        assert not peer.ask(Look(), Seen).running
        assert peer._process is not None
        os.killpg(peer._process.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="the connection ended"):
            peer.ask(Look(), Seen)
        assert not peer.ask(Look(), Seen).running
        assert (hosts / PEER / "commands").read_text().count("tidectl.node") == 2
    finally:
        peer.close()


def test_a_peer_that_falls_silent_while_it_starts_is_named_in_time(
    tidectl: Tidectl, profile: Path, state: Path, hosts: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("LOOK_S", 0.5), ("LOST_S", 1.0)):
        monkeypatch.setattr(starting, name, seconds)
    look = starting.Start._look

    def impatient(start: starting.Start) -> None:
        monkeypatch.setattr(peers, "HELLO_S", 1.0)  # the first connection may take its time
        look(start)

    monkeypatch.setattr(starting.Start, "_look", impatient)
    monkeypatch.setenv("FAKE_DAEMON", "1:hang")
    fails(hosts, "mute")  # behind its fourth answer, and no further connection comes about
    ran = tidectl("start", str(profile))
    assert (ran.exit_code, f"error: {PEER}: it does not answer in time" in ran.stderr) == (69, True), ran.stderr
    assert f"{PEER}: its ranks could not be ended" in ran.stderr
    assert not supervisor.is_locked(state)


def test_a_port_in_use_is_named_before_any_node_is_asked(
    tidectl: Tidectl, profile: Path, hosts: Path, there: Path
) -> None:
    port = load(profile).parallel.control_port
    with socket.create_server(("127.0.0.1", port)):
        ran = tidectl("start", str(profile))
    assert (ran.exit_code, f"127.0.0.1:{port} (parallel.control_port): the port is in use" in ran.stderr) == (69, True)
    assert not (hosts / PEER / "commands").exists()


def test_closing_ends_a_question_that_is_under_way(hosts: Path, there: Path) -> None:
    fails(hosts, "hang")
    peer = peers.Peer(Node(PEER, (1,), False))
    failed: list[UnavailableError] = []

    def ask() -> None:
        with pytest.raises(UnavailableError) as caught:
            peer.ask(Look(), Seen)
        failed.append(caught.value)

    asking = threading.Thread(target=ask)
    asking.start()
    within(10, lambda: (hosts / PEER / "commands").exists())
    peer.close()
    asking.join(10)
    assert "the connection ended" in str(failed[0])


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("printf 'tidelm-node {}\\n'; sleep 9", "another version"),
        ("head -c 200000 /dev/zero; sleep 9", "in time"),
        ("yes", "in time"),
        ("yes", "writes without end"),
        ("cat /dev/zero", "writes without end"),
        ('printf \'tidelm-node {"type":"Done"}\\n\'; sleep 9', "answered a question by Done"),
        ("echo why >&2; exit 3", r"the connection ended \(exit code 3\): why"),
    ],
)
def test_an_answer_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch, program: str, words: str) -> None:
    monkeypatch.setattr(peers, "HELLO_S", 1.0 if words == "in time" else 60.0)
    if (program, words) == ("yes", "in time"):  # there is always something to read
        monkeypatch.setattr(peers, "MAX_UNMARKED_BYTES", 1 << 60)
        monkeypatch.setattr(peers.selectors.DefaultSelector, "select", lambda *_: [True])
    peer = peers.Peer(Node("there", (1,), False), ["bash", "-c", program])
    with pytest.raises((UnavailableError, peers.ConfigError), match=words):
        peer.ask(Look(), Seen)
    peer.close()


@pytest.mark.parametrize("answer", ['{"type":"Lines","lines":[],"running":false,"more":1}', '{"type":"New"}', "{"])
def test_an_answer_of_another_build_is_told_as_such(answer: str) -> None:
    about = msgspec.json.encode(About(PROTOCOL, "1", "b", "", 1.0)).decode()
    program = f"for answer in '{about}' '{about}' '{answer}'; do read -r; echo \"tidelm-node $answer\"; done; sleep 9"
    peer = peers.Peer(Node("there", (1,), False), ["bash", "-c", program])
    with pytest.raises(peers.ConfigError, match="TideLM there is another version"):
        peer.ask(Tail(1, 1), Lines)
    assert peer._process is None
    peer.close()


def test_long_answers_and_what_a_shell_says_between_them(tmp_path: Path) -> None:
    """Whatever pieces they come in."""
    (tmp_path / "long").write_bytes(
        b"tidelm-node " + msgspec.json.encode(Lines([(1, "x" * 3_000_000)], True)) + b"\nmotd\nmo"
    )
    about = msgspec.json.encode(About(PROTOCOL, "1", "b", "", 1.0)).decode()
    program = (
        f"echo hello; for answer in '{about}' '{about}'; do read -r; echo \"hi tidelm-node $answer\"; done; "
        f'read -r; cat {tmp_path / "long"}; read -r; echo \'td tidelm-node {{"type":"Done"}}\'; sleep 9'
    )
    peer = peers.Peer(Node("there", (1,), False), ["bash", "-c", program])
    assert len(peer.ask(Tail(1, 1), Lines).lines[0][1]) == 3_000_000
    assert peer.ask(Tail(1, 1), Done) == Done()
    peer.close()


def test_a_host_that_looks_like_an_option_is_none() -> None:
    command = peers.Peer(Node("-oProxyCommand=touch /tmp/x", (1,), False))._command
    assert command[command.index("--") + 1].startswith("-oProxy")


def test_another_machine_than_rank_0s_starts_its_own_alone(
    tidectl: Tidectl, profile: Path, state: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "is_own_address", lambda host: host == "203.0.113.8")
    profile.write_text(profile.read_text().replace("['127.0.0.1', '127.0.0.2']", "['203.0.113.7', '203.0.113.8']"))
    ran = tidectl("start", str(profile))
    assert (ran.exit_code, "rank 0 is on 203.0.113.7" in ran.stderr) == (2, True)
    assert tidectl("start", str(profile), "--here").exit_code == 0
    run = supervisor.status(state).run
    assert run is not None
    assert [child.rank for child in run.ranks] == [1]
    assert tidectl("stop").exit_code == 0


def test_a_restart_waits_for_memory_that_comes_back_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of either node."""
    monkeypatch.setattr(stopping, "SETTLE_EVERY_S", 0.0)
    free = {"a": [10, 10, 10, 10], "b": [10, 40, 90, 90]}  # GB

    def each(requests: Sequence[tuple[Here, object]], *_: object) -> list[Seen]:
        looked = [free[member.node.host].pop(0) for member, _ in requests]
        return [Seen(False, None, [], None, 0.0, gb * 10**9, 0, {}) for gb in looked]

    with Team([Node("a", (0,), True), Node("b", (1,), True)], tmp_path) as team:
        monkeypatch.setattr(team, "each", each)
        stopping.settle(team)
        assert free == {"a": [], "b": []}
        free |= {"a": list(range(10_000)), "b": list(range(10_000))}
        monkeypatch.setattr(stopping, "SETTLE_S", 0.05)
        stopping.settle(team)  # it grows for ever, and is not waited for


def test_a_dead_process_is_no_process_of_a_rank(state: Path, profile: Path) -> None:
    state.mkdir()
    me, dead = identify(os.getpid()), Identity(os.getpid(), 1)
    run = supervisor.Run(str(profile), me, 0.0, 2, [supervisor.Child(0, me), supervisor.Child(1, dead)])
    (state / "supervisor.json").write_bytes(msgspec.json.encode(run))
    found = seen(state)
    assert list(found.processes) == [0]
    assert found.processes[0].memory_bytes > 1 << 20
    assert 0 < found.available_bytes < found.total_bytes


def test_an_address_that_leads_back_here_is_no_other_node(
    tidectl: Tidectl, profile: Path, hosts: Path, state: Path
) -> None:
    (hosts / PEER / "state").symlink_to(state)
    ran = tidectl("start", str(profile))
    assert (ran.exit_code, "ssh leads back to this machine" in ran.stderr) == (78, True), ran.stderr
    assert not (state / "logs").exists()


def test_nodes_are_addresses() -> None:
    three = Parallel(ranks=4, hosts=("203.0.113.1", "127.0.0.1", "127.0.0.1", "127.0.0.2"))
    assert nodes_of(three) == [
        Node("203.0.113.1", (0,), False),
        Node("127.0.0.1", (1, 2), True),
        Node("127.0.0.2", (3,), False),
    ]
    assert nodes_of(Parallel(ranks=2)) == [Node("", (0, 1), True)]


def test_a_run_on_this_machine_alone_leaves_no_record(state: Path) -> None:
    state.mkdir()
    record.write(state, [Node("a", (0,), True), Node("b", (1,), False)])
    assert msgspec.json.decode((state / record.FILE).read_bytes())["over"] is False
    record.write(state, [Node("", (0, 1), True)])
    assert record.read(state) is None
