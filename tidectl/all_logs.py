"""`tidectl logs`: the ranks' logs from all nodes, merged by the time that their lines begin with; followed until the
ranks have ended."""

import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from tidectl import logs, record, runner
from tidectl.node_messages import Lines, LogLine, MoreLogs, OpenLogs
from tidectl.nodes import Node
from tidectl.output import emit, is_terminal, say, styled, visible
from tidectl.peers import Peer
from tidectl.state import state_dir
from tidectl.team import Here, Team
from tided.errors import TideError

POLL_S = 0.2
LOOK_S = 5.0
LOST_S = 20.0  # a node that is not reached for so long
GAP_LINES = 1000  # looked through for what was shown last, behind a connection that was lost

_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


def show(rank: int | None, lines: int, follow: bool, all_runs: bool, as_json: bool) -> None:
    directory = state_dir()
    nodes = choose(directory, rank, all_runs)
    several = sum(len(node.ranks) for node in nodes) > 1
    with Team(nodes, directory) as team:
        merge, followed = Merge(), [_Followed(member, lines) for member in team.members]
        tail = merge(_opened(team, followed, lines, all_runs))
        if as_json and not follow:
            emit("logs/1", {"lines": [_fields(line) for line in tail]})
            return
        write = _json_line if as_json else _writer(prefixed=several)
        _write_all(tail, write)
        if follow:
            _follow(team, followed, merge, write)


def choose(directory: Path, rank: int | None, all_runs: bool) -> list[Node]:
    """The nodes and of each the ranks whose logs are asked for. Raises UsageError, NotRunningError."""
    found = record.read(directory)
    others = [node for node in found.nodes if not node.here] if found else []
    if rank is not None and (there := [node for node in others if rank in node.ranks]):
        return [there[0]._replace(ranks=(rank,))]
    ranks = logs.choose(runner.ranks_with_logs(directory), rank, all_runs, runner.status(directory))
    here = next((node for node in found.nodes if node.here), None) if found else None
    ours = Node(here.host if here else "", tuple(ranks), True)
    return [ours, *others] if rank is None else [ours]


class Merge:
    """Lines of several ranks in the order of their times. What has none (a trace) stays behind the line before it."""

    def __init__(self) -> None:
        self._newest: dict[int, str] = {}

    def __call__(self, lines: Iterable[LogLine]) -> list[LogLine]:
        timed = []
        for line in lines:
            if match := _TIME.match(line[1]):
                self._newest[line[0]] = match[0]
            timed.append((self._newest.get(line[0], ""), line))
        return [line for _, line in sorted(timed, key=lambda pair: pair[0])]


class _Followed:
    """A node whose logs are followed. A connection that is made anew knows nothing of the logs: they are opened again,
    and what was shown already is found in them."""

    def __init__(self, member: Here | Peer, lines: int) -> None:
        self.member, self.over = member, False
        self.asking: Future[Lines | TideError] | None = None
        self._lines, self._is_open, self._heard_s = lines, False, time.monotonic()
        self._last: dict[int, LogLine] = {}

    def ask(self, team: Team) -> "Future[Lines | TideError]":
        ranks = list(self.member.node.ranks)
        question = MoreLogs() if self._is_open else OpenLogs(ranks, max(self._lines, GAP_LINES), False)
        self.asking = self.asking or team.begin(self.member, question, Lines, LOOK_S)
        return self.asking

    def take(self) -> list[LogLine]:
        """What has come; a node that has not answered yet is not waited for."""
        if self.asking is None or not self.asking.done():
            return []
        answer, self.asking = self.asking.result(), None
        if isinstance(answer, TideError):
            self._is_open = False
            if time.monotonic() > self._heard_s + LOST_S:
                say(f"{answer.where}: {answer.what}")
                self.over = True
            return []
        if not self._is_open:
            return self.opened([line for rank in self.member.node.ranks for line in self._behind(rank, answer.lines)])
        self.over = not answer.running and not answer.lines
        return self._shown(answer.lines)

    def opened(self, lines: list[LogLine]) -> list[LogLine]:
        self._is_open = True
        return self._shown(lines)

    def _shown(self, lines: list[LogLine]) -> list[LogLine]:
        self._heard_s = time.monotonic()
        self._last |= {line[0]: line for line in lines}
        return lines

    def _behind(self, rank: int, lines: Sequence[LogLine]) -> list[LogLine]:
        """Of a rank's newest lines those that were not shown yet."""
        ours = [line for line in lines if line[0] == rank]
        places = [place for place, line in enumerate(ours) if line == self._last.get(rank)]
        if places:
            return ours[places[-1] + 1 :]
        if ours:
            say(f"{self.member.node}: the connection was lost; lines of rank {rank} may be missing")
        return ours if rank in self._last else ours[max(0, len(ours) - self._lines) :]


def _opened(team: Team, followed: Sequence[_Followed], lines: int, all_runs: bool) -> list[LogLine]:
    """A node that is not reached is told, and its lines are missing."""
    requests = [(one.member, OpenLogs(list(one.member.node.ranks), lines, all_runs)) for one in followed]
    found: list[LogLine] = []
    for one, answer in zip(followed, team.each(requests, Lines), strict=True):
        if isinstance(answer, TideError):
            if len(team.members) == 1:
                raise answer
            say(f"{answer.where}: {answer.what}")
        else:
            found += one.opened(answer.lines)
    return found


def _follow(team: Team, followed: list[_Followed], merge: Merge, write: Callable[[LogLine], None]) -> None:
    while followed:
        wait([one.ask(team) for one in followed], POLL_S)
        _write_all(merge([line for one in followed for line in one.take()]), write)
        followed = [one for one in followed if not one.over]
        if followed:
            time.sleep(POLL_S)
    say("the ranks have ended")


def _write_all(lines: Sequence[LogLine], write: Callable[[LogLine], None]) -> None:
    for line in lines:
        write(line)
    sys.stdout.flush()


def _writer(prefixed: bool) -> Callable[[LogLine], None]:
    terminal = is_terminal(sys.stdout)

    def write(line: LogLine) -> None:
        prefix = styled(f"rank {line[0]} | ", "dim", sys.stdout) if prefixed else ""
        print(f"{prefix}{visible(line[1]) if terminal else line[1]}")

    return write


def _json_line(line: LogLine) -> None:
    emit("logs-line/1", _fields(line))


def _fields(line: LogLine) -> dict[str, Any]:
    return {"rank": line[0], "line": line[1]}
