"""A checkpoint directory of safetensors files, opened by its headers alone: nothing of the data is read or copied
until a tensor is asked for. Importing this module does not import torch; only `Checkpoint.read` needs it."""

import hashlib
import mmap
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from packers.generated import Generated, generated_in
from packers.headers import DTYPE_BYTES, REFETCH, Shard, TensorInfo, read_shard, shown
from packers.overlay import Overlay, identity_under
from tided.errors import DataError, TensorError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

__all__ = ["Checkpoint", "TensorInfo", "TensorSpec"]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
MAX_JSON_BYTES = 100_000_000
SHOWN_NAMES = 10
SAMPLES = 64  # windows of a shard that its identity covers
SAMPLE_BYTES = 4096
MAP_NORESERVE = 0x4000  # Linux; named in `mmap` from Python 3.13 on


@dataclass(frozen=True)
class TensorSpec:
    """What a model expects of a tensor: a safetensors dtype ("BF16"), or several that are as good, and its shape."""

    dtype: str | tuple[str, ...]
    shape: tuple[int, ...]

    def fits(self, found: TensorInfo) -> bool:
        dtypes = (self.dtype,) if isinstance(self.dtype, str) else self.dtype
        return found.dtype in dtypes and found.shape == self.shape

    def __str__(self) -> str:
        dtypes = self.dtype if isinstance(self.dtype, str) else " or ".join(self.dtype)
        return f"{dtypes} {list(self.shape)}"


class Checkpoint:
    """`config`: config.json as a dict. `tensors`: every tensor by name. `shards`: the files, by name. `overlay`: what
    the model is served under."""

    def __init__(
        self, path: Path, config: dict[str, Any], shards: tuple[Shard, ...], overlay: Overlay | None = None
    ) -> None:
        self.path, self.config, self.shards, self.overlay = path, config, shards, overlay
        self.tensors: Mapping[str, TensorInfo] = {t.name: t for shard in shards for t in shard.tensors}
        self.generated: Mapping[Path, Generated] = generated_in(shards)
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Reads config, index and every shard's header. Raises DataError or TensorError, naming file and offset."""
        root = Path(path).resolve()
        if not root.is_dir():
            raise DataError(
                "there is no such directory",
                where=str(path),
                hint="name a directory with config.json and *.safetensors",
            )
        config = _json(_inside(root, CONFIG), dict[str, Any])
        if not (root / INDEX).exists():
            return cls(root, config, (read_shard(_inside(root, SINGLE)),))
        weight_map = _json(_inside(root, INDEX), _Index).weight_map
        files = sorted(set(weight_map.values()))
        shards = tuple(read_shard(_inside(root, _checked_name(root, name))) for name in files)
        _check_index(root / INDEX, weight_map, dict(zip(files, shards, strict=True)))
        return cls(root, config, shards)

    def under(self, overlay: Overlay) -> "Checkpoint":
        """The same files, of which the tensors that the overlay replaces are read from it."""
        found = Checkpoint(self.path, self.config, self.shards, overlay)
        found.tensors = {**self.tensors, **overlay.replaces}
        return found

    def require(self, expected: Mapping[str, TensorSpec]) -> None:
        """Raises TensorError unless the checkpoint holds exactly these tensors."""
        require(self.tensors, expected, self.path, REQUIRE_HINT)

    def home(self, name: str) -> Path:
        """The directory where a tensor is, or should be."""
        return self.path

    def spec(self, name: str) -> TensorSpec:
        """What the tensor is. Raises TensorError where there is none."""
        info = self.tensors.get(name)
        if info is None:
            raise TensorError(f"tensor {shown(name)} is missing", where=str(self.path))
        return TensorSpec(info.dtype, info.shape)

    def read(self, name: str) -> "torch.Tensor":
        """The tensor in its own dtype and shape, on CPU: a view of the mapped file, no copy (except where a file lays a
        tensor across its dtype's alignment). Writing to it changes this process's pages, never the file."""
        import torch

        info = self.tensors.get(name)
        if info is None:
            raise TensorError(f"tensor {shown(name)} is missing", where=str(self.path))
        dtype = _torch_dtype(info.dtype)
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        made = self.generated.get(info.path)
        if made is not None:
            return torch.from_numpy(made.tensor(info)).view(dtype).view(info.shape)
        raw = torch.frombuffer(self._map(info.path), dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        if info.offset % DTYPE_BYTES[info.dtype]:
            raw = raw.clone()
        return raw.view(dtype).view(info.shape)

    def unmap(self) -> None:
        """Lets go of the mapped files, and so of the memory of what was read. A tensor in use keeps its own file; a
        later `read` maps anew."""
        self._maps.clear()

    def served_identity(self) -> str:
        """Names the weights that are served: those of `identity` under the overlay."""
        return identity_under(self.identity(), self.overlay.sha256 if self.overlay else "")

    def identity(self) -> str:
        """A stable name of the files' content, whatever is laid over it, quick for any size. sha256 over

        - config.json (as values: its formatting does not count),
        - every shard's file name and size, and its tensors' names, dtypes, shapes and offsets,
        - of every shard, 64 windows of 4 KiB spread evenly over its data, the first and the last byte included; all of
          the data where it is no larger than that.

        Trained or quantised again, a checkpoint differs in nearly every window. A few bytes altered between the windows
        of a large shard are NOT seen: this tells models apart, it does not prove that a file is undamaged.
        """
        digest = hashlib.sha256(msgspec.json.encode(self.config, order="sorted"))
        for shard in self.shards:
            layout = [(t.name, t.dtype, t.shape, t.offset) for t in sorted(shard.tensors, key=lambda t: t.name)]
            digest.update(msgspec.json.encode((shard.path.name, shard.size_bytes, layout)))
            made = self.generated.get(shard.path)
            for window in _samples(shard) if made is None else [f"seed {made.seed}".encode()]:
                digest.update(window)
        return digest.hexdigest()

    def _map(self, path: Path) -> mmap.mmap:
        """The whole file, copy on write. NORESERVE: else Linux refuses to map a shard larger than the memory."""
        mapped = self._maps.get(path)
        if mapped is None:
            with path.open("rb") as file:
                flags, prot = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                mapped = self._maps[path] = mmap.mmap(file.fileno(), 0, flags=flags, prot=prot)
        return mapped


REQUIRE_HINT = "this is another model's checkpoint, an incomplete download, or a layout that this build does not know"


def require(found: Mapping[str, TensorInfo], expected: Mapping[str, TensorSpec], where: Path, hint: str) -> None:
    """Raises TensorError unless exactly the `expected` tensors are there. Names what is missing, extra or misshapen:
    the first ten of each kind, and how many more."""
    missing = [shown(name) for name in sorted(expected.keys() - found.keys())]
    extra = [shown(name) for name in sorted(found.keys() - expected.keys())]
    misshapen = [
        f"{shown(name)} (is {one.dtype} {list(one.shape)}, must be {expected[name]}) in {one.path.name}"
        for name, one in sorted(found.items())
        if name in expected and not expected[name].fits(one)
    ]
    kinds = (("missing", missing), ("not known to this model", extra), ("of a wrong dtype or shape", misshapen))
    faults = [f"{len(names)} {kind}: {_first(names)}" for kind, names in kinds if names]
    if faults:
        raise TensorError(f"tensors: {'; '.join(faults)}", where=str(where), hint=hint)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _json(path: Path, kind: type[T]) -> T:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except OSError as e:
        raise DataError(f"is missing or cannot be read ({e.strerror})", where=str(path), hint=REFETCH) from e
    if len(text) > MAX_JSON_BYTES:
        raise DataError(f"is larger than {MAX_JSON_BYTES} bytes", where=str(path))
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise DataError(f"is not what a checkpoint holds: {e}", where=str(path), hint=REFETCH) from e


def _checked_name(root: Path, name: str) -> str:
    if not FILE_NAME.fullmatch(name):
        raise DataError(f"{shown(name)!r} is no name of a shard", where=str(root / INDEX))
    return name


def _inside(root: Path, name: str) -> Path:
    """The file `name` of the directory. A link is followed only as long as it stays inside."""
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise DataError(
            f"{name} is a link to {path}, outside the checkpoint's directory",
            where=str(root),
            hint="put the files themselves there, e.g. `tidectl fetch REPOSITORY --to DIRECTORY`",
        )
    return path


def _check_index(index: Path, weight_map: Mapping[str, str], shards: Mapping[str, Shard]) -> None:
    """Every tensor lies in the shard that the index names, and no shard holds one that the index does not know."""
    found = {(tensor.name, file) for file, shard in shards.items() for tensor in shard.tensors}
    listed = set(weight_map.items())
    faults = [
        f"{len(pairs)} {kind}: {_first([f'{shown(name)} ({file})' for name, file in sorted(pairs)])}"
        for kind, pairs in (
            ("listed but not in their shard", listed - found),
            ("in a shard but not listed", found - listed),
        )
        if pairs
    ]
    if faults:
        raise TensorError("index and shards differ, tensors " + "; ".join(faults), where=str(index), hint=REFETCH)


def _first(names: list[str]) -> str:
    rest = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _samples(shard: Shard) -> Iterable[bytes]:
    """See `Checkpoint.identity`."""
    length = shard.size_bytes - shard.data_offset
    count, size = (SAMPLES, SAMPLE_BYTES) if length > SAMPLES * SAMPLE_BYTES else (1, length)
    try:
        with shard.path.open("rb") as file:
            begins = [shard.data_offset + i * (length - size) // max(count - 1, 1) for i in range(count)]
            for begin in begins:  # all of them are under way before one is waited for
                os.posix_fadvise(file.fileno(), begin, size, os.POSIX_FADV_WILLNEED)
            for begin in begins:
                file.seek(begin)
                yield file.read(size)
    except OSError as e:
        raise DataError(f"cannot be read: {e.strerror}", where=str(shard.path)) from e


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    return {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "U16": torch.uint16,
        "I16": torch.int16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "F32": torch.float32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F64": torch.float64,
    }[name]
