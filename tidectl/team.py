"""The nodes of a run, as `tidectl` on rank 0's machine asks them: this one by a call, the others over ssh."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

from tidectl.node_messages import About, Reply, Request
from tidectl.node_work import Work, about
from tidectl.nodes import Node
from tidectl.peers import ANSWER_S, Peer, of_kind
from tided.errors import ConfigError, TideError

Kind = TypeVar("Kind", bound=Reply)


class Here:
    """This machine."""

    def __init__(self, node: Node, state_dir: Path) -> None:
        self.node, self._work = node, Work(state_dir)

    def ask(self, request: Request, kind: type[Kind], timeout_s: float = ANSWER_S) -> Kind:
        return of_kind(self._work(request), kind, self.node)

    def close(self) -> None:
        self._work.close()


class Team:
    """The nodes of a run. `first`: rank 0's."""

    def __init__(self, nodes: Sequence[Node], state_dir: Path) -> None:
        self.members: list[Here | Peer] = [Here(node, state_dir) if node.here else Peer(node) for node in nodes]
        self._pool = ThreadPoolExecutor(max(1, len(nodes)), "node")

    @property
    def first(self) -> Here | Peer:
        return self.members[0]

    @property
    def peers(self) -> list[Peer]:
        return [member for member in self.members if isinstance(member, Peer)]

    def each(
        self, requests: Sequence[tuple[Here | Peer, Request]], kind: type[Kind], timeout_s: float = ANSWER_S
    ) -> list[Kind | TideError]:
        """All at the same time; an answer a request, or why there is none."""
        if len(requests) == 1:
            return [_answer(requests[0][0], requests[0][1], kind, timeout_s)]
        return list(self._pool.map(lambda pair: _answer(pair[0], pair[1], kind, timeout_s), requests))

    def begin(
        self, member: Here | Peer, request: Request, kind: type[Kind], timeout_s: float
    ) -> "Future[Kind | TideError]":
        """One question, whose answer is looked for later; one at a time for each member."""
        return self._pool.submit(_answer, member, request, kind, timeout_s)

    def all(
        self, requests: Sequence[tuple[Here | Peer, Request]], kind: type[Kind], timeout_s: float = ANSWER_S
    ) -> list[Kind]:
        """The same; raises the first error."""
        answers = self.each(requests, kind, timeout_s)
        for answer in answers:
            if isinstance(answer, TideError):
                raise answer
        return [answer for answer in answers if not isinstance(answer, TideError)]

    def connect(self, state_dir: Path, same_build: bool = True) -> None:
        """To every peer. Raises for one that is not reached, is this machine, or runs another build."""
        for found in self._pool.map(_connected, self.peers):
            if isinstance(found, TideError):
                raise found
        ours = about(state_dir)
        for peer in self.peers:
            _check(peer, ours, same_build)

    def close(self) -> None:
        for member in self.members:
            member.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _answer(member: Here | Peer, request: Request, kind: type[Kind], timeout_s: float) -> Kind | TideError:
    try:
        return member.ask(request, kind, timeout_s)
    except TideError as error:
        return error


def _connected(peer: Peer) -> About | TideError:
    try:
        return peer.connect()
    except TideError as error:
        return error


def _check(peer: Peer, ours: About, same_build: bool) -> None:
    theirs = peer.about
    assert theirs is not None
    if theirs.place and theirs.place == ours.place:
        hint = "where ranks share a machine, write one address for all of them"
        raise ConfigError("ssh leads back to this machine", where=f"{peer.node} in parallel.hosts", hint=hint)
    if same_build and theirs.build != ours.build:
        what = f"TideLM there is another build: {theirs.version} {theirs.build}, here {ours.version} {ours.build}"
        raise ConfigError(what, where=str(peer.node), hint="install the same on all nodes")
