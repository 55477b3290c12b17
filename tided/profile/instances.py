"""Instances of the service: which profile and which rank `tided@INSTANCE.service` means on this node.

    tided@NAME.service         the rank of profile NAME that lives here
    tided@NAME:RANK.service    this rank of it, where several live on one node

The same unit name and the same profile serve on every node: who lives here follows from `parallel.hosts`.
"""

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tided.errors import ConfigError, UnavailableError, UsageError
from tided.settings import Parallel

SITE_DIR = Path("/etc/tidelm")  # a node's own profiles
BUNDLED_DIR = Path(__file__).parents[2] / "profiles"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # what a unit's name takes unescaped, and no path
_RANK = re.compile(r"0|[1-9][0-9]?")


class Instance(NamedTuple):
    """`rank` None: the one that lives here."""

    name: str
    rank: int | None


def unit_name(name: str, rank: int | None = None) -> str:
    """Raises UsageError for a profile whose name no unit can have."""
    if not _NAME.fullmatch(name):
        hint = "letters, digits and . _ - alone, beginning with a letter or digit; rename the file"
        raise UsageError(f"a service cannot be named after the profile '{name}'", hint=hint)
    return f"tided@{name}.service" if rank is None else f"tided@{name}:{rank}.service"


def parse(instance: str) -> Instance:
    """What stands between @ and .service. Raises UsageError."""
    name, colon, rank = instance.partition(":")
    if not _NAME.fullmatch(name) or (colon and not _RANK.fullmatch(rank)):
        raise UsageError(f"'{instance}' is no instance", hint="NAME or NAME:RANK; NAME is that of a profile")
    return Instance(name, int(rank) if colon else None)


def profile_of(name: str, site_dir: Path = SITE_DIR) -> Path:
    """The node's own profile of that name, else the bundled one. Raises ConfigError where there is neither."""
    for directory in (site_dir, BUNDLED_DIR):
        if (path := directory / f"{name}.toml").is_file():
            return path
    raise ConfigError(f"there is no profile '{name}'", hint=f"put it at {site_dir / name}.toml, on every node")


def rank_here(parallel: Parallel, name: str, is_here: Callable[[str], bool] | None = None) -> int:
    """The one rank that lives on this node, by the word of the profile `name`. Raises UnavailableError while no
    address of `parallel.hosts` is this node's (its network may still come up), ConfigError where several are."""
    if parallel.ranks == 1:
        return 0
    asked = is_here or is_own_address
    ours = [rank for rank, host in enumerate(parallel.hosts) if asked(host)]
    if len(ours) == 1:
        return ours[0]
    if not parallel.hosts or ours:
        listed = ", ".join(str(rank) for rank in ours or range(parallel.ranks))
        raise ConfigError(
            f"several ranks live on this node: {listed}",
            where=name,
            hint=f"start each by its number, as {unit_name(name, (ours or [0])[0])}",
        )
    raise UnavailableError(
        f"none of parallel.hosts is an address of this node: {', '.join(parallel.hosts)}",
        where=name,
        hint="name this node's address on the link between the ranks; `ip address` lists them",
    )


def is_own_address(host: str) -> bool:
    """Whether a socket can be bound to it. A name that cannot be looked up is not."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
