"""What systemctl and journalctl say, read as a supervisor's status and logs; the commands that are given to them. (Real
units: `make test-systemd`.)"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tidectl import runner, state, units
from tided.control.state import StateFile
from tided.errors import ConfigError, NotRunningError, UnavailableError
from tided.settings import Settings

PID = os.getpid()
BLOCK = (
    "Id=tided@{name}.service\nActiveState={active}\nSubState={sub}\nMainPID={pid}\nExecMainCode={code}\n"
    "ExecMainStatus={status}\nInvocationID=abc{name}\n"
)


def block(name: str, active: str, sub: str, pid: int = 0, code: int = 0, status: int = 0) -> str:
    return BLOCK.format(name=name, active=active, sub=sub, pid=pid, code=code, status=status)


class Manager:
    """`shown`: what `systemctl show` prints next; the last of them again and again."""

    def __init__(self) -> None:
        self.shown: list[str] = [""]
        self.journal: list[dict[str, object]] = []
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> str:
        if "show" in command:
            return self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
        self.commands.append([word for word in command if not word.startswith("--no")])
        if command[0] == "journalctl":
            return "".join(json.dumps(_given(record, "--all" in command)) + "\n" for record in self.journal)
        return ""


def _given(record: dict[str, object], whole: bool) -> dict[str, object]:
    """journalctl(1): fields larger than 4096 bytes are encoded as null unless --all."""
    return {name: value if whole or len(str(value)) <= 4096 else None for name, value in record.items()}


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    """The service is installed, and `tmp_path / "state"` is its state directory."""
    found = Manager()
    for path in ("state", "etc"):
        (tmp_path / path).mkdir()
    (tmp_path / "tided@.service").touch()
    monkeypatch.setattr(units, "run", found)
    monkeypatch.setattr(units, "TEMPLATE", tmp_path / "tided@.service")
    monkeypatch.setattr(units, "BOOTED", tmp_path)
    monkeypatch.setattr(units, "SITE_DIR", tmp_path / "etc")
    monkeypatch.setattr(state, "SYSTEM_DIR", tmp_path / "state")
    return found


def test_the_service_is_used_where_it_is_installed_and_for_its_state_alone(manager: Manager, tmp_path: Path) -> None:
    assert units.in_use(tmp_path / "state")
    assert not units.in_use(tmp_path / "other")
    (tmp_path / "tided@.service").unlink()
    assert not units.in_use(tmp_path / "state")


def test_ranks_that_run(manager: Manager, tmp_path: Path) -> None:
    StateFile(tmp_path / "state", 0).enter("ready", port=8000)
    manager.shown = [
        block("mini-deepseek:1", "activating", "start", PID) + "\n" + block("mini-deepseek:0", "active", "running", PID)
    ]
    found = runner.status(tmp_path / "state")
    assert found.running
    assert found.run is not None
    assert [child.rank for child in found.run.ranks] == [0, 1]
    assert (found.run.planned, found.run.stopping) == (2, False)
    assert Path(found.run.profile).name == "mini-deepseek.toml"
    assert [rank.phase for rank in found.ranks] == ["ready"]
    assert found.last is None


@pytest.mark.parametrize(("instance", "told"), [("gone", True), ("gone", False), ("mini-deepseek", True)])
def test_a_unit_that_runs_is_seen_whatever_became_of_its_profile(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: str, told: bool
) -> None:
    """Removed, or with a mistake in it: what runs is told of, stopped, and not started a second time."""

    def wrong(_: Path) -> Settings:
        raise ConfigError("a mistake")

    monkeypatch.setattr(units, "load", wrong)
    if told:
        StateFile(tmp_path / "state", 1).enter("ready", port=8000)
    manager.shown = [block(instance, "active", "running", PID)]
    found = runner.status(tmp_path / "state").run
    assert found is not None
    assert [child.rank for child in found.ranks] == [1 if told else 0]
    assert Path(found.profile).stem == instance
    with pytest.raises(UnavailableError, match=f"{instance} runs already"):
        runner.start(Path(units.BUNDLED_DIR) / "mini-deepseek.toml", tmp_path / "state", [0])
    manager.shown += [manager.shown[0], block(instance, "inactive", "dead")]
    runner.stop(tmp_path / "state", 1.0)
    assert manager.commands == [["systemctl", "stop", f"tided@{instance}.service"]]


def test_a_rank_that_is_to_be_started_again_has_ended(manager: Manager, tmp_path: Path) -> None:
    StateFile(tmp_path / "state", 1).enter("failed", "no memory", exit_code=69)
    manager.shown = [
        block("mini-deepseek:0", "active", "running", PID)
        + "\n"
        + block("mini-deepseek:1", "activating", "auto-restart", 0, 1, 69)
    ]
    found = runner.status(tmp_path / "state")
    assert found.running
    assert found.last is not None
    assert (found.last.first, [(rank.exit_code, rank.message) for rank in found.last.ranks]) == (1, [(69, "no memory")])


def test_a_rank_that_was_killed_is_told_by_its_signal(manager: Manager, tmp_path: Path) -> None:
    StateFile(tmp_path / "state", 0).enter("loading")
    manager.shown = [block("mini-deepseek:0", "failed", "failed", 0, 2, 9)]
    found = runner.status(tmp_path / "state")
    assert (found.running, found.run) == (False, None)
    assert found.last is not None
    assert [rank.exit_code for rank in found.last.ranks] == [137]
    manager.shown = [""]  # forgotten by the service manager, and stopped in order
    StateFile(tmp_path / "state", 0).enter("stopped", exit_code=0)
    last = runner.status(tmp_path / "state").last
    assert last is not None
    assert (last.first, [rank.exit_code for rank in last.ranks]) == (None, [0])


def test_a_start_names_each_rank_and_forgets_what_they_said_before(manager: Manager, tmp_path: Path) -> None:
    StateFile(tmp_path / "state", 1).enter("failed", "before", exit_code=65)
    profile = Path(units.BUNDLED_DIR) / "mini-deepseek.toml"
    runner.start(profile, tmp_path / "state", [0, 1])
    names = ["tided@mini-deepseek:0.service", "tided@mini-deepseek:1.service"]
    assert manager.commands == [["systemctl", "reset-failed", *names], ["systemctl", "start", *names]]
    assert not list((tmp_path / "state").glob("rank-*.json"))
    assert not list((tmp_path / "etc").iterdir())  # the service finds bundled profiles itself
    manager.shown = [block("mini-deepseek:0", "active", "running", PID)]
    with pytest.raises(UnavailableError, match="mini-deepseek runs already"):
        runner.start(profile, tmp_path / "state", [0, 1])


def test_a_profile_of_another_place_is_kept_for_the_service(manager: Manager, tmp_path: Path) -> None:
    profile = tmp_path / "mine.toml"
    profile.write_text(
        "[model]\npath = 'x'\nserved_name = 'm'\n[experts]\nresident = 8\n"
        "[cache]\ncontext_tokens = 64\npool_tokens = 64\n"
    )
    runner.start(profile, tmp_path / "state", [0])
    kept = tmp_path / "etc" / "mine.toml"
    assert f'path = "{tmp_path / "x"}"' in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o644
    runner.start(profile, tmp_path / "state", [0])  # what was sent is replaced
    kept.write_text("# another's\n")
    with pytest.raises(ConfigError, match="another profile of that name"):
        runner.start(profile, tmp_path / "state", [0])


def test_a_stop_is_by_force_when_the_time_is_over(manager: Manager, tmp_path: Path) -> None:
    live = block("mini-deepseek:0", "deactivating", "stop-sigterm", PID)
    manager.shown = [live, live, live, block("mini-deepseek:0", "inactive", "dead")]
    runner.stop(tmp_path / "state", 0.0)
    name = "tided@mini-deepseek:0.service"
    assert manager.commands == [["systemctl", "stop", name], ["systemctl", "kill", "--signal=SIGKILL", name]]
    with pytest.raises(NotRunningError):
        runner.stop(tmp_path / "state", 0.0)


def test_the_journal_reads_like_a_log(manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.shown = [block("mini-deepseek:1", "active", "running", PID)]
    manager.journal = [
        {"MESSAGE": "INFO daemon ready", "__REALTIME_TIMESTAMP": "1700000000123456", "__CURSOR": "c1"},
        {"MESSAGE": [0x61, 0xFF, 0x0A, 0x62], "__REALTIME_TIMESTAMP": "1700000001000000", "__CURSOR": "c2"},
    ]
    log = runner.log_of(tmp_path / "state", 1)
    lines = [text for _, text in log.last(9)]
    assert [line.partition(",")[2] for line in lines] == ["123 INFO daemon ready", "000 a\ufffd", "000 b"]
    assert "_SYSTEMD_INVOCATION_ID=abcmini-deepseek:1" in manager.commands[-1]
    manager.journal = []
    assert log.added() == []
    assert "--after-cursor=c2" in manager.commands[-1]
    assert "--unit=tided@mini-deepseek:1.service" in manager.commands[-1]


def test_a_unit_that_has_written_nothing_yet_is_followed(manager: Manager, tmp_path: Path) -> None:
    """`logs -f -n 0` too: what comes is looked for from one and the same moment on, until there is a first line."""
    manager.shown = [block("mini-deepseek:1", "active", "running", PID)]
    log = runner.log_of(tmp_path / "state", 1)
    before_s = time.time()
    assert log.last(0) == []
    after_s = time.time()
    for _ in range(2):
        assert log.added() == []
        since = next(word for word in manager.commands[-1] if word.startswith("--since=@"))
        assert before_s <= float(since.partition("@")[2]) + 1e-6 <= after_s + 2e-6
    manager.journal = [{"MESSAGE": "first", "__REALTIME_TIMESTAMP": "1700000000123456", "__CURSOR": "c1"}]
    assert [text.rpartition(" ")[2] for _, text in log.added()] == ["first"]
    log.added()
    assert "--after-cursor=c1" in manager.commands[-1]


def test_a_long_line_of_the_journal_is_one(manager: Manager, tmp_path: Path) -> None:
    manager.shown = [block("mini-deepseek:1", "active", "running", PID)]
    manager.journal = [{"MESSAGE": "x" * 5000, "__REALTIME_TIMESTAMP": "1700000000123456", "__CURSOR": "c1"}]
    assert [len(text.rpartition(" ")[2]) for _, text in runner.log_of(tmp_path / "state", 1).last(9)] == [5000]
