"""`tidectl logs`: the ranks' logs from all nodes, merged by the time that their lines begin with; followed until the
ranks have ended."""

import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
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
LOST = 25  # questions in a row that a node does not answer

_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


def show(rank: int | None, lines: int, follow: bool, all_runs: bool, as_json: bool) -> None:
    directory = state_dir()
    nodes = choose(directory, rank, all_runs)
    several = sum(len(node.ranks) for node in nodes) > 1
    with Team(nodes, directory) as team:
        merge, running = Merge(), list(team.members)
        tail = merge(_opened(team, lines, all_runs))
        if as_json and not follow:
            emit("logs/1", {"lines": [_fields(line) for line in tail]})
            return
        write = _json_line if as_json else _writer(prefixed=several)
        _write_all(tail, write)
        if follow:
            _follow(team, running, merge, write)


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


def _opened(team: Team, lines: int, all_runs: bool) -> list[LogLine]:
    """A node that is not reached is told, and its lines are missing."""
    requests = [(member, OpenLogs(list(member.node.ranks), lines, all_runs)) for member in team.members]
    found: list[LogLine] = []
    for answer in team.each(requests, Lines):
        if isinstance(answer, TideError):
            if len(team.members) == 1:
                raise answer
            say(f"{answer.where}: {answer.what}")
        else:
            found += answer.lines
    return found


def _follow(team: Team, running: list[Here | Peer], merge: Merge, write: Callable[[LogLine], None]) -> None:
    failures = dict.fromkeys(running, 0)
    while running:
        answers = team.each([(member, MoreLogs()) for member in running], Lines)
        fresh: list[LogLine] = []
        for member, answer in list(zip(running, answers, strict=True)):
            if isinstance(answer, TideError):
                failures[member] += 1
                if failures[member] > LOST:
                    say(f"{answer.where}: {answer.what}")
                    running.remove(member)
            else:
                fresh += answer.lines
                if not answer.running and not answer.lines:
                    running.remove(member)
        _write_all(merge(fresh), write)
        if running:
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
