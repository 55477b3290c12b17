"""A daemon that is started by a unit: what it is told by name, by credentials, and how it logs."""

import io
import logging
import os
import socket
import stat
import subprocess
import sys

import pytest

from tests.daemon.tiny import profile_text
from tided import daemon
from tided.control import journal
from tided.control.keys import credential, load_keys
from tided.control.state import read_rank
from tided.errors import PermissionError_
from tided.profile import instances


@pytest.fixture
def node(tmp_path, monkeypatch):
    """As a service manager sets it; returns the directory of profiles."""
    site = tmp_path / "etc"
    site.mkdir()
    monkeypatch.setenv("CONFIGURATION_DIRECTORY", str(site))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    return site


def written(node, name, text="", **parallel):
    table = "".join(f"{key} = {value}\n" for key, value in parallel.items())
    (node / f"{name}.toml").write_text(f"{profile_text(node / 'nowhere')}\n[parallel]\n{table}{text}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required"),
        (["--profile", "a.toml"], "--profile and --rank go together"),
        (["--instance", "a", "--rank", "1"], "--profile and --rank go together"),
        (["--instance", "a", "--profile", "a.toml", "--rank", "1"], "not allowed with"),
    ],
)
def test_a_call_names_a_profile_with_a_rank_or_an_instance(arguments, words, capsys):
    with pytest.raises(SystemExit) as left:
        daemon.main(arguments)
    assert left.value.code == 2
    assert words in capsys.readouterr().err


def test_an_instance_names_profile_and_rank(node, monkeypatch):
    seen = []

    def checked(profile, rank):
        seen.append((profile, rank))
        raise PermissionError_("enough")

    monkeypatch.setattr(daemon, "_checked", checked)
    monkeypatch.setattr(instances, "is_own_address", lambda host: host == "192.0.2.2")
    written(node, "pair", ranks=2, hosts='["192.0.2.1", "192.0.2.2"]')
    assert daemon.main(["--instance", "pair"]) == 77
    assert daemon.main(["--instance", "pair:0"]) == 77
    assert seen == [(node / "pair.toml", 1), (node / "pair.toml", 0)]


@pytest.mark.parametrize(
    ("instance", "code", "words"),
    [
        ("absent", 78, "there is no profile 'absent'"),
        ("../pair", 2, "no instance"),
        ("broken:0", 78, "rank = 2"),
        ("local", 78, "several ranks live on this node: 0, 1"),
        ("far", 69, "none of parallel.hosts is an address of this node"),
        ("local:1", 65, "there is no checkpoint"),
    ],
)
def test_what_an_instance_is_refused_for(node, caplog, monkeypatch, instance, code, words):
    monkeypatch.setattr(instances, "is_own_address", lambda host: False)
    written(node, "local", ranks=2)
    written(node, "far", ranks=2, hosts='["192.0.2.1", "192.0.2.2"]')
    written(node, "broken", text="rank = 2\n")
    assert daemon.main(["--instance", instance]) == code
    assert words in caplog.text


def test_the_service_manager_is_told_why_a_start_failed(node, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        daemon.main(["--instance", "absent:0"])
        assert manager.recv(4096).decode() == "STATUS=failed: there is no profile 'absent'"


def test_the_state_of_a_rank_that_its_profile_refuses_is_kept(node, tmp_path):
    written(node, "broken", text="rank = 2\n")
    daemon.main(["--instance", "broken:1"])
    assert read_rank(tmp_path / "state", 1).exit_code == 78


HOLDER = """
import os, sys, time
from pathlib import Path
from tided.control.state import Claim
claim = Claim(Path(sys.argv[1]), 1, "other.toml")
child = os.fork()  # which must not hold it on
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_a_second_process_of_a_rank_is_refused_and_leaves_the_firsts_files_alone(node, tmp_path, caplog):
    written(node, "broken", text="rank = 2\n")
    state = tmp_path / "state"
    state.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(state)], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        assert daemon.main(["--instance", "broken:1"]) == 69
        assert f"rank 1 runs here already (other.toml, pid {holder.pid})" in caplog.text
        assert read_rank(state, 1) is None
        assert daemon.main(["--instance", "broken:0"]) == 78  # of another rank nobody is in the way
        holder.kill()
        holder.wait(10)
        assert daemon.main(["--instance", "broken:1"]) == 78
    finally:
        holder.kill()
        os.kill(child, 9)
        holder.communicate()


def test_a_credential_is_taken_for_keys_and_a_comment_sign_for_none(tmp_path, monkeypatch):
    keys = load_keys(tmp_path / "made" / "curve.key", create=True)
    given = tmp_path / "given"
    given.mkdir()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(given))
    assert credential() is None
    file = given / "curve.key"
    file.write_text("#")
    assert credential() is None
    file.write_bytes((tmp_path / "made" / "curve.key").read_bytes())
    file.chmod(0o440)  # root's, with an ACL for the service's user, looks so
    assert credential() == file
    assert load_keys(file, create=False) == keys
    file.chmod(0o444)
    with pytest.raises(PermissionError_, match="others may read"):
        load_keys(file, create=False)
    assert credential({}) is None


def test_elsewhere_a_key_file_that_a_group_may_read_is_refused(tmp_path):
    path = tmp_path / "state" / "curve.key"
    load_keys(path, create=True)
    path.chmod(0o440)
    with pytest.raises(PermissionError_, match="others may read"):
        load_keys(path, create=False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o440


def test_every_line_of_a_message_has_its_priority_in_a_journal():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(journal.JournalFormatter("%(levelname)s %(message)s"))
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        handler.emit(logging.LogRecord("x", level, "", 0, "one\ntwo", None, None))
    lines = stream.getvalue().splitlines()
    assert lines[0::2] == ["<7>DEBUG one", "<6>INFO one", "<4>WARNING one", "<3>ERROR one", "<2>CRITICAL one"]
    assert lines[1::2] == ["<7>two", "<6>two", "<4>two", "<3>two", "<2>two"]


def test_a_log_is_the_journals_only_if_it_really_goes_there(tmp_path):
    code = (
        "import os, sys; from tided.control import journal; found = os.fstat(2); "
        "print(journal.is_journal(sys.stderr, {'JOURNAL_STREAM': f'{found.st_dev}:{found.st_ino}'}), "
        "journal.is_journal(sys.stderr, {'JOURNAL_STREAM': '1:2'}), journal.is_journal(sys.stderr, {}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=dict(os.environ)
    )
    assert done.stdout.split() == ["True", "False", "False"]
