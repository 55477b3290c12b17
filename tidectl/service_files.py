"""The files of the service: what they say, where they go, and whether somebody changed them.

The first line of an installed file holds the digest of the rest. So a file that differs from what would be written now
is either an older one of ours, which may be replaced, or somebody's, which may not; no list of files is kept anywhere.
"""

import difflib
import hashlib
import re
from pathlib import Path
from typing import Literal, NamedTuple

UNITS_DIR = Path(__file__).parent.parent / "units"
PREFIX = "/opt/tidelm"  # in the files as they are bundled
MOST_BYTES = 1 << 20

PLACES = {
    "tided@.service": "etc/systemd/system/tided@.service",
    "tided.target": "etc/systemd/system/tided.target",
    "tidelm.sysusers": "etc/sysusers.d/tidelm.conf",
    "tidelm.tmpfiles": "etc/tmpfiles.d/tidelm.conf",
}
ENABLED = ("etc/systemd/system/tided.target.wants/tided@*.service", "etc/systemd/system/*.wants/tided.target")

_MARK = re.compile(r"# Written by `tidectl service install`\. Digest of the rest: ([0-9a-f]{64})\n")

State = Literal["absent", "current", "older", "changed"]


class File(NamedTuple):
    """`text`: what it is to hold. `found`: what it holds, None where it is not there."""

    path: Path
    text: str
    found: str | None

    @property
    def state(self) -> State:
        if self.found is None:
            return "absent"
        if self.found == self.text:
            return "current"
        return "older" if is_ours(self.found) else "changed"

    def diff(self, *, remove: bool = False) -> str:
        """Unified, from what is there to what is to be there."""
        before, after = self.found or "", "" if remove else self.text
        names = (str(self.path) if before else "/dev/null", str(self.path) if after else "/dev/null")
        return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), *names))


def files(root: Path, prefix: str) -> list[File]:
    """All of them, as they are to be for a TideLM that is installed at `prefix`."""
    return [
        File(root / place, marked(bundled(name).replace(f"{PREFIX}/", f"{prefix.rstrip('/')}/")), read(root / place))
        for name, place in PLACES.items()
    ]


def bundled(name: str) -> str:
    return (UNITS_DIR / name).read_text(encoding="utf-8")


def marked(text: str) -> str:
    return f"# Written by `tidectl service install`. Digest of the rest: {digest(text)}\n{text}"


def is_ours(text: str) -> bool:
    """Whether it is as some TideLM wrote it."""
    mark = _MARK.match(text)
    return mark is not None and mark[1] == digest(text[mark.end() :])


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def read(path: Path) -> str | None:
    """Raises OSError, but for a file that is not there. Bytes that are no text make a file that is not ours."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None


def enabled(root: Path) -> list[Path]:
    """The links by which ranks start with the machine."""
    return sorted(path for pattern in ENABLED for path in root.glob(pattern) if path.is_symlink())
