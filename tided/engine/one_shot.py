"""Collectives of ranks on one host by one launch each (`kernels.one_shot_triton`), of parts that fit its slabs. A rank
lends the others a region of its device's memory; what they open it by is exchanged over the ranks' store.

Sums are added in the order of the ranks, as those of NCCL's parts are: the same bits either way."""

import logging
from datetime import timedelta

import msgspec
import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from kernels.one_shot_triton import ADDED, LARGEST_BYTES, OWN_WORDS, REGION_BYTES, STACKED, one_shot
from tided.engine import peer_memory
from tided.errors import PairError, UnavailableError, told

__all__ = ["ADDED", "LARGEST_BYTES", "STACKED", "OneShot", "opened"]

log = logging.getLogger("data plane")

ENDED = 1 << 32  # the host's own word; else 1 + the rank that did not come


class Offer(msgspec.Struct, frozen=True):
    """What a rank tells the others, in two rounds: its device and the handle of its region, then whether it has opened
    theirs. `fault`: what it cannot do."""

    fault: str = ""
    device: str = ""
    handle: bytes = b""


class OneShot:
    """One a process, used by one thread and on one stream at a time. regions int64 [ranks + 1] on the device: where the
    ranks' regions lie for this process, and `word`, int64 [1] that host and device see at one address (pinned).
    `patience_s`: longest wait for a peer within a launch."""

    def __init__(self, rank: int, regions: Tensor, word: Tensor, patience_s: float) -> None:
        self.rank, self.ranks = rank, len(regions) - 1
        self._regions, self._word, self._patience_s = regions, word, patience_s
        self._own = torch.zeros(OWN_WORDS, dtype=torch.int64, device=regions.device)
        self.most_bytes = LARGEST_BYTES

    def takes(self, part: Tensor) -> bool:
        """The same on all ranks, for parts that are alike."""
        return part.element_size() == 4 and 0 < part.nbytes <= self.most_bytes

    def __call__(self, part: Tensor, kind: int) -> Tensor:
        """A contiguous part that it takes -> what `kernels.one_shot_triton.one_shot` makes of it."""
        patience_us = int(1e6 * self._patience_s)
        return one_shot(part, self._regions, self._own, self.rank, self.ranks, kind, patience_us)

    def check(self) -> None:
        """Asks no device: what launches that are over have left. Raises PairError if a peer did not come to one."""
        word = int(self._word[0])
        if 0 < word < ENDED:
            raise PairError(
                f"rank {self.rank} waited {self._patience_s:g} s on its device for rank {word - 1}, in a collective",
                hint=f"the log of rank {word - 1} shows where it stood",
            )

    def end(self) -> None:
        """Launches wait for nobody any more. What was lent stays until the process ends: peers may still read it."""
        self._word[0] = ENDED


def opened(store: Store, rank: int, ranks: int, wait_s: float, patience_s: float) -> OneShot:
    """For the current device; all ranks at once. Raises UnavailableError on all where one cannot, or does not come
    within `wait_s`."""
    device, address, addresses = torch.cuda.current_device(), 0, list[int]()
    try:
        address, handle = peer_memory.lend(REGION_BYTES)
        own = Offer(device=peer_memory.identity(device), handle=handle)
    except UnavailableError as error:
        own = Offer(fault=error.what)
    offers = exchanged(store, "lent", rank, ranks, own, wait_s)
    try:
        addresses = [address if r == rank else _borrowed(device, offer) for r, offer in enumerate(offers)]
        own = Offer()
    except UnavailableError as error:
        own = Offer(fault=error.what)
    exchanged(store, "opened", rank, ranks, own, wait_s)
    word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    regions = torch.tensor([*addresses, word.data_ptr()], dtype=torch.int64).to(torch.device("cuda", device))
    return OneShot(rank, regions, word, patience_s)


def _borrowed(device: int, offer: Offer) -> int:
    if why := peer_memory.why_apart(device, offer.device):
        raise UnavailableError(why)
    return peer_memory.borrow(offer.handle)


def exchanged(store: Store, round_: str, rank: int, ranks: int, own: Offer, wait_s: float) -> list[Offer]:
    """Every rank's offer of a round. Raises UnavailableError, on all ranks alike, where one has a fault, and where one
    does not come."""
    keys = [f"one-shot-{round_}-{number}" for number in range(ranks)]
    try:
        store.set(keys[rank], msgspec.json.encode(own).decode())
        store.wait(keys, timedelta(seconds=wait_s))
        offers = [msgspec.json.decode(store.get(key), type=Offer) for key in keys]
    except RuntimeError as error:
        log.warning("exchange over the ranks' store: %s", error)
        raise UnavailableError(
            f"rank {rank} finds not every rank with parallel.one_shot within {wait_s:g} s: {told(error)}"
        ) from error
    for number, offer in enumerate(offers):
        if offer.fault:
            raise UnavailableError(
                f"parallel.one_shot: rank {number} cannot share memory with its peers: {offer.fault}",
                hint="set it to false: NCCL then carries all sums",
            )
    return offers
