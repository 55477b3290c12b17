"""`tidectl start | stop | restart`, over the supervisor of this machine."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tidectl import http, logs, profiles, supervisor
from tidectl.output import emit, say
from tidectl.preflight import check_ports, check_profile
from tidectl.running import look, url_of
from tidectl.state import state_dir
from tidectl.waiting import Item, line, waiting
from tided.control.state import RankState
from tided.errors import NotRunningError, TideError
from tided.settings import Settings

LOG_LINES = 15
STOP_MARGIN_S = 20.0  # beside server.drain_s: what the supervisor itself allows, and some
HEALTH_EVERY_S = 0.25
ABORT_S = 15.0  # an interrupted start has no request to finish


def start(profile: Path, timeout_s: float, as_json: bool) -> None:
    """Everything that can be refused is refused before a process is started."""
    settings = check_profile(profile)
    directory = state_dir()
    _claim(directory)
    check_ports(settings)
    _start(profile, directory, timeout_s, as_json)


def stop(timeout_s: float | None, as_json: bool) -> None:
    directory = state_dir()
    ended = _stop(directory, timeout_s)
    if as_json:
        emit("stop/1", ended)
    else:
        say(f"stopped {profiles.name_of(ended['profile'])}")
        for rank in ended["ranks"]:
            if rank["exit_code"]:
                say(f"rank {rank['rank']} {supervisor.how_ended(rank['exit_code'])}")


def restart(profile: Path | None, timeout_s: float, as_json: bool) -> None:
    """The new profile is judged before the old one is stopped: a mistake in it costs no service. Where nothing runs,
    what ran last is started."""
    directory = state_dir()
    now = supervisor.status(directory)
    ran = now.run or now.last
    if profile is None and ran is None:
        raise NotRunningError("nothing runs, and nothing ran here before", hint="tidectl start PROFILE")
    chosen = profile or Path(ran.profile if ran else "")
    settings = check_profile(chosen)
    if now.run is None:
        say(f"nothing was running: starting {profiles.name_of(str(chosen))}")
    if now.run is not None:
        _stop(directory, None)
    _claim(directory)
    check_ports(settings)
    _start(chosen, directory, timeout_s, as_json)


def _claim(directory: Path) -> None:
    """Refuses when something runs; else ends what a killed supervisor left, which still holds memory and ports."""
    lock = supervisor.take_lock(directory)
    try:
        supervisor.clean(directory)
    finally:
        os.close(lock)


def _start(profile: Path, directory: Path, timeout_s: float, as_json: bool) -> None:
    handle = supervisor.start(profile, directory)
    try:
        with waiting() as show:
            ranks = handle.wait_ready(timeout_s, lambda ranks: show(loading(ranks)))
    except KeyboardInterrupt:
        _abort(handle)
        raise
    except TideError:
        _show_why(directory)
        raise
    _report(profile, directory, ranks, as_json)


def _abort(handle: supervisor.Handle) -> None:
    """Nothing serves yet, so nothing is waited for but the ranks' own end."""
    say("interrupted: ending the ranks")
    handle.process.terminate()
    try:
        handle.process.wait(ABORT_S)
    except subprocess.TimeoutExpired:
        handle.process.kill()
        handle.process.wait()
    _claim(handle.state_dir)
    say("nothing is running")


def _show_why(directory: Path) -> None:
    """How far the ranks are that go on loading, or the log of the one that ended: its last word is often shorter."""
    now = supervisor.status(directory)
    if now.running:
        say(line(loading(now.ranks)))
    found = supervisor.culprit(now.last) if now.last and not now.running else None
    if found is None:
        return
    told = [line for line in found.message.splitlines() if line.strip()]
    lines = logs.tail_of(directory, found.rank, LOG_LINES)
    lines = [line for line in lines if not any(part in line for part in told)]
    if lines:
        say(f"the last lines of rank {found.rank}'s log:")
        say("\n".join(f"  {line}" for line in lines))


def _report(profile: Path, directory: Path, ranks: list[RankState], as_json: bool) -> None:
    now = look(directory)
    facts: dict[str, Any] = {"profile": str(profile), "url": now.url}
    if as_json:
        emit("start/1", {**facts, "ranks": [{"rank": rank.rank, "pid": rank.pid} for rank in ranks]})
        return
    name = profiles.name_of(str(profile))
    model = (now.health or {}).get("model") or "the model"
    say(f"{model} serves at {now.url} (profile {name})" if now.url else f"{name}: the ranks of this machine are ready")


def _stop(directory: Path, timeout_s: float | None) -> dict[str, Any]:
    """Stops what runs: how each rank ended, and the requests that were cut."""
    now = supervisor.status(directory)
    drain_s = _drain_s(now)
    limit_s = drain_s + STOP_MARGIN_S if timeout_s is None else timeout_s
    if now.run is not None:
        say(f"stopping {profiles.name_of(now.run.profile)} (running requests may finish)")
    requests = _OpenRequests(url_of(now))
    try:
        supervisor.stop(directory, limit_s, requests)
    except KeyboardInterrupt:
        say("interrupted; the ranks go on ending, see `tidectl status`")
        raise
    cut = requests.left_after(min(limit_s, drain_s))
    if any(cut.values()):
        say(f"the time was over; requests cut: {cut['running']} running, {cut['waiting']} waiting")
    last = supervisor.status(directory).last
    ranks = [{"rank": rank.rank, "exit_code": rank.exit_code} for rank in last.ranks] if last else []
    return {"profile": now.run.profile if now.run else "", "ranks": ranks, "cut": cut}


class _OpenRequests:
    """The server's requests while it ends, as it last said; called again and again."""

    def __init__(self, url: str) -> None:
        self._url, self._began_s = url, time.monotonic()
        self._asked_s, self._left = -HEALTH_EVERY_S, {"running": 0, "waiting": 0}

    def __call__(self) -> None:
        now_s = time.monotonic()
        if not self._url or now_s < self._asked_s + HEALTH_EVERY_S:
            return
        self._asked_s = now_s
        with suppress(TideError):  # the port closes when the answers are out
            health = http.health(self._url, HEALTH_EVERY_S)
            lanes = health.get("lanes")
            running = lanes.get("busy") if isinstance(lanes, dict) else None
            counts = (("running", running), ("waiting", health.get("queue")))
            self._left = {name: count if isinstance(count, int) else 0 for name, count in counts}

    def left_after(self, allowed_s: float) -> dict[str, int]:
        """None when all ended before the time was over: then they had finished."""
        over = time.monotonic() - self._began_s >= allowed_s
        return self._left if over else dict.fromkeys(self._left, 0)


def _drain_s(now: supervisor.Status) -> float:
    from tided.profile import load

    try:
        settings: Settings = load(now.run.profile if now.run else "")
    except TideError:  # changed or removed since it was started
        return STOP_MARGIN_S
    return settings.server.drain_s


def loading(ranks: list[RankState]) -> list[Item]:
    """For a view of the start. A failed rank's message is the error in full, which is told when all have ended."""
    return [
        Item(
            name=f"rank {rank.rank}",
            state=rank.phase,
            since=rank.since,
            detail="" if rank.phase == "failed" else rank.message.partition("\n")[0],
            done=rank.done,
            total=rank.total,
            ready=rank.phase == "ready",
        )
        for rank in ranks
    ] or [Item("starting the ranks")]
