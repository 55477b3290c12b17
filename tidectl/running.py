"""What runs on this machine, seen from outside: the supervisor's files, the processes, the server's own word."""

from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tidectl import http, profiles, runner, supervisor
from tidectl.state import state_dir
from tided.errors import PermissionError_, TideError, UnavailableError

DEFAULT_URL = "http://127.0.0.1:8000"
HEALTH_S = 2.0

State = Literal["serving", "starting", "stopping", "degraded", "stopped"]

LEAVING = {"draining", "stopped"}  # phases of a rank that ends in order


class NotServingError(TideError):
    """Something runs here, and does not answer requests now."""

    exit_code = 4


class Rank(NamedTuple):
    """`since`: Unix time at which the phase began; 0 when the rank has said nothing yet. `total` 0: no progress in
    numbers. `host`: its node, "" where the profile names none. `memory_bytes` 0, `read_bytes_s` None: not known."""

    rank: int
    pid: int
    alive: bool
    phase: str
    since: float
    message: str
    done: int = 0
    total: int = 0
    host: str = ""
    memory_bytes: int = 0
    read_bytes_s: float | None = None


class Machine(NamedTuple):
    """A node's memory; 0 where the system does not tell."""

    host: str
    available_bytes: int
    total_bytes: int


class Snapshot(NamedTuple):
    """`health` is None where no server of this machine answers; `trouble` says in words what is not well. `machines`:
    of the nodes, where they were asked."""

    state: State
    profile: str
    url: str
    started: float
    ranks: list[Rank]
    health: dict[str, Any] | None
    trouble: list[str]
    last: supervisor.Ended | None
    machines: tuple[Machine, ...] = ()


def look(directory: Path | None = None) -> Snapshot:
    """Changes nothing, waits for at most `HEALTH_S`."""
    directory = directory or state_dir()
    now = runner.status(directory)
    health = _health(url) if (url := url_of(now)) else None
    if health is None:
        now = runner.status(directory)  # a stop may have begun while it was waited for
    if now.run is None:
        return Snapshot(_without_run(now), "", "", 0.0, [], None, [], now.last)
    ranks = ranks_of(now, {child.rank for child in now.run.ranks if child.process.is_alive()})
    stopping = _is_stopping(now)
    trouble = _trouble(now, ranks, "" if stopping else url, health, stopping)
    state = "stopping" if stopping else state_of(ranks, trouble)
    return Snapshot(state, now.run.profile, url_of(now), now.run.started, ranks, health, trouble, now.last)


def _without_run(now: supervisor.Status) -> State:
    """Before its first rank a supervisor has told nothing; behind the last it has told how they ended."""
    if not now.running:
        return "stopped"
    return "stopping" if now.last else "starting"


def _is_stopping(now: supervisor.Status) -> bool:
    """By request, or because every rank was told to end. Without a supervisor nobody goes on with it."""
    if not now.running or now.run is None:
        return False
    said = {rank.rank: rank for rank in now.ranks}
    ours = [(child, said.get(child.rank)) for child in now.run.ranks]
    leave = [rank is not None and rank.pid == child.process.pid and rank.phase in LEAVING for child, rank in ours]
    return now.run.stopping or (bool(leave) and all(leave))


def server_url(given: str | None) -> str:
    """Of the server that is named, else of the one that runs here, else the usual one. Raises UsageError, and
    NotServingError for what runs here and does not serve (yet)."""
    url = given or running_url()
    if given is None:
        with suppress(PermissionError_, UnavailableError, OSError):  # no state directory: nothing of ours runs
            _refuse_unready(look(), url)
    return http.base_url(url or DEFAULT_URL)


def _refuse_unready(now: Snapshot, url: str | None) -> None:
    name = profiles.name_of(now.profile) if now.profile else "a profile"
    other = "another server is named with --url"
    if now.state == "starting":
        hint = f"`tidectl status` shows how far it is; {other}"
        raise NotServingError(f"{name} is starting: it answers no requests yet", hint=hint)
    if now.state == "stopping":
        raise NotServingError(f"{name} is stopping: it takes no new requests", hint=other)
    if now.state == "degraded" and url is None:
        raise NotServingError(f"{name} is in trouble: {now.trouble[0]}", hint=f"see `tidectl status`; {other}")


def running_url() -> str | None:
    """Where the server of this machine answers, or None; never an error."""
    with suppress(TideError, OSError):
        return url_of(runner.status(state_dir())) or None
    return None


def url_of(now: supervisor.Status) -> str:
    """Rank 0 says its port, the profile says its address; "" where rank 0 does not serve here."""
    port = next((rank.port for rank in now.ranks if rank.rank == 0 and now.run), 0)
    if not port or now.run is None:
        return ""
    from tided.profile import load

    host = "127.0.0.1"
    with suppress(TideError):  # the profile was changed or removed since it was started
        host = load(now.run.profile).server.host
    return http.local_url(host, port)


def ranks_of(now: supervisor.Status, alive: Container[int]) -> list[Rank]:
    """Those that were started and not ended in order. `alive`: ranks whose process lives, as their own machine sees."""
    return [_rank(child, now, child.rank in alive) for child in now.run.ranks] if now.run else []


def _rank(child: supervisor.Child, now: supervisor.Status, alive: bool) -> Rank:
    said = next((rank for rank in now.ranks if rank.rank == child.rank and rank.pid == child.process.pid), None)
    if said is None:
        return Rank(child.rank, child.process.pid, alive, "started" if alive else "ended", 0.0, "")
    phase = said.phase if alive else "ended"
    return Rank(child.rank, child.process.pid, alive, phase, said.since, said.message, said.done, said.total)


def _health(url: str) -> dict[str, Any] | None:
    try:
        return http.health(url, HEALTH_S)
    except TideError:
        return None


def _trouble(
    now: supervisor.Status, ranks: list[Rank], url: str, health: dict[str, Any] | None, stopping: bool
) -> list[str]:
    """`url`: "" where no answer is expected. While all is stopping, that a rank has ended is none."""
    found = [] if now.running else ["the supervisor was killed: `tidectl stop` ends what is left of the ranks"]
    found += [f"rank {rank.rank} has ended" for rank in ranks if not rank.alive and not stopping]
    failed = [rank for rank in ranks if rank.alive and rank.phase == "failed"]
    found += [f"rank {rank.rank}: {headline(rank.message)}" for rank in failed]
    if url and health is None:
        found.append(f"{url}/health does not answer")
    if health and health.get("status") == "fault":
        found.append(headline(str(health.get("fault") or "the server is at fault")))
    return list(dict.fromkeys(found))


def headline(message: str) -> str:
    """What happened; what a library said of it and the next step stay in the log."""
    return message.partition("\n")[0]


def state_of(ranks: list[Rank], trouble: list[str]) -> State:
    if trouble:
        return "degraded"
    phases = {rank.phase for rank in ranks}
    if phases == {"ready"}:
        return "serving"
    return "stopping" if phases & LEAVING else "starting"
