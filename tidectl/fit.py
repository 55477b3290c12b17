"""`tidectl fit`: the directions that an edited checkpoint took out of its base, as a file for model.ablation."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from packers.ablation import write
from packers.fit import Found, Hub, Local, Source, Work, fit_layer, layers_of
from packers.hub import Repository
from tidectl.output import emit, say
from tidectl.waiting import Item, Show, waiting
from tidectl.writable import refuse_unwritable
from tided.errors import DataError, UnavailableError, UsageError
from tided.files import whole

RANGE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
RESULT = "kept.json"


class Kept(msgspec.Struct, forbid_unknown_fields=True):
    """What a run has found so far. `base`, `edited`: of which contents."""

    base: str
    edited: str
    layers: dict[int, Found | None] = {}


def run(base: str, edited: str, out: Path, layers: str, as_json: bool) -> None:
    out, wanted = out.absolute(), _range(layers)
    refuse_unwritable(out, "--out")
    with waiting() as show:
        show([Item("opening", base)])
        old, new = _open(base), _open(edited)
        with _working(out.with_name(f".{out.name}.work")) as folder:
            found = _fit(old, new, folder, _chosen(wanted, layers_of(old)), show)
            if not found:
                raise DataError("the two checkpoints do not differ where an ablation would", where=edited)
            write(out, [(edit.layer, np.array(edit.direction), edit.alphas) for edit in found])
            shutil.rmtree(folder)
    _report(out, found, old.fetched_bytes + new.fetched_bytes, as_json)


def _fit(old: Source, new: Source, folder: Path, layers: list[int], show: Show) -> list[Found]:
    """The layers that were edited; those that an earlier run has looked at are taken from it."""

    def tell(name: str, done: int, total: int) -> None:
        show([Item("reading", name, done=done >> 10, total=total >> 10, detail="KiB")])

    kept = _kept(folder, old.label, new.label)
    for layer in layers:
        if layer not in kept.layers:
            show([Item("comparing", f"layer {layer}")])
            kept.layers[layer] = fit_layer(Work(old, new, folder, tell), layer)
            _keep(folder, kept)
    return [edit for layer in layers if (edit := kept.layers[layer])]


@contextmanager
def _working(folder: Path) -> Iterator[Path]:
    """A folder beside the result, for one run at a time; it stays when the run does not come to its end."""
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    except BlockingIOError as error:
        raise UnavailableError("another run works on this file", where=str(folder), hint="wait for it") from error
    finally:
        os.close(lock)


def _open(name: str) -> Source:
    if Path(name).is_dir():
        return Local(Path(name))
    try:
        return Hub(Repository.open(name))
    except (DataError, UnavailableError) as error:
        hint = f"there is no directory {name} either; {error.hint}".removesuffix("; ")
        raise type(error)(error.what, where=error.where, hint=hint) from error


def _range(text: str) -> range | None:
    """None: all. Raises UsageError."""
    match = RANGE.fullmatch(text)
    if text and not match:
        raise UsageError(f"--layers {text}: neither a layer nor A-B")
    return range(int(match[1]), int(match[2] or match[1]) + 1) if match else None


def _chosen(wanted: range | None, layers: list[int]) -> list[int]:
    found = [layer for layer in layers if wanted is None or layer in wanted]
    if not found:
        raise UsageError(f"--layers: the checkpoint has layers {layers[0]} to {layers[-1]}")
    return found


def _kept(folder: Path, base: str, edited: str) -> Kept:
    """Of an earlier run over the same contents; of others it is not used."""
    with suppress(OSError, msgspec.DecodeError):
        found = msgspec.json.decode((folder / RESULT).read_bytes(), type=Kept)
        if (found.base, found.edited) == (base, edited):
            return found
    return Kept(base, edited)


def _keep(folder: Path, kept: Kept) -> None:
    with whole(folder / RESULT) as file:
        file.write(msgspec.json.encode(kept))


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
