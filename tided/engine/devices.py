"""Where a rank computes, and whether its memory suffices: both are judged before the ranks meet."""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tided.control.memory import available_bytes
from tided.engine.memory import (
    RESIDENTS,
    Gate,
    Need,
    Node,
    gates,
    gb,
    hosts,
    largest_budget,
    needs,
    passing_bytes,
    sharing,
)
from tided.errors import UnavailableError, told
from tided.settings import Parallel, Settings

if TYPE_CHECKING:
    from tided.engine.build import OpenedModel

log = logging.getLogger("tided.devices")

MEMINFO = Path("/proc/meminfo")
SHOWN_SHARE = 0.01  # of all that is needed: less is not worth its place in a line
ALWAYS = (RESIDENTS, "context")


def use_device(settings: Settings, rank: int) -> None:
    """Chooses the rank's CUDA device for the calling thread: the first rank of a host has the first. To be called
    before any process group or allocation. Raises UnavailableError where there is none for it."""
    if settings.engine.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise UnavailableError(
            'no CUDA device: engine.device = "cuda", and torch finds none',
            hint='is the driver there (nvidia-smi), and is this torch one with CUDA? Else set engine.device = "cpu"',
        )
    index, count = local_index(settings.parallel, rank), torch.cuda.device_count()
    if index >= count:
        raise UnavailableError(
            f"rank {rank} is number {index + 1} of its host, which has {count} CUDA devices",
            hint="each rank needs a device of its own: lower parallel.ranks, or name more parallel.hosts",
        )
    torch.cuda.set_device(index)


def local_index(parallel: Parallel, rank: int) -> int:
    """How many earlier ranks run on the rank's host, by the profile's word."""
    of = parallel.hosts or ("",) * parallel.ranks
    return of[:rank].count(of[rank])


def refuse_shortage(opened: "OpenedModel", rank: int) -> None:
    """Raises UnavailableError when the memory that is free now cannot hold what the settings ask for, or would leave no
    room for a prompt: what is too large, by how much, and which budget fits."""
    node = here(opened.settings)
    if node is None:
        return
    failed = [gate for gate in gates(opened, rank, node, started=True) if not gate.passes]
    if failed:
        raise _refusal(opened, rank, node, max(failed, key=lambda gate: gate.missing_bytes))


def refuse_beyond(opened: "OpenedModel", rank: int, total_bytes: int) -> None:
    """The same against all memory that the machine has, whoever holds it now: what no start could get. For a look at a
    profile beside another that runs."""
    apart = opened.settings.engine.device == "cuda" and not is_unified()
    node = Node(apart, total_bytes, torch.cuda.get_device_properties().total_memory if apart else 0)
    failed = [gate for gate in gates(opened, rank, node, started=False) if not gate.passes]
    if failed:
        gate = max(failed, key=lambda gate: gate.missing_bytes)
        what = f"{gb(gate.asked_bytes)} are asked for, and this machine has {gb(gate.free_bytes)} in all"
        raise UnavailableError(what, where=f"rank {rank}", hint=_what_fits(opened, node))


def here(settings: Settings) -> Node | None:
    """This machine as a start finds it; None where nothing tells how much is free."""
    on_cuda = settings.engine.device == "cuda"
    apart = on_cuda and not is_unified()
    system = free_bytes(False)
    if not apart:
        free = free_bytes(on_cuda)
        return None if free is None else Node(False, free)
    device = free_bytes(True)
    assert device is not None, "a device tells what is free"
    return Node(True, device if system is None else system, device)


def free_bytes(on_cuda: bool) -> int | None:
    """Memory that can be allocated, what the system would give back included; None where nothing tells. A device in
    the system's memory has its own figure too, which leaves out the file cache, and may be the larger one all the
    same."""
    own = int(torch.cuda.mem_get_info()[0]) if on_cuda else None
    if own is not None and not is_unified():
        return own
    told = available_bytes(MEMINFO)
    return max((figure for figure in (own, told) if figure is not None), default=None)


def is_unified() -> bool:
    """A device in the system's memory."""
    return torch.cuda.is_available() and bool(getattr(torch.cuda.get_device_properties(), "is_integrated", False))


@contextmanager
def allocating(opened: "OpenedModel", rank: int) -> Iterator[None]:
    """What fails for want of memory is told as such: an anonymous map, torch on CPU and torch on CUDA each raise
    another kind of error."""
    try:
        yield
    except Exception as error:
        if not is_shortage(error):
            raise
        log.warning("an allocation failed", exc_info=error)
        raise UnavailableError(
            f"there is not enough memory: {_listed(opened, rank)}; {told(error)}",
            hint="lower experts.resident, or cache.pool_tokens; `tidectl plan` shows what fits",
        ) from error


def is_shortage(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _refusal(opened: "OpenedModel", rank: int, node: Node, gate: Gate) -> UnavailableError:
    memory, several = opened.settings.memory, len(sharing(opened.settings, rank))
    ranks = f" on each of {several} ranks" if several > 1 and not gate.name.endswith("device") else ""
    if gate.name.startswith("serve"):
        beside = f"a prefill chunk takes {gb(passing_bytes(opened))} in passing (model.prefill_chunk_tokens)"
    else:
        beside = f"{gb(memory.reserve_bytes)} stay free (memory.reserve_bytes)"
    where = " of the device's memory" if gate.name.endswith("device") else ""
    return UnavailableError(
        f"there is not enough memory: {_listed(opened, rank)}{ranks}; {beside}; {gb(gate.free_bytes)}{where} are "
        f"free, {gb(gate.missing_bytes)} too little",
        hint=_what_fits(opened, node),
    )


def _what_fits(opened: "OpenedModel", node: Node) -> str:
    """Judged as if every node were like this one."""
    fits = largest_budget(opened, [node] * len(hosts(opened.settings)), started=True)
    if fits is None:
        most = max(_beside_residents(opened, node), key=lambda need: need.nbytes)
        return f"no budget of experts fits beside {gb(most.nbytes)} of {most.what} ({most.setting}): see `tidectl plan`"
    return f"experts.resident = {fits} fits; lower that, or cache.pool_tokens (`tidectl plan` shows both)"


def _beside_residents(opened: "OpenedModel", node: Node) -> list[Need]:
    """Of all ranks; where the system's memory is short beside a device that has its own, what lies there."""
    ranks = range(len(hosts(opened.settings)))
    judged = [gate for rank in ranks for gate in gates(opened, rank, node, started=True)]
    short = node.apart and any(not (gate.passes or gate.name.endswith("device")) for gate in judged)
    found = [need for rank in ranks for need in needs(opened, rank, node.apart)]
    return [need for need in found if need.what != RESIDENTS and (need.system or not short)]


def _listed(opened: "OpenedModel", rank: int) -> str:
    found = [need for need in needs(opened, rank) if not need.taken and need.setting]
    least = SHOWN_SHARE * sum(need.nbytes for need in found)
    told = [need for need in found if need.nbytes >= least or need.what in ALWAYS]
    return ", ".join(f"{gb(need.nbytes)} of {need.what} ({need.setting})" for need in told)
