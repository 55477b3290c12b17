"""Rows of an Engram table, read from the checkpoint on disk: the table (100 GB in the released model) never is in
memory.

Rows are known from token ids alone, so a pass asks for them before its first layer and takes them where it needs them;
the reads run in a few threads beside the layers in between. Rows read lately stay in a cache of fixed size."""

import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.formats import fp8_rows
from packers.shards import Checkpoint, TensorInfo
from tided.errors import DataError, UnavailableError
from tided.models.deepseek_v41.row_cache import Bytes, Ints, RowCache

READ_TIMEOUT_S = 60.0  # for the task that has waited longest: a prompt's thousands may take longer together
READERS = 16  # threads, of all layers together
# Of one task. The disk is told of all its rows before the first is read, so they wait for it together: a decode step's
# two dozen need no more than one thread, and so none of the engine's time for others to begin.
TASK_ROWS = 64


class _Array:
    """One tensor of fixed-size rows, in a file that stays open as long as this does."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._info: TensorInfo = checkpoint.tensors[name]
        self.row_bytes = self._info.nbytes // self._info.shape[0]
        self._made = checkpoint.generated.get(self._info.path)
        if self._made is None:
            self._fd = os.open(self._info.path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._fd)

    def expect(self, row: int) -> None:
        """Its read may begin, into the page cache."""
        if self._made is None:
            with suppress(OSError):  # a file system that takes no such word; what is wrong, the read tells
                at = self._info.offset + row * self.row_bytes
                os.posix_fadvise(self._fd, at, self.row_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, row: int, out: memoryview) -> None:
        where, name = str(self._info.path), self._info.name
        if self._made is not None:
            self._made.fill(self._info, row * self.row_bytes, np.frombuffer(out, np.uint8))
            return
        try:
            count = os.preadv(self._fd, [out], self._info.offset + row * self.row_bytes)
        except OSError as e:
            raise DataError(f"row {row} of {name} cannot be read: {e.strerror}", where=where) from e
        if count != self.row_bytes:
            raise DataError(f"ends inside row {row} of {name}", where=where)


class Table:
    """One layer's table. Used by the engine's thread alone; only the reads themselves run elsewhere."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, cache_bytes: int, readers: ThreadPoolExecutor) -> None:
        """`prefix`: "layers.L.engram.embed". Raises DataError when a file cannot be opened."""
        try:
            self.weight = _Array(checkpoint, f"{prefix}.weight")
            self.scale = _Array(checkpoint, f"{prefix}.scale")
        except OSError as e:
            raise DataError(f"cannot be opened: {e.strerror}", where=str(e.filename)) from e
        self.row_bytes = self.weight.row_bytes + self.scale.row_bytes
        self._cache = RowCache(cache_bytes, self.row_bytes)
        self._readers = readers

    def ask(self, rows: Ints) -> "Asked":
        """rows [T, columns]. Cached rows are copied now, the others are read beside the caller."""
        distinct, index = np.unique(rows, return_inverse=True)
        data: Bytes = np.empty((len(distinct), self.row_bytes), dtype=np.uint8)
        wanted = np.flatnonzero(~self._cache.recall(distinct, data))
        tasks = [wanted[i : i + TASK_ROWS] for i in range(0, len(wanted), TASK_ROWS)]
        reads = [self._readers.submit(self._read, distinct[task], task, data) for task in tasks]
        return Asked(self, distinct, wanted, data, index.reshape(rows.shape), reads)

    def remember(self, rows: Ints, data: Bytes) -> None:
        """Keeps rows that were read, [n], as data [n, row bytes]."""
        self._cache.remember(rows, data)

    def _read(self, rows: Ints, places: Ints, data: Bytes) -> None:
        for row in rows.tolist():
            self.weight.expect(row)
            self.scale.expect(row)
        for row, i in zip(rows.tolist(), places.tolist(), strict=True):
            out = memoryview(data[i])
            self.weight.read(row, out[: self.weight.row_bytes])
            self.scale.read(row, out[self.weight.row_bytes :])


@dataclass(frozen=True)
class Asked:
    """Rows asked for, perhaps not read yet: `index` [T, columns] points into `data` [distinct rows, row bytes];
    `wanted` are the places in data of those being read."""

    table: Table
    distinct: Ints
    wanted: Ints
    data: Bytes
    index: Ints
    reads: list[Future[None]]

    def take(self, device: torch.device) -> Tensor:
        """-> fp32 [T, columns * dim], dequantised; raises as `raw`."""
        rows, dim = torch.from_numpy(self.raw()).flatten(0, 1), self.table.weight.row_bytes
        weight = rows[:, :dim].contiguous().view(torch.float8_e4m3fn)
        return fp8_rows(weight, rows[:, dim:].contiguous()).view(len(self.index), -1).to(device)

    def raw(self) -> Bytes:
        """-> [T, columns, row bytes] as the table holds them. Raises DataError if a read failed, UnavailableError if
        one hangs."""
        self._wait()
        self.remember()
        return self.data[self.index]

    def put(self, out: Bytes) -> None:
        """The same into `out`; `remember` may follow when there is time."""
        self._wait()
        np.take(self.data, self.index, axis=0, out=out, mode="clip")  # the mode that needs no buffer

    def remember(self) -> None:
        """What was read stays in the cache."""
        if len(self.wanted):
            self.table.remember(self.distinct[self.wanted], self.data[self.wanted])

    def _wait(self) -> None:
        try:
            for read in self.reads:
                read.result(READ_TIMEOUT_S)  # begun in this order: it runs by now, or is done
        except TimeoutError as e:
            raise UnavailableError(f"the disk gave no Engram rows for {READ_TIMEOUT_S:.0f} s") from e
