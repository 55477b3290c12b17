"""What was asked of `tidectl fetch`."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from packers.manifest import Kind


class Options(NamedTuple):
    """`to` None: a directory of the repository's name, here. `sums`: NAME=SHA256, the user's own word. `from_hub`: the
    other nodes fetch for themselves. `verify`: all that is here is read again. `lent`: another node has all of it, as
    it is to be. `profile`, `sent`: the name of whose directories it goes to, each node's own; what peers get of it."""

    repository: str
    to: Path | None = None
    revision: str = ""
    dense: bool = False
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    sums: Sequence[str] = ()
    nodes: Sequence[str] = ()
    connections: int = 8
    dry_run: bool = False
    from_hub: bool = False
    verify: bool = False
    lent: bool = False
    profile: str = ""
    sent: str = ""

    @property
    def directory(self) -> Path:
        name = self.repository.rpartition("/")[2] + ("-dense" if self.dense else "")
        return (self.to or Path(name)).absolute()

    @property
    def kind(self) -> Kind:
        return "dense" if self.dense else "whole"

    def command(self, commit: str, *where: str) -> list[str]:
        """That goes on with it, here or on another node. `where`: words that name the directory."""
        told = [
            *(["--dense"] if self.dense else []),
            *(["--verify"] if self.verify else []),
            *(part for pattern in self.include for part in ("--include", pattern)),
            *(part for pattern in self.exclude for part in ("--exclude", pattern)),
            *(part for given in self.sums for part in ("--sha256", given)),
        ]
        return ["tidectl", "fetch", self.repository, "--revision", commit, *where, *told]
