"""Where TideLM keeps what outlives a process: keys, histories, logs, the state of running ranks."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tided.errors import PermissionError_, UnavailableError

SYSTEM_DIR = Path("/var/lib/tidelm")


def state_dir() -> Path:
    """The state directory, made if need be, 0700 because histories and logs are private.

    `$TIDE_STATE_DIR`; else, for root where the service is installed, /var/lib/tidelm; else `$XDG_STATE_HOME/tidelm` or
    ~/.local/state/tidelm.
    """
    path = chosen_dir()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except PermissionError as error:
        raise PermissionError_("the state directory cannot be used by this user", where=str(path)) from error
    except OSError as error:
        hint = "set TIDE_STATE_DIR to a directory of your own"
        raise UnavailableError(f"no state directory ({error.strerror})", where=str(path), hint=hint) from error
    _make_private(path, found)
    return path


def chosen_dir() -> Path:
    """Where it is, or would be made."""
    if chosen := os.environ.get("TIDE_STATE_DIR"):
        return Path(chosen).absolute()
    if os.geteuid() == 0 and SYSTEM_DIR.is_dir():
        return SYSTEM_DIR
    base = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "tidelm"


@contextmanager
def as_owner(directory: Path) -> Iterator[None]:
    """Root acts as whom the state directory `directory` belongs to, the service: what is made there is its own, and a
    link that it has laid there leads root nowhere that it could not go itself. Raises PermissionError_ there."""
    found = directory.stat()
    if os.geteuid() != 0 or found.st_uid == 0:
        yield
        return
    groups, group = os.getgroups(), os.getegid()
    try:
        os.setgroups([])
        os.setegid(found.st_gid)
        os.seteuid(found.st_uid)
        yield
    except PermissionError as error:
        raise PermissionError_(f"{error.strerror} for its owner", where=str(error.filename)) from error
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)


def _make_private(path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if not mode & 0o077:
        return
    if found.st_uid != os.geteuid() or mode & (stat.S_ISVTX | stat.S_IWOTH):
        # Another's, or shared like /tmp: closing it would break what others keep there.
        hint = "set TIDE_STATE_DIR to a directory of your own"
        raise PermissionError_(
            "others may use this directory, so it cannot hold private state", where=str(path), hint=hint
        )
    path.chmod(0o700)
