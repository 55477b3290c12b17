"""`tidectl fit`: the directions that an edited checkpoint took out of its base, as a file for model.ablation."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from packers.ablation import write
from packers.fit import Found, Hub, Local, Source, Work, fit_layer, layers_of
from packers.hub import Repository
from tidectl.output import emit, say
from tidectl.waiting import Item, waiting
from tided.errors import DataError, UsageError

RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
RESULT = "kept.json"


class Kept(msgspec.Struct, forbid_unknown_fields=True):
    """What a run has found so far. `base`, `edited`: of which contents."""

    base: str
    edited: str
    layers: dict[int, Found | None] = {}


def run(base: str, edited: str, out: Path, layers: str, as_json: bool) -> None:
    out = out.absolute()
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is no directory", hint="make it first, or name another --out")
    with waiting() as show:
        show([Item("opening", base)])
        old, new = _open(base), _open(edited)
        folder = out.with_name(f".{out.name}.work")
        folder.mkdir(mode=0o700, exist_ok=True)
        kept = _kept(folder, old.label, new.label)
        for layer in _chosen(layers, layers_of(old)):

            def tell(name: str, done: int, total: int) -> None:
                show([Item("reading", name, done=done >> 10, total=total >> 10, detail="KiB")])

            if layer not in kept.layers:
                show([Item("comparing", f"layer {layer}")])
                kept.layers[layer] = fit_layer(Work(old, new, folder, tell), layer)
                _keep(folder, kept)
    found = [edit for _, edit in sorted(kept.layers.items()) if edit]
    if not found:
        raise DataError("the two checkpoints do not differ where an ablation would", where=edited)
    write(out, [(edit.layer, np.array(edit.direction), edit.alphas) for edit in found])
    (folder / RESULT).unlink()
    folder.rmdir()
    _report(out, found, old.fetched_bytes + new.fetched_bytes, as_json)


def _open(name: str) -> Source:
    return Local(Path(name)) if Path(name).is_dir() else Hub(Repository.open(name))


def _chosen(text: str, layers: list[int]) -> list[int]:
    if not text:
        return layers
    match = RANGE.fullmatch(text)
    if not match:
        raise UsageError(f"--layers {text}: neither a layer nor A-B")
    first, last = int(match[1]), int(match[2] or match[1])
    return [layer for layer in layers if first <= layer <= last]


def _kept(folder: Path, base: str, edited: str) -> Kept:
    """Of an earlier run over the same contents; of others it is not used."""
    try:
        found = msgspec.json.decode((folder / RESULT).read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):
        return Kept(base, edited)
    return found if (found.base, found.edited) == (base, edited) else Kept(base, edited)


def _keep(folder: Path, kept: Kept) -> None:
    temporary = folder / f"{RESULT}.new"
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(kept))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / RESULT)


def _report(out: Path, found: list[Found], fetched_bytes: int, as_json: bool) -> None:
    if as_json:
        rows = [{"layer": edit.layer, "alphas": edit.alphas, "explained": edit.explained} for edit in found]
        emit("fit/1", {"path": str(out), "layers": rows, "fetched_bytes": fetched_bytes})
        return
    for edit in found:
        say(f"layer {edit.layer}: {_words(edit.alphas)}; explained {_words(edit.explained)}")
    say(f"{out}: {len(found)} layers; {fetched_bytes / 1e6:.1f} MB fetched")


def _words(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {figure:.3f}" for name, figure in figures.items())
