"""What a check is, what it looks at, and what it finds."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from tidectl.doctor.engine import Engine
from tidectl.doctor.machine import Machine
from tidectl.doctor.peers import Peer, ask
from tidectl.nodes import local_ranks
from tidectl.running import Snapshot
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
    """What all checks look at. `settings` None: no profile, or one that is wrong (`wrong`, in words). `read` hears of
    bytes that a check of all of them has read."""

    machine: Machine
    state_dir: Path
    running: Snapshot
    profile: Path | None = None
    settings: Settings | None = None
    wrong: str = ""
    engine: Engine = field(default_factory=Engine)
    read: Callable[[int], None] = lambda nbytes: None

    @property
    def is_running(self) -> bool:
        """The profile's own ranks hold memory and ports here."""
        return self.running.state != "stopped" and self.profile is not None and self._is_its_profile

    @property
    def _is_its_profile(self) -> bool:
        return self.running.profile == str(self.profile)

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
    """`id`: stable, for programs. `limit_s`: after which it counts as failed. `needs`: "profile": skipped without one,
    "pair": also where all ranks are on this machine. `deep`: only with --deep."""

    id: str
    look: Look
    limit_s: float = 5.0
    needs: Literal["", "profile", "pair"] = ""
    deep: bool = False


def unmet(check: Check, view: View) -> str:
    """Why a check has nothing to look at; empty: it has."""
    if check.needs and view.settings is None:
        return "the profile is wrong" if view.wrong else "no profile: name one"
    return "all ranks are on this machine" if check.needs == "pair" and not view.peers else ""


def size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
