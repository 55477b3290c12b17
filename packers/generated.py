"""Weights that no file holds: a checkpoint whose shards are headers alone, and whose numbers are made as they are read.

Beside them lies `synthetic.json`. A tensor's numbers depend on its name, its format and the seed, so every rank and
every reading gets the same: a long draw of its kind, begun at a place that its name gives. Their size keeps activations
near one; routed experts are every code there is. numpy alone: readers of experts run in threads without torch."""

import hashlib
import math
import threading
from bisect import bisect_right
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from packers.headers import DTYPE_BYTES, Shard, TensorInfo
from tided.errors import DataError

MARK = "synthetic.json"
NUMBERS = 1_048_573  # of a draw: a prime, so that no matrix repeats its rows
Bytes = NDArray[np.uint8]


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a directory of made-up weights says of itself. `engram_vocabulary`: 0 where the model has no Engram. `held`:
    its shards are headers alone."""

    like: str
    layers: int
    experts: int
    engram_vocabulary: int
    seed: int
    held: bool


def read_mark(directory: Path) -> Mark | None:
    """None: these are no made-up weights. Raises DataError for a mark that is none."""
    try:
        return msgspec.json.decode((directory / MARK).read_bytes(), type=Mark)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as e:
        raise DataError(f"is not what `tidectl synth` writes: {e}", where=str(directory / MARK)) from e


def generated_in(shards: tuple[Shard, ...]) -> "dict[Path, Generated]":
    """By path, the shards whose numbers are made up as they are read."""
    found: dict[Path, Generated] = {}
    for directory in {shard.path.parent for shard in shards}:
        mark = read_mark(directory)
        if mark is not None and mark.held:
            inside = tuple(shard for shard in shards if shard.path.parent == directory)
            found |= dict.fromkeys((shard.path for shard in inside), Generated(mark.seed, inside))
    return found


class Generated:
    """Any thread may ask."""

    def __init__(self, seed: int, shards: tuple[Shard, ...] = ()) -> None:
        self.seed = seed
        self._by_path = {shard.path: shard.tensors for shard in shards}
        self._draws: dict[tuple[str, float, float], Bytes] = {}
        self._lock = threading.Lock()

    def tensor(self, info: TensorInfo) -> Bytes:
        """All bytes of a tensor."""
        out = np.empty(info.nbytes, np.uint8)
        self.fill(info, 0, out)
        return out

    def fill(self, info: TensorInfo, at: int, out: Bytes) -> None:
        """out [n] becomes the bytes [at, at + n) of a tensor."""
        draw = self._draw(info)
        size = DTYPE_BYTES[info.dtype]
        place = (_phase(self.seed, info.name) * size + at) % len(draw)
        done = 0
        while done < len(out):
            count = min(len(out) - done, len(draw) - place)
            out[done : done + count] = draw[place : place + count]
            done, place = done + count, 0

    def file(self, path: Path) -> "GeneratedFile":
        return GeneratedFile(self, path, self._by_path[path])

    def _draw(self, info: TensorInfo) -> Bytes:
        kind = (info.dtype, *_sizes(info))
        with self._lock:
            if kind not in self._draws:
                self._draws[kind] = _drawn(self.seed, *kind)
            return self._draws[kind]


class GeneratedFile:
    """A shard as readers of experts see it (`tided.experts.files.RangeFile`)."""

    direct = True  # nothing goes through the page cache

    def __init__(self, generated: Generated, path: Path, tensors: tuple[TensorInfo, ...]) -> None:
        self.path, self._generated, self._tensors = path, generated, tensors
        self._offsets = [tensor.offset for tensor in tensors]

    def read(self, offset: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Bytes [offset, offset + nbytes), all of them of tensors, at the beginning of `buffer`."""
        out, done = np.frombuffer(buffer, dtype=np.uint8)[:nbytes], 0
        number = bisect_right(self._offsets, offset) - 1
        while done < nbytes:
            if number < 0 or number >= len(self._tensors):
                raise DataError(f"bytes {offset} to {offset + nbytes} belong to no tensor", where=str(self.path))
            tensor = self._tensors[number]
            at = offset + done - tensor.offset
            count = min(nbytes - done, tensor.nbytes - at)
            self._generated.fill(tensor, at, out[done : done + count])
            done, number = done + count, number + 1
        return buffer[:nbytes]

    def close(self) -> None:
        pass


def _sizes(info: TensorInfo) -> tuple[float, float]:
    """Mean and deviation of a tensor's numbers; of scales, the exponent and how far it goes down."""
    name, shape = info.name, info.shape
    if info.dtype in ("I8", "I16", "I32"):
        return 0.0, 0.0
    if info.dtype == "F8_E8M0":
        return float(-round(math.log2(32 * shape[-1]) / 2) - (2 if ".experts." in name else 0)), 1.0
    if info.dtype == "F8_E4M3":
        return 0.0, 1.0
    if len(shape) == 1:
        if name.endswith(".suh"):  # the scales of a trellis' inputs: its numbers themselves are near one
            return 0.0, shape[0] ** -0.5
        near = 1.0 if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "_scale", ".svh")) else 0.0
        return near, 0.02 if name.endswith((".bias", ".bias_vl", "_bias")) else 0.1
    return 0.0, math.prod(shape[1:]) ** -0.5


def _phase(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") % NUMBERS


def _drawn(seed: int, dtype: str, mean: float, deviation: float) -> Bytes:
    draw = np.random.default_rng([seed, len(dtype), round(1e9 * deviation)])
    if dtype == "I8":
        return draw.integers(0, 256, NUMBERS, dtype=np.uint8)
    if dtype == "I16":  # any words are a trellis
        return draw.integers(0, 1 << 16, NUMBERS, dtype=np.uint16).view(np.uint8)
    if dtype == "I32":  # a marker, whose being there is all that counts
        return np.zeros(4, np.uint8)
    if dtype == "F8_E8M0":
        return (127 + int(mean) - draw.integers(0, int(deviation) + 1, NUMBERS)).astype(np.uint8)
    values = (mean + deviation * draw.standard_normal(NUMBERS)).astype(np.float32)
    if dtype == "F32":
        return values.view(np.uint8)
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint8)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if dtype == "F8_E4M3":
        return _e4m3(values)
    raise DataError(f"no numbers of the format {dtype} are made up")


def _e4m3(values: NDArray[np.float32]) -> Bytes:
    """The nearest code of each, |value| < 448."""
    codes = np.arange(127, dtype=np.float32)  # 0 .. 0x7E: all that are no NaN, ascending
    exponent, mantissa = codes // 8, codes % 8
    known = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10)).astype(np.float32)
    middle = (known[1:] + known[:-1]) / 2
    found = np.searchsorted(middle, np.abs(values)).astype(np.uint8)
    codes_of: Bytes = found | (np.signbit(values).astype(np.uint8) << np.uint8(7))
    return codes_of
