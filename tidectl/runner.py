"""Who runs the ranks of this node: the service manager where the service is installed, else our own supervisor."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tidectl import logs, supervisor, units
from tidectl.journal import Journal
from tidectl.sent import text_of
from tidectl.supervisor import Status
from tided.control.state import Claim, lock_file
from tided.files import write_private
from tided.profile import load
from tided.profile.instances import SITE_DIR
from tided.settings import MOST_RANKS


def start(profile: Path, state_dir: Path, ranks: Sequence[int]) -> None:
    """Returns at once. Raises UnavailableError when something runs already."""
    if units.in_use(state_dir):
        units.start(units.keep_profile(profile, text_of(load(profile))), state_dir, ranks)
    else:
        supervisor.start(profile, state_dir, ranks=ranks)


def status(state_dir: Path) -> Status:
    """Changes nothing."""
    return units.status(state_dir) if units.in_use(state_dir) else supervisor.status(state_dir)


def stop(state_dir: Path, timeout_s: float, watch: Callable[[], None] = lambda: None) -> None:
    """Running requests may finish first, until `timeout_s`; then by force. `watch` is called before it and while it
    lasts. Raises NotRunningError."""
    chosen = units.stop if units.in_use(state_dir) else supervisor.stop
    chosen(state_dir, timeout_s, watch)


def is_running(state_dir: Path) -> bool:
    return units.is_running() if units.in_use(state_dir) else supervisor.is_locked(state_dir)


def claim(state_dir: Path) -> None:
    """Refuses when something runs; else ends what a killed supervisor left, which still holds memory and ports."""
    if units.in_use(state_dir):
        return units.refuse_running(state_dir)
    lock = supervisor.take_lock(state_dir)
    try:
        supervisor.clean(state_dir)
    finally:
        os.close(lock)
    return None


@contextmanager
def at_rest(state_dir: Path, words: str) -> Iterator[None]:
    """Nothing of this directory runs or starts while it lasts, ranks without a supervisor included: every rank that a
    profile may have is held. `words`: who keeps it so. Raises UnavailableError for what runs."""
    with ExitStack() as held:
        if units.in_use(state_dir):
            units.refuse_running(state_dir)
        else:
            held.callback(os.close, supervisor.take_lock(state_dir))
        for rank in range(MOST_RANKS):
            held.callback(_hold(state_dir, rank, words))
        yield


def _hold(state_dir: Path, rank: int, words: str) -> Callable[[], None]:
    """Gives what lets it go."""
    was_here = lock_file(state_dir, rank).exists()
    try:
        claim = Claim(state_dir, rank, words)
    except OSError as error:
        if was_here or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return lambda: None  # a full disk has no room for the rank's own lock either, without which it does not start
    return claim.release if was_here else claim.remove


def keep_profile(name: str, text: str, state_dir: Path) -> Path:
    """Where a profile that another node sent is kept."""
    if units.in_use(state_dir):
        return units.keep_profile(Path(f"{name}.toml"), text)
    path = state_dir / "profile.toml"
    write_private(path, text.encode())
    return path


def key_file(state_dir: Path) -> Path:
    """Of the control plane, where a profile names none. The service gets root's."""
    return SITE_DIR / "curve.key" if units.in_use(state_dir) else state_dir / "curve.key"


def log_of(state_dir: Path, rank: int) -> logs.Log | Journal:
    """Raises FileNotFoundError where there is none."""
    if units.in_use(state_dir):
        return Journal(rank, units.loaded())
    return logs.Log(rank, logs.log_path(state_dir, rank))


def tail_of(state_dir: Path, rank: int, lines: int) -> list[str]:
    """The end of a rank's last run, for a message about how it ended; empty where there is none."""
    try:
        log = log_of(state_dir, rank)
    except OSError:
        return []
    found = [*log.last(lines), *log.rest()]
    log.close()
    return [text for _, text in found[-lines:]]


def ranks_with_logs(state_dir: Path) -> list[int]:
    if units.in_use(state_dir):
        return [unit.rank for unit in units.loaded()] or units.ranks_told(state_dir)
    return logs.found(state_dir / "logs")
