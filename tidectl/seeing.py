"""What runs on all nodes of a run, seen from rank 0's: what this machine knows, and what the others answer."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tidectl import record, supervisor
from tidectl.node_messages import Look, Seen
from tidectl.nodes import Node
from tidectl.peers import Peer
from tidectl.running import Machine, Rank, Snapshot, look, ranks_of, state_of
from tidectl.team import Here, Team
from tided.errors import TideError

PEER_S = 10.0
RATE_S = 0.3  # over which reads are counted

Answers = dict[Node, Seen | TideError]


class Watch:
    """Looks again and again, over the same connections as long as the nodes are the same."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir, self._nodes = state_dir, list[Node]()
        self._team = Team([], state_dir)

    def look(self) -> Snapshot:
        """As `running.look`, with the other nodes' ranks, their memory and what they read from disks. Changes
        nothing."""
        found = record.read(self._state_dir)
        known = found.nodes if found else [Node("", (), True)]
        nodes = [node for node in known if node.here or (found and not found.over)]
        if nodes != self._nodes:
            self.close()
            self._team, self._nodes = Team(nodes, self._state_dir), nodes
        first = _ask(self._team, self._team.members)
        here = look(self._state_dir)
        second = _again(self._team, first) if here.state == "serving" else first
        return _joined(here, first, second)

    def close(self) -> None:
        self._team.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def look_everywhere(state_dir: Path) -> Snapshot:
    """Once."""
    with Watch(state_dir) as watch:
        return watch.look()


def _ask(team: Team, members: Sequence[Here | Peer]) -> Answers:
    answers = team.each([(member, Look()) for member in members], Seen, PEER_S)
    return {member.node: answer for member, answer in zip(members, answers, strict=True)}


def _again(team: Team, first: Answers) -> Answers:
    """Far enough behind the first answers that a rate can be told. Who gave none is not waited for twice."""
    began = max((seen.time_s for node, seen in first.items() if isinstance(seen, Seen) and node.here), default=0.0)
    time.sleep(min(RATE_S, max(0.0, began + RATE_S - time.time())))
    return first | _ask(team, [member for member in team.members if isinstance(first[member.node], Seen)])


def _joined(here: Snapshot, first: Answers, second: Answers) -> Snapshot:
    trouble, ranks = list(here.trouble), list[Rank]()
    for node, seen in second.items():
        if isinstance(seen, TideError):
            trouble.append(f"{node}: {seen.what}")
            ranks += [Rank(rank, 0, False, "unknown", 0.0, "", host=node.host) for rank in node.ranks]
        elif node.here:
            ranks += _with_figures(here.ranks, node, first[node], seen)
        else:
            there = ranks_of(_status(seen), seen.processes)
            ranks += _with_figures(there, node, first[node], seen)
            trouble += _trouble(node, seen, here)
            if seen.running and here.state != "stopping":
                trouble += [f"rank {rank.rank} on {node} has ended" for rank in there if not rank.alive]
    machines = [
        Machine(str(node), seen.available_bytes, seen.total_bytes)
        for node, seen in second.items()
        if isinstance(seen, Seen)
    ]
    state = here.state
    if state != "stopping" and len(trouble) > len(here.trouble):
        state = "degraded"
    elif state == "serving":
        state = state_of(ranks, trouble)
    ends = [here.last, *(seen.last for node, seen in second.items() if isinstance(seen, Seen) and not node.here)]
    ranks.sort(key=lambda rank: rank.rank)
    return here._replace(state=state, ranks=ranks, trouble=trouble, last=_last(ends), machines=tuple(machines))


def _status(seen: Seen) -> supervisor.Status:
    return supervisor.Status(seen.running, seen.run, seen.ranks, seen.last)


def _trouble(node: Node, seen: Seen, here: Snapshot) -> list[str]:
    """A node that does not run yet while rank 0 starts, or any more while it stops, is none."""
    if here.state == "stopped":
        return [f"ranks on {node} still run: `tidectl stop` ends them"] if seen.running else []
    if seen.running or here.state in ("starting", "stopping"):
        return []
    found = supervisor.culprit(seen.last) if seen.last else None
    how = f"rank {found.rank} {supervisor.how_ended(found.exit_code)}" if found else "its ranks do not run"
    return [f"{node}: {how}"]


def _with_figures(ranks: Sequence[Rank], node: Node, first: Seen | TideError, second: Seen) -> list[Rank]:
    found = []
    for rank in ranks:
        process = second.processes.get(rank.rank)
        rate = _rate(first, second, rank.rank)
        memory = process.memory_bytes if process else 0
        found.append(rank._replace(host=node.host, memory_bytes=memory, read_bytes_s=rate))
    return found


def _rate(first: Seen | TideError, second: Seen, rank: int) -> float | None:
    """Bytes a second that a rank reads from disks."""
    if isinstance(first, TideError) or second.time_s <= first.time_s:
        return None
    old, new = first.processes.get(rank), second.processes.get(rank)
    if old is None or new is None or old.read_bytes < 0 or new.read_bytes < old.read_bytes:
        return None
    return (new.read_bytes - old.read_bytes) / (second.time_s - first.time_s)


def _last(ends: Sequence[supervisor.Ended | None]) -> supervisor.Ended | None:
    """How the run ended, from all nodes: `first` is the one with a reason of its own, else the first of all."""
    known = [last for last in ends if last is not None]
    if len(known) < 2:
        return known[0] if known else None
    alone = [last for last in known if last.first is not None]
    reasons = [last for last in alone if supervisor.has_own_reason(last)]
    chosen = min(reasons or alone or known, key=lambda last: last.ended)
    ranks = sorted((rank for last in known for rank in last.ranks), key=lambda rank: rank.rank)
    return supervisor.Ended(known[0].profile, chosen.ended, chosen.first, ranks)
