"""Where the bytes of experts come from. Every source yields the same record for the same (layer, expert)."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kernels.record import ExpertRecord, Part
from packers.generated import GeneratedFile
from packers.shards import Checkpoint, TensorInfo
from tided.errors import TensorError
from tided.experts.files import RangeFile, Staging, span_bytes

# (layer, expert) -> the checkpoint's names of w1, w3, w2 codes, then w1, w3, w2 scales: the order of a record's parts.
# `layer` counts the layers with routed experts, 0 .. moe_layers - 1.
ExpertNames = Callable[[int, int], Sequence[str]]

# A gap that is no larger than this, nor than what follows it, costs less to read than another round trip to the disk.
GAP_BYTES = 256 << 10


class ExpertSource(Protocol):
    def read(self, layer: int, expert: int, out: memoryview) -> None:
        """Fills `out` (writable, record.slot_bytes) with the rank's record. Any thread may call. Raises DataError."""
        ...


@dataclass(frozen=True)
class ReadStats:
    """`seconds` are summed over threads. `direct`: every file so far was read past the page cache."""

    records: int = 0
    reads: int = 0
    read_bytes: int = 0
    seconds: float = 0.0
    direct: bool = True


@dataclass(frozen=True)
class Cut:
    """What a rank needs of one tensor: file bytes [begin, end), as `rows` rows of which `columns` belong to it."""

    path: Path
    begin: int
    end: int
    part: Part
    columns: slice


class RunSource:
    """Experts out of original shards, in as few contiguous runs as the layout allows, each cut into place in the
    caller's memory. `cuts` and `slot_bytes` say what an expert is made of, `finish` writes what no file has."""

    def __init__(self, checkpoint: Checkpoint, ranks: int, rank: int) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        self.ranks, self.rank = ranks, rank
        self.checkpoint = checkpoint
        self._files: dict[Path, RangeFile | GeneratedFile] = {}
        self._staging = Staging()
        self._lock = threading.Lock()
        self._stats = ReadStats()

    @property
    def stats(self) -> ReadStats:
        return self._stats

    def cuts(self, layer: int, expert: int) -> list[Cut]:
        raise NotImplementedError

    def slot_bytes(self, layer: int, expert: int) -> int:
        raise NotImplementedError

    def finish(self, layer: int, expert: int, out: "npt.NDArray[np.uint8]") -> None:
        raise NotImplementedError

    def read(self, layer: int, expert: int, out: memoryview) -> None:
        """`out` has at least the record's bytes; what is behind them stays."""
        if out.nbytes < self.slot_bytes(layer, expert):
            raise ValueError(f"{out.nbytes} bytes of room for a record of {self.slot_bytes(layer, expert)}")
        began = time.perf_counter()
        slot = np.frombuffer(out, dtype=np.uint8)
        runs = list(_runs(self.cuts(layer, expert)))
        for run in runs:
            self._read_run(run, slot)
        self.finish(layer, expert, slot)
        self._count(sum(map(_run_bytes, runs)), len(runs), time.perf_counter() - began)

    def close(self) -> None:
        """No read may be running or follow."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _read_run(self, run: list[Cut], slot: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
        begin, nbytes = run[0].begin, _run_bytes(run)
        buffer = self._staging.buffer(span_bytes(begin, nbytes))
        read = np.frombuffer(self._file(run[0].path).read(begin, nbytes, buffer), dtype=np.uint8)
        for cut in run:
            part = cut.part
            whole = read[cut.begin - begin : cut.end - begin].reshape(part.rows, -1)
            slot[part.offset : part.offset + part.nbytes].reshape(part.rows, -1)[:] = whole[:, cut.columns]

    def _file(self, path: Path) -> RangeFile | GeneratedFile:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                made = self.checkpoint.generated.get(path)
                file = self._files[path] = RangeFile(path) if made is None else made.file(path)
            return file

    def _count(self, read_bytes: int, reads: int, seconds: float) -> None:
        with self._lock:
            s, direct = self._stats, all(file.direct for file in self._files.values())
            self._stats = ReadStats(
                s.records + 1, s.reads + reads, s.read_bytes + read_bytes, s.seconds + seconds, direct
            )


class CheckpointSource(RunSource):
    """Experts whose records are all of one size.

    In the released layout scales and weights lie apart, so one rank takes two runs. A rank of two takes three, of four
    four or five: its rows of w1 and w3 lie apart then. Of w2, which is cut by columns, every rank reads all codes and
    scales and keeps its own: 13 MB for a record of 9.4 with two ranks."""

    def __init__(self, checkpoint: Checkpoint, names: ExpertNames, record: ExpertRecord, rank: int) -> None:
        super().__init__(checkpoint, record.ranks, rank)
        self.record, self._names, self._whole = record, names, replace(record, ranks=1)

    def read(self, layer: int, expert: int, out: memoryview) -> None:
        if out.nbytes != self.record.slot_bytes:
            raise ValueError(f"{out.nbytes} bytes of room for a record of {self.record.slot_bytes}")
        super().read(layer, expert, out)

    def slot_bytes(self, layer: int, expert: int) -> int:
        return self.record.slot_bytes

    def cuts(self, layer: int, expert: int) -> list[Cut]:
        names = self._names(layer, expert)
        parts = zip(self.record.parts, self._whole.shapes, names, strict=True)
        return [self._cut(index, part, shape, name) for index, (part, shape, name) in enumerate(parts)]

    def finish(self, layer: int, expert: int, out: "npt.NDArray[np.uint8]") -> None:
        out[self.record.nbytes :] = 0

    def _cut(self, index: int, part: Part, shape: tuple[int, int], name: str) -> Cut:
        info = _byte_tensor(self.checkpoint, name, shape)
        if index % 3 == W2:
            columns = slice(self.rank * part.row_bytes, (self.rank + 1) * part.row_bytes)
            return Cut(info.path, info.offset, info.offset + info.nbytes, part, columns)
        begin = info.offset + self.rank * part.nbytes
        return Cut(info.path, begin, begin + part.nbytes, part, slice(None))


class EveryRank(RunSource):
    """The records of all ranks, one behind the other, of which every byte is read once."""

    def __init__(self, sources: Sequence[RunSource]) -> None:
        super().__init__(sources[0].checkpoint, len(sources), 0)
        self._sources = sources

    def slot_bytes(self, layer: int, expert: int) -> int:
        return sum(self.sizes(layer, expert))

    def sizes(self, layer: int, expert: int) -> list[int]:
        """Bytes of each rank's record."""
        return [source.slot_bytes(layer, expert) for source in self._sources]

    def cuts(self, layer: int, expert: int) -> list[Cut]:
        begins = accumulate(self.sizes(layer, expert), initial=0)
        return [
            replace(cut, part=replace(cut.part, offset=begin + cut.part.offset))
            for source, begin in zip(self._sources, begins, strict=False)
            for cut in source.cuts(layer, expert)
        ]

    def finish(self, layer: int, expert: int, out: "npt.NDArray[np.uint8]") -> None:
        begin = 0
        for source, nbytes in zip(self._sources, self.sizes(layer, expert), strict=True):
            source.finish(layer, expert, out[begin : begin + nbytes])
            begin += nbytes


W2 = 2  # parts 2 and 5 of a record; cut by columns, so a rank reads all of it


def _byte_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> TensorInfo:
    info = checkpoint.tensors.get(name)
    if info is None:
        raise TensorError(f"tensor {name} is missing", where=str(checkpoint.path))
    if info.shape[:1] != shape[:1] or info.nbytes != shape[0] * shape[1]:
        raise TensorError(
            f"tensor {name} is {info.dtype} {list(info.shape)}, an expert here needs {shape[0]} rows of {shape[1]} "
            "bytes",
            where=f"{info.path}:{info.offset}",
        )
    return info


def _run_bytes(run: list[Cut]) -> int:
    return max(cut.end for cut in run) - run[0].begin


def _runs(cuts: list[Cut]) -> Iterator[list[Cut]]:
    """Cuts that lie side by side in one file, by offset. Those of one rank do not overlap: the shard's header was
    checked. Those of several may be of the same tensor."""
    for _, same_file in groupby(sorted(cuts, key=lambda c: (c.path, c.begin)), key=lambda c: c.path):
        run: list[Cut] = []
        for cut in same_file:
            if run and cut.begin - run[-1].end > min(GAP_BYTES, cut.end - cut.begin):
                yield run
                run = []
            run.append(cut)
        yield run
