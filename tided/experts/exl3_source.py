"""Routed EXL3 experts out of an original checkpoint: every record has the size that its matrices give it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels import exl3
from kernels.exl3_record import HEADER_BYTES, Exl3Record, Stored, header_of
from kernels.record import Part
from packers.exl3 import StoredMatrix, is_signs, matrix_of
from packers.headers import TensorInfo
from packers.shards import Checkpoint
from tided.experts.source import Cut, RunSource

# (layer, expert) -> the checkpoint's names of its gate, up and down. `layer` counts layers with routed experts.
MatrixNames = Callable[[int, int], Sequence[str]]
DOWN = 2


class Exl3Source(RunSource):
    """An expert's tensors lie side by side in what the converter writes: one run, of which a rank keeps its columns of
    gate and up and its rows of down."""

    def __init__(self, checkpoint: Checkpoint, names: MatrixNames, record: Exl3Record, rank: int) -> None:
        super().__init__(checkpoint, record.ranks, rank)
        self.record, self._names = record, names
        self._found: dict[tuple[int, int], list[StoredMatrix]] = {}

    def stored(self, layer: int, expert: int) -> Stored:
        """How the expert is stored. Raises TensorError for tensors that are none."""
        return _stored(self._matrices(layer, expert))

    def slot_bytes(self, layer: int, expert: int) -> int:
        return self.record.slot_bytes(self.stored(layer, expert))

    def cuts(self, layer: int, expert: int) -> list[Cut]:
        matrices = self._matrices(layer, expert)
        offset, cuts = self.record.offsets[-1], list[Cut]()
        for number, matrix in enumerate(matrices):
            cuts += self._scales(number, matrix)
            cuts.append(self._trellis(number, matrix, offset))
            offset += self.record.trellis_bytes(matrix.half_bits)
        return cuts

    def finish(self, layer: int, expert: int, out: "npt.NDArray[np.uint8]") -> None:
        """The header, signs of old files as the scales that they stand for, and zeros to the end of the page."""
        matrices = self._matrices(layer, expert)
        stored = _stored(matrices)
        out[:HEADER_BYTES] = np.frombuffer(header_of(stored), np.uint8)
        out[self.record.nbytes(stored) : self.record.slot_bytes(stored)] = 0
        for number, matrix in enumerate(matrices):
            for place, scales, part in self._places(number, matrix):
                if is_signs(scales):
                    values = exl3.signs(self.checkpoint.read(scales.name))[part].numpy()
                    begin = self.record.offsets[place]
                    out[begin : begin + values.nbytes] = values.view(np.uint8)

    def _matrices(self, layer: int, expert: int) -> list[StoredMatrix]:
        found = self._found.get((layer, expert))
        if found is None:
            d, inner = self.record.hidden, self.record.intermediate
            sides = ((d, inner), (d, inner), (inner, d))
            names = zip(self._names(layer, expert), sides, strict=True)
            found = self._found[layer, expert] = [matrix_of(self.checkpoint, name, *side) for name, side in names]
        return found

    def _places(self, number: int, matrix: StoredMatrix) -> list[tuple[int, TensorInfo, slice]]:
        """(which vector of a record, from which tensor, which of its values): inputs, then outputs."""
        n = self.record.share
        own, whole = slice(self.rank * n, (self.rank + 1) * n), slice(0, self.record.hidden)
        if number == DOWN:
            return [(4, matrix.inputs, own), (5, matrix.outputs, whole)]
        return [(number, matrix.inputs, whole), (2 + number, matrix.outputs, own)]

    def _scales(self, number: int, matrix: StoredMatrix) -> list[Cut]:
        return [
            _run(info, self.record.offsets[place], 2 * part.start, 2 * (part.stop - part.start))
            for place, info, part in self._places(number, matrix)
            if not is_signs(info)
        ]

    def _trellis(self, number: int, matrix: StoredMatrix, offset: int) -> Cut:
        nbytes = self.record.trellis_bytes(matrix.half_bits)
        if number == DOWN:
            return _run(matrix.trellis, offset, self.rank * nbytes, nbytes)
        rows = self.record.hidden // exl3.TILE
        part, info = Part(offset, rows, nbytes // rows), matrix.trellis
        columns = slice(self.rank * part.row_bytes, (self.rank + 1) * part.row_bytes)
        return Cut(info.path, info.offset, info.offset + info.nbytes, part, columns)


def _run(info: TensorInfo, offset: int, begin: int, nbytes: int) -> Cut:
    """Bytes [begin, begin + nbytes) of a tensor, to `offset` of the record."""
    return Cut(info.path, info.offset + begin, info.offset + begin + nbytes, Part(offset, 1, nbytes), slice(None))


def _stored(matrices: Sequence[StoredMatrix]) -> Stored:
    gate, up, down = matrices
    return Stored((gate.half_bits, up.half_bits, down.half_bits), (gate.codebook, up.codebook, down.codebook))


class Described(NamedTuple):
    """`record` with the kinds of matrices and the number of experts that there are; [layers, experts] bytes of every
    rank's record, and of what whole experts hold."""

    record: Exl3Record
    nbytes: npt.NDArray[np.int64]
    whole: npt.NDArray[np.int64]


def describe(source: Exl3Source, layers: int, experts: int) -> Described:
    stored = [[source.stored(layer, expert) for expert in range(experts)] for layer in range(layers)]
    each, record = {one for row in stored for one in row}, source.record
    kinds = {kind for one in each for kind in zip(one.codebooks, one.half_bits, strict=True)}
    uncut = replace(record, ranks=1)
    sizes, wholes = ({one: size(one) for one in each} for size in (record.slot_bytes, uncut.nbytes))
    found, whole = (np.array([[of[one] for one in row] for row in stored], dtype=np.int64) for of in (sizes, wholes))
    return Described(replace(record, kinds=tuple(sorted(kinds)), experts=experts), found, whole)
