"""Which file a profile argument means: a path, the name of one of this node's own profiles, or of one that comes with
TideLM. The service's units take the same names (`tided.profile.instances`)."""

import os.path
from pathlib import Path

from tided.errors import UsageError

BUNDLED_DIR = Path(__file__).parent.parent / "profiles"
SITE_DIR = Path("/etc/tidelm")


def named() -> dict[str, Path]:
    """By name: this node's own, which come before bundled ones of the same name, and those."""
    return bundled() | {path.stem: path for path in sorted(SITE_DIR.glob("*.toml"))}


def bundled() -> dict[str, Path]:
    return {path.stem: path for path in sorted(BUNDLED_DIR.glob("*.toml"))}


def names(incomplete: str = "") -> list[str]:
    """For the shell's completion."""
    return [name for name in named() if name.startswith(incomplete)]


def find(argument: str) -> Path:
    """A file wins over a name, so that a bundled name can never shadow somebody's own profile."""
    # Unlike Path's, these two never raise, whatever the argument.
    path = os.path.expanduser(argument)  # noqa: PTH111
    if os.path.isfile(path):  # noqa: PTH113
        return Path(path)
    known = named()
    if argument in known:
        return known[argument]
    import difflib

    close = difflib.get_close_matches(argument, known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known profiles: {', '.join(known)}"
    raise UsageError(f"no profile '{argument}': neither a file nor the name of one", hint=hint)


def name_of(path: str) -> str:
    """What `find` takes for it: its name, else the path."""
    return next((name for name, found in named().items() if str(found) == path), path)


def title(path: Path) -> str:
    """The first line of a profile's opening comment."""
    with path.open(encoding="utf-8", errors="replace") as file:
        line = file.readline(200)
    return line.lstrip("# ").strip() if line.startswith("#") else ""
