"""The collectives of a tensor-parallel group over torch.distributed: gloo on CPU, NCCL on CUDA.

Floating-point sums depend on their order, and ranks must not differ in a bit. So nothing is reduced on the way: the
parts are gathered and added in rank order. On CUDA every rank gathers and adds. On CPU rank 0 alone gathers and
adds, and sends the result: 2 (ranks - 1) messages instead of ranks (ranks - 1), and no rank waits for all others.
Measured on [1, 256] fp32 over loopback, two cores, median ms:

    ranks   this     gloo all_gather    gloo all_reduce
    2       0.12     0.20               0.22
    4       0.26     3.8                4.5

Ranks on one host whose devices read each other's memory may join small parts by a launch of their own instead
(`parallel.one_shot`, `engine.one_shot`): what does not fit there goes by NCCL.

Neither the rendezvous nor the data is encrypted or authenticated (torch offers neither): on more than one node, the
link must be private to them. Both listen on the link's address alone.
"""

import fcntl
import ipaddress
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tided.control.wire import all_local, leader_ip, listen_tcp
from tided.errors import ConfigError, PairError, UnavailableError, told
from tided.settings import Parallel, Settings

if TYPE_CHECKING:
    from tided.engine.one_shot import OneShot

log = logging.getLogger("data plane")

COLLECTIVE_STEPS = 1.5  # a wait in a collective, in longest steps: whoever watches the engine's steps says more
MEET_POLL_S = 0.05
CLOSE_S = 5.0  # for the library to let go of the group
SIOCGIFADDR = 0x8915
MOST_SHARING = 8  # ranks whose flags fit a region of `kernels.one_shot_triton`
Join = Callable[[Sequence[Tensor]], Tensor]


class TorchGroup:
    """`tided.models.parallel.Group` of more than one rank. One a process; used by the engine thread alone. `one_shot`
    takes the parts that fit it, where the settings ask for it.

    `calls` and `seconds`: collectives so far, and the time that the calling thread spent in them, waiting for slower
    ranks included. On CUDA that is the time to launch them: the device waits, the thread does not."""

    one_shot: "OneShot | None" = None

    def __init__(self, settings: Settings, rank: int) -> None:
        """Meets the other ranks. Raises UnavailableError when they do not come or the port is in use."""
        self.rank, self.ranks = rank, settings.parallel.ranks
        self.calls, self.seconds = 0, 0.0
        on_cuda = settings.engine.device == "cuda"
        _choose_interface(settings.parallel, rank, "NCCL_SOCKET_IFNAME" if on_cuda else "GLOO_SOCKET_IFNAME")
        _choose_adapters(settings.parallel, on_cuda)
        refuse_one_shot(settings.parallel, on_cuda)
        self._store = _meet(settings.parallel, rank)
        patience_s = COLLECTIVE_STEPS * settings.parallel.step_timeout_s
        try:
            dist.init_process_group(
                "nccl" if on_cuda else "gloo",
                store=self._store,
                rank=rank,
                world_size=self.ranks,
                timeout=timedelta(seconds=patience_s),
            )
        except Exception as error:
            raise UnavailableError(f"rank {rank} cannot join the data plane: {_said(error)}") from error
        self._group = dist.distributed_c10d._get_default_group()
        self._combine = self._everywhere if on_cuda else self._by_rank_0
        if settings.parallel.one_shot:
            from tided.engine import one_shot  # a compiler, which a CPU need not have

            try:
                self.one_shot = one_shot.opened(
                    self._store, rank, self.ranks, settings.parallel.start_timeout_s, patience_s
                )
            except BaseException:
                self.close()
                raise

    def sum(self, part: Tensor) -> Tensor:
        """fp32, any shape."""
        if part.dtype is not torch.float32:
            raise TypeError(f"the ranks add fp32, not {part.dtype}")
        return self._timed(part, _add)

    def gather(self, part: Tensor) -> Tensor:
        """-> [ranks, ...]; any type."""
        return self._timed(part, _stack)

    def concat(self, part: Tensor) -> Tensor:
        """[..., n] -> [..., ranks * n]; any type."""
        return self._timed(part, _concat)

    def check(self) -> None:
        """Raises PairError if a launch that is over waited in vain for another rank."""
        if self.one_shot is not None:
            self.one_shot.check()

    @contextmanager
    def by_library(self) -> Iterator[None]:
        """Everything goes by NCCL meanwhile; on all ranks at once."""
        kept, self.one_shot = self.one_shot, None
        try:
            yield
        finally:
            self.one_shot = kept

    def meet(self, where: str, wait_s: float, meanwhile: Callable[[], None]) -> None:
        """Returns when every rank has come here, once for each `where`; `meanwhile` is called until then, and ends the
        wait by what it raises. A collective has less patience. Raises UnavailableError when one does not come within
        `wait_s`, or the ranks' store is gone."""
        everybody, ends_s = [f"{where}-{rank}" for rank in range(self.ranks)], time.monotonic() + wait_s
        try:
            self._store.set(f"{where}-{self.rank}", "here")
            while not self._store.check(everybody):
                meanwhile()
                if time.monotonic() > ends_s:
                    raise UnavailableError(f"not every rank has {where} within {wait_s:g} s")
                time.sleep(MEET_POLL_S)
        except RuntimeError as error:
            raise UnavailableError(f"the ranks' store is gone before all have {where}: {_said(error)}") from error

    def close(self) -> None:
        """Lets go without waiting for anybody: a peer may be dead, and an orderly destroy would wait for it. NCCL may
        never let go while captured graphs hold collectives: then it is left behind, for a process that ends by
        `os._exit` (in an orderly exit its destructors were seen to abort); so it is where no thread can begin any more,
        and what brought the rank here is told."""
        if self.one_shot is not None:
            self.one_shot.end()
        ending = threading.Thread(target=self._abort, name="data plane's end", daemon=True)
        with suppress(RuntimeError):
            ending.start()
            ending.join(CLOSE_S)

    def _abort(self) -> None:
        with suppress(Exception):
            self._group.abort()

    def _timed(self, part: Tensor, join: Join) -> Tensor:
        began_s = time.perf_counter()
        try:
            return self._combine(part.contiguous(), join)
        except RuntimeError as error:
            raise PairError(
                f"rank {self.rank} lost another rank in the middle of a step",
                hint=f"the collective: {_said(error)}",
            ) from error
        finally:
            self.calls += 1
            self.seconds += time.perf_counter() - began_s

    def _by_rank_0(self, part: Tensor, join: Join) -> Tensor:
        if self.rank:
            result = part.new_empty(_joined_shape(part, self.ranks, join))
            sent = self._group.send([_as_bytes(part)], 0, 0)
            self._group.recv([_as_bytes(result)], 0, 0).wait()
            sent.wait()
            return result
        parts = [part, *(torch.empty_like(part) for _ in range(1, self.ranks))]
        coming = [self._group.recv([_as_bytes(parts[rank])], rank, 0) for rank in range(1, self.ranks)]
        for arrival in coming:
            arrival.wait()
        result = join(parts)
        going = [self._group.send([_as_bytes(result)], rank, 0) for rank in range(1, self.ranks)]
        for departure in going:
            departure.wait()
        return result

    def _everywhere(self, part: Tensor, join: Join) -> Tensor:
        if self.one_shot is not None and join in BY_ONE_LAUNCH and self.one_shot.takes(part):
            return self.one_shot(part, BY_ONE_LAUNCH[join])
        gathered = part.new_empty((self.ranks, *part.shape))
        self._group._allgather_base(gathered.view(-1), part.view(-1)).wait()
        return gathered if join is _stack else join(gathered.unbind(0))


def _add(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _concat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=-1)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts))


# The kinds of `kernels.one_shot_triton`. Logits, one concatenation a step, go by NCCL: over NVLink its 13 us were 437.
BY_ONE_LAUNCH: dict[Join, int] = {_add: 0, _stack: 1}


def _joined_shape(part: Tensor, ranks: int, join: Join) -> tuple[int, ...]:
    if join is _stack:
        return (ranks, *part.shape)
    return (*part.shape[:-1], part.shape[-1] * ranks) if join is _concat else tuple(part.shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    """gloo knows few types; bytes travel as they are."""
    return tensor.view(-1).view(torch.uint8)


def _meet(parallel: Parallel, rank: int) -> TCPStore:
    """The rendezvous at rank 0. torch would listen on every interface; the socket it is given listens on one."""
    address, wait = leader_ip(parallel), timedelta(seconds=parallel.start_timeout_s)
    try:
        if rank:
            return TCPStore(address, parallel.data_port, parallel.ranks, is_master=False, timeout=wait)
        listener = listen_tcp(address, parallel.data_port, "parallel.data_port")
        return TCPStore(
            address,
            parallel.data_port,
            parallel.ranks,
            is_master=True,
            timeout=wait,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"rank {rank} finds nobody at {address}:{parallel.data_port}: {_said(error)}",
            hint="is rank 0 running, and is parallel.data_port reachable?",
        ) from error


def _choose_interface(parallel: Parallel, rank: int, variable: str) -> None:
    """gloo and NCCL read the interface from the environment; without it they guess from the host's name."""
    name = parallel.interface or _interface_of(leader_ip(parallel) if all_local(parallel) else parallel.hosts[rank])
    if name:
        os.environ[variable] = name


def _choose_adapters(parallel: Parallel, on_cuda: bool) -> None:
    """NCCL reads them from the environment, where they stay as they are unless the profile names others."""
    if (parallel.hca or parallel.gid_index >= 0) and not on_cuda:
        raise ConfigError(
            "parallel.hca and parallel.gid_index choose RDMA adapters, which only CUDA ranks use",
            hint='remove them, or set engine.device = "cuda"',
        )
    if parallel.hca:
        os.environ["NCCL_IB_HCA"] = parallel.hca
    if parallel.gid_index >= 0:
        os.environ["NCCL_IB_GID_INDEX"] = str(parallel.gid_index)
    elif not os.environ.get("NCCL_IB_GID_INDEX", "").strip():
        os.environ.pop("NCCL_IB_GID_INDEX", None)  # NCCL would take an empty one for index 0


def refuse_one_shot(parallel: Parallel, on_cuda: bool) -> None:
    """Raises ConfigError where the ranks cannot share memory, by the profile's word; the devices are asked later."""
    if not parallel.one_shot:
        return
    why = ""
    if not on_cuda:
        why = 'engine.device is not "cuda"'
    elif parallel.ranks == 1:
        why = "parallel.ranks is 1"
    elif not all_local(parallel):
        why = f"parallel.hosts names {len(set(parallel.hosts))} hosts"
    elif parallel.ranks > MOST_SHARING:
        why = f"parallel.ranks is {parallel.ranks}, above {MOST_SHARING}"
    if why:
        raise ConfigError(
            f"parallel.one_shot is for CUDA ranks, at least two, that share one host: {why}",
            hint="set parallel.one_shot to false",
        )


def _interface_of(host: str) -> str:
    """The interface that has the address; "" for IPv6, where the library's own choice must do."""
    address = ipaddress.ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    if address.version == 6:
        return ""
    names = [name for _, name in socket.if_nameindex()]
    if address.is_loopback:
        return next((name for name in names if name.startswith("lo")), "")
    for name in names:
        if _ipv4_of(name) == str(address):
            return name
    raise ConfigError(
        f"no interface of this machine has the address {host}",
        hint="parallel.hosts lists one address a rank, in the order of the ranks; or set parallel.interface",
    )


def _ipv4_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(reply[20:24])
    return ""


def _said(error: Exception) -> str:
    """For people; the library's own words, which name addresses and files of its build, are for the log."""
    log.warning("the data plane: %s", error)
    return told(error)
