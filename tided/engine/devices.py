"""Where a rank computes, and whether its memory suffices: both are judged before the ranks meet."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from tided.control.memory import available_bytes
from tided.engine.slots import arena_bytes
from tided.errors import UnavailableError
from tided.settings import Parallel, Settings

if TYPE_CHECKING:
    from tided.engine.build import OpenedModel

MEMINFO = Path("/proc/meminfo")


class Need(NamedTuple):
    what: str
    setting: str
    nbytes: int


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
    return _hosts(parallel)[:rank].count(_hosts(parallel)[rank])


def _hosts(parallel: Parallel) -> tuple[str, ...]:
    return parallel.hosts or ("",) * parallel.ranks


def needs(opened: "OpenedModel", rank: int) -> list[Need]:
    """What a rank allocates, in bytes. What a step needs in passing comes on top."""
    settings = opened.settings
    context = opened.family.context_bytes(opened.checkpoint.config, settings)
    found = [
        Need("experts", "experts.resident", arena_bytes(opened)),
        Need("context", "cache.pool_tokens", context),
        Need("dense weights", "model.path", opened.family.dense_bytes(opened.checkpoint, settings)),
    ]
    if drafter := opened.family.drafter_bytes(opened.checkpoint, settings):
        found.append(Need("drafter", "engine.draft", drafter))
    if rank == settings.vision.rank:
        found.append(Need("vision tower", "vision.rank", opened.family.vision_bytes(opened.checkpoint.config)))
    prompts = settings.cache.prefix_ram_bytes
    if prompts and (settings.engine.device == "cpu" or _is_unified()):  # a cache in the system's memory
        found.append(Need("cached prompts", "cache.prefix_ram_bytes", prompts))
    return found


def refuse_shortage(opened: "OpenedModel", rank: int) -> None:
    """Raises UnavailableError when the memory that is free now cannot hold what the settings ask for."""
    parallel, on_cuda = opened.settings.parallel, opened.settings.engine.device == "cuda"
    free = free_bytes(on_cuda)
    hosts = _hosts(parallel)
    apart = on_cuda and not _is_unified()
    sharing = [rank] if apart else [one for one, host in enumerate(hosts) if host == hosts[rank]]
    if free is not None and sum(need.nbytes for one in sharing for need in needs(opened, one)) > free:
        ranks = f" on each of {len(sharing)} ranks" if len(sharing) > 1 else ""
        raise _shortage(f"there is not enough memory: {_listed(opened, rank)}{ranks}; {_gb(free)} are free")


def free_bytes(on_cuda: bool) -> int | None:
    """Memory that can be allocated, what the system would give back included; None where nothing tells."""
    if on_cuda and not _is_unified():
        return int(torch.cuda.mem_get_info()[0])
    return available_bytes(MEMINFO)


def _is_unified() -> bool:
    """A device in the system's memory: CUDA's own figure leaves out the file cache, which gives way."""
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
        raise _shortage(f"there is not enough memory: {_listed(opened, rank)}; {error}") from error


def is_shortage(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _shortage(what: str) -> UnavailableError:
    return UnavailableError(what.strip().splitlines()[0], hint="lower experts.resident, or cache.pool_tokens")


def _listed(opened: "OpenedModel", rank: int) -> str:
    return ", ".join(f"{_gb(need.nbytes)} of {need.what} ({need.setting})" for need in needs(opened, rank))


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB"
