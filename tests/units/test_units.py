"""The units as files: what systemd says of them, and that they agree with the daemon."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tided import errors
from tided.api.auth import read_keys
from tided.control.keys import CREDENTIAL, credential

UNITS = Path(__file__).parents[2] / "units"
RESTARTED = {1, 69, 70}  # a mistake of ours, something missing, failed ranks
MOST_EXPOSURE = 35  # tenths

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian's package systemd)"
)


def lines(name):
    """(directive, value) of a unit, comments and tables left out."""
    text = (UNITS / name).read_text()
    found = [line.split("=", 1) for line in text.splitlines() if line and line[0] not in "#["]
    return [(directive, value) for directive, value in found]


def values(directive, name="tided@.service"):
    return [value for found, value in lines(name) if found == directive]


@pytest.fixture
def units(tmp_path):
    """As they are installed, with a program that is there."""
    text = (UNITS / "tided@.service").read_text()
    assert text.count("/opt/tidelm/") == 1
    program = tmp_path / "opt" / "bin" / "tided"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "tided@.service").write_text(text.replace("/opt/tidelm/", f"{tmp_path}/opt/"))
    shutil.copy(UNITS / "tided.target", tmp_path)
    return tmp_path


@needs_systemd
def test_systemd_understands_every_line(units):
    command = ["systemd-analyze", "verify", "--man=no", units / "tided@.service", units / "tided.target"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    ours = [line for line in done.stderr.splitlines() if "tided" in line]
    assert (done.returncode, ours) == (0, [])


@needs_systemd
def test_systemd_would_tell_a_mistake(units):
    unit = units / "tided@.service"
    unit.write_text(unit.read_text().replace("WatchdogSec=30", "WatchdogSecs=30"))
    command = ["systemd-analyze", "verify", "--man=no", unit]
    assert "WatchdogSecs" in subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr


@needs_systemd
@pytest.mark.parametrize(("most", "passes"), [(MOST_EXPOSURE, True), (5, False)])
def test_little_is_exposed(units, most, passes):
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={most}"]
    done = subprocess.run([*command, units / "tided@.service"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode == 0) == passes, done.stdout.splitlines()[-1]


def all_codes(kind=errors.TideError):
    yield kind.exit_code
    for child in kind.__subclasses__():
        yield from all_codes(child)


def test_every_exit_code_is_restarted_or_known_to_be_of_no_use():
    [prevented] = values("RestartPreventExitStatus")
    never = {int(code) for code in prevented.split()}
    ours = {
        code
        for kind in errors.TideError.__subclasses__()
        for code in all_codes(kind)
        if kind.__module__ == "tided.errors"
    }
    assert never >= {2, 65, 77, 78}
    assert not never & RESTARTED
    assert ours <= never | RESTARTED | {3}  # 3 is a word of commands alone


def test_a_pair_that_fails_again_and_again_is_given_up():
    """All starts that the limit allows must fit in its time, waits for a peer that never comes included, or it would
    never be reached."""
    from tided.profile import load
    from tided.profile.instances import BUNDLED_DIR

    [every], [burst], [pause] = values("StartLimitIntervalSec"), values("StartLimitBurst"), values("RestartSec")
    assert every == "1h"
    for profile in BUNDLED_DIR.glob("*.toml"):
        assert int(burst) * (load(profile).parallel.start_timeout_s + int(pause) + 60) < 3600, profile


def test_the_daemon_says_when_it_is_ready_and_nobody_else_may():
    """Without `notify` it would count as started before it has read a byte; with another access, a process that decodes
    images could keep the watchdog quiet."""
    assert values("Type") == ["notify"]
    assert values("NotifyAccess") == ["main"]
    assert int(values("WatchdogSec")[0]) > 0


def test_each_credential_has_a_file_of_root_and_one_that_stands_in_for_it():
    """A unit does not start without a file that `LoadCredential` alone names."""
    given = [value.split(":", 1) for value in values("SetCredential")]
    read = [value.split(":", 1) for value in values("LoadCredential")]
    assert sorted(given) == [["api-keys", "#"], [CREDENTIAL, "#"]]
    assert sorted(read) == [["api-keys", "/etc/tidelm/api-keys"], [CREDENTIAL, "/etc/tidelm/curve.key"]]


def test_a_credential_that_stands_in_is_taken_for_none(tmp_path):
    """The ranks' own keys then count; a profile that names the API's is refused, and opens nothing."""
    for value in values("SetCredential"):
        name, _, content = value.partition(":")
        (tmp_path / name).write_text(content)
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert credential(environment) is None
    with pytest.raises(errors.ConfigError, match="holds no API key"):
        read_keys(tmp_path / "api-keys")
    (tmp_path / CREDENTIAL).write_text("{}")
    assert credential(environment) == tmp_path / CREDENTIAL


@pytest.mark.parametrize(
    ("directive", "found"),
    [
        ("SystemCallFilter", ["@system-service", "~@privileged"]),
        ("SystemCallArchitectures", ["native"]),
        ("SystemCallErrorNumber", ["EPERM"]),
        ("CapabilityBoundingSet", [""]),
        ("AmbientCapabilities", [""]),
        ("NoNewPrivileges", ["yes"]),
        ("ProtectSystem", ["strict"]),
        ("ProtectHome", ["tmpfs"]),
        ("DevicePolicy", ["closed"]),
        ("DeviceAllow", ["char-nvidia* rw", "char-infiniband* rw"]),
        ("RestrictAddressFamilies", ["AF_UNIX AF_INET AF_INET6 AF_NETLINK"]),
        ("UMask", ["0077"]),
        ("StateDirectoryMode", ["0700"]),
        ("LimitCORE", ["0"]),
        ("KillMode", ["mixed"]),
        ("ExecReload", ["/bin/kill -HUP $MAINPID"]),
    ],
)
def test_what_systemd_keeps_the_daemon_from(directive, found):
    """As text, where no systemd is that would judge it."""
    assert values(directive) == found


def test_what_a_gpu_and_its_memory_need_is_not_taken():
    taken = {"PrivateDevices", "MemoryDenyWriteExecute", "PrivateNetwork", "PrivateUsers", "ProcSubset"}
    limits = {"MemoryMax", "MemoryHigh", "MemoryLimit", "MemorySwapMax"}
    assert not {directive for directive, _ in lines("tided@.service")} & (taken | limits)
    assert values("LimitMEMLOCK") == ["infinity"]


def test_the_user_of_the_unit_is_made_and_owns_its_directory():
    [user], [state] = values("User"), values("StateDirectory")
    made = [line.split() for line in (UNITS / "tidelm.sysusers").read_text().splitlines() if line[:1] == "u"]
    assert [row[1] for row in made] == [user]
    owned = [line.split() for line in (UNITS / "tidelm.tmpfiles").read_text().splitlines() if line[:1] == "d"]
    assert ["d", f"/var/lib/{state}", "0700", user, user] in owned


def test_comments_tell_why():
    """Nearly every line that is no matter of course has words above it."""
    text = (UNITS / "tided@.service").read_text().splitlines()
    assert sum(line.startswith("#") for line in text) > 0.5 * sum("=" in line and line[0] != "#" for line in text)
