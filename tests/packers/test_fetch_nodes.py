"""`tidectl fetch` on other nodes: over an ssh that runs its command on this machine, in another directory."""

import os
import stat
import textwrap
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from hub_server import COMMIT, Hub, serving
from shard_files import small

from packers.manifest import NAME, read_manifest
from tidectl import fetch, fetch_nodes, fetch_profile
from tided.errors import UnavailableError, UsageError

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
    """Where other nodes keep their files: `here` of a command becomes NODE."""
    programs = tmp_path / "bin"
    programs.mkdir()
    ssh = f"""\
        #!/bin/sh
        while [ "$1" != -- ]; do shift; done
        node=$2; shift 2
        [ $node = silent ] && exit 127
        exec sh -c "$(echo "$*" | sed "s,{tmp_path}/here,{tmp_path}/$node,")"
        """
    (programs / "ssh").write_text(textwrap.dedent(ssh))
    (programs / "ssh").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def test_a_node_fetches_the_same_commit_itself(hub: Hub, nodes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch.run(fetch.Options("some/model", nodes / "here", nodes=["spark-2"]), False)
    here, there = ({file.name: file.read_bytes() for file in (nodes / at).iterdir()} for at in ("here", "spark-2"))
    assert here.keys() == there.keys()
    assert all(there[name] == body for name, body in here.items() if name != NAME)
    kept = read_manifest(nodes / "spark-2")
    assert kept is not None
    assert (kept.commit, kept.revision, kept.complete) == (COMMIT, COMMIT, True)
    assert "spark-2: the same" in capsys.readouterr().err


def test_a_node_that_fails_is_named_with_its_own_words(hub: Hub, nodes: Path) -> None:
    (nodes / "spark-2").write_text("a file in the way")
    with pytest.raises(UnavailableError, match="cannot be made or used") as refused:
        fetch.run(fetch.Options("some/model", nodes / "here", nodes=["spark-2"]), False)
    assert refused.value.where == f"spark-2, {nodes / 'spark-2'}"
    with pytest.raises(UnavailableError) as refused:
        fetch.run(fetch.Options("some/model", nodes / "here", nodes=["silent"]), False)
    assert "at the same path" in refused.value.hint


def test_a_machine_without_ssh_says_so(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_nodes, "SSH", (str(tmp_path / "no-ssh"),))
    with pytest.raises(UnavailableError, match="no ssh here"):
        fetch.run(fetch.Options("some/model", tmp_path / "here", nodes=["spark-2"]), False)


def test_a_profile_says_where_to_and_which_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_profile, "local_ranks", lambda parallel: [0])
    text = (ROOT / "profiles" / "mini-deepseek.toml").read_text()
    text = text.replace("hosts = []", 'hosts = ["192.0.2.6", "192.0.2.7"]')
    profile = tmp_path / "pair.toml"
    profile.write_text(text.replace('path = "../minis/deepseek"', 'path = "/models/here"'))
    found = fetch_profile.for_profile(fetch.Options("some/model"), str(profile))
    assert (found.directory, found.nodes) == (Path("/models/here"), ("192.0.2.7",))
    other = fetch_profile.for_profile(fetch.Options("some/model", Path("/x"), nodes=["192.0.2.7"]), str(profile))
    assert (other.directory, other.nodes) == (Path("/x"), ("192.0.2.7",))
    with pytest.raises(UsageError, match=r"model\.dense"):
        fetch_profile.for_profile(fetch.Options("some/model", dense=True), str(profile))
