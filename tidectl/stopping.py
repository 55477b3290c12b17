"""`tidectl stop`: on all nodes of what runs, at the same time. Rank 0 lets its requests finish and takes the others
along."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tidectl import http, profiles, record, runner, supervisor
from tidectl.node_messages import End, Ends, Look, Seen
from tidectl.nodes import Node
from tidectl.output import say
from tidectl.running import url_of
from tidectl.team import Team
from tided.errors import NotRunningError, TideError, UnavailableError
from tided.settings import Settings

STOP_MARGIN_S = 20.0  # beside server.drain_s: what the supervisor itself allows, and some
HEALTH_EVERY_S = 0.25
SETTLE_S, SETTLE_EVERY_S, LOOK_S = 20.0, 0.3, 5.0
GROWTH_BYTES = 100_000_000  # of a second look, and below it memory stands still
PEER_MARGIN_S = 60.0  # a connection, and what is ended by force

Answers = Sequence[Ends | TideError]


def stop(directory: Path, timeout_s: float | None) -> dict[str, Any]:
    """Stops what runs: how each rank ended, and the requests that were cut. Raises NotRunningError, and
    UnavailableError for nodes that were not reached."""
    now = runner.status(directory)
    drain_s = _drain_s(now)
    limit_s = drain_s + STOP_MARGIN_S if timeout_s is None else timeout_s
    if now.run is not None:
        say(f"stopping {profiles.name_of(now.run.profile)} (running requests may finish)")
    requests = _OpenRequests(url_of(now))
    try:
        with _ended_elsewhere(directory, limit_s) as others:
            _end_here(directory, limit_s, requests, others)
            answers = others.result() if others else []  # each question has a deadline of its own
    except KeyboardInterrupt:
        say("interrupted; the ranks go on ending, see `tidectl status`")
        raise
    cut = requests.left_after(min(limit_s, drain_s))
    if any(cut.values()):
        say(f"the time was over; requests cut: {cut['running']} running, {cut['waiting']} waiting")
    _refuse_left(directory, answers)
    profile = now.run.profile if now.run else ""
    return {"profile": profile, "ranks": _ends(runner.status(directory), answers), "cut": cut}


@contextmanager
def _ended_elsewhere(directory: Path, timeout_s: float) -> Iterator["Future[Answers] | None"]:
    """The answers of the other nodes of what runs; None where there are none, or they have ended."""
    found = record.read(directory)
    if found is None or found.over:
        yield None
        return
    pool = ThreadPoolExecutor(1)
    with Team([node for node in found.nodes if not node.here], directory) as team:
        requests = [(member, End(timeout_s)) for member in team.members]
        yield pool.submit(team.each, requests, Ends, timeout_s + PEER_MARGIN_S)
    pool.shutdown(wait=False)


def _end_here(directory: Path, limit_s: float, requests: "_OpenRequests", others: "Future[Answers] | None") -> None:
    try:
        runner.stop(directory, limit_s, requests)
    except NotRunningError:  # what is left of a run may be on other nodes alone
        if others is None or not any(isinstance(one, TideError) or one.ran for one in others.result()):
            _note_over(directory)
            raise


def _refuse_left(directory: Path, answers: Answers) -> None:
    failed = [answer for answer in answers if isinstance(answer, TideError)]
    if not failed:
        _note_over(directory)
    else:
        names = "; ".join(f"{error.where}: {error.what}" for error in failed)
        hint = "a rank that lost rank 0 ends by itself; `tidectl stop` here tries again, or run it there"
        raise UnavailableError(f"the ranks of this machine have ended, others may run: {names}", hint=hint)


def _note_over(directory: Path) -> None:
    found = record.read(directory)
    if found is not None:
        record.write(directory, found.nodes, over=True)


def _ends(now: supervisor.Status, answers: Answers) -> list[dict[str, int]]:
    lasts = [now.last, *(answer.last for answer in answers if isinstance(answer, Ends))]
    ranks = [rank for last in lasts if last for rank in last.ranks]
    return [{"rank": rank.rank, "exit_code": rank.exit_code} for rank in sorted(ranks, key=lambda rank: rank.rank)]


def settle(team: Team) -> None:
    """Waits until no node's free memory grows any more: what was locked or lay in files comes back later than the
    process that held it ends, and a start counts what is free. At most `SETTLE_S`."""
    deadline, before = time.monotonic() + SETTLE_S, dict[Node, int]()
    while time.monotonic() < deadline:
        answers = team.each([(member, Look()) for member in team.members], Seen, LOOK_S)
        free = {
            member.node: seen.available_bytes
            for member, seen in zip(team.members, answers, strict=True)
            if isinstance(seen, Seen)
        }
        if before and all(now < before.get(node, 0) + GROWTH_BYTES for node, now in free.items()):
            return
        before = free
        time.sleep(SETTLE_EVERY_S)


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
