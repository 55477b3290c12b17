"""`tidectl synth`: a checkpoint of made-up weights in a released model's shapes."""

from pathlib import Path

from tidectl.output import emit, say
from tidectl.waiting import Item, waiting


def run(
    out: Path,
    like: str,
    layers: int | None,
    experts: int | None,
    engram_vocabulary: int | None,
    seed: int,
    in_memory: bool,
    as_json: bool,
) -> None:
    with waiting() as show:
        show([Item("preparing")])
        from tided.engine.synthetic import plan, synthesise

        def progress(done: int, total: int) -> None:
            show([Item("writing", f"{done / 1e9:.1f} of {total / 1e9:.1f} GB", done=done, total=total)])

        total = synthesise(out, plan(like, layers, experts, engram_vocabulary, seed, in_memory), progress)
    if as_json:
        emit("synth/1", {"path": str(out), "bytes": total, "in_memory": in_memory})
    elif in_memory:
        say(f"{out}: headers of {total / 1e9:.1f} GB, whose numbers are made as they are read")
    else:
        say(f"{out}: {total / 1e9:.1f} GB")
