"""Weights: what was fetched, whether it is this model's, and with --deep whether every byte is right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packers.manifest import NAME, Manifest, faults, is_untouched, read_manifest
from packers.overlay import digest_of
from packers.packs import Pack
from tidectl.doctor.check import Finding, View, fail, ok, size, skip, warn
from tidectl.doctor.memory import ANSWER_S
from tided.errors import DataError

SHOWN = 5


def fetched(view: View) -> Finding:
    """By sizes and times; bytes are for --deep."""
    told, wrong = [], []
    for folder in folders(view):
        try:
            manifest = read_manifest(folder)
        except DataError as error:
            return fail(str(error.what), error.hint)
        if manifest is None:
            continue
        touched = [name for name, entry in manifest.files.items() if not is_untouched(folder / name, entry)]
        again = _again(folder, manifest)
        if not manifest.complete:
            return fail(f"{folder}: the fetch of {manifest.repository} did not come to its end", f"{again} goes on")
        if touched:
            wrong.append((f"{folder}: {len(touched)} files differ from what was fetched, {touched[0]} first", again))
        told.append(f"{folder}: {manifest.repository} at {manifest.commit[:12]}, {len(manifest.files)} files")
    if wrong:
        return warn(wrong[0][0], f"{wrong[0][1]} compares them, and mends what is damaged")
    return ok("; ".join(told)) if told else skip(f"no {NAME}: `tidectl fetch` did not bring it")


def inventory(view: View) -> Finding:
    """Every tensor, by name, form and place, as a start would read it."""
    opened = view.engine.answer("checkpoint", ANSWER_S)
    if opened.fault:
        return fail(opened.fault, opened.hint or "`tidectl fetch` brings a checkpoint")
    answer, value = view.engine.answer("inventory", ANSWER_S), dict[str, Any](opened.value)
    if answer.fault:
        return fail(answer.fault, answer.hint or "fetch the checkpoint again")
    seen = f"{value['tensors']} tensors in {value['shards']} files, {size(value['bytes'])}"
    return ok(f"{seen}: all of {answer.value['family']}, and no other")


def packs(view: View) -> Finding:
    """Whose they are, by their headers."""
    assert view.settings is not None
    if view.settings.experts.source != "pack":
        return skip("experts are read from the checkpoint")
    answer = view.engine.answer("packs", ANSWER_S)
    if answer.fault:
        return fail(answer.fault, answer.hint or f"`tidectl pack {view.profile}` makes them")
    return ok(f"{view.settings.experts.pack_dir}: of this checkpoint, for {_ranks(view)}")


def sums(view: View) -> Finding:
    """Reads all of every file that was fetched, and what edits the model."""
    assert view.settings is not None
    told, wrong, again = [], list[str](), ""
    for folder in folders(view):
        manifest = read_manifest(folder)
        if manifest is None:
            told.append(f"{folder}: no {NAME} to compare with")
            continue
        if found := list(faults(folder, manifest, view.read)):
            wrong += [f"{folder}/{fault}" for fault in found]
            again = _again(folder, manifest)
        total = sum(entry.bytes for entry in manifest.files.values())
        told.append(f"{folder}: {len(manifest.files)} files, {size(total)}")
    told += [f"{path}: sha256 {digest_of(path)}" for path in _edits(view)]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        return fail("; ".join(wrong[:SHOWN]) + more, f"{again[:-1]} --verify` mends them")
    compared = any(NAME not in one for one in told)
    return ok("; ".join(told)) if compared else skip("; ".join(told))


def pack_sums(view: View) -> Finding:
    """Reads all of every pack of this node."""
    assert view.settings is not None
    if view.settings.experts.source != "pack":
        return skip("experts are read from the checkpoint")
    told = []
    for path in _pack_files(view):
        try:
            pack = Pack.open(path)
            each = pack.header.size_bytes // max(1, pack.header.records)
            pack.verify(lambda done, total, each=each: view.read(each))  # type: ignore[misc]
        except DataError as error:
            return fail(f"{error.where}: {error.what}", error.hint)
        told.append(f"{path.name}: {pack.header.records} records, {size(pack.header.size_bytes)}")
    return ok("; ".join(told)) if told else fail(f"no pack in {view.settings.experts.pack_dir}", "`tidectl pack`")


def folders(view: View) -> Iterator[Path]:
    """The checkpoints of the profile."""
    assert view.settings is not None
    model = view.settings.model
    return (Path(path) for path in dict.fromkeys((model.path, model.dense)) if path)


def deep_bytes(view: View) -> int:
    """That a check of all bytes will read, by what is known."""
    total = 0
    for folder in folders(view):
        manifest = read_manifest(folder)
        total += sum(entry.bytes for entry in manifest.files.values()) if manifest else 0
    return total + sum(path.stat().st_size for path in _pack_files(view))


def _again(folder: Path, manifest: Manifest) -> str:
    return f"`tidectl fetch {manifest.repository} --to {folder}{' --dense' * (manifest.kind == 'dense')}`"


def _pack_files(view: View) -> list[Path]:
    assert view.settings is not None
    if view.settings.experts.source != "pack":
        return []
    folder, ranks = Path(view.settings.experts.pack_dir), view.settings.parallel.ranks
    return sorted(path for rank in view.ranks_here for path in folder.glob(f"experts-rank-{rank}-of-{ranks}.*"))


def _edits(view: View) -> list[str]:
    assert view.settings is not None
    return [path for path in (view.settings.model.overlay, view.settings.model.ablation) if path]


def _ranks(view: View) -> str:
    return f"rank{'s' * (len(view.ranks_here) > 1)} {', '.join(map(str, view.ranks_here))}"
