"""`tidectl guard` over two nodes, of which one stands behind a program that takes ssh's place."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.daemon.tiny import make_checkpoint, profile_text
from tests.tidectl.canned import Tidectl
from tests.tidectl.test_lifecycle import within
from tests.tidectl.test_nodes import PEER, fails, hosts, there  # noqa: F401  # fixtures
from tidectl import differing, guarding, peers, preflight
from tidectl.differing import Rank
from tidectl.node_messages import Facts
from tidectl.node_work import Work
from tidectl.nodes import Node
from tidectl.sent import text_of
from tided.errors import DataError, GuardError, UnavailableError
from tided.profile import load


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint"))


@pytest.fixture
def profile(checkpoint: Path, tmp_path: Path) -> Path:
    path = tmp_path / "pair.toml"
    path.write_text(f"{profile_text(checkpoint)}\n[parallel]\nranks = 2\nhosts = ['127.0.0.1', '{PEER}']\n")
    return path


@pytest.mark.usefixtures("hosts")
def test_nodes_that_agree_then_one_with_another_tokenizer(
    tidectl: Tidectl,
    profile: Path,
    checkpoint: Path,
    state: Path,
    there: Path,  # noqa: F811
) -> None:
    ran = tidectl("guard", str(profile), "--json")
    assert ran.exit_code == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert (told["schema"], told["agree"], told["differences"]) == ("tidectl.guard/1", True, [])
    facts = told["ranks"][1]["facts"]
    assert {"checkpoint", "code", "library.torch", "tokenizer", "overlay", "experts.resident"} <= facts.keys()
    assert [path.name for path in (*state.iterdir(), *there.iterdir())] == []

    other = there / "checkpoint"
    shutil.copytree(checkpoint, other)
    (other / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes() + b"\n")
    (there / "node.toml").write_text("[model]\npath = 'checkpoint'\n")
    ran = tidectl("guard", str(profile))
    assert ran.exit_code == 78
    header, row = ran.stdout.splitlines()
    assert header.split() == ["fact", "rank", "0", "(127.0.0.1)", "rank", "1", f"({PEER})"]
    assert row.split()[:2] == ["tokenizer", "sha256"]
    assert "the ranks differ" in ran.stderr


def test_an_interrupt_waits_for_no_node(profile: Path, hosts: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(peers, "HELLO_S", 600.0)
    fails(hosts, "hang")

    def interrupt() -> None:
        within(60, lambda: (hosts / PEER / "commands").exists())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        differing.declared(load(profile), [Node(PEER, (1,), False)])
    thread.join()


@pytest.mark.usefixtures("hosts")
def test_no_node_but_rank_0s_needs_its_api_keys(
    tidectl: Tidectl, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(profile)
    gone = replace(settings, server=replace(settings.server, host="0.0.0.0", api_keys_file=str(tmp_path / "gone")))
    monkeypatch.setattr(guarding, "check_profile", lambda _: gone)
    assert tidectl("guard", str(profile)).exit_code == 0


def test_a_profile_that_no_memory_of_the_machine_could_hold(profile: Path, state: Path) -> None:
    state.mkdir()
    settings = load(profile)
    whole = replace(settings, cache=replace(settings.cache, prefix_ram_bytes=1 << 48))
    work = Work(state)
    with pytest.raises(UnavailableError, match=r"this machine has .* in all"):
        work(Facts(text_of(whole), [0]))
    assert list(state.iterdir()) == []


NODES = [Node("here", (0,), True), Node("there", (1,), False)]


def ranks(theirs: dict[str, str], skew_s: tuple[float, float] = (0.0, 0.0)) -> list[Rank]:
    ours = {"checkpoint": "a", "library.torch": "2", "driver": "580"}
    return [Rank(0, NODES[0], ours, None, (0.0, 0.0)), Rank(1, NODES[1], ours | theirs, None, skew_s)]


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch, profile: Path) -> list[Rank]:
    """What the nodes would declare; to be filled by a test."""
    found: list[Rank] = []
    monkeypatch.setattr(guarding, "declared", lambda *_: found)
    monkeypatch.setattr(differing, "declared", lambda *_: found)
    monkeypatch.setattr(guarding, "check_profile", load)
    monkeypatch.setattr(preflight, "check_profile", load)
    return found


def test_a_node_that_refuses_gives_its_own_code(tidectl: Tidectl, profile: Path, declared: list[Rank]) -> None:
    error = DataError("the shard is truncated", where="there: a.safetensors", hint="fetch it again")
    declared += [ranks({})[0], Rank(1, NODES[1], {}, error, (0.0, 0.0))]
    ran = tidectl("guard", str(profile))
    assert (ran.exit_code, ran.stdout) == (65, "")
    assert "error: there: a.safetensors: the shard is truncated\n  fetch it again\n" in ran.stderr
    told = json.loads(tidectl("guard", str(profile), "--json").stdout)
    assert (told["agree"], told["ranks"][1]["error"]["exit_code"]) == (False, 65)
    with pytest.raises(DataError):
        differing.refuse(load(profile), NODES)


def test_every_difference_is_a_row(tidectl: Tidectl, profile: Path, declared: list[Rank]) -> None:
    declared += ranks({"driver": "570", "checkpoint": "b", "library.nccl": "2.27"})
    told = json.loads(tidectl("guard", str(profile), "--json").stdout)
    assert told["differences"] == [
        {"fact": "checkpoint", "values": {"0": "a", "1": "b"}},
        {"fact": "driver", "values": {"0": "580", "1": "570"}},
        {"fact": "library.nccl", "values": {"0": "(absent)", "1": "2.27"}},
    ]
    with pytest.raises(GuardError, match="driver: rank 0 has 580, rank 1 has 570"):
        differing.refuse(load(profile), NODES)


@pytest.mark.parametrize(("skew", "late"), [((0.4, 0.0), False), ((-0.9, 0.1), True), ((3.0, 3.0), False)])
def test_a_clock_that_is_surely_off_is_told_and_no_difference(
    tidectl: Tidectl, profile: Path, declared: list[Rank], skew: tuple[float, float], late: bool
) -> None:
    declared += ranks({}, skew)
    ran = tidectl("guard", str(profile))
    assert (ran.exit_code, "the clock of there is" in ran.stderr) == (0, late)
    assert "2 ranks on 2 nodes agree in 3 facts" in ran.stderr


@pytest.mark.usefixtures("there")
def test_a_node_that_is_not_reached_is_named(tidectl: Tidectl, profile: Path, hosts: Path) -> None:  # noqa: F811
    fails(hosts, "refuse")
    (rank,) = differing._of_peer(peers.Peer(Node(PEER, (1,), False)), "")
    assert isinstance(rank.error, UnavailableError)
    assert rank.error.where == PEER
