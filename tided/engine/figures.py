"""What rank 0 tells of itself, taken from where it is counted: lanes, reads, the resident set."""

from dataclasses import replace

from tided.engine.board import LaneFigures
from tided.engine.executor import Executor
from tided.engine.motion import Motion
from tided.engine.scheduler import Running
from tided.engine.stats import Reads, RequestStats, Residency
from tided.experts.fetch import Waits
from tided.experts.io import Priority


def lane_figures(lane: int, running: Running, stats: RequestStats) -> LaneFigures:
    drafts = stats.drafts
    return LaneFigures(
        lane=lane,
        phase="parked" if running.parked else "prompt" if running.in_prefill else "answer",
        admitted_s=stats.admitted_s or 0.0,
        prompt_tokens=len(running.request.prompt_ids),
        computed_tokens=running.computed,
        answer_tokens=stats.completion_tokens,
        drafted=drafts.drafted,
        accepted=drafts.accepted,
        fidelity=running.request.fidelity,
    )


def reads_of(executor: Executor, motion: Motion) -> Reads:
    """What was read since the start, by all requests."""
    reads = {kind: n for kind, n in executor.residents.reads.items() if kind is not Priority.PREFIX}
    waits, hot = waits_of(executor), motion.count
    return Reads(
        nbytes=sum(count.bytes for count in reads.values()),
        seconds=sum(count.seconds for count in reads.values()),
        queue_ms=sum(count.queue_ms for count in reads.values()),
        hot_bytes=reads[Priority.ASYNC_HOT].bytes if Priority.ASYNC_HOT in reads else 0,
        failed=sum(count.failed for count in reads.values()),
        hot_issued=hot.issued,
        hot_late=hot.late,
        hot_used=hot.used,
        hot_used_weight=hot.used_weight,
        hot_evicted_unused=hot.evicted_unused,
        promoted=hot.promoted,
        waited_reads=waits.reads,
        waited_kept=waits.kept,
        wait_s=waits.seconds,
    )


def waits_of(executor: Executor) -> Waits:
    """As of now: what steps waited for since the start."""
    return replace(executor.urgent.waits) if executor.urgent else Waits()


def residency_of(executor: Executor) -> Residency:
    residents, shape = executor.residents, executor.model.shape
    return Residency(
        executor.plan_version,
        residents.count,
        shape.moe_layers * shape.experts_per_layer,
        f"{residents.mask_hash:016x}",
        residents.by_layer,
        None if residents.bytes_share is None else round(residents.bytes_share, 4),
    )
