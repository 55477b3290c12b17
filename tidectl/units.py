"""The ranks of a node as instances of the service, where `tidectl service install` has put it: `systemctl` starts and
stops them, the journal has their logs (`tidectl.journal`), and the profile lies in /etc/tidelm.

Gives what `tidectl.supervisor` gives. Only root may start services, and only its state directory is theirs.
"""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tidectl import state
from tidectl.processes import KILL_WAIT_S, POLL_S, identify
from tidectl.sent import SENT
from tidectl.supervisor import SIGNAL_CODES, Child, Ended, EndedRank, Run, Status
from tided.control.state import LAST_PHASES, RankState, rank_file, read_rank
from tided.errors import ConfigError, NotRunningError, TideError, UnavailableError, UsageError
from tided.files import write_private
from tided.profile import load
from tided.profile.instances import BUNDLED_DIR, SITE_DIR, parse, profile_of, rank_here, unit_name

TEMPLATE = Path("/etc/systemd/system/tided@.service")
BOOTED = Path("/run/systemd/system")  # sd_booted(3)
COMMAND_S = 30.0
PROPERTIES = "Id,ActiveState,SubState,MainPID,ExecMainCode,ExecMainStatus,ActiveEnterTimestamp,InvocationID"
KILLED = ("2", "3")  # CLD_KILLED, CLD_DUMPED
WAITS = "auto-restart"


class Unit(NamedTuple):
    """`exit_code` as the shell counts, of the newest process; `invocation` names that run in the journal."""

    name: str
    profile: str
    rank: int
    active: str
    sub: str
    pid: int
    exit_code: int
    invocation: str

    @property
    def is_live(self) -> bool:
        return self.active in ("active", "activating", "deactivating", "reloading")

    @property
    def has_ended(self) -> bool:
        """By itself; the service manager may start it again."""
        return self.active == "failed" or self.sub == WAITS


def in_use(state_dir: Path) -> bool:
    return state_dir == state.SYSTEM_DIR and TEMPLATE.is_file() and BOOTED.is_dir()


def keep_profile(path: Path, text: str) -> Path:
    """Where the service finds the profile `path`, which is kept there as `text` unless it is there already. Raises
    ConfigError for another of that name, UsageError for a name that a service cannot have."""
    unit_name(path.stem)
    target = SITE_DIR / f"{path.stem}.toml"
    if path.absolute() == target or (path.parent.absolute() == BUNDLED_DIR and not target.exists()):
        return path.absolute()
    with suppress(FileNotFoundError):
        old = target.read_text(encoding="utf-8", errors="replace")
        if not old.startswith(SENT) and old != text:
            hint = f"start it by its name, `tidectl start {path.stem}`, or rename one of the two"
            raise ConfigError("another profile of that name is here", where=str(target), hint=hint)
    write_private(target, text.encode())
    target.chmod(0o644)
    return target


def start(profile: Path, state_dir: Path, ranks: Sequence[int]) -> None:
    """Raises UnavailableError when something runs already."""
    refuse_running(state_dir)
    names = [unit_name(profile.stem, rank) for rank in ranks]
    for rank in ranks:
        rank_file(state_dir, rank).unlink(missing_ok=True)
    with suppress(UnavailableError):  # units that were never loaded have nothing to reset
        _systemctl("reset-failed", *names)
    _systemctl("start", "--no-block", *names)


def refuse_running(state_dir: Path) -> None:
    for unit in loaded():
        if unit.is_live:
            what = f"{unit.profile} runs already ({unit.name})"
            raise UnavailableError(what, where=str(state_dir), hint="tidectl stop ends it, tidectl restart replaces it")


def status(state_dir: Path) -> Status:
    """`last` tells of ranks that ended by themselves even while the service manager is about to start them again."""
    units = loaded()
    live = [unit for unit in units if unit.is_live]
    last = _ended(state_dir, units)
    if not live:
        numbers = [rank.rank for rank in last.ranks] if last else []
        return Status(False, None, [told for rank in numbers if (told := read_rank(state_dir, rank))], last)
    children = []
    for unit in live:
        with suppress(ProcessLookupError):
            if unit.pid:
                children.append(Child(unit.rank, identify(unit.pid)))
    said = [found for child in children if (found := _said(state_dir, child))]
    started = min((one.started for one in said), default=time.time())
    stopping = any(unit.active == "deactivating" for unit in live)
    profile = str(_profile_path(live[0].profile))
    return Status(True, Run(profile, identify(1), started, len(live), children, stopping), said, last)


def stop(state_dir: Path, timeout_s: float, watch: Callable[[], None] = lambda: None) -> None:
    """As `supervisor.stop`. Raises NotRunningError."""
    names = [unit.name for unit in loaded() if unit.is_live]
    if not names:
        raise NotRunningError("nothing is running", where=str(state_dir))
    watch()
    _systemctl("stop", "--no-block", *names)
    for wait_s in (timeout_s, KILL_WAIT_S):
        deadline = time.monotonic() + wait_s
        while _any_live(names) and time.monotonic() < deadline:
            watch()
            time.sleep(POLL_S * 4)
        if not _any_live(names):
            return
        _systemctl("kill", "--signal=SIGKILL", *names)
    raise UnavailableError(f"{', '.join(names)} do not end, not even by SIGKILL")


def is_running() -> bool:
    return any(unit.is_live for unit in loaded())


def loaded() -> list[Unit]:
    """Instances that the service manager knows, by rank. One that runs is among them whatever became of its profile."""
    text = _systemctl("show", "tided@*", f"--property={PROPERTIES}")
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
        if fields.get("Id", "").startswith("tided@"):
            with suppress(UsageError):  # an instance that means nothing runs no rank
                found.append(_unit(fields))
    return sorted((unit for unit in found if unit.rank >= 0), key=lambda unit: unit.rank)


def _unit(fields: dict[str, str]) -> Unit:
    """`rank` -1: nobody can tell, and it does not run."""
    name, rank = parse(fields["Id"].removeprefix("tided@").removesuffix(".service"))
    status = int(fields.get("ExecMainStatus") or 0)
    code = SIGNAL_CODES + status if fields.get("ExecMainCode") in KILLED else status
    pid, invocation = int(fields.get("MainPID") or 0), fields.get("InvocationID", "")
    unit = Unit(fields["Id"], name, -1, fields["ActiveState"], fields["SubState"], pid, code, invocation)
    return unit._replace(rank=_rank_of(unit) if rank is None else rank)


def _rank_of(unit: Unit) -> int:
    """Of an instance that names none: as its process says, else as its profile does, which may have been changed,
    removed, or name an address that is away."""
    directory = state.SYSTEM_DIR
    told = [found for rank in ranks_told(directory) if unit.pid and (found := read_rank(directory, rank))]
    if ours := [found.rank for found in told if found.pid == unit.pid]:
        return ours[0]
    try:
        return rank_here(load(profile_of(unit.profile)).parallel, unit.profile)
    except TideError:
        return 0 if unit.is_live else -1


def _any_live(names: Sequence[str]) -> bool:
    return any(unit.is_live for unit in loaded() if unit.name in names)


def _profile_path(name: str) -> Path:
    with suppress(TideError):
        return profile_of(name)
    return SITE_DIR / f"{name}.toml"


def _said(state_dir: Path, child: Child) -> RankState | None:
    found = read_rank(state_dir, child.rank)
    return found if found and found.pid == child.process.pid else None


def _ended(state_dir: Path, units: Sequence[Unit]) -> Ended | None:
    """What ranks have told of their end, and for those that could not what the service manager saw."""
    if any(unit.is_live and not unit.has_ended for unit in units) and not any(unit.has_ended for unit in units):
        return None
    known = {unit.rank: unit for unit in units}
    states = [found for rank in ranks_told(state_dir) if (found := read_rank(state_dir, rank))]
    over = [one for one in states if one.rank not in known or known[one.rank].has_ended or not known[one.rank].is_live]
    if not over:
        return None
    ranks = [_ended_rank(one, known.get(one.rank)) for one in over]
    failed = [one for one, rank in zip(over, ranks, strict=True) if rank.exit_code]
    first = min(failed, key=lambda one: one.since).rank if failed else None
    name = known[over[0].rank].profile if over[0].rank in known else ""
    profile = str(_profile_path(name)) if name else ""
    return Ended(profile, max(one.since for one in over), first, ranks)


def _ended_rank(said: RankState, unit: Unit | None) -> EndedRank:
    if said.phase in LAST_PHASES and said.exit_code is not None:
        return EndedRank(said.rank, said.exit_code, said.message if said.phase == "failed" else "")
    return EndedRank(said.rank, unit.exit_code if unit else 0, "")


def ranks_told(state_dir: Path) -> list[int]:
    numbers = (path.stem.removeprefix("rank-") for path in state_dir.glob("rank-*.json"))
    return sorted(int(number) for number in numbers if number.isdigit())


def _systemctl(*arguments: str) -> str:
    return run(["systemctl", "--no-pager", "--no-ask-password", *arguments])


def run(command: Sequence[str], timeout_s: float = COMMAND_S) -> str:
    """What it writes. Raises UnavailableError for one that does not run, fails, or takes too long."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"`{' '.join(command)}` did not run: {error}") from None
    if done.returncode:
        why = done.stderr.strip() or done.stdout.strip()
        raise UnavailableError(f"`{' '.join(command)}` failed with {done.returncode}: {why}")
    return done.stdout
