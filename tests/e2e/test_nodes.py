"""The mini on two nodes by `tidectl`, the whole path: 127.0.0.1, and 127.0.0.2 behind a program that takes ssh's place
and gives it a state directory of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.control.conftest import free_ports

PEER = "127.0.0.2"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def profile(tmp_path):
    """The bundled one with addresses, its relative paths as they are: seen from where the file lies."""
    first = free_ports(4)
    text = (ROOT / "profiles" / "mini-deepseek.toml").read_text()
    changes = {
        "hosts = []": f'hosts = ["127.0.0.1", "{PEER}"]',
        "control_port = 5710": f"control_port = {first}",
        "data_port = 5720": f"data_port = {first + 2}",
        "port = 8000": f"port = {first + 3}",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    folder = tmp_path / "profiles"
    folder.mkdir()
    (tmp_path / "minis").symlink_to(ROOT / "minis")
    for seed in (ROOT / "profiles").iterdir():
        if not seed.name.endswith(".toml"):
            (folder / seed.name).symlink_to(seed)
    (folder / "pair.toml").write_text(text)
    return folder / "pair.toml"


@pytest.fixture
def tidectl(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    shutil.copy(ROOT / "tests" / "tidectl" / "fake_ssh.sh", programs / "ssh")
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FAKE_SSH": str(tmp_path / "hosts"),
        "TIDE_STATE_DIR": str(tmp_path / "state"),
    }

    def run(*arguments):
        command = [sys.executable, "-m", "tidectl.main", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)

    yield run
    run("stop", "--timeout", "5")


def test_a_mini_on_two_nodes_answers_and_stops(profile, tidectl, tmp_path):
    started = tidectl("start", str(profile))
    assert started.returncode == 0, started.stderr
    found = json.loads(tidectl("status", "--json").stdout)
    assert (found["state"], found["trouble"]) == ("serving", [])
    assert [(rank["rank"], rank["host"], rank["phase"]) for rank in found["ranks"]] == [
        (0, "127.0.0.1", "ready"),
        (1, PEER, "ready"),
    ]
    answer = tidectl("chat", "--temperature", "0", "--no-thinking", "What is the capital of Norway?")
    assert "Oslo" in answer.stdout, answer.stderr
    lines = tidectl("logs", "-n", "200").stdout.splitlines()
    assert {line[:7] for line in lines} == {"rank 0 ", "rank 1 "}
    times = [line.partition("| ")[2][:23] for line in lines]
    assert times == sorted(times)
    assert len({line[:7] for line in lines[: len(lines) // 2]}) == 2  # one by one, and not one log behind the other
    stopped = json.loads(tidectl("stop", "--json").stdout)
    assert stopped["ranks"] == [{"rank": 0, "exit_code": 0}, {"rank": 1, "exit_code": 0}]
    assert not list((tmp_path / "hosts" / PEER / "state").glob("supervisor.json"))
