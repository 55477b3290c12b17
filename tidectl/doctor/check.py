"""What a check is, what it looks at, and what it finds."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tidectl.doctor.engine import NO_PROFILE, Engine
from tidectl.doctor.machine import Machine
from tidectl.doctor.peers import Peer, ask
from tidectl.nodes import local_ranks
from tidectl.running import Snapshot
from tided.errors import TideError
from tided.profile import load
from tided.settings import Settings

Verdict = Literal["ok", "warn", "fail", "skip"]


class Finding(NamedTuple):
    """`evidence`: what was seen, in figures. `fix`: the next step of whoever reads it."""

    verdict: Verdict
    evidence: str
    fix: str = ""


def ok(evidence: str) -> Finding:
    return Finding("ok", evidence)


def warn(evidence: str, fix: str) -> Finding:
    return Finding("warn", evidence, fix)


def fail(evidence: str, fix: str) -> Finding:
    return Finding("fail", evidence, fix)


def skip(why: str) -> Finding:
    return Finding("skip", why)


@dataclass
class View:
    """What all checks look at. `settings` None: no profile, or one that is wrong (`wrong`, in words). `alone`: other
    nodes are not asked. `read` hears of bytes that a check of all of them has read."""

    machine: Machine
    state_dir: Path
    running: Snapshot
    profile: Path | None = None
    settings: Settings | None = None
    wrong: str = ""
    alone: bool = False
    engine: Engine = field(default_factory=Engine)
    read: Callable[[int], None] = lambda nbytes: None

    @property
    def is_running(self) -> bool:
        """The profile's own ranks hold memory and ports here. A node keeps the profile that it runs as a file of its
        own, so what it says counts, and not where it is."""
        if not self.is_busy or self.settings is None:
            return False
        if self.running.profile == str(self.profile):
            return True
        with suppress(TideError):
            return load(self.running.profile) == self.settings
        return False

    @property
    def is_busy(self) -> bool:
        """Something serves here, whatever: nothing may be measured that would slow it."""
        return self.running.state != "stopped"

    def measured(self, what: str) -> dict[str, Any]:
        """What the running pair told of its start; empty: nothing."""
        told = (self.running.health or {}).get("engine_config")
        found = told.get(what) if isinstance(told, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def on_cuda(self) -> bool:
        return self.settings is not None and self.settings.engine.device == "cuda"

    @cached_property
    def ranks_here(self) -> list[int]:
        return local_ranks(self.settings.parallel) if self.settings else []

    @property
    def peers(self) -> list[str]:
        """Addresses of the other nodes."""
        hosts = self.settings.parallel.hosts if self.settings else ()
        return list(dict.fromkeys(host for rank, host in enumerate(hosts) if rank not in self.ranks_here))

    @cached_property
    def peers_asked(self) -> list[Peer]:
        return [ask(self.machine, host) for host in self.peers]


Look = Callable[[View], Finding]


class Check(NamedTuple):
    """`id`: stable, for programs. `limit_s`: after which it counts as failed. `needs`: "profile": skipped without one;
    "pair": also where all ranks are on this machine; "peers": also where other nodes are not asked. `deep`: only with
    --deep."""

    id: str
    look: Look
    limit_s: float = 5.0
    needs: Literal["", "profile", "pair", "peers"] = ""
    deep: bool = False


def unmet(check: Check, view: View) -> str:
    """Why a check has nothing to look at; empty: it has."""
    if check.needs and view.settings is None:
        return "the profile is wrong" if view.wrong else NO_PROFILE
    if check.needs in ("pair", "peers") and not view.peers:
        return "all ranks are on this machine"
    return "other nodes are not asked (--here)" if check.needs == "peers" and view.alone else ""


def size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
