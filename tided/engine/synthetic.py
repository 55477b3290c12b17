"""Checkpoints of made-up weights in a released model's shapes, names, formats and shards: what a machine can hold and
how fast it is does not depend on what the numbers say. Either written to disk, or held: then the shards are headers,
and the numbers are made as the engine reads them (`packers.generated`)."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from packers.generated import MARK, Generated, Mark, read_mark
from packers.headers import TensorInfo
from packers.shard_writer import described, write_file, write_shard
from packers.shards import CONFIG, INDEX, TensorSpec
from tided.engine.synthetic_shapes import LIKE, Like
from tided.engine.synthetic_tokenizer import tokenizer_json
from tided.errors import UnavailableError, UsageError

RESERVE_BYTES = 1 << 30  # that stay free on the file system
Progress = Callable[[int, int], None]  # (bytes done, of all)


def plan(
    like: str, layers: int | None, experts: int | None, engram_vocabulary: int | None, seed: int, held: bool
) -> Mark:
    """None: as the released model has it. Raises UsageError for a model that there is not."""
    model = LIKE.get(like)
    if model is None:
        raise UsageError(f"there are no shapes called {like!r}", hint=f"--like {' | '.join(LIKE)}")
    layers = model.layers[-1] if layers is None else layers
    experts = model.experts[-1] if experts is None else experts
    if layers not in model.layers:
        raise UsageError(f"--layers must be {model.layers[0]} to {model.layers[-1]}")
    if experts not in model.experts:
        raise UsageError(f"--experts must be {model.experts[0]}, which a token takes, to {model.experts[-1]}")
    if engram_vocabulary is not None and not model.engram_vocabulary:
        raise UsageError(f"--engram-vocabulary: {like} has no Engram tables")
    return Mark(like, layers, experts, engram_vocabulary or model.engram_vocabulary, seed, held)


def synthesise(directory: Path, mark: Mark, progress: Progress) -> int:
    """Writes the checkpoint into a directory that is new, empty, or an unfinished one of the same kind, which goes on
    where it stopped: a shard is whole or not there, and the index comes last. Returns the bytes of all shards. Raises
    UsageError for a directory that holds something else, UnavailableError where the file system has no room."""
    _claim(directory, mark)
    model = LIKE[mark.like]
    write_file(directory / "tokenizer.json", tokenizer_json(model.vocabulary, model.special))
    config = model.config(mark, directory)
    shards = list(_shards(directory, model, model.tensors(config)))
    total = sum(tensors[-1].offset + tensors[-1].nbytes for _, tensors in shards)
    if not mark.held:
        _check_room(directory, shards, total)
    generated, done = Generated(mark.seed), 0

    def written(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    for head, tensors in shards:
        path = tensors[0].path
        if path.exists():
            written(path.stat().st_size)
        else:
            write_shard(path, head, tensors, None if mark.held else generated.fill, written)
            written(path.stat().st_size if mark.held else tensors[0].offset)
    weight_map = {tensor.name: tensor.path.name for _, tensors in shards for tensor in tensors}
    write_file(directory / CONFIG, msgspec.json.format(msgspec.json.encode(config)))
    write_file(directory / INDEX, msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return total


def _claim(directory: Path, mark: Mark) -> None:
    """A directory of ours. Its mark is there before anything else is."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = read_mark(directory)
        if found is None and any(directory.iterdir()):
            raise UsageError("this directory holds something else", where=str(directory), hint="name a new one")
        if found not in (None, mark):
            raise UsageError(
                f"this directory holds made-up weights of another kind: {found}",
                where=str(directory),
                hint="name a new one, or delete it",
            )
        write_file(directory / MARK, msgspec.json.encode(mark))
    except OSError as e:
        raise UnavailableError(f"cannot be written ({e.strerror})", where=str(directory)) from e


def _shards(
    directory: Path, model: Like, tensors: Mapping[str, TensorSpec]
) -> Iterator[tuple[bytes, list[TensorInfo]]]:
    """The files of the released model. In a file scales come before weights, as they do there."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(model.group(name.split(".")), []).append(name)
    order = sorted(groups, key=lambda group: _rank(model, group))
    for number, group in enumerate(order, 1):
        path = directory / f"model-{number:05d}-of-{len(order):05d}.safetensors"
        names = sorted(groups[group], key=lambda name: not name.endswith(".scale"))
        yield described(path, ((name, tensors[name]) for name in names))


def _rank(model: Like, group: str) -> tuple[int, int]:
    kind, _, number = group.partition(".")
    return model.files.index(kind), int(number or 0)


def _check_room(directory: Path, shards: list[tuple[bytes, list[TensorInfo]]], total: int) -> None:
    there = sum(path.stat().st_size for _, tensors in shards if (path := tensors[0].path).exists())
    free, wanted = shutil.disk_usage(directory).free, total - there + RESERVE_BYTES
    if free < wanted:
        raise UnavailableError(
            f"{wanted / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free",
            where=str(directory),
            hint="--in-memory writes headers alone; less room takes a smaller --engram-vocabulary, fewer --layers",
        )
