"""What a rank needs of memory, in bytes by class, from a checkpoint's headers and the settings alone.

The same sum judges a start before anything is allocated, is what `tidectl plan` shows, and says what a change of the
budget needs. What is read from headers is exact; what a rank allocates in passing, and what its process is, are
estimates, and marked so. Two gates, of each memory that a rank takes part in:

    load   everything that stays, and the reserve, fit into what is free
    serve  everything that stays, one prefill chunk, and what the watch ends the ranks below, fit too: a start that
           passes the first gate alone says that it is ready, and dies with its first long prompt
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from kernels.exl3_record import Exl3Record
from kernels.kept import MOST_BYTES as KEPT_BYTES
from tided.engine.slots import arena_bytes, resident_bytes, rounding_bytes
from tided.settings import Settings

if TYPE_CHECKING:
    from tided.engine.build import OpenedModel

PROCESS_BYTES = 450_000_000  # Python, torch and what else is loaded, before anything of a model
CUDA_BYTES = 1_000_000_000  # a CUDA context and its libraries
GRAPH_BYTES = 1_500_000_000  # captured graphs, kernels, workspaces of products and of collectives
DEMAND_GRIDS = 5  # fp32 [lanes, layers, experts]: counts, mass and three uses

RESIDENTS, EXPERTS_BESIDE = "residents", "slots beside them"


class Need(NamedTuple):
    """`setting`: what it follows from. `system`: in the system's memory whatever the device has. `taken`: by the time a
    start judges, it is. `estimate`: not from headers."""

    what: str
    setting: str
    nbytes: int
    system: bool = False
    taken: bool = False
    estimate: bool = False


class Gate(NamedTuple):
    """What must fit into one memory of a node, and what is free of it; `missing_bytes` above 0: it does not."""

    name: str
    asked_bytes: int
    free_bytes: int

    @property
    def missing_bytes(self) -> int:
        return max(0, self.asked_bytes - self.free_bytes)

    @property
    def passes(self) -> bool:
        return self.asked_bytes <= self.free_bytes


class Node(NamedTuple):
    """Where ranks lie. `apart`: the device has memory of its own, else one memory is both. `free_bytes` of what ranks
    of the host share (all of it, or the system's), `device_bytes` of a rank's device."""

    apart: bool
    free_bytes: int
    device_bytes: int = 0


def needs(opened: "OpenedModel", rank: int, apart: bool = False) -> list[Need]:
    """What stays allocated on a rank while it serves, the largest classes first to be told. `apart`: its device has
    memory of its own."""
    settings, family, config = opened.settings, opened.family, opened.checkpoint.config
    cuda = settings.engine.device == "cuda"
    residents = resident_bytes(opened)
    found = [
        Need(RESIDENTS, "experts.resident", residents),
        Need(EXPERTS_BESIDE, "tide.hot_ring_slots, experts.spare_slots", arena_bytes(opened) - residents),
        Need("context", "cache.pool_tokens", family.context_bytes(config, settings)),
        Need("dense weights", "model.path", family.dense_bytes(opened.checkpoint, settings)),
        Need("drafter", "engine.draft", family.drafter_bytes(opened.checkpoint, settings)),
        Need("vision tower", "vision.rank", family.vision_bytes(config) if rank == settings.vision.rank else 0),
        Need("windows of lanes", "engine.lanes", family.lane_bytes(config, settings) * settings.engine.lanes),
        Need("demand", "engine.lanes", _demand_bytes(opened)),
        Need("cached prompts", "cache.prefix_ram_bytes", settings.cache.prefix_ram_bytes, system=True),
        Need("Engram rows", "model.engram_cache_bytes", _engram_bytes(opened), system=True),
        Need("reads under way", "experts.read_threads", _staging_bytes(opened), system=True, estimate=True),
    ]
    if not cuda and isinstance(opened.record, Exl3Record):
        found.append(Need("decoded trellises", "", KEPT_BYTES, estimate=True))
    if cuda and not apart:
        found.append(Need("rounding of slots", "", rounding_bytes(opened), estimate=True))
    if cuda:
        found.append(Need("graphs, kernels", "engine.device", GRAPH_BYTES, estimate=True))
        found.append(Need("CUDA", "engine.device", CUDA_BYTES, taken=True, estimate=True))
    found.append(Need("process", "", PROCESS_BYTES, system=True, taken=True, estimate=True))
    return [need for need in found if need.nbytes]


def passing_bytes(opened: "OpenedModel") -> int:
    """What one prefill chunk allocates on a rank and gives back: an estimate."""
    return opened.family.passing_bytes(opened.checkpoint.config, opened.settings)


def _demand_bytes(opened: "OpenedModel") -> int:
    shape = opened.shape
    return DEMAND_GRIDS * 4 * opened.settings.engine.lanes * shape.moe_layers * shape.experts_per_layer


def _engram_bytes(opened: "OpenedModel") -> int:
    return opened.settings.model.engram_cache_bytes if opened.family.has_engram else 0


def _staging_bytes(opened: "OpenedModel") -> int:
    """A reading thread holds a run of the file, and a record that is copied to a device."""
    return 2 * opened.settings.experts.read_threads * opened.largest_bytes


def hosts(settings: Settings) -> tuple[str, ...]:
    return settings.parallel.hosts or ("",) * settings.parallel.ranks


def sharing(settings: Settings, rank: int) -> list[int]:
    """The ranks of the rank's host, itself among them."""
    of = hosts(settings)
    return [one for one, host in enumerate(of) if host == of[rank]]


def gates(
    opened: "OpenedModel", rank: int, node: Node, started: bool, known: Mapping[int, Sequence[Need]] | None = None
) -> list[Gate]:
    """Both, of each memory that the rank takes part in. `started`: the processes are there already, and what they are
    is not free any more. `known`: `needs` of the ranks, if they are."""
    ranks, memory, chunk = sharing(opened.settings, rank), opened.settings.memory, passing_bytes(opened)
    asked = known or {one: needs(opened, one, node.apart) for one in ranks}
    found = []
    if node.apart:
        own = _sum([asked[rank]], started, system=False)
        found += [
            Gate("load, device", own, node.device_bytes),
            Gate("serve, device", own + chunk, node.device_bytes),
        ]
    stays = _sum([asked[one] for one in ranks], started, system=True if node.apart else None)
    passing = 0 if node.apart else chunk * len(ranks)
    return [
        *found,
        Gate("load", stays + memory.reserve_bytes, node.free_bytes),
        Gate("serve", stays + passing + memory.exit_below_bytes, node.free_bytes),
    ]


def _sum(asked: Iterable[Sequence[Need]], started: bool, system: bool | None) -> int:
    """`system`: of this kind of memory alone; None: of both."""
    return sum(
        need.nbytes
        for of_rank in asked
        for need in of_rank
        if not (started and need.taken) and (system is None or need.system == system)
    )


def with_resident(opened: "OpenedModel", resident: int) -> "OpenedModel":
    """The same model under another budget."""
    experts = structs.replace(opened.settings.experts, resident=resident)
    return replace(opened, settings=structs.replace(opened.settings, experts=experts))


def largest_budget(
    opened: "OpenedModel", nodes: Sequence[Node], started: bool, known: Mapping[int, Sequence[Need]] | None = None
) -> int | None:
    """The largest `experts.resident` with which all gates pass on every rank; None: not even the least. `nodes`: of
    each rank; `known`: their `needs`, if they are."""
    shape = opened.shape
    least, most = shape.moe_layers * shape.top_k, shape.moe_layers * shape.experts_per_layer
    asked = known or {rank: needs(opened, rank, node.apart) for rank, node in enumerate(nodes)}
    room = [_room(opened, rank, node, started, asked) for rank, node in enumerate(nodes)]

    def fits(resident: int) -> bool:
        taken = resident_bytes(with_resident(opened, resident))
        return all(taken <= left for left in room)

    if not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def _room(opened: "OpenedModel", rank: int, node: Node, started: bool, known: Mapping[int, Sequence[Need]]) -> int:
    """Bytes of residents that each rank of the node may have; below 0 where a memory is short in which none lie."""
    one, room = resident_bytes(opened), []
    for gate in gates(opened, rank, node, started, known):
        holders = _holders(gate, opened, rank, node)
        if holders:
            room.append((gate.free_bytes - gate.asked_bytes) // holders + one)
        elif not gate.passes:
            return -1
    return min(room)


def _holders(gate: Gate, opened: "OpenedModel", rank: int, node: Node) -> int:
    """Ranks whose residents lie in the gate's memory."""
    if not node.apart:
        return len(sharing(opened.settings, rank))
    return 1 if gate.name.endswith("device") else 0


def context_token_bytes(opened: "OpenedModel") -> float:
    """Of a rank, for a token of context more."""
    return opened.family.context_bytes(opened.checkpoint.config, opened.settings) / opened.settings.cache.pool_tokens


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 50_000_000 or not nbytes else f"{nbytes / 1e6:.3g} MB"
