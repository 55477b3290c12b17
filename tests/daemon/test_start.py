"""What `tided` refuses, with which code, and that it does so before torch is loaded."""

import os
import socket
import subprocess
import sys

import pytest

from tests.daemon.helpers import write_profile
from tests.daemon.tiny import profile_text
from tided.control.state import read_rank
from tided.files import temporary_of


def tided(profile, rank, state_dir, *, fails_within_s=60):
    command = [sys.executable, "-X", "importtime", "-m", "tided.daemon", "--profile", str(profile), "--rank", str(rank)]
    state = ["--state-dir", str(state_dir)] if state_dir else []
    environment = {
        name: value for name, value in os.environ.items() if name not in ("STATE_DIRECTORY", "TIDE_STATE_DIR")
    }
    done = subprocess.run([*command, *state], capture_output=True, text=True, timeout=fails_within_s, env=environment)
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    words = "\n".join(line for line in lines if not line.startswith("import time:"))
    assert "Traceback" not in words
    assert "torch" not in imported
    return done.returncode, words


@pytest.fixture
def profile(checkpoint, tmp_path):
    return write_profile(tmp_path, profile_text(checkpoint))[0]


def edited(profile, old, new):
    text = profile.read_text()
    assert old in text
    profile.write_text(text.replace(old, new))
    return profile


def test_a_wrong_profile(profile, tmp_path):
    (tmp_path / "state").mkdir()
    left = temporary_of(tmp_path / "state" / "rank-0.json")  # by a rank that was killed
    left.touch()
    code, words = tided(edited(profile, "resident = 52", 'resident = "many"'), 0, tmp_path / "state")
    assert code == 78
    assert "profile.toml:" in words
    state = read_rank(tmp_path / "state", 0)
    assert (state.phase, state.exit_code) == ("failed", 78)
    assert "resident" in state.message
    assert not left.exists()


def test_a_number_without_end(profile, tmp_path):
    code, words = tided(edited(profile, "resident = 52", f"resident = {'1' * 5000}"), 0, tmp_path / "state")
    assert code == 78
    assert "so many digits" in words
    assert read_rank(tmp_path / "state", 0).exit_code == 78


BROKEN = (
    "import sys; from tided import daemon; daemon.load_for_start = lambda _: open('/secret/x'); sys.exit(daemon.main())"
)


def test_a_mistake_of_ours_before_anything_runs_reaches_the_state_file(tmp_path):
    arguments = ["--profile", "x.toml", "--rank", "0", "--state-dir", str(tmp_path / "state")]
    done = subprocess.run([sys.executable, "-c", BROKEN, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "/secret/x" in done.stderr
    state = read_rank(tmp_path / "state", 0)
    assert (state.phase, state.exit_code) == ("failed", 1)
    assert "FileNotFoundError: No such file or directory" in state.message
    assert "/secret" not in state.message  # by `tidectl status` and the service manager others read it


def test_a_missing_checkpoint(profile, checkpoint, tmp_path):
    code, words = tided(edited(profile, str(checkpoint), "nowhere"), 0, tmp_path / "state")
    assert code == 65
    assert "nowhere" in words


def test_a_rank_that_the_profile_does_not_have(profile, tmp_path):
    code, words = tided(profile, 2, tmp_path / "state")
    assert code == 2
    assert "no rank 2" in words


def test_a_missing_state_directory(profile):
    code, words = tided(profile, 0, None)
    assert code == 2
    assert "--state-dir" in words


def test_a_state_directory_that_cannot_be_made(profile, tmp_path):
    (tmp_path / "file").touch()
    code, words = tided(profile, 0, tmp_path / "file" / "state")
    assert code == 77
    assert "state directory" in words


def test_a_key_file_that_others_may_read(profile, tmp_path):
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "curve.key").touch(mode=0o644)
    code, words = tided(profile, 1, tmp_path / "state")
    assert code == 77
    assert "curve.key" in words


def test_addresses_that_are_not_one_a_rank(profile, tmp_path):
    changed = edited(profile, "[parallel]", '[parallel]\nhosts = ["127.0.0.1", "127.0.0.1", "127.0.0.1"]')
    code, words = tided(changed, 0, tmp_path / "state")
    assert code == 78
    assert "hosts" in words


def test_a_busy_http_port_is_found_before_anything_is_loaded(profile, tmp_path):
    port = int(profile.read_text().partition("[server]\nport = ")[2].split()[0])
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        code, words = tided_with_torch_allowed(profile, tmp_path)
    assert code == 69
    assert str(port) in words


def tided_with_torch_allowed(profile, tmp_path):
    command = [sys.executable, "-m", "tided.daemon", "--profile", str(profile), "--rank", "0"]
    done = subprocess.run(
        [*command, "--state-dir", str(tmp_path / "state")], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr
