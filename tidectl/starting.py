"""A start on all nodes: what each can refuse first, then the ranks, then the wait until all serve.

    connect   ssh, the same build
    prepare   the profile is sent, judged there, its keys agree; nothing runs there
    begin     rank 0's node; the others once rank 0 has passed its own checks
    wait      every node's supervisor is looked at

The first rank that ends, ends all.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tidectl import record, runner, supervisor
from tidectl.node_messages import Begin, Done, End, Ends, Look, Prepare, Prepared, Seen
from tidectl.nodes import Node
from tidectl.peers import Peer
from tidectl.processes import POLL_S
from tidectl.sent import text_for_peer
from tidectl.team import Here, Team
from tidectl.waiting import Item
from tided.control.state import RankState
from tided.errors import TideError, UnavailableError
from tided.settings import Settings

PEER_POLL_S = 0.2
LOOK_S = 5.0
LOST_S = 20.0  # a peer that is not reached for so long
OTHERS_END_S = 3.0  # of several that end, one has a reason of its own
END_S = 15.0  # a start that is given up has no request to finish

Watch = Callable[[list[Item]], None]


class RankFailed(Exception):
    """A rank ended: `error` says why; `member` and `rank` where its log is."""

    def __init__(self, error: TideError, member: Here | Peer, rank: int | None) -> None:
        super().__init__(str(error))
        self.error, self.member, self.rank = error, member, rank


class OutOfTime(UnavailableError):
    """The ranks go on loading."""


class Start:
    """One start of the ranks of `team`. `profile`: the file on this machine."""

    def __init__(self, team: Team, settings: Settings, profile: Path, state_dir: Path) -> None:
        self._team, self._settings, self._profile, self._state_dir = team, settings, profile, state_dir
        self._paths: dict[Node, str] = {team.first.node: str(profile)}
        self._begun: list[Here | Peer] = []
        self._seen: dict[Node, Seen] = {}
        self._heard_s: dict[Node, float] = {}

    def run(self, timeout_s: float, watch: Watch) -> list[RankState]:
        """Until all serve. Raises RankFailed; what a node refuses; OutOfTime, and the ranks go on."""
        deadline = time.monotonic() + timeout_s
        self._prepare(watch)
        record.write(self._state_dir, [member.node for member in self._team.members])
        self._begin([self._team.first])
        while time.monotonic() < deadline:
            self._look()
            watch(self.items())
            if any(_has_ended(self._seen[member.node]) for member in self._begun):
                raise self._why()
            if len(self._begun) < len(self._team.members) and self._has_passed_checks():
                self._begin(self._team.peers)
                continue
            if ranks := self._all_ready():
                return ranks
            time.sleep(PEER_POLL_S if self._team.peers else POLL_S)
        hint = "they go on loading: tidectl status shows how far they are, tidectl stop ends them"
        raise OutOfTime(f"the ranks are not ready after {timeout_s:g} s", hint=hint)

    def _prepare(self, watch: Watch) -> None:
        """The profile, and where no file is named for them the keys, go to the other nodes."""
        if not self._team.peers:
            return
        from tided.control.keys import load_keys  # with the library of the control plane

        watch([Item("other nodes", "connecting")])
        self._team.connect(self._state_dir)
        watch([Item("other nodes", "checking the profile")])
        named = self._settings.parallel.key_file
        path = Path(named or runner.key_file(self._state_dir))
        keys, text = load_keys(path, create=True), text_for_peer(self._settings)
        secret = "" if named else path.read_text()
        requests = [
            (peer, Prepare(self._profile.stem, text, peer.node.host, list(peer.node.ranks), secret, keys.leader.public))
            for peer in self._team.peers
        ]
        for peer, prepared in zip(self._team.peers, self._team.all(requests, Prepared), strict=True):
            self._paths[peer.node] = prepared.profile

    def abort(self) -> list[TideError]:
        """Ends what was begun, on all nodes; what could not be ended."""
        answers = self._team.each([(member, End(END_S)) for member in self._begun], Ends, 3 * END_S)
        return [answer for answer in answers if isinstance(answer, TideError)]

    def items(self) -> list[Item]:
        several = len(self._team.members) > 1
        return [item for member in self._team.members for item in self._items(member, several)]

    def _items(self, member: Here | Peer, several: bool) -> list[Item]:
        where = f" ({member.node})" if several else ""
        seen = self._seen.get(member.node)
        said = {rank.rank: rank for rank in seen.ranks} if seen else {}
        silent = "starting" if member in self._begun else "waits for rank 0"
        ranks = [(rank, said.get(rank)) for rank in member.node.ranks]
        return [_item(state, where) if state else Item(f"rank {rank}{where}", silent) for rank, state in ranks]

    def _begin(self, members: Sequence[Here | Peer]) -> None:
        self._begun += members  # what begins and does not tell so is ended too
        now_s = time.monotonic()
        self._heard_s |= {member.node: now_s for member in members}
        self._team.all([(one, Begin(self._paths[one.node], list(one.node.ranks))) for one in members], Done)

    def _look(self) -> None:
        """A peer that is not reached for a moment is asked again."""
        answers = self._team.each([(member, Look()) for member in self._begun], Seen, LOOK_S)
        now_s = time.monotonic()
        for member, answer in zip(self._begun, answers, strict=True):
            if isinstance(answer, Seen):
                self._seen[member.node], self._heard_s[member.node] = answer, now_s
            elif member.node not in self._seen or now_s > self._heard_s[member.node] + LOST_S:
                raise answer

    def _has_passed_checks(self) -> bool:
        return any(rank.rank == 0 and rank.phase != "checking" for rank in self._seen[self._team.first.node].ranks)

    def _all_ready(self) -> list[RankState]:
        """All ranks once all serve; else none."""
        if len(self._begun) < len(self._team.members):
            return []
        found = [rank for member in self._begun for rank in self._ready(member)]
        return found if len(found) == sum(len(member.node.ranks) for member in self._begun) else []

    def _ready(self, member: Here | Peer) -> list[RankState]:
        seen = self._seen[member.node]
        if seen.run is None or len(seen.run.ranks) < seen.run.planned:
            return []
        return [rank for rank in seen.ranks if rank.phase == "ready"]

    def _why(self) -> RankFailed:
        """The rank with a reason of its own; the others may tell theirs a moment later."""
        deadline = time.monotonic() + OTHERS_END_S
        while time.monotonic() < deadline and not self._own_reasons() and self._still_running():
            time.sleep(PEER_POLL_S)
            self._look()
        ended = self._own_reasons() or [one for one in self._begun if _has_ended(self._seen[one.node])]
        member = min(ended, key=lambda one: self._last_word_s(one))
        seen = self._seen[member.node]
        found = supervisor.culprit(seen.last) if seen.last else None
        now = supervisor.Status(seen.running, seen.run, seen.ranks, seen.last)
        directory, where = (self._state_dir, "") if member.node.here else (None, f" on {member.node}")
        return RankFailed(supervisor.why_ended(now, directory, where), member, found.rank if found else None)

    def _own_reasons(self) -> list[Here | Peer]:
        """The nodes where a rank ended by something else than the loss of its peer."""
        return [one for one in self._begun if supervisor.has_own_reason(self._seen[one.node].last)]

    def _still_running(self) -> bool:
        return any(not _has_ended(self._seen[member.node]) for member in self._begun)

    def _last_word_s(self, member: Here | Peer) -> float:
        last = self._seen[member.node].last
        return last.ended if last else 0.0


def _has_ended(seen: Seen) -> bool:
    """A service manager may be about to start a rank again that has ended."""
    return not seen.running or (seen.last is not None and seen.last.first is not None)


def _item(rank: RankState, where: str) -> Item:
    """A failed rank's message is the error in full, which is told when all have ended."""
    return Item(
        name=f"rank {rank.rank}{where}",
        state=rank.phase,
        since=rank.since,
        detail="" if rank.phase == "failed" else rank.message.partition("\n")[0],
        done=rank.done,
        total=rank.total,
        ready=rank.phase == "ready",
    )
