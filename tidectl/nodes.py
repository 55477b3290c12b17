"""The nodes of a profile: which ranks share a machine. A node is an address: ranks with one address are on one machine,
other addresses are other machines."""

from typing import NamedTuple

from tided.profile.instances import is_own_address
from tided.settings import Parallel


class Node(NamedTuple):
    """`host`: as the profile names it, "" where it names none. `here`: it is this machine."""

    host: str
    ranks: tuple[int, ...]
    here: bool

    def __str__(self) -> str:
        return self.host or "this machine"


def nodes_of(parallel: Parallel) -> list[Node]:
    """Rank 0's first. At most one is this machine: the first whose address is one of its own."""
    if not parallel.hosts:
        return [Node("", tuple(range(parallel.ranks)), True)]
    ours = next((host for host in parallel.hosts if is_own_address(host)), None)
    ranks = {host: tuple(n for n, other in enumerate(parallel.hosts) if other == host) for host in parallel.hosts}
    return [Node(host, numbers, host == ours) for host, numbers in ranks.items()]


def local_ranks(parallel: Parallel) -> list[int]:
    """The ranks of this machine."""
    return [rank for node in nodes_of(parallel) if node.here for rank in node.ranks]
