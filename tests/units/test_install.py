"""`make install` and `make uninstall`: what a node has then."""

import json
import stat
import subprocess
from pathlib import Path

import pytest

from tests.units.conftest import make, system_python

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(1500)]


def tidectl(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """From elsewhere, without anything of this repository."""
    environment = {"PATH": "/usr/bin:/bin", "TIDE_STATE_DIR": str(home / "state"), "LANG": "C.UTF-8"}
    return subprocess.run(
        [home / "bin" / "tidectl", *arguments],
        cwd="/", env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_commands_run_and_find_what_came_with_them(installed):
    home = installed / "opt/tidelm"
    assert tidectl(home, "--version").stdout.startswith("tidelm ")
    listed = json.loads(tidectl(home, "profile", "list", "--json").stdout)["profiles"]
    by_name = {row["name"]: row for row in listed}
    assert set(by_name) == {"ds41-mxfp4", "glm53-exl3", "mini-deepseek", "mini-glm"}
    assert all(Path(row["path"]).is_relative_to(home) for row in listed)
    for mini in ("mini-deepseek", "mini-glm"):
        checked = tidectl(home, "profile", "check", mini)
        assert checked.returncode == 0, checked.stderr
        assert "there is no checkpoint" not in checked.stdout + checked.stderr
    assert "tided.target" in tidectl(home, "service", "show").stdout


def test_the_daemon_is_the_installed_one(installed):
    home = installed / "opt/tidelm"
    environment = {"PATH": "/usr/bin:/bin", "STATE_DIRECTORY": str(installed / "state")}
    done = subprocess.run(
        [home / "bin" / "tided", "--instance", "absent"],
        cwd="/", env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 78
    assert "there is no profile 'absent'" in done.stderr


def test_others_may_read_it_and_nothing_is_left_to_be_compiled(installed):
    home = installed / "opt/tidelm"
    files = [path for path in home.rglob("*") if not path.is_symlink()]
    closed = [path for path in files if not path.stat().st_mode & stat.S_IROTH]
    assert closed == []
    sources = [path for path in files if path.suffix == ".py" and "/site-packages/tided/" in str(path)]
    compiled = [path for path in sources if list((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))]
    assert sources
    assert len(compiled) == len(sources)


def test_it_names_no_place_but_its_own(installed):
    """Who makes a package moves it afterwards."""
    home = installed / "opt/tidelm"
    scripts = [home / "venv" / "bin" / name for name in ("tidectl", "tided")]
    assert all(str(installed) not in path.read_text() for path in scripts)
    links = [home / "bin" / name for name in ("tidectl", "tided")]
    assert [str(path.readlink()) for path in links] == ["../venv/bin/tidectl", "../venv/bin/tided"]
    moved = home.rename(installed / "moved")
    try:
        assert tidectl(moved, "--version").stdout.startswith("tidelm ")
    finally:
        moved.rename(home)


def test_again_takes_the_place_of_the_first_and_uninstall_leaves_what_is_not_its_own(installed, tmp_path):
    home = tmp_path / "opt/tidelm"
    call = (f"DESTDIR={tmp_path}", f"PYTHON={system_python()}")
    (home / "venv").mkdir(parents=True)
    (home / "venv" / "old").write_text("")
    (home / "mine").write_text("")
    assert make("install", *call).returncode == 0
    assert not (home / "venv" / "old").exists()
    assert not list(home.glob("venv.*"))
    unit = tmp_path / "etc/systemd/system/tided@.service"
    assert tidectl(home, "service", "install", "--root", str(tmp_path), "--prefix", "/opt/tidelm").returncode == 0
    refused = make("uninstall", *call)
    assert refused.returncode != 0
    assert "service uninstall" in refused.stderr
    assert tidectl(home, "--version").returncode == 0
    assert tidectl(home, "service", "uninstall", "--root", str(tmp_path)).returncode == 0
    assert not unit.exists()
    assert make("uninstall", *call).returncode == 0
    assert [path.name for path in home.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("PREFIX=opt",), "PREFIX must be absolute"),
        (("PREFIX=/",), "PREFIX must be absolute"),
        (("PYTHON=/root/python",), "lies in a home"),
    ],
)
def test_what_would_not_serve_is_refused_before_anything_is_made(installed, tmp_path, arguments, words):
    if "PYTHON" in arguments[0]:  # one that says that it is in a home
        stub = tmp_path / "python"
        stub.write_text("#!/bin/sh\necho /root/.local/bin/python3.12\n")
        stub.chmod(0o755)
        arguments = (f"PYTHON={stub}",)
    refused = make("install", f"DESTDIR={tmp_path}/to/", *arguments)
    assert refused.returncode != 0
    assert words in refused.stderr
    assert not (tmp_path / "to").exists()
