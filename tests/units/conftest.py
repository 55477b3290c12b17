"""TideLM installed as on a node, once for all tests that need it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.units.box import Box, box
from tests.units.serving import RANKS, prepare

ROOT = Path(__file__).parents[2]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Without what would show the installed commands the repository's own code."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
    command = ["make", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)


def system_python() -> str:
    """One that a service could see; "" where there is none."""
    found = (
        os.path.realpath(path)
        for path in (sys.base_prefix + "/bin/python3", shutil.which("python3", path="/usr/bin"))
        if path
    )
    return next((path for path in found if not path.startswith(("/root/", "/home/")) and Path(path).exists()), "")


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that stands for /, with TideLM in /opt/tidelm."""
    if not (python := system_python()):
        pytest.skip("an installation needs a Python 3.11 or newer outside of /root and /home (Debian's python3-venv)")
    destination = tmp_path_factory.mktemp("installed")
    done = make("install", f"DESTDIR={destination}", "PREFIX=/opt/tidelm", f"PYTHON={python}")
    assert done.returncode == 0, done.stdout + done.stderr
    return destination


@pytest.fixture(scope="module")
def node(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """One that has the service and a profile for two ranks; nothing runs."""
    with box(tmp_path_factory.mktemp("node"), installed) as inside:
        prepare(inside)
        yield inside


@pytest.fixture
def pair(node: Box) -> Box:
    """Serving; the limits of starts count anew for each test."""
    node("systemctl", "reset-failed")
    node("systemctl", "start", *RANKS)
    return node
