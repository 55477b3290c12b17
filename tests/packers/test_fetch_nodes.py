"""`tidectl fetch` on other nodes: over an ssh that runs its command on this machine, in another directory."""

import http.client
import io
import json
import os
import stat
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import huggingface_hub.constants
import pytest
from hub_server import COMMIT, Hub, serving
from msgspec.structs import replace
from shard_files import small, write_checkpoint

from packers.manifest import NAME, read_manifest
from packers.shards import Checkpoint
from tidectl import peers
from tidectl.fetch import profile as of_profile
from tidectl.fetch import room
from tidectl.fetch.ask import make_plan
from tidectl.fetch.lender import Lender, lending, take
from tidectl.fetch.options import Options
from tidectl.fetch.profile import for_profile
from tidectl.fetch.run import run
from tidectl.fetch.show import again
from tidectl.node_messages import Room
from tided.errors import ConfigError, UnavailableError, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub({"some/model": small(tmp_path / "source")})
    with serving(made) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield made


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where other nodes keep their files: `here` of a command becomes NODE. A tunnel is no more than its other end's
    port, since both ends are this machine."""
    programs = tmp_path / "bin"
    programs.mkdir()
    ssh = f"""\
        #!/bin/sh
        while [ "$1" != -- ]; do
            case $1 in -R*) there=${{1%%:*}}; there=${{there#-R}}; near=${{1##*:}};; esac
            shift
        done
        node=$2; shift 2
        [ $node = silent ] && exit 127
        [ $node = behind-proxy ] && export http_proxy=http://127.0.0.1:9 ALL_PROXY=http://127.0.0.1:9
        export TIDE_STATE_DIR={tmp_path}/state-$node
        mine="s,{tmp_path}/here,{tmp_path}/$node,"
        sed -u "s,127.0.0.1:$there,127.0.0.1:$near,; $mine" | sh -c "$(echo "$*" | sed "$mine")"
        """
    (programs / "ssh").write_text(textwrap.dedent(ssh))
    (programs / "ssh").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != NAME}


@pytest.mark.parametrize("from_hub", [False, True])
def test_a_node_gets_the_same_commit(hub: Hub, nodes: Path, capsys: pytest.CaptureFixture[str], from_hub: bool) -> None:
    """From here, so that a byte comes over the internet once; or, where it is asked to, from the hub by itself."""
    run(Options("some/model", nodes / "here", nodes=["spark-2"], from_hub=from_hub), False)
    assert files(nodes / "spark-2") == files(nodes / "here")
    kept = read_manifest(nodes / "spark-2")
    assert kept is not None
    assert (kept.commit, kept.revision, kept.complete) == (COMMIT, COMMIT, True)
    assert all(entry.by for entry in kept.files.values())
    assert "spark-2: the same" in capsys.readouterr().err
    assert hub.sent_bytes == sum(map(len, files(nodes / "here").values())) * (1 + from_hub)


def test_a_node_behind_a_proxy_takes_the_files_past_it(hub: Hub, nodes: Path) -> None:
    run(Options("some/model", nodes / "here", nodes=["behind-proxy"]), False)
    assert files(nodes / "behind-proxy") == files(nodes / "here")


def test_dense_weights_reach_a_node_as_they_are(hub: Hub, nodes: Path) -> None:
    """Which cannot put them together itself: the experts' files are not here."""
    one, other = ("U8", [3], b"abc"), ("U8", [2], b"de")
    tensors = {"a.safetensors": {"model.layers.0.mlp.experts.0.up_proj.weight": one, "model.norm.weight": other}}
    hub.repositories["some/model"] = write_checkpoint(nodes / "routed", tensors, model_type="x")
    run(Options("some/model", nodes / "here", dense=True, nodes=["spark-2"]), False)
    assert files(nodes / "spark-2") == files(nodes / "here")
    assert list(Checkpoint.open(nodes / "spark-2").tensors) == ["model.norm.weight"]
    kept = read_manifest(nodes / "spark-2")
    assert kept is not None
    assert kept.kind == "dense"


def test_what_is_lent_changed_meanwhile(hub: Hub, nodes: Path) -> None:
    """The node finds it by the sum that it had."""
    run(Options("some/model", nodes / "here"), False)
    shard = nodes / "here" / "b.safetensors"
    before = shard.stat()
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UnavailableError, match="its sha256 is"):
        run(Options("some/model", nodes / "here", nodes=["spark-2"]), False)


def get(lender: Lender, path: str, token: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", lender.port, timeout=10)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_only_the_files_are_lent_and_only_by_the_word(hub: Hub, tmp_path: Path) -> None:
    run(Options("some/model", tmp_path / "here"), False)
    (tmp_path / "here" / "private").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    kept = read_manifest(tmp_path / "here")
    assert kept is not None
    with lending(tmp_path / "here", kept) as lender:
        about, at = f"/api/models/some/model/revision/{COMMIT}", f"/some/model/resolve/{COMMIT}/"
        assert get(lender, about, "guess")[0] == get(lender, about, "")[0] == 401
        listed = json.loads(get(lender, about, lender.token)[1])
        assert {file["rfilename"] for file in listed["siblings"]} == set(kept.files)
        assert get(lender, f"{at}a.safetensors", lender.token, Range="bytes=0-7")[0] == 206
        for name in ("private", "../secret", "%2e%2e/secret", "/etc/passwd", NAME):
            assert get(lender, at + name, lender.token, Range="bytes=0-1")[0] == 404, name
        for odd in ("bytes=0-", "bytes=5-2", "bytes=0-99999999", "lines=1-2", "bytes=0-1,3-4"):
            assert get(lender, f"{at}a.safetensors", lender.token, Range=odd)[0] == 416, odd


def test_a_loan_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    with pytest.raises(UsageError, match="--to-node"):
        take()


def test_a_node_that_cannot_take_part_is_named_before_a_byte_comes(hub: Hub, nodes: Path) -> None:
    (nodes / "spark-2").write_text("a file in the way")
    with pytest.raises(UnavailableError, match="cannot be made or used") as refused:
        run(Options("some/model", nodes / "here", nodes=["spark-2"]), False)
    assert refused.value.where == f"spark-2: {nodes / 'spark-2'}"
    for dry_run in (False, True):
        with pytest.raises(ConfigError, match="there is no TideLM") as absent:
            run(Options("some/model", nodes / "here", nodes=["silent"], dry_run=dry_run), False)
        assert absent.value.where == "silent"
        assert "at the same path" in absent.value.hint
    assert hub.sent_bytes == 0
    assert not (nodes / "here").exists()


def test_room_on_a_node_is_looked_at_before_a_byte_comes(
    hub: Hub, nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there already needs none."""
    ask = room.ask

    def full(names: Sequence[str], question: Room) -> list[room.There]:
        return [(name, replace(found, free_bytes=0)) for name, found in ask(names, question)]

    monkeypatch.setattr(room, "ask", full)
    options = Options("some/model", nodes / "here", nodes=["spark-2"])
    with pytest.raises(UnavailableError, match=r"are to come, 0\.0 kB are free") as refused:
        run(options, False)
    assert refused.value.where == f"spark-2, {nodes / 'spark-2'}"
    assert hub.sent_bytes == 0
    run(Options("some/model", nodes / "spark-2"), False)
    run(options, False)
    assert files(nodes / "spark-2") == files(nodes / "here")


def test_a_dry_run_tells_of_every_node(hub: Hub, nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = Options("some/model", nodes / "here", nodes=["spark-2"], dry_run=True)
    run(options, True)
    told = json.loads(capsys.readouterr().out)
    (there,) = told["nodes"]
    assert (there["node"], there["path"], there["left_bytes"]) == (
        "spark-2",
        str(nodes / "spark-2"),
        told["left_bytes"],
    )
    assert there["free_bytes"] > 0
    run(options, False)
    assert f"then on spark-2, from here through ssh, to {nodes / 'spark-2'}: " in capsys.readouterr().err
    assert not (nodes / "spark-2").exists()


def test_a_node_has_its_own_directory(hub: Hub, nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its node.toml says, where the profile names the directory; what --to names counts everywhere."""
    monkeypatch.setattr(of_profile, "local_ranks", lambda parallel: [0])
    text = (ROOT / "profiles" / "mini-deepseek.toml").read_text()
    profile = nodes / "pair.toml"
    profile.write_text(
        text.replace("hosts = []", 'hosts = ["192.0.2.6", "192.0.2.7"]')
        .replace('path = "../minis/deepseek"', f'path = "{nodes / "here"}"')
        .replace('seed = "', f'seed = "{ROOT}/profiles/')
    )
    own = nodes / "state-192.0.2.7"
    own.mkdir(mode=0o700)
    (own / "node.toml").write_text(f"[model]\npath = '{nodes / 'elsewhere'}'\n")
    options = for_profile(Options("some/model"), str(profile))
    run(options, False)
    assert files(nodes / "elsewhere") == files(nodes / "here")
    assert not (nodes / "192.0.2.7").exists()
    plan = make_plan(options, threading.Event(), lambda _: None)
    assert f"--profile {profile}" in again(options, plan)
    assert "--to " not in again(options, plan)
    run(for_profile(options._replace(to=nodes / "here", sent="", profile=""), str(profile)), False)
    assert files(nodes / "192.0.2.7") == files(nodes / "here")


def test_a_machine_without_ssh_says_so(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SSH", (str(tmp_path / "no-ssh"),))
    with pytest.raises(UnavailableError, match="ssh cannot be run"):
        run(Options("some/model", tmp_path / "here", nodes=["spark-2"]), False)


def test_a_profile_says_where_to_and_which_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_profile, "local_ranks", lambda parallel: [0])
    text = (ROOT / "profiles" / "mini-deepseek.toml").read_text()
    text = text.replace("hosts = []", 'hosts = ["192.0.2.6", "192.0.2.7"]')
    profile = tmp_path / "pair.toml"
    profile.write_text(text.replace('path = "../minis/deepseek"', 'path = "/models/here"'))
    found = for_profile(Options("some/model"), str(profile))
    assert (found.directory, found.nodes) == (Path("/models/here"), ("192.0.2.7",))
    other = for_profile(Options("some/model", Path("/x"), nodes=["192.0.2.7"]), str(profile))
    assert (other.directory, other.nodes) == (Path("/x"), ("192.0.2.7",))
    with pytest.raises(UsageError, match=r"model\.dense"):
        for_profile(Options("some/model", dense=True), str(profile))
