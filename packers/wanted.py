"""Which files a fetch makes out of a repository, and out of which of its bytes: whole ones, or a checkpoint without its
routed experts, put together from ranges."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import msgspec

from packers.headers import Shard, TensorInfo, shown
from packers.hub import Published, Repository
from packers.manifest import NAME as MANIFEST
from packers.shard_writer import described
from packers.shards import INDEX, SINGLE, TensorSpec
from tided.errors import DataError, UsageError

ROUTED = re.compile(r"\.(?:mlp|ffn)\.experts\.[0-9]+\.")  # in the tensor names of every family
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", INDEX)
SEGMENT = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]{0,199}")
DEEPEST = 8  # directories in a name
SMALL_BYTES = 64 << 20  # what comes along with dense weights: texts, a tokenizer

Shards = Callable[[Sequence[str]], Iterable[Shard]]  # the headers of these files


class Range(NamedTuple):
    """Bytes [begin, end) of a file of the repository."""

    file: str
    begin: int
    end: int


Piece = bytes | Range


@dataclass(frozen=True)
class Target:
    """A file to be made, `pieces` in order. `published`: what the hub says of the whole; of one that is put together
    here its size alone."""

    name: str
    pieces: tuple[Piece, ...]
    published: Published

    @property
    def nbytes(self) -> int:
        return self.published.size

    @property
    def is_published(self) -> bool:
        return bool(self.published.sha256 or self.published.git)


def whole(repository: Repository, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Target]:
    """Every file but hidden ones; `include`, `exclude`: shell patterns of names. Raises UsageError for a pattern that
    nothing matches, DataError for a name that is not one of a file below a directory."""
    names = [name for name in repository.files if not _is_hidden(name) and name != MANIFEST]
    for pattern in (*include, *exclude):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"{pattern}: {repository.name} has no such file", hint=f"it has {_some(names)}")
    chosen = [name for name in names if not include or _matches(name, include)]
    found = [_as_it_is(repository, _checked(name, repository)) for name in chosen if not _matches(name, exclude)]
    if not found:
        raise UsageError(f"{repository.name}: no file is left to fetch")
    return sorted(found, key=_order)


def dense(repository: Repository, shards: Shards) -> list[Target]:
    """The checkpoint without its routed experts, those of the drafter included, under the same names of files, and what
    is no weight. Raises DataError for a repository that holds no such checkpoint."""
    where = repository.weight_map
    kept = {name: file for name, file in where.items() if not ROUTED.search(name)}
    if len(kept) in (0, len(where)):
        raise DataError("its tensors are not those of a model with routed experts", where=repository.name)
    found = [_as_it_is(repository, _checked(name, repository)) for name in _beside(repository)]
    for file in kept.values():
        _checked(file, repository)
    for shard in shards(sorted(set(kept.values()))):
        _check_listed(shard, where, repository)
        found.append(_without_experts(repository, shard))
    if INDEX in repository.files:
        total = sum(target.nbytes for target in found if target.name.endswith(".safetensors"))
        index = msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": dict(sorted(kept.items()))})
        found.append(Target(INDEX, (index,), Published(len(index))))
    return sorted(found, key=_order)


def left_out_bytes(repository: Repository, targets: Iterable[Target]) -> int:
    """Of the repository's weights, what these targets do not bring."""
    files = {piece.file for target in targets for piece in target.pieces if isinstance(piece, Range)}
    weights = {name for name in repository.files if name.endswith(".safetensors")}
    brought = sum(target.nbytes for target in targets if target.name in weights)
    return sum(repository.sizes[name] for name in weights | (files & weights)) - brought


def _without_experts(repository: Repository, shard: Shard) -> Target:
    """A shard that has none is taken as it is, and so has the hub's own sum."""
    name = str(shard.path)
    kept = [tensor for tensor in shard.tensors if not ROUTED.search(tensor.name)]
    if len(kept) == len(shard.tensors):
        return _as_it_is(repository, name)
    head, infos = described(shard.path, [(t.name, TensorSpec(t.dtype, t.shape)) for t in kept])
    size = infos[-1].offset + infos[-1].nbytes if infos else len(head)
    return Target(name, (head, *_runs(name, kept)), Published(size))


def _runs(file: str, tensors: Iterable[TensorInfo]) -> Iterator[Range]:
    """Neighbours come by one request."""
    begin = end = -1
    for tensor in tensors:
        if tensor.offset != end:
            if end > begin:
                yield Range(file, begin, end)
            begin = tensor.offset
        end = tensor.offset + tensor.nbytes
    if end > begin:
        yield Range(file, begin, end)


def _check_listed(shard: Shard, where: Mapping[str, str], repository: Repository) -> None:
    """Else what is put together would be a checkpoint that no loader takes, after hours."""
    listed = {name for name, file in where.items() if file == str(shard.path)}
    held = {tensor.name for tensor in shard.tensors}
    if listed != held:
        odd = shown(sorted(listed ^ held)[0])
        raise DataError(
            f"index and shard differ in {len(listed ^ held)} tensors, {odd} first",
            where=f"{repository.name}/{shard.path}",
        )


def _beside(repository: Repository) -> list[str]:
    return [
        name
        for name, said in repository.files.items()
        if "/" not in name
        and not _is_hidden(name)
        and name != MANIFEST
        and not name.endswith(WEIGHTS)
        and said.size <= SMALL_BYTES
    ]


def _as_it_is(repository: Repository, name: str) -> Target:
    said = repository.files[name]
    return Target(name, (Range(name, 0, said.size),) if said.size else (), said)


def _checked(name: str, repository: Repository) -> str:
    """A hub names the files, and none of them may lie outside the directory, or be hidden in it."""
    parts = name.split("/")
    if len(parts) > DEEPEST or not all(SEGMENT.fullmatch(part) for part in parts) or name not in repository.files:
        raise DataError(f"{shown(name)} is no name of a file to be fetched", where=repository.name)
    return name


def _is_hidden(name: str) -> bool:
    """`.gitattributes` and the like; what is above the directory is none of them."""
    return any(part.startswith(".") and set(part) != {"."} for part in name.split("/"))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _some(names: Sequence[str]) -> str:
    shortest = [shown(name) for name in sorted(names)[:8]]
    return ", ".join(shortest) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _order(target: Target) -> tuple[bool, str]:
    """What is small first, so that what is wrong with it is told first."""
    return target.name.endswith(".safetensors"), str(Path(target.name))


__all__ = ["SINGLE", "Piece", "Range", "Target", "dense", "left_out_bytes", "whole"]
