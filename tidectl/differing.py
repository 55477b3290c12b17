"""What the boot guard would say: the facts of every rank, by its own node, compared without starting anything."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tidectl.node_messages import Declared, Facts
from tidectl.nodes import Node
from tidectl.peers import NODE, Peer
from tidectl.sent import text_for_peer
from tided import guard
from tided.errors import GuardError, TideError
from tided.settings import Settings

FACTS_S = 120.0  # torch is imported, and every shard's headers are read


class Rank(NamedTuple):
    """`facts`: those of the boot guard, and `build`, which a start compares before. `error`: why there are none.
    `skew_s`: its node's clock against ours, and how far off that may be."""

    rank: int
    node: Node
    facts: dict[str, str]
    error: TideError | None
    skew_s: tuple[float, float]


def declared(settings: Settings, nodes: Sequence[Node]) -> list[Rank]:
    """Of every rank, rank 0's first. This machine is asked by a process of its own: torch stays out of this one."""
    text = text_for_peer(settings)
    peers, pool = [Peer(node, NODE if node.here else ()) for node in nodes], ThreadPoolExecutor(len(nodes))
    try:
        found = list(pool.map(lambda peer: _of_peer(peer, text), peers))
    finally:  # Ctrl-C too, which waits for no answer
        for peer in peers:
            peer.close()
        pool.shutdown(wait=False, cancel_futures=True)
    return sorted((rank for ranks in found for rank in ranks), key=lambda rank: rank.rank)


def _of_peer(peer: Peer, text: str) -> list[Rank]:
    node = peer.node
    try:
        facts = peer.ask(Facts(text, list(node.ranks)), Declared, FACTS_S).ranks
        build = {"build": peer.about.build if peer.about else ""}
        return [Rank(rank, node, build | facts[rank], None, peer.skew_s) for rank in node.ranks]
    except TideError as error:
        return [Rank(rank, node, {}, error, peer.skew_s) for rank in node.ranks]
    finally:
        peer.close()


def refuse(settings: Settings, nodes: Sequence[Node]) -> None:
    """Raises the first rank's own error, or GuardError for ranks that differ."""
    ranks = declared(settings, nodes)
    for rank in ranks:
        if rank.error is not None:
            raise rank.error
    for rank in ranks[1:]:
        if found := guard.compare(ranks[0].facts, rank.facts):
            what = "the ranks differ, so they would refuse to serve:\n"
            raise GuardError(what + guard.describe(found, "rank 0", f"rank {rank.rank}"), where=str(rank.node))
