"""Rows of an Engram table, read from the checkpoint on disk: the table (100 GB in the released model) never is in
memory.

Rows are known from token ids alone, so a pass asks for them before its first layer and takes them where it needs them;
the reads run in a few threads beside the layers in between. Rows read lately stay in a cache of fixed size."""

import os
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.formats import fp8_rows
from packers.shards import Checkpoint, TensorInfo
from tided.errors import DataError, UnavailableError

READ_TIMEOUT_S = 60.0  # for the task that has waited longest: a prompt's thousands may take longer together
READERS = 16  # threads, of all layers together
# Rows of one task. Of a prompt's rows, so many that handing them over costs little beside reading them; of a decode
# step's two dozen, few enough that they are read at once: one after the other they would cost a layer 24 waits for the
# disk, beside each other two.
_LEAST_TASK_ROWS, _MOST_TASK_ROWS = 2, 64
Bytes = NDArray[np.uint8]


class _Array:
    """One tensor of fixed-size rows, in a file that stays open as long as this does."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._info: TensorInfo = checkpoint.tensors[name]
        self.row_bytes = self._info.nbytes // self._info.shape[0]
        self._fd = os.open(self._info.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def read(self, row: int, out: memoryview) -> None:
        where, name = str(self._info.path), self._info.name
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
        self.cached_rows = cache_bytes // self.row_bytes
        self._cache: Bytes = np.empty((self.cached_rows, self.row_bytes), dtype=np.uint8)
        self._place_of: OrderedDict[int, int] = OrderedDict()  # row -> place in the cache, least recently used first
        self._readers = readers

    def ask(self, rows: NDArray[np.int64]) -> "Asked":
        """rows [T, columns]. Cached rows are copied now, the others are read beside the caller."""
        distinct, index = np.unique(rows, return_inverse=True)
        data: Bytes = np.empty((len(distinct), self.row_bytes), dtype=np.uint8)
        missing = [i for i, row in enumerate(distinct.tolist()) if not self._recall(row, data[i])]
        wanted = [(i, int(distinct[i])) for i in missing]
        size = _task_rows(len(wanted))
        tasks = [wanted[i : i + size] for i in range(0, len(wanted), size)]
        reads = [self._readers.submit(self._read, task, data) for task in tasks]
        return Asked(self, wanted, data, index.reshape(rows.shape), reads)

    def remember(self, row: int, data: Bytes) -> None:
        """Keeps a row that was read, in place of the least recently used one when the cache is full."""
        if not self.cached_rows or row in self._place_of:
            return
        full = len(self._place_of) == self.cached_rows
        place = self._place_of.popitem(last=False)[1] if full else len(self._place_of)
        self._cache[place] = data
        self._place_of[row] = place

    def _recall(self, row: int, out: Bytes) -> bool:
        place = self._place_of.get(row)
        if place is None:
            return False
        self._place_of.move_to_end(row)
        out[:] = self._cache[place]
        return True

    def _read(self, task: list[tuple[int, int]], data: Bytes) -> None:
        for i, row in task:
            out = memoryview(data[i])
            self.weight.read(row, out[: self.weight.row_bytes])
            self.scale.read(row, out[self.weight.row_bytes :])


def _task_rows(rows: int) -> int:
    return min(_MOST_TASK_ROWS, max(_LEAST_TASK_ROWS, -(-rows // READERS)))


@dataclass(frozen=True)
class Asked:
    """Rows asked for, perhaps not read yet: `index` [T, columns] points into `data` [distinct rows, row bytes];
    `wanted` are those being read, as (place in data, row)."""

    table: Table
    wanted: list[tuple[int, int]]
    data: Bytes
    index: NDArray[np.int64]
    reads: list[Future[None]]

    def take(self, device: torch.device) -> Tensor:
        """-> fp32 [T, columns * dim], dequantised. Raises DataError if a read failed, UnavailableError if one
        hangs."""
        try:
            for read in self.reads:
                read.result(READ_TIMEOUT_S)  # begun in this order: it runs by now, or is done
        except TimeoutError as e:
            raise UnavailableError(f"the disk gave no Engram rows for {READ_TIMEOUT_S:.0f} s") from e
        for i, row in self.wanted:
            self.table.remember(row, self.data[i])
        rows, dim = torch.from_numpy(self.data[self.index.reshape(-1)]), self.table.weight.row_bytes
        weight = rows[:, :dim].contiguous().view(torch.float8_e4m3fn)
        return fp8_rows(weight, rows[:, dim:].contiguous()).view(len(self.index), -1).to(device)
