"""`tidectl pack`: the routed experts of a checkpoint as one file a rank, and whether such a file is undamaged."""

from pathlib import Path
from typing import NamedTuple

from packers.packs import Pack
from tidectl.output import emit, say
from tidectl.waiting import Item, waiting
from tided.errors import UsageError

EXAMPLES = (
    "tidectl pack PROFILE --out DIR | --checkpoint DIR --ranks N --out DIR | --exl3 DIR --ranks N | --verify FILE"
)


class Options(NamedTuple):
    """None: as the profile says."""

    ranks: int | None = None
    rank: int | None = None
    out: Path | None = None
    exl3: Path | None = None


class _Job(NamedTuple):
    """`kind`: what the experts must be stored in; empty: whatever there is."""

    checkpoint: Path
    ranks: int
    rank: int | None
    out: Path
    kind: str = ""


def run(profile: Path | None, checkpoint: Path | None, verify: Path | None, options: Options, as_json: bool) -> None:
    if verify is None:
        _write(_job(profile, checkpoint, options), as_json)
    elif profile or checkpoint or options != Options():
        raise UsageError("--verify reads one file and needs nothing else", hint=EXAMPLES)
    else:
        _verify(verify, as_json)


def _job(profile: Path | None, checkpoint: Path | None, options: Options) -> _Job:
    ranks, out, exl3 = options.ranks, options.out, options.exl3
    if [profile, checkpoint, exl3].count(None) != 2:
        raise UsageError("name either a profile or a checkpoint", hint=EXAMPLES)
    if exl3 is not None:
        checkpoint, out = exl3, out or exl3.absolute().with_name(f"{exl3.absolute().name}-packs")
    if profile is not None:
        from tided.profile import load

        settings = load(profile)
        checkpoint = Path(settings.model.path)
        ranks = ranks or settings.parallel.ranks
        out = out or (Path(settings.experts.pack_dir) if settings.experts.pack_dir else None)
    if checkpoint is None or ranks is None:
        raise UsageError("over how many ranks are the experts cut?", hint="name them with --ranks N")
    if out is None:
        raise UsageError("where to? the profile has no experts.pack_dir", hint="name a directory with --out DIR")
    return _Job(checkpoint, ranks, options.rank, out, "exl3" if exl3 else "")


def _write(job: _Job, as_json: bool) -> None:
    with waiting() as show:
        show([Item("loading")])
        from tided.engine.packing import pack_checkpoint

        def progress(done: int, total: int) -> None:
            show([Item("packing", f"{done} of {total} experts", done=done, total=total)])

        paths = pack_checkpoint(job.checkpoint, job.ranks, job.rank, job.out, progress, job.kind)
    packs = [{"path": str(path), "bytes": path.stat().st_size} for path in paths]
    if as_json:
        emit("pack/1", {"packs": packs})
        return
    for pack in packs:
        say(f"{pack['path']}: {pack['bytes']} bytes")


def _verify(path: Path, as_json: bool) -> None:
    pack = Pack.open(path)
    with waiting() as show:
        pack.verify(lambda done, total: show([Item("checking", f"{done} of {total} experts", done=done, total=total)]))
    header = pack.header
    if as_json:
        about = {"model": header.model, "rank": header.rank, "ranks": header.ranks, "records": header.records}
        emit("pack-verify/1", {"path": str(path), "bytes": header.size_bytes, "intact": True, **about})
    else:
        say(
            f"{path}: intact; rank {header.rank} of {header.ranks}, {header.layers} layers of {header.experts}, "
            f"checkpoint {header.model[:16]}"
        )
