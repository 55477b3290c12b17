"""`tidectl service`: what it writes, what it refuses, what it leaves alone."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidectl import service, service_files
from tidectl.main import app

UNIT = "etc/systemd/system/tided@.service"


@pytest.fixture
def root(tmp_path):
    """A system with TideLM at /opt/tidelm."""
    program(tmp_path, "/opt/tidelm")
    return tmp_path


def program(root, prefix):
    path = root / prefix.lstrip("/") / "bin" / "tided"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.fixture
def run(root):
    """`run("install", ...)` on that system: the result of the command."""

    def call(verb, *options, prefix="/opt/tidelm"):
        chosen = ["--prefix", prefix] if verb != "uninstall" else []
        return CliRunner().invoke(app, ["service", verb, "--root", str(root), *chosen, *options])

    return call


def tree(root):
    """Every file below etc, as (mode, content)."""
    return {
        str(path.relative_to(root)): (path.stat().st_mode & 0o777, path.read_text())
        for path in sorted((root / "etc").rglob("*"))
        if path.is_file()
    }


def test_the_files_are_written_once_and_name_the_program(root, run):
    before = os.umask(0o077)
    try:
        first = run("install")
    finally:
        os.umask(before)
    assert first.exit_code == 0, first.output
    written = tree(root)
    assert set(written) == set(service_files.PLACES.values())
    assert {mode for mode, _ in written.values()} == {0o644}  # systemd reads them as root, people as themselves
    assert "ExecStart=/opt/tidelm/bin/tided --instance %i\n" in written[UNIT][1]
    assert first.stdout.count("--- /dev/null") == 4
    again = run("install")
    assert (again.exit_code, again.stdout) == (0, "")
    assert tree(root) == written


def test_show_with_dry_run_is_what_install_would_change(root, run):
    asked, would = run("show", "--dry-run"), run("install", "--dry-run")
    assert (asked.exit_code, asked.output) == (0, would.output)
    assert "+ExecStart=/opt/tidelm/bin/tided" in asked.stdout
    assert not (root / "etc").exists()
    run("install")
    assert run("show", "--dry-run").stdout == ""


def test_an_image_without_the_program_is_told_how_to_get_it(root, run):
    refused = run("install", prefix="/srv/tide")
    assert refused.exit_code == 2
    assert f"make install DESTDIR={root} PREFIX=/srv/tide\n" in refused.stderr


def test_another_prefix_is_shown_as_a_difference_and_taken(root, run):
    run("install")
    program(root, "/srv/tide")
    moved = run("install", prefix="/srv/tide")
    changes = [line for line in moved.stdout.splitlines() if line[:1] in "+-" and "Digest" not in line]
    assert changes[2:] == [
        "-ExecStart=/opt/tidelm/bin/tided --instance %i",
        "+ExecStart=/srv/tide/bin/tided --instance %i",
    ]
    assert "ExecStart=/srv/tide/bin/tided" in (root / UNIT).read_text()


@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_what_would_be_done_is_shown_and_not_done(root, run, verb):
    if verb == "uninstall":
        run("install")
    before = tree(root) if verb == "uninstall" else {}
    shown = run(verb, "--dry-run")
    assert shown.exit_code == 0
    assert "ExecStart=/opt/tidelm" in shown.stdout
    assert (tree(root) if (root / "etc").exists() else {}) == before


@pytest.mark.parametrize("verb", ["install", "uninstall"])
@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("WatchdogSec=30", "WatchdogSec=60"),
        lambda text: text.partition("\n")[2],  # without its first line it is nobody's
        lambda text: text + "# mine\n",
        lambda text: "mine",
    ],
    ids=["a value", "the mark", "a line", "all"],
)
def test_what_somebody_changed_is_kept_unless_told(root, run, verb, change):
    run("install")
    unit = root / UNIT
    unit.write_text(changed := change(unit.read_text()))
    before = tree(root)
    refused = run(verb)
    assert refused.exit_code == 1
    assert "changed by hand" in refused.output
    assert tree(root) == before
    assert "would be refused" in run("install", "--dry-run").output
    assert run(verb, "--force").exit_code == 0
    assert unit.with_name(unit.name + ".saved").read_text() == changed
    assert unit.exists() == (verb == "install")


def test_bytes_that_are_no_text_are_somebodys(root, run):
    (root / UNIT).parent.mkdir(parents=True)
    (root / UNIT).write_bytes(b"\xff\xfe")
    assert run("install").exit_code == 1


def test_taking_it_away_leaves_models_histories_profiles_and_drop_ins(root, run):
    run("install")
    kept = [
        root / "var/lib/tidelm/history/a.sqlite",
        root / "var/lib/tidelm/models/m/model.safetensors",
        root / "etc/tidelm/pair.toml",
        root / "etc/systemd/system/tided@.service.d/override.conf",
        root / "etc/systemd/system/other.service",
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept")
    link = root / "etc/systemd/system/tided.target.wants/tided@pair.service"
    link.parent.mkdir()
    link.symlink_to("/etc/systemd/system/tided@.service")
    assert run("uninstall").exit_code == 0
    assert not link.is_symlink()
    assert {path for path in root.rglob("*") if path.is_file()} == {*kept, root / "opt/tidelm/bin/tided"}
    again = run("uninstall")
    assert (again.exit_code, again.stdout) == (0, "")
    assert "nothing is installed" in again.output


def test_every_file_is_told_with_its_state(root, run):
    states = lambda: {row["path"]: row["state"] for row in json.loads(run("show", "--json").stdout)["files"]}  # noqa: E731
    assert set(states().values()) == {"absent"}
    run("install")
    assert set(states().values()) == {"current"}
    program(root, "/srv/tide")
    run("install", prefix="/srv/tide")
    assert states()[str(root / UNIT)] == "older"
    (root / UNIT).write_text("mine")
    assert states()[str(root / UNIT)] == "changed"
    assert f"# {root / UNIT}: changed\n" in run("show").stdout


def test_as_an_object(root, run):
    told = json.loads(run("install", "--json").stdout)
    assert told["schema"] == "tidectl.service-install/1"
    assert (told["done"], told["commands"]) == (True, [])  # of another system's files nobody is told
    assert [row["state"] for row in told["files"]] == ["absent"] * 4
    gone = json.loads(run("uninstall", "--json", "--dry-run").stdout)
    assert (gone["schema"], gone["done"], len(gone["files"])) == ("tidectl.service-uninstall/1", False, 4)


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("/opt/nowhere", "there is no program"),
        ("/opt/a b", "in its own way"),
        ("/opt/%i", "in its own way"),
        ("/home/me/tidelm", "does not see what is below /home"),
        ("/root/tidelm", "does not see what is below /root"),
        ("/tmp/tidelm", "does not see what is below /tmp"),
    ],
)
def test_a_program_that_the_unit_could_not_start_is_refused(root, run, prefix, words):
    if "see" in words:
        program(root, prefix)
    refused = run("install", prefix=prefix)
    assert refused.exit_code == 2
    assert words in refused.output
    assert not (root / "etc").exists()


def test_a_python_in_a_home_is_refused(root, run):
    (root / "root" / "python").mkdir(parents=True)
    (root / "opt/tidelm/bin/python").symlink_to(root / "root" / "python")
    refused = run("install")
    assert refused.exit_code == 2
    assert f"{root}/root/python" in refused.output


@pytest.fixture
def live(root, monkeypatch):
    """A machine where systemd runs: the commands that would be called, and what `systemctl list-units` says."""
    calls, units = [], []

    def called(command, **_):
        calls.append(list(command))
        listed = "".join(f"{unit} loaded active running TideLM\n" for unit in units)
        return subprocess.CompletedProcess(command, 0, listed if "list-units" in command else "", "")

    monkeypatch.setattr(service, "_is_live", lambda _: True)
    monkeypatch.setattr(subprocess, "run", called)
    return calls, units


def test_a_running_system_is_told(run, live):
    calls, _ = live
    assert run("install", "--dry-run").exit_code == 0
    assert calls == []
    run("install")
    assert [call[0] for call in calls] == ["systemd-sysusers", "systemd-tmpfiles", "systemctl"]
    assert calls[-1] == ["systemctl", "daemon-reload"]


def test_units_that_run_are_not_taken_away(root, run, live):
    _, units = live
    run("install")
    units.append("tided@pair.service")
    for options in ((), ("--force",)):
        refused = run("uninstall", *options)
        assert refused.exit_code == 1
        assert "running: tided@pair.service" in refused.output
    assert (root / UNIT).exists()
    units.clear()
    assert run("uninstall").exit_code == 0


def test_who_may_not_write_is_told(root, run, monkeypatch):
    def refused(file):
        raise PermissionError(13, "Permission denied", str(file.path))

    monkeypatch.setattr(service, "_write", refused)
    monkeypatch.setattr(service.os, "geteuid", lambda: 1000)
    told = run("install")
    assert told.exit_code == 77
    assert "cannot be written: Permission denied" in told.output
    assert "run it as root" in told.output


def test_the_bundled_files_name_one_prefix():
    for name in service_files.PLACES:
        text = service_files.bundled(name)
        assert text.count(service_files.PREFIX) == (1 if name == "tided@.service" else 0)
    assert {path.name for path in Path(service_files.UNITS_DIR).iterdir()} == set(service_files.PLACES)
