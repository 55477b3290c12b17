"""Which file a profile argument means: a path, or the name of a profile that comes with TideLM."""

import os.path
from pathlib import Path

from tided.errors import UsageError

BUNDLED_DIR = Path(__file__).parent.parent / "profiles"


def bundled() -> dict[str, Path]:
    return {path.stem: path for path in sorted(BUNDLED_DIR.glob("*.toml"))}


def names(incomplete: str = "") -> list[str]:
    """For the shell's completion."""
    return [name for name in bundled() if name.startswith(incomplete)]


def find(argument: str) -> Path:
    """A file wins over a bundled name, so that a bundled name can never shadow somebody's own profile."""
    # Unlike Path's, these two never raise, whatever the argument.
    path = os.path.expanduser(argument)  # noqa: PTH111
    if os.path.isfile(path):  # noqa: PTH113
        return Path(path)
    if argument in bundled():
        return bundled()[argument]
    import difflib

    close = difflib.get_close_matches(argument, bundled(), n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"bundled profiles: {', '.join(bundled())}"
    raise UsageError(f"no profile '{argument}': neither a file nor a bundled name", hint=hint)


def name_of(path: str) -> str:
    """What `find` takes for it: its bundled name, else the path."""
    return next((name for name, bundled_path in bundled().items() if str(bundled_path) == path), path)


def title(path: Path) -> str:
    """The first line of a profile's opening comment."""
    with path.open(encoding="utf-8", errors="replace") as file:
        line = file.readline(200)
    return line.lstrip("# ").strip() if line.startswith("#") else ""
