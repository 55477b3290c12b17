"""Disks: whether experts can be read past the page cache, how fast, and what room is left."""

import os
from pathlib import Path
from typing import Any

from tidectl.doctor.check import Finding, View, fail, ok, size, skip, warn
from tidectl.doctor.memory import ANSWER_S

SLOW_BYTES_PER_S, USELESS_BYTES_PER_S = 2e9, 0.6e9  # the seed's plans assume 2 to 4 ms for a record of 9.4 MB
LEAST_FREE_BYTES = 1_000_000_000
WEIGHTS = (".safetensors", ".mxfp4", ".exl3")


def direct(view: View) -> Finding:
    """Overlay file systems of containers, some network and encrypted ones refuse it."""
    assert view.settings is not None
    folders = [Path(view.settings.model.path)]
    if view.settings.experts.source == "pack":
        folders.append(Path(view.settings.experts.pack_dir))
    files = [largest for folder in folders if (largest := _largest(folder))]
    if not files:
        return skip(f"no weights in {' or '.join(map(str, folders))}")
    for file in files:
        if why := view.machine.reads_directly(file):
            fix = "put it on a file system with O_DIRECT (ext4, xfs); in a container mount the directory itself"
            return fail(f"{file} cannot be read past the page cache: {why}", fix)
    return ok(f"{', '.join(sorted({str(file.parent) for file in files}))}: read past the page cache")


def rate(view: View) -> Finding:
    """Of what serves the figures of its start: a probe beside it would make its reads wait."""
    if view.is_running:
        found = view.measured("expert_reads")
        if not found.get("curve"):
            return skip(str(found.get("not_measured") or "what runs here does not tell"))
        points = [(p["in_flight"], p["gb_s"] * 1e9, p["latency_ms"] / 1e3) for p in found["curve"]]
        return _judged(view, points, "measured when it was started")
    if view.is_busy:
        return skip("something else runs here, and a probe would slow it")
    answer = view.engine.answer("reads", ANSWER_S)
    if answer.fault:
        return skip(answer.fault) if not answer.crash else fail(answer.fault, "this is a mistake of ours, or a disk's")
    value: dict[str, Any] = dict(answer.value)
    if not value["points"]:
        return skip(str(value["not_measured"]))
    points = [(p["in_flight"], p["bytes_per_s"], p["s"]) for p in value["points"]]
    return _judged(view, points, f"records of {size(value['record_bytes'])}")


def _judged(view: View, points: list[tuple[int, float, float]], how: str) -> Finding:
    alone, best = points[0], max(points, key=lambda point: point[1])
    seen = (
        f"{best[1] / 1e9:.2f} GB/s with {best[0]} in flight, {alone[1] / 1e9:.2f} GB/s and {1e3 * alone[2]:.1f} ms "
        f"alone ({how})"
    )
    if not view.on_cuda or best[1] >= SLOW_BYTES_PER_S:
        return ok(seen)
    fix = "is it an NVMe of its own, with nothing else reading? See experts.read_threads, and packs (`tidectl pack`)"
    return fail(seen, fix) if best[1] < USELESS_BYTES_PER_S else warn(seen, fix)


def free(view: View) -> Finding:
    """Where the state is: histories, logs, prompts, parked contexts. A directory that is not there yet counts as its
    parent."""
    assert view.settings is not None
    left, wanted = view.machine.free_bytes(view.state_dir), view.settings.cache.prefix_disk_bytes
    used = _used(view.state_dir / "cache")
    seen = f"{size(left)} are free at {view.state_dir}"
    if left < LEAST_FREE_BYTES:
        return fail(seen, "make room: without it no history and no log is written")
    if left + used < wanted:
        seen = f"{seen}; cached prompts may take {size(wanted)}, and have {size(used)}"
        return warn(seen, "make room, or lower cache.prefix_disk_bytes")
    return ok(seen)


def _used(folder: Path) -> int:
    total = 0
    for at, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(at) / name).stat().st_size
            except OSError:  # gone meanwhile
                continue
    return total


def _largest(folder: Path) -> Path | None:
    try:
        files = [path for path in folder.iterdir() if path.suffix in WEIGHTS and path.is_file()]
        return max(files, key=lambda path: path.stat().st_size, default=None)
    except OSError:
        return None
