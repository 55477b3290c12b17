"""One rank's model in memory, for the daemon and for offline runs alike.

`open_model` reads headers only, so that every refusal that needs no weights comes within a second. `build_rank` then
takes the memory and the time: arena, dense weights, residents. Between the two the ranks agree on the residents.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from kernels.exl3_record import Exl3Record
from kernels.experts import has_cuda_form
from kernels.numerics import FP32, Numerics
from kernels.record import ExpertRecord
from packers.joined import experts_of
from packers.shards import Checkpoint
from tided.cache.pool import PAGE_TOKENS
from tided.engine.caching import CachePlan, Caching
from tided.engine.depth import Depths
from tided.engine.executor import Executor
from tided.engine.link_probe import LinkSpeed
from tided.engine.packing import pack_header
from tided.engine.scheduler import Limits
from tided.engine.slots import agreed_arena
from tided.errors import ConfigError
from tided.experts.arena import Pair
from tided.experts.bank import ExpertBank
from tided.experts.checkpoint import Record, described, source_of
from tided.experts.fetch import SyncRules, UrgentReads
from tided.experts.io import IoScheduler
from tided.experts.pack import PackSource
from tided.experts.probe import Curve, choose, measure
from tided.experts.residents import Residents
from tided.experts.source import RunSource
from tided.experts.tables import DemandTap, RoutingTables
from tided.models.base import Model, ModelShape
from tided.models.families import Family, family_of, open_checkpoint
from tided.models.parallel import Group
from tided.settings import Settings
from tided.tide.kinds import Kinds, kinds_of

log = logging.getLogger("experts")

CONTEXT_VERSION = 2  # raise it with any change after which the same tokens become another context
Progress = Callable[[str, int, int], None]  # (what is loaded, parts done, parts in all)


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint that fits the settings; nothing of its data is loaded."""

    settings: Settings
    checkpoint: Checkpoint
    family: Family
    shape: ModelShape
    record: Record
    kinds: Kinds | None = None  # of records that may differ in size

    @property
    def largest_bytes(self) -> int:
        """Of a record."""
        if isinstance(self.record, ExpertRecord):
            return self.record.slot_bytes
        assert self.kinds is not None, "records of this kind may differ in size"
        return self.kinds.nbytes[-1]

    @property
    def all_pairs(self) -> list[Pair]:
        return [(layer, e) for layer in range(self.shape.moe_layers) for e in range(self.shape.experts_per_layer)]


@dataclass(frozen=True)
class Rank:
    """`executor` runs the steps; the rest is what the rooms beside the engine read."""

    opened: OpenedModel
    model: Model
    bank: ExpertBank
    residents: Residents
    reads: "ExpertReads"
    executor: Executor
    group: Group
    link: LinkSpeed | None = None  # between the ranks; None: one alone

    def close(self) -> None:
        self.executor.caching.close()
        self.reads.close()


def open_model(settings: Settings) -> OpenedModel:
    """Raises DataError for a checkpoint that is none, ConfigError for settings that it cannot be served with."""
    checkpoint = open_checkpoint(settings.model)
    family = family_of(checkpoint.config)
    shape = family.shape(checkpoint.config)
    family.check(checkpoint.config, settings)
    check_budget(settings, shape)
    check_context(settings, shape)
    if settings.vision.rank >= 0 and not family.vision_bytes(checkpoint.config):
        raise ConfigError(f"vision.rank = {settings.vision.rank}: this model has no vision tower", hint="set it to -1")
    record = family.expert_record(checkpoint, settings.parallel.ranks)
    check_device(settings, record, family.numerics(settings))
    names = family.expert_names(checkpoint)
    mixed = described(checkpoint, names, record, shape.moe_layers, shape.experts_per_layer)
    spare_slots, ring_slots = settings.experts.spare_slots, settings.tide.hot_ring_slots
    if mixed is None:
        return OpenedModel(settings, checkpoint, family, shape, record)
    kinds = kinds_of(mixed.whole, spare_slots, ring_slots, mixed.nbytes)
    return OpenedModel(settings, checkpoint, family, shape, mixed.record, kinds)


def build_rank(
    opened: OpenedModel, group: Group, pairs: Sequence[Pair], progress: Progress, cache_dir: Path | None = None
) -> Rank:
    """Loads the rank's share of the dense weights and of the resident `pairs`, the same on every rank. `cache_dir`: the
    rank's own, for prompts and parked contexts; None: both stay in memory."""
    settings, shape = opened.settings, opened.shape
    device = torch.device(settings.engine.device)
    torch.set_num_threads(settings.engine.threads)
    tables = RoutingTables(shape.moe_layers, shape.experts_per_layer, device)
    lanes, tide = settings.engine.lanes, settings.tide
    tap = DemandTap(lanes, shape.moe_layers, shape.experts_per_layer, device, tide.light_weight)
    arena = agreed_arena(opened, pairs, device, group)
    reads = ExpertReads.open(opened, group.rank)
    urgent = UrgentReads(arena, tables, reads.io, SyncRules(tide.sync_weight, tide.sync_reads), lanes)
    bank = ExpertBank(opened.record, arena.data, tables, tap, urgent)
    residents = Residents(arena, tables, reads.io, shape.moe_layers, shape.experts_per_layer, shape.top_k)
    progress("dense weights", 0, 1)
    model = opened.family.load(opened.checkpoint, settings, group, bank, device)
    progress("dense weights", 1, 1)
    residents.fill(pairs, lambda done, total: progress("experts", done, total))
    reads.io.set_mode("serve")
    caching = open_caching(opened, model, cache_dir, reads.io)
    executor = Executor(model, residents, tap, urgent, caching, group)
    return Rank(opened, model, bank, residents, reads, executor, group)


Source = RunSource | PackSource


@dataclass(frozen=True)
class ExpertReads:
    """Where a rank's expert records come from, and who reads them. `curve`: how the disk answered."""

    source: Source
    io: IoScheduler
    curve: Curve

    @classmethod
    def open(cls, opened: OpenedModel, rank: int) -> "ExpertReads":
        """Measures the disk. Raises DataError for a pack that is not this checkpoint's, and what a read raises."""
        source, most = open_source(opened, rank), opened.settings.experts.read_threads
        try:
            curve = measure(source, opened.all_pairs, opened.largest_bytes, most)
        except BaseException:
            source.close()
            raise
        depths = choose(curve, most)
        log.info("expert reads in flight: %d at boot, %d while serving (%s)", depths.deep, depths.background, curve)
        return cls(source, IoScheduler(source, depths), curve)

    def about(self) -> dict[str, Any]:
        """For /health."""
        depths, kind = self.io.depths, "pack" if isinstance(self.source, PackSource) else "checkpoint"
        return {
            "source": kind,
            "direct": self.source.stats.direct,
            "in_flight_at_boot": depths.deep,
            "in_flight_while_serving": depths.background,
            "curve": [
                {"in_flight": p.depth, "gb_s": round(p.bytes_per_s / 1e9, 3), "latency_ms": round(1e3 * p.latency_s, 3)}
                for p in self.curve.points
            ],
            "not_measured": self.curve.why,
        }

    def close(self) -> None:
        self.io.close()
        self.source.close()


def open_source(opened: OpenedModel, rank: int) -> Source:
    """Both give the same bytes; a pack must be that of this checkpoint, this rank and this cut."""
    checkpoint, experts = opened.checkpoint, opened.settings.experts
    if experts.source == "pack":
        expected = pack_header(experts_of(checkpoint), opened.family, rank, opened.record.ranks)
        return PackSource(Path(experts.pack_dir), expected, experts.verify_reads)
    return source_of(checkpoint, opened.family.expert_names(checkpoint), opened.record, rank)


def open_caching(opened: OpenedModel, model: Model, folder: Path | None, io: IoScheduler) -> Caching:
    """Raises ConfigError when the folder cannot be used."""
    settings, device = opened.settings, opened.settings.engine.device
    processor = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    about = {
        "version": CONTEXT_VERSION,
        "model": opened.checkpoint.identity(),
        "overlay": opened.checkpoint.overlay.sha256 if opened.checkpoint.overlay else "",
        "numerics": settings.model.numerics,
        "rows": settings.cache.dtype,
        "split": settings.cache.split,
        "replay": settings.model.decoder_replay,
        "page": [model.page_tokens, model.page_bytes],
        "lane": lane_layout(model),
        "ranks": settings.parallel.ranks,
        "torch": str(torch.__version__),
        "processor": f"{device} {processor}",
    }
    cache = settings.cache
    plan = CachePlan(
        seed=msgspec.json.encode(about).decode(),
        chunk_tokens=settings.model.prefill_chunk_tokens,
        ram_bytes=cache.prefix_ram_bytes,
        disk_bytes=cache.prefix_disk_bytes,
        folder=folder,
        strict=cache.prefix_strict,
    )
    try:
        return Caching(model, plan, io.run)
    except OSError as error:
        raise ConfigError(f"the caches cannot use {folder}: {error.strerror}", hint="set TIDE_STATE_DIR") from error


def lane_layout(model: Model) -> dict[str, str]:
    """What a context holds beside its pages: another drafter, window or dtype is another cache."""
    lane = model.open_lane(0)
    try:
        return {name: f"{part.dtype} {list(part.shape)}" for name, part in model.lane_parts(lane).items()}
    finally:
        model.close_lane(lane)


def check_budget(settings: Settings, shape: ModelShape) -> None:
    """Raises ConfigError unless a resident set of the size asked for exists."""
    least, most = shape.moe_layers * shape.top_k, shape.moe_layers * shape.experts_per_layer
    resident = settings.experts.resident
    if not least <= resident <= most:
        raise ConfigError(
            f"experts.resident = {resident}: this model needs {least} to {most}",
            hint=f"{shape.moe_layers} layers of {shape.experts_per_layer} experts, {shape.top_k} a token: "
            "fewer than that a layer cannot route, more than all there are cannot be kept",
        )


def check_device(settings: Settings, record: Record, numerics: Numerics) -> None:
    """Raises ConfigError for routed experts in a format that the device has no kernels for: a GPU would take them one
    by one, expanded, a hundred times slower. Without any rounding that is asked for."""
    if settings.engine.device != "cuda" or numerics is FP32 or has_cuda_form(record, numerics):
        return
    stored = "EXL3" if isinstance(record, Exl3Record) else record.codec.upper()
    raise ConfigError(
        f"{settings.model.path}: on CUDA this build serves this model's experts in EXL3, not in {stored}",
        where="engine.device",
        hint='serve an EXL3 release, or set device = "cpu"',
    )


def check_context(settings: Settings, shape: ModelShape) -> None:
    """Raises ConfigError unless the checkpoint reaches the context, and the pool holds one request of it."""
    context, pool = settings.cache.context_tokens, settings.cache.pool_tokens
    if context > shape.context_tokens:
        raise ConfigError(f"cache.context_tokens = {context}: this model reaches {shape.context_tokens} positions")
    if context > pool:
        raise ConfigError(f"cache.pool_tokens = {pool}: must hold one request of cache.context_tokens = {context}")


def draft_depths(settings: Settings, model: Model) -> Depths:
    """The policy that `engine.draft` names, for a model that was loaded by the same settings."""
    draft = settings.engine.draft
    if draft == "off" or draft == "acceptance" or draft == "confidence":
        return Depths(draft, model.draft_tokens, one_by_one=model.drafts_one_by_one)
    return Depths("fixed", model.draft_tokens, int(draft))


def scheduler_limits(settings: Settings, draft_tokens: int = 0) -> Limits:
    """`draft_tokens`: most that a step of this model drafts."""
    return Limits(
        lanes=settings.engine.lanes,
        queue=settings.engine.queue,
        context_tokens=settings.cache.context_tokens,
        pool_tokens=settings.cache.pool_tokens,
        page_tokens=PAGE_TOKENS,
        chunk_tokens=settings.model.prefill_chunk_tokens,
        swaps=settings.experts.spare_slots,
        look_rows=settings.tide.look_rows,
        guard_every_steps=settings.engine.guard_every_steps,
        can_wait=settings.tide.sync_slots > 0,
        park_tokens=settings.cache.park_tokens,
        draft_tokens=draft_tokens,
        snapshots=settings.cache.prefix_ram_bytes + settings.cache.prefix_disk_bytes > 0,
        prefill_share=settings.engine.prefill_share,
    )
